// Drawn operations on softdelta's device: sizes, types and options as ggml allows them, operands that lie as views may:
// permuted, with gaps, or with a stride of zero, which repeats. Truth is ggml's CPU backend on the same numbers in f32
// without gaps.
//
// SOFTDELTA_CALLS is how many are drawn of each operation, SOFTDELTA_SEED the first of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ggml.h"
#include "load.h"
#include "operations/thresholds.h"

namespace {

using Shape = std::array<std::int64_t, GGML_MAX_DIMS>;

std::int64_t number_of(const char* variable, std::int64_t otherwise) {
    const char* given = std::getenv(variable);
    return given != nullptr ? std::atoll(given) : otherwise;
}

ggml_backend_t backend_of(const char* device) {
    ggml_backend_t backend = ggml_backend_dev_init(ggml_backend_dev_by_name(device), nullptr);
    const auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(backend)), "ggml_backend_set_n_threads"));
    set(backend, 2);
    return backend;
}

struct Backends {
    ggml_backend_t softdelta = backend_of("softdelta"), cpu = backend_of("CPU");
};

const Backends& backends() {
    static const Backends value;
    return value;
}

// How an operand may lie: rows: each in one piece; heads: dimensions 0 and 1 in one piece; columns: dimension 1 is the
// fastest; whole: without gaps.
enum class Lies { rows, heads, columns, whole };

// An operand, and the same numbers in f32 without gaps.
struct Operand {
    ggml_tensor *given, *plain;
    std::function<float(std::int64_t)> number;  // element i; none: random
};

class Draw {
  public:
    explicit Draw(std::int64_t seed) : random(static_cast<unsigned>(seed)) {}
    ~Draw() {
        ggml_backend_buffer_free(buffer_);
        ggml_free(context);
    }
    Draw(const Draw&) = delete;
    Draw& operator=(const Draw&) = delete;

    std::int64_t from(std::int64_t first, std::int64_t last) {
        return std::uniform_int_distribution<std::int64_t>(first, last)(random);
    }
    bool chance(int percent) { return from(1, 100) <= percent; }
    template <class T>
    T one_of(std::initializer_list<T> values) {
        return *(values.begin() + from(0, static_cast<std::int64_t>(values.size()) - 1));
    }

    Operand& operand(const char* name, ggml_type type, const Shape& ne, Lies lies,
                     std::function<float(std::int64_t)> number = nullptr) {
        const std::size_t unit = ggml_type_size(type);
        std::array<int, GGML_MAX_DIMS> order = {0, 1, 2, 3};
        if (lies == Lies::columns) std::swap(order[0], order[1]);
        if (lies != Lies::whole) std::shuffle(order.begin() + (lies == Lies::heads ? 2 : 1), order.end(), random);
        std::array<std::size_t, GGML_MAX_DIMS> nb{};
        std::size_t bytes = unit;
        for (const int dim : order) {
            const auto d = static_cast<std::size_t>(dim);
            nb[d] = bytes;
            bytes = dim == 0 ? bytes * static_cast<std::size_t>(ne[0] / ggml_blck_size(type))
                             : bytes * static_cast<std::size_t>(ne[d]);
            const bool gap = lies == Lies::heads ? dim > 0 : lies != Lies::whole;
            if (gap && chance(20)) bytes += unit * static_cast<std::size_t>(from(1, 3));
        }
        ggml_tensor* storage =
            ggml_new_tensor_1d(context, type, static_cast<std::int64_t>(bytes / unit) * ggml_blck_size(type));
        ggml_tensor* t = ggml_view_4d(context, storage, ne[0], ne[1], ne[2], ne[3], nb[1], nb[2], nb[3], 0);
        t->nb[0] = nb[0];
        text += std::string(" ") + name + " " + ggml_type_name(type);
        for (std::size_t d = 0; d < ne.size(); ++d) {
            const bool fastest = static_cast<int>(d) == order[0] || (lies == Lies::heads && d < 2);
            if (lies != Lies::whole && !fastest && chance(20)) t->nb[d] = 0;
            text += (d == 0 ? " [" : ", ") + std::to_string(ne[d]) + ":" + std::to_string(t->nb[d]);
            zero_strides += ne[d] > 1 && t->nb[d] == 0 ? 1 : 0;
        }
        text += "]";
        operands_.push_back(std::make_unique<Operand>(Operand{
            t, ggml_new_tensor_4d(context, type == GGML_TYPE_I32 ? type : GGML_TYPE_F32, ne[0], ne[1], ne[2], ne[3]),
            std::move(number)}));
        return *operands_.back();
    }

    void allocate() {
        buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(context, ggml_backend_cpu_buffer_type());
        for (const auto& x : operands_) {
            fill(*x);
            copy(*x);
        }
    }

    std::vector<float> compute(ggml_backend_t backend, ggml_tensor* result) {
        ggml_cgraph* graph = ggml_new_graph(context);
        ggml_build_forward_expand(graph, result);
        EXPECT_TRUE(ggml_backend_supports_op(backend, result)) << text;
        EXPECT_EQ(ggml_backend_graph_compute(backend, graph), GGML_STATUS_SUCCESS) << text;
        std::vector<float> numbers(static_cast<std::size_t>(ggml_nelements(result)));
        ggml_backend_tensor_get(result, numbers.data(), 0, ggml_nbytes(result));
        return numbers;
    }

    // Whether the first `count` numbers of both results are the same.
    void expect_same(ggml_tensor* given, ggml_tensor* plain, double limit, std::int64_t count = 0) {
        allocate();
        const std::vector<float> ours = compute(backends().softdelta, given), right = compute(backends().cpu, plain);
        double difference = 0, size = 0;
        for (std::size_t i = 0; i < (count > 0 ? static_cast<std::size_t>(count) : right.size()); ++i) {
            difference += std::pow(static_cast<double>(ours[i]) - right[i], 2);
            size += std::pow(static_cast<double>(right[i]), 2);
        }
        EXPECT_TRUE(difference <= limit * limit * size)
            << text << ": " << std::sqrt(difference / size) << ", expected at most " << limit;
    }

    std::mt19937 random;
    ggml_context* context = ggml_init({std::size_t{1} << 20, nullptr, true});
    std::string text;
    int zero_strides = 0;

  private:
    void fill(const Operand& x) {
        constexpr std::size_t period = 262147;  // prime; more random numbers would take most of the test's time
        ggml_tensor* storage = x.given->view_src;
        std::normal_distribution<float> normal;
        std::vector<float> numbers(static_cast<std::size_t>(ggml_nelements(storage)));
        for (std::size_t i = 0; i < numbers.size(); ++i)
            numbers[i] = x.number     ? x.number(static_cast<std::int64_t>(i))
                         : i < period ? normal(random)
                                      : numbers[i - period];
        if (x.given->type == GGML_TYPE_I32)
            std::copy(numbers.begin(), numbers.end(), static_cast<std::int32_t*>(storage->data));
        else if (x.given->type == GGML_TYPE_F32)
            std::memcpy(storage->data, numbers.data(), ggml_nbytes(storage));
        else
            ggml_quantize_chunk(x.given->type, numbers.data(), storage->data, 0,
                                ggml_nelements(storage) / ggml_blck_size(storage->type), ggml_blck_size(storage->type),
                                nullptr);
    }
    static void copy(const Operand& x) {
        auto* to = static_cast<float*>(x.plain->data);
        const ggml_tensor* t = x.given;
        const auto at = [t](std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) {
            return static_cast<const char*>(t->data) + i0 * t->nb[0] + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
        };
        for (std::int64_t i3 = 0; i3 < t->ne[3]; ++i3)
            for (std::int64_t i2 = 0; i2 < t->ne[2]; ++i2)
                for (std::int64_t i1 = 0; i1 < t->ne[1]; ++i1, to += t->ne[0])
                    if (ggml_type_size(t->type) == 4)
                        for (std::int64_t i0 = 0; i0 < t->ne[0]; ++i0) std::memcpy(to + i0, at(i0, i1, i2, i3), 4);
                    else
                        ggml_get_type_traits(t->type)->to_float(at(0, i1, i2, i3), to, t->ne[0]);
    }

    std::vector<std::unique_ptr<Operand>> operands_;
    ggml_backend_buffer_t buffer_ = nullptr;
};

// Draws calls, and sees that strides of zero are among them.
template <class Call>
void draw_calls(std::int64_t calls, const Call& call) {
    const std::int64_t seed = number_of("SOFTDELTA_SEED", 1);
    int zero_strides = 0;
    for (std::int64_t i = 0; i < number_of("SOFTDELTA_CALLS", calls); ++i) {
        Draw draw(seed + i);
        draw.text = "SOFTDELTA_SEED=" + std::to_string(seed + i);
        call(draw);
        zero_strides += draw.zero_strides;
        if (testing::Test::HasFailure()) return;
    }
    EXPECT_GT(zero_strides, 0);
}

struct DeltaSizes {
    std::int64_t size, key_heads, heads, tokens, key_sequences, sequences, slots;
    bool channel_gate;
};

DeltaSizes draw_delta_sizes(Draw& draw) {
    DeltaSizes s{};
    s.size = draw.one_of<std::int64_t>({16, 32, 64, 128});
    s.key_heads = draw.from(1, 3);
    s.heads = s.key_heads * draw.from(1, 3);
    s.tokens = draw.one_of({draw.from(1, 4), draw.from(5, 48), draw.from(49, 150)});
    s.key_sequences = draw.from(1, 3);
    s.sequences = s.key_sequences * draw.from(1, 2);
    s.slots = draw.chance(70) ? 1 : draw.from(2, 5);
    s.channel_gate = draw.chance(50);
    return s;
}

struct DeltaOperands {
    std::array<Operand*, 6> all;  // q, k, v, g, beta, state
    ggml_tensor* build(ggml_context* context, ggml_tensor* Operand::*of, std::int64_t slots) const {
        return ggml_gated_delta_net(context, all[0]->*of, all[1]->*of, all[2]->*of, all[3]->*of, all[4]->*of,
                                    all[5]->*of, slots);
    }
};

DeltaOperands draw_delta(Draw& draw, const DeltaSizes& s) {
    const float length = 1 / std::sqrt(static_cast<float>(s.size));
    std::normal_distribution<float> normal;
    const auto key = [&draw, normal, length](std::int64_t) mutable { return length * normal(draw.random); };
    const auto gate = [&draw, normal](std::int64_t) mutable { return -0.1F * std::abs(normal(draw.random)); };
    const auto beta = [&draw, normal](std::int64_t) mutable { return 1 / (1 + std::exp(-normal(draw.random))); };
    const Shape keys = {s.size, s.key_heads, s.tokens, s.key_sequences};
    return {{&draw.operand("q", GGML_TYPE_F32, keys, Lies::rows),
             &draw.operand("k", GGML_TYPE_F32, keys, Lies::rows, key),
             &draw.operand("v", GGML_TYPE_F32, {s.size, s.heads, s.tokens, s.sequences}, Lies::rows),
             &draw.operand("g", GGML_TYPE_F32, {s.channel_gate ? s.size : 1, s.heads, s.tokens, s.sequences},
                           Lies::whole, gate),
             &draw.operand("beta", GGML_TYPE_F32, {1, s.heads, s.tokens, s.sequences}, Lies::whole, beta),
             &draw.operand("state", GGML_TYPE_F32, {s.size, s.size, s.heads, s.sequences}, Lies::whole)}};
}

TEST(DrawnOperations, GatedDeltaNet) {
    draw_calls(150, [](Draw& draw) {
        const DeltaSizes s = draw_delta_sizes(draw);
        const DeltaOperands in = draw_delta(draw, s);
        const std::int64_t written =
            s.sequences * s.heads * s.size * (s.tokens + std::min(s.slots, s.tokens) * s.size);  // not the older slots
        draw.expect_same(in.build(draw.context, &Operand::given, s.slots),
                         in.build(draw.context, &Operand::plain, s.slots), 2e-5, written);
    });
}

// A sequence has the same bits alone as among others. (All sequences of one operation have the same number of tokens.)
TEST(DrawnOperations, SequencesOfGatedDeltaNetAreIndependent) {
    draw_calls(100, [](Draw& draw) {
        DeltaSizes s = draw_delta_sizes(draw);
        s.key_sequences = s.sequences = draw.from(2, 4);
        const DeltaOperands in = draw_delta(draw, s);
        ggml_tensor* together = in.build(draw.context, &Operand::given, s.slots);
        const std::int64_t n = draw.from(0, s.sequences - 1);
        std::vector<Operand> alone;
        DeltaOperands one{};
        for (std::size_t i = 0; i < in.all.size(); ++i) {
            ggml_tensor* t = in.all[i]->given;
            ggml_tensor* view = ggml_view_4d(draw.context, t->view_src, t->ne[0], t->ne[1], t->ne[2], 1, t->nb[1],
                                             t->nb[2], t->nb[3], static_cast<std::size_t>(n) * t->nb[3]);
            alone.push_back({view, nullptr, nullptr});
        }
        for (std::size_t i = 0; i < alone.size(); ++i) one.all[i] = &alone[i];
        ggml_tensor* single = one.build(draw.context, &Operand::given, s.slots);
        draw.allocate();
        const auto all = draw.compute(backends().softdelta, together), its = draw.compute(backends().softdelta, single);
        const std::int64_t o = s.tokens * s.heads * s.size, state = s.heads * s.size * s.size;
        EXPECT_TRUE(std::equal(its.begin(), its.begin() + o, all.begin() + n * o)) << draw.text;
        for (std::int64_t slot = 0; slot < std::min(s.slots, s.tokens); ++slot)
            EXPECT_TRUE(std::equal(its.begin() + o + slot * state, its.begin() + o + (slot + 1) * state,
                                   all.begin() + s.sequences * o + (slot * s.sequences + n) * state))
                << draw.text << " slot " << slot;
    });
}

// Mamba-2's: states come from anywhere in a pool.
TEST(DrawnOperations, SsmScan) {
    draw_calls(150, [](Draw& draw) {
        const std::int64_t key_size = draw.one_of({16, 96, 128, 256}), size = draw.one_of({16, 64, 80});
        const std::int64_t groups = draw.from(1, 3), heads = groups * draw.from(1, 4), sequences = draw.from(1, 3);
        const std::int64_t tokens = draw.one_of({draw.from(1, 4), draw.from(5, 48), draw.from(49, 150)});
        const std::int64_t pool = sequences + draw.from(0, 2), slots = draw.chance(70) ? 1 : draw.from(2, 5);
        const float length = 1 / std::sqrt(static_cast<float>(key_size));
        std::normal_distribution<float> normal;
        const auto key = [&draw, normal, length](std::int64_t) mutable { return length * normal(draw.random); };
        const auto decay = [&draw, normal](std::int64_t) mutable { return -std::exp(normal(draw.random)); };
        const auto place = [&draw, pool](std::int64_t) { return static_cast<float>(draw.from(0, pool - 1)); };
        const Shape keys = {key_size, groups, tokens, sequences};
        const std::array<Operand*, 7> in = {
            &draw.operand("states", GGML_TYPE_F32, {key_size, size, heads, pool}, Lies::whole),
            &draw.operand("x", GGML_TYPE_F32, {size, heads, tokens, sequences}, Lies::heads),
            &draw.operand("dt", GGML_TYPE_F32, {heads, tokens, sequences, 1}, Lies::whole),
            &draw.operand("A", GGML_TYPE_F32, {1, heads, 1, 1}, Lies::whole, decay),
            &draw.operand("B", GGML_TYPE_F32, keys, Lies::heads, key),
            &draw.operand("C", GGML_TYPE_F32, keys, Lies::heads),
            &draw.operand("ids", GGML_TYPE_I32, {sequences, 1, 1, 1}, Lies::whole, place)};
        const auto build = [&](ggml_tensor* Operand::*of) {
            return ggml_ssm_scan(draw.context, in[0]->*of, in[1]->*of, in[2]->*of, in[3]->*of, in[4]->*of, in[5]->*of,
                                 in[6]->*of, slots);
        };
        const std::int64_t written = sequences * heads * size * (tokens + std::min(slots, tokens) * key_size);
        draw.expect_same(build(&Operand::given), build(&Operand::plain), 2e-5, written);
    });
}

void draw_attention(Draw& draw, std::int64_t most_keys, std::int64_t least_numbers) {
    const std::int64_t size = 32 * draw.from(1, 4), value_size = draw.chance(70) ? size : 32 * draw.from(1, 4);
    const std::int64_t queries = draw.one_of({draw.from(1, 4), draw.from(5, 40), draw.from(16, 40)});
    std::int64_t batch = draw.chance(60) ? 1 : draw.from(2, 3), key_heads = draw.from(1, 3);
    const std::int64_t heads = key_heads * draw.one_of({1, 2, 4, 7});
    std::int64_t keys = draw.from(1, most_keys);
    const auto type = [&] {
        if (least_numbers > 0) return draw.one_of({GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL});
        return draw.one_of({GGML_TYPE_F32, GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                            GGML_TYPE_Q5_0, GGML_TYPE_Q5_1});
    };
    const ggml_type k_type = type(), v_type = draw.chance(50) ? k_type : type();
    // More floats than a backend keeps at once.
    const std::int64_t of_key = key_heads * (size + value_size);
    if (least_numbers > 0)
        keys = least_numbers / of_key * draw.from(20, 40) / 20 / (draw.chance(50) ? batch : 1) + draw.from(1, 64);

    const Operand& q = draw.operand("q", GGML_TYPE_F32, {size, queries, heads, batch}, Lies::rows);
    const Operand& k = draw.operand("k", k_type, {size, keys, key_heads, batch}, Lies::rows);
    const Operand& v = draw.operand("v", v_type, {value_size, keys, key_heads, batch}, Lies::rows);
    ggml_tensor* mask = nullptr;
    const bool alibi = draw.chance(20);
    if (alibi || draw.chance(70)) {
        const std::int64_t mask_keys = keys + (draw.chance(30) ? draw.from(1, 40) : 0);
        const std::int64_t rows = queries + (draw.chance(30) ? draw.from(1, 8) : 0);
        const int kind = draw.one_of({0, 0, 1, 2});
        const std::int64_t seen = draw.from(std::max<std::int64_t>(1, keys - 3 * queries), keys);
        draw.text += kind == 0 ? " causal" : kind == 1 ? " hides some" : " adds";
        std::normal_distribution<float> normal;
        // As causal has it, row i sees `seen` keys less those of the rows behind it.
        mask = draw.operand("mask", GGML_TYPE_F16,
                            {mask_keys, rows, draw.chance(15) ? heads : 1, draw.chance(15) ? batch : 1}, Lies::whole,
                            [=, &draw](std::int64_t i) mutable {
                                const std::int64_t key = i % mask_keys, row = i / mask_keys % rows;
                                if (kind == 0) return key < seen - queries + 1 + row ? 0 : -INFINITY;
                                if (kind == 1) return draw.chance(30) ? -INFINITY : 0.0F;
                                return normal(draw.random);
                            })
                   .given;
    }
    ggml_tensor* sinks = nullptr;
    if (draw.chance(30)) {  // as likely as all keys
        const float logit = std::log(static_cast<float>(keys));
        sinks = draw.operand("sinks", GGML_TYPE_F32, {heads, 1, 1, 1}, Lies::whole, [=](std::int64_t) { return logit; })
                    .given;
    }
    const float softcap = draw.chance(20) ? 10 : 0, scale = 1 / std::sqrt(static_cast<float>(size));
    const auto build = [&](ggml_tensor* Operand::*of) {
        ggml_tensor* op = ggml_flash_attn_ext(draw.context, q.*of, k.*of, v.*of, mask, scale, alibi ? 8 : 0, softcap);
        ggml_flash_attn_ext_add_sinks(op, sinks);
        return op;
    };
    const bool floats = k_type == GGML_TYPE_F32 && v_type == GGML_TYPE_F32;
    draw.expect_same(build(&Operand::given), build(&Operand::plain), floats ? 2e-5 : 1e-2);
}

TEST(DrawnOperations, FlashAttention) {
    draw_calls(300, [](Draw& draw) { draw_attention(draw, 400, 0); });
}

// Floats of keys and values are more than a backend keeps at once: ranges of keys or of sequences.
TEST(DrawnOperations, FlashAttentionInRanges) {
    draw_calls(30, [](Draw& draw) { draw_attention(draw, 0, softdelta_ggml::expanded_numbers); });
}

TEST(DrawnOperations, SsmConv) {
    draw_calls(150, [](Draw& draw) {
        const std::int64_t width = draw.from(2, 8), channels = draw.from(1, 70), tokens = draw.from(1, 60);
        const Operand& x =
            draw.operand("x", GGML_TYPE_F32, {width - 1 + tokens, channels, draw.from(1, 3), 1}, Lies::rows);
        const Operand& weight = draw.operand("weight", GGML_TYPE_F32, {width, channels, 1, 1}, Lies::rows);
        draw.expect_same(ggml_ssm_conv(draw.context, x.given, weight.given),
                         ggml_ssm_conv(draw.context, x.plain, weight.plain), 1e-6);
    });
}

// The library's kernels take eight taps at most.
TEST(DrawnOperations, WiderConvolutionsAreLeftToGgml) {
    draw_calls(5, [](Draw& draw) {
        for (const std::int64_t width : {8, 9}) {
            const Operand& x = draw.operand("x", GGML_TYPE_F32, {width + 30, 5, 1, 1}, Lies::rows);
            const Operand& weight = draw.operand("weight", GGML_TYPE_F32, {width, 5, 1, 1}, Lies::rows);
            EXPECT_EQ(
                ggml_backend_supports_op(backends().softdelta, ggml_ssm_conv(draw.context, x.given, weight.given)),
                width == 8);
        }
    });
}

TEST(DrawnOperations, Concat) {
    draw_calls(150, [](Draw& draw) {
        const std::int64_t channels = draw.from(1, 70), sequences = draw.from(1, 3), more = draw.from(1, 2);
        const Operand& a = draw.operand("a", GGML_TYPE_F32, {draw.from(1, 9), channels, sequences, more},
                                        draw.chance(50) ? Lies::rows : Lies::columns);
        const Operand& b =
            draw.operand("b", GGML_TYPE_F32, {draw.from(1, 60), channels, sequences, more}, Lies::columns);
        draw.expect_same(ggml_concat(draw.context, a.given, b.given, 0), ggml_concat(draw.context, a.plain, b.plain, 0),
                         0);
    });
}

TEST(DrawnOperations, L2Norm) {
    draw_calls(50, [](Draw& draw) {
        const Operand& x = draw.operand(
            "x", GGML_TYPE_F32, {draw.from(1, 200), draw.from(1, 5), draw.from(1, 5), draw.from(1, 3)}, Lies::rows);
        draw.expect_same(ggml_l2_norm(draw.context, x.given, 1e-6F), ggml_l2_norm(draw.context, x.plain, 1e-6F), 1e-6);
    });
}

// The library refuses a negative softcap; the device's graph then fails, and nothing is thrown.
TEST(DrawnOperations, WhatTheLibraryRefusesFails) {
    Draw draw(1);
    const Shape shape = {64, 16, 2, 1};
    const Operand &q = draw.operand("q", GGML_TYPE_F32, shape, Lies::whole),
                  &k = draw.operand("k", GGML_TYPE_F32, shape, Lies::whole);
    ggml_tensor* op = ggml_flash_attn_ext(draw.context, q.given, k.given, k.given, nullptr, 1, 0, -8);
    ggml_cgraph* graph = ggml_new_graph(draw.context);
    ggml_build_forward_expand(graph, op);
    draw.allocate();
    EXPECT_EQ(ggml_backend_graph_compute(backends().softdelta, graph), GGML_STATUS_FAILED);
}

}  // namespace

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
    return check::load(true) ? RUN_ALL_TESTS() : 1;
}

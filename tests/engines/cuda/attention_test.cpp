// Attention on the GPU against the truth: drawn calls of every option, whose tensors the library copies to the GPU and
// back.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engines/cuda/gpu_test.h"
#include "support/array.h"
#include "support/fast_attention.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

class CudaAttention : public OnGpuTest {};

bool is_refused(const FastAttention& call, bool gradients) {
    const AttentionInputs& in = call.call().attention;
    const std::int64_t most = gradients ? 256 : 576;
    return in.q.shape(3) > most || in.v.shape(3) > most || in.k_scale || in.v_scale || (gradients && in.block_table);
}

// Calls that take long where there is no GPU: three of the six that are drawn there.
std::int64_t half_of(std::int64_t calls) {
    return (calls + 1) / 2;
}

using DrawCall = FastAttention (*)(std::uint64_t seed);

void expect_right_forward(DrawCall draw, bool all = false, std::int64_t calls = call_count(300)) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(calls); ++seed) {
        const FastAttention call = draw(seed);
        const Names names = all ? call.forward_names() : call.some(call.forward_names());
        if (is_refused(call, false)) {
            EXPECT_THROW(call.forward(names, cuda()), Unsupported);
            continue;
        }
        const Results results = call.forward(names, cuda());
        EXPECT_EQ(judge_results(call, results), "") << "SOFTDELTA_SEED=" << seed;
        expect_same_bits(results, call.forward(names, cuda()), seed);
    }
}

void expect_right_backward(DrawCall draw, std::int64_t calls = call_count(300)) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(calls); ++seed) {
        const FastAttention call = draw(seed);
        const Names names = call.some(call.gradient_names());
        if (names.empty()) continue;
        if (is_refused(call, true)) {
            EXPECT_THROW(call.backward(names, {}, cuda()), Unsupported);
            continue;
        }
        const Results all = call.forward(call.forward_names(), cuda());
        Results saved;
        if (seed / 3 % 4 != 0) saved.insert(*all.find("o"));
        if (seed / 3 % 4 < 3) saved.insert(*all.find("lse"));
        const Results gradients = call.backward(names, saved, cuda());
        EXPECT_EQ(judge_gradients(call, gradients), "") << "SOFTDELTA_SEED=" << seed;
        expect_same_bits(gradients, call.backward(names, saved, cuda()), seed);
    }
}

TEST_F(CudaAttention, ForwardIsRight) {
    expect_right_forward(draw_fast_attention);
}
TEST_F(CudaAttention, BackwardIsRight) {
    expect_right_backward(draw_fast_attention);
}
TEST_F(CudaAttention, ForwardOfUnitsIsRight) {
    expect_right_forward(draw_unit_attention);
}
TEST_F(CudaAttention, ForwardOfFewQueriesIsRight) {
    expect_right_forward(draw_step_attention, true);
}
TEST_F(CudaAttention, ForwardOfManyChannelsIsRight) {
    expect_right_forward(draw_wide_attention, true, half_of(call_count(100)));
}
TEST_F(CudaAttention, ForwardOverManyRangesIsRight) {
    expect_right_forward(draw_long_step_attention, true, 1);
}
TEST_F(CudaAttention, BackwardOfUnitsIsRight) {
    expect_right_backward(draw_unit_attention);
}

TEST_F(CudaAttention, ForwardOfPackedSequencesIsRight) {
    expect_right_forward(draw_packed_attention, true, half_of(call_count(60)));
}
TEST_F(CudaAttention, BackwardOfPackedSequencesIsRight) {
    expect_right_backward(draw_packed_attention, half_of(call_count(60)));
}
TEST_F(CudaAttention, BackwardOfPaddedRowsIsRight) {
    expect_right_backward(draw_padded_attention, half_of(call_count(60)));
}

TEST_F(CudaAttention, ForwardOfF32IsRight) {
    expect_right_forward(draw_f32_attention);
}
TEST_F(CudaAttention, BackwardOfF32IsRight) {
    expect_right_backward(draw_f32_attention);
}

TEST_F(CudaAttention, ForwardOfBiasesIsRight) {
    expect_right_forward(draw_biased_attention);
}
TEST_F(CudaAttention, BackwardOfBiasesIsRight) {
    expect_right_backward(draw_biased_attention);
}

TEST_F(CudaAttention, TwentyRunsHaveTheSameBits) {
    for (const DrawCall draw : {draw_unit_attention, draw_fast_attention})
        for (const std::uint64_t seed : {2u, 3u, 5u, 7u}) {
            const FastAttention call = draw(seed);
            if (is_refused(call, true)) continue;
            const Results outputs = call.forward(call.forward_names(), cuda());
            const Results gradients = call.backward(call.gradient_names(), outputs, cuda());
            for (int run = 1; run < 20; ++run) {
                expect_same_bits(outputs, call.forward(call.forward_names(), cuda()), seed);
                expect_same_bits(gradients, call.backward(call.gradient_names(), outputs, cuda()), seed);
            }
        }
}

// A key that the bias hides is no number: its tile is left to the kernels of planes, which has more tiles of dbias than
// these have blocks. Then heads share dbias.
class TilesLeftToPlanes : public CudaAttention, public testing::WithParamInterface<std::pair<Index, Index>> {};
TEST_P(TilesLeftToPlanes, HaveTheirGradient) {
    constexpr Index S = 136, D = 8;
    const Index H = GetParam().first, bias_heads = GetParam().second;
    Random random(3);
    Array q(DType::bf16, {1, S, H, D}), k(DType::bf16, {1, S, H, D}), v(DType::bf16, {1, S, H, D});
    Array d_o(DType::bf16, {1, S, H, D}), bias(DType::bf16, {1, bias_heads, S, S});
    for (Array* t : {&q, &k, &v, &d_o}) fill_normal(*t, random);
    for (Index i = 0; i < bias.count(); ++i) bias.set(i, i % S == 3 ? -INFINITY : 2048);
    for (Index h = 0; h < H; ++h) k.set({0, 3, h, 0}, NAN);
    const AttentionInputs in{.q = q.view(), .k = k.view(), .v = v.view(), .bias = bias.view()};
    const auto run = [&](const char* engine) {
        Array dbias(DType::bf16, {1, bias_heads, S, S});
        AttentionGradients grad;
        grad.d_o = d_o.view(), grad.dbias = dbias.view();
        Execution execution;
        execution.engine = engine;
        attention_backward(in, grad, {}, execution);
        return dbias;
    };
    const Array expected = run("reference"), actual = run("cuda");
    double off = 0, all = 0;
    for (Index i = 0; i < expected.count(); ++i) {
        off += std::pow(actual.get(i) - expected.get(i), 2);
        all += std::pow(expected.get(i), 2);
    }
    EXPECT_LT(std::sqrt(off), 5e-3 * std::sqrt(all));
}
INSTANTIATE_TEST_SUITE_P(CudaAttention, TilesLeftToPlanes, testing::Values(std::pair(64, 64), std::pair(4, 1)));

// Scores that climb from tile to tile of 128 keys, by less and by more than what the maximum of a row lags behind
// (2^8, of f16 2^5), than sums of weights may grow (2^24); and that fall. Rows of a warp differ. A row of the second
// head makes its warp follow maxima again, one of the third exceeds what f32 holds: it leaves its block to another
// kernel.
TEST_F(CudaAttention, RowsWhoseScoresClimbAreRight) {
    constexpr Index H = 3, Lq = 200, Lk = 776, D = 64;
    constexpr double steps[] = {0, 3, 4.5, 5.5, 7.5, 9, -40, 14, 30, 70, 150};  // of log2
    constexpr Index kinds[] = {7, 10, 11};                                      // of them, of each head
    for (const DType type : {DType::bf16, DType::f16}) {
        Random random(7);
        Array q(type, {1, Lq, H, D}), k(type, {1, Lk, H, D}), v(type, {1, Lk, H, D}), bias(type, {1, H, Lq, Lk});
        Array sink(DType::f32, {H});
        for (Array* t : {&q, &k, &v, &sink}) fill_normal(*t, random);
        for (Index i = 0; i < bias.count(); ++i)
            bias.set(i, std::log(2.0) * steps[i / Lk % Lq % kinds[i / (Lk * Lq)]] * static_cast<double>(i % Lk / 128));
        const AttentionInputs in{.q = q.view(), .k = k.view(), .v = v.view(), .bias = bias.view(), .sink = sink.view()};
        const auto run = [&](const Execution& execution) {
            std::pair results(Array(type, {1, Lq, H, D}), Array(DType::f32, {1, H, Lq}));
            attention_forward(in, {.o = results.first.view(), .lse = results.second.view()}, {}, execution);
            return results;
        };
        Execution reference;
        reference.engine = "reference";
        const auto expected = run(reference), actual = run(cuda());
        const double most = type == DType::bf16 ? 5e-3 : 7e-4;
        for (Index h = 0; h < H; ++h)
            for (Index i = 0; i < Lq; ++i) {
                double off = 0, all = 0;
                for (Index d = 0; d < D; ++d) {
                    off += std::pow(actual.first.get({0, i, h, d}) - expected.first.get({0, i, h, d}), 2);
                    all += std::pow(expected.first.get({0, i, h, d}), 2);
                }
                EXPECT_LT(std::sqrt(off), 3 * most * std::sqrt(all)) << "row " << i << " of head " << h;
                EXPECT_NEAR(actual.second.get({0, h, i}), expected.second.get({0, h, i}), 2e-3) << "row " << i;
            }
    }
}

void expect_reference_gradients(const AttentionInputs& in, const AttentionOptions& options, const Array& d_o,
                                bool dbias, const std::string& what, bool saved = false) {
    const auto run = [&](const Execution& execution) {
        std::map<std::string, Array> results;
        const auto result_of = [&results](const char* name, const Tensor& t) {
            Shape shape;
            for (std::size_t i = 0; i < t.rank(); ++i) shape.push_back(t.shape(i));
            return results.emplace(name, Array(t.dtype(), shape)).first->second.view();
        };
        AttentionGradients grad;
        grad.d_o = d_o.view();
        grad.dq = result_of("dq", in.q), grad.dk = result_of("dk", in.k), grad.dv = result_of("dv", in.v);
        if (dbias) grad.dbias = result_of("dbias", in.bias);
        Array lse(DType::f32, {in.q.shape(0), in.q.shape(2), in.q.shape(1)});
        if (saved) {
            grad.o = result_of("o", d_o.view()), grad.lse = lse.view();
            attention_forward(in, {.o = grad.o, .lse = grad.lse}, options, execution);
        }
        attention_backward(in, grad, options, execution);
        return results;
    };
    Execution reference;
    reference.engine = "reference";
    const auto expected = run(reference), actual = run(cuda());
    for (const auto& [name, values] : expected) {
        double off = 0, all = 0;
        for (Index i = 0; i < values.count(); ++i) {
            off += std::pow(actual.at(name).get(i) - values.get(i), 2);
            all += std::pow(values.get(i), 2);
        }
        EXPECT_LE(std::sqrt(off), 5e-3 * std::sqrt(all)) << name << what;
    }
}

// A bias of −∞ hides keys that hold NaN or Inf from all queries: what is seen has its gradients, and they have none.
// Kernels that repeat odd blocks of rows take several on a device of few multiprocessors, as the emulated one is.
TEST_F(CudaAttention, KeysThatABiasHidesMayHoldAnything) {
    constexpr Index H = 8, Hk = 4, S = 200, D = 64;
    constexpr DType type = DType::bf16;
    Random random(5);
    Array q(type, {1, S, H, D}), k(type, {1, S, Hk, D}), v(type, {1, S, Hk, D}), d_o(type, {1, S, H, D});
    Array bias(type, {1, H, S, S});
    for (Array* t : {&q, &k, &v, &d_o, &bias}) fill_normal(*t, random);
    for (const auto& [key, of_key, of_value] : {std::tuple{7, NAN, INFINITY}, {70, 1.0F, NAN}, {199, INFINITY, 1.0F}}) {
        for (Index i = 0; i < Hk * D; ++i) k.set(key * Hk * D + i, of_key), v.set(key * Hk * D + i, of_value);
        for (Index row = 0; row < H * S; ++row) bias.set(row * S + key, -INFINITY);
    }
    const AttentionInputs in{.q = q.view(), .k = k.view(), .v = v.view(), .bias = bias.view()};
    expect_reference_gradients(in, {}, d_o, true, "");
}

// What the drawn calls seldom are: whole sequences without a bias of each query, whose ds is kept in the workspace.
TEST_F(CudaAttention, GradientsOfWholeSequencesAreRight) {
    constexpr DType type = DType::bf16;
    Random random(11);
    struct Case {
        Index B, H, Hk, Lq, Lk, D, bias_queries;  // 0: no bias
        Causal causal;
        bool dbias, shared = false;  // by heads
    };
    const Case cases[] = {{1, 2, 1, 200, 136, 72, 0, Causal::none, false},
                          {2, 2, 2, 70, 131, 128, 0, Causal::bottom_right, false},
                          {2, 4, 2, 196, 90, 96, 0, Causal::top_left, false},
                          {1, 2, 1, 130, 264, 128, 1, Causal::none, true},
                          {2, 2, 1, 129, 136, 80, 1, Causal::bottom_right, false},
                          {2, 2, 1, 100, 200, 104, 100, Causal::none, false},
                          {2, 4, 2, 130, 264, 64, 130, Causal::bottom_right, true, true}};
    for (const Case& c : cases) {
        Array q(type, {c.B, c.Lq, c.H, c.D}), k(type, {c.B, c.Lk, c.Hk, c.D}), v(type, {c.B, c.Lk, c.Hk, c.D});
        Array d_o(type, {c.B, c.Lq, c.H, c.D}),
            bias(type, {c.B, c.shared ? 1 : c.H, std::max<Index>(c.bias_queries, 1), c.Lk});
        for (Array* t : {&q, &k, &v, &d_o, &bias}) fill_normal(*t, random);
        AttentionInputs in{.q = q.view(), .k = k.view(), .v = v.view()};
        if (c.bias_queries > 0) in.bias = bias.view();
        AttentionOptions options;
        options.causal = c.causal;
        expect_reference_gradients(in, options, d_o, c.dbias, " of D " + std::to_string(c.D));
    }
}

// Scores far from 0 though nothing is added to them, and of D 128 with ds in the workspace.
TEST_F(CudaAttention, FarScoresHaveTheirGradient) {
    constexpr Index H = 4, Hk = 2, S = 140;
    constexpr DType type = DType::bf16;
    for (const Index D : {64, 128, 192}) {
        Random random(13);
        Array q(type, {1, S, H, D}), k(type, {1, S, Hk, D}), v(type, {1, S, Hk, D}), d_o(type, {1, S, H, D});
        for (Array* t : {&q, &k, &v, &d_o}) fill_normal(*t, random);
        for (Index i = 0; i < S; ++i) q.set({0, i, 1, 0}, 4096), k.set({0, i, 0, 0}, 8);
        const AttentionInputs in{.q = q.view(), .k = k.view(), .v = v.view()};
        for (const bool saved : {false, true})
            expect_reference_gradients(in, {}, d_o, false, " of D " + std::to_string(D), saved);
    }
}

// A bias expanded along any dimensions, whose gradient has all elements.
TEST_F(CudaAttention, ExpandedBiasesHaveTheirGradient) {
    constexpr Index B = 2, H = 4, Hk = 2, Lq = 136, Lk = 144;
    const std::array<std::pair<Index, DType>, 3> sizes = {{{64, DType::f16}, {128, DType::bf16}, {192, DType::bf16}}};
    constexpr std::array<unsigned, 16> subsets = {4, 1, 2, 6, 12, 3, 0, 5, 7, 8, 9, 10, 11, 13, 14, 15};
    for (std::size_t i = 0; i < std::min<std::size_t>(call_count(48), 48); ++i) {
        const unsigned expanded = subsets[i % subsets.size()];
        const auto [D, type] = sizes[(i + i / subsets.size()) % sizes.size()];
        Random random(expanded);
        Array q(type, {B, Lq, H, D}), k(type, {B, Lk, Hk, D}), v(type, {B, Lk, Hk, D}), d_o(type, {B, Lq, H, D});
        Array bias(type, {B, H, Lq, Lk});
        for (Array* t : {&q, &k, &v, &d_o, &bias}) fill_normal(*t, random);
        for (std::size_t dim = 0; dim < 4; ++dim)
            if ((expanded >> dim & 1u) != 0) bias.repeat(dim);
        const AttentionInputs in{.q = q.view(), .k = k.view(), .v = v.view(), .bias = bias.view()};
        AttentionOptions options;
        options.causal = D == 128 ? Causal::bottom_right : Causal::none;
        expect_reference_gradients(in, options, d_o, true,
                                   " of D " + std::to_string(D) + ", expanded: " + std::to_string(expanded));
    }
}

TEST_F(CudaAttention, SharedBiasesOfNoKeysHaveNoGradient) {
    constexpr Index B = 2, H = 4, Hk = 2, Lq = 8, D = 64;
    constexpr DType type = DType::bf16;
    Random random(1);
    Array q(type, {B, Lq, H, D}), k(type, {B, 0, Hk, D}), v(type, {B, 0, Hk, D}), d_o(type, {B, Lq, H, D});
    Array bias(type, {1, 1, Lq, 0});
    fill_normal(q, random), fill_normal(d_o, random);
    AttentionOptions options;
    options.empty_row = EmptyRow::zero;
    const AttentionInputs in{.q = q.view(), .k = k.view(), .v = v.view(), .bias = bias.view()};
    expect_reference_gradients(in, options, d_o, true, " of no keys");
}

// Tokens that lie in one place, which the copy engine does not take, are as their copies are.
TEST_F(CudaAttention, TokensInOnePlaceAreRead) {
    constexpr Index B = 2, H = 4, Hk = 2, Lq = 136, Lk = 144;
    constexpr DType type = DType::bf16;
    std::uint64_t n = 0;
    for (const Index D : {64, 128, 256})
        for (std::size_t repeated = 0; repeated < 4; ++repeated) {
            if (n++ * 5 % 12 >= static_cast<std::uint64_t>(call_count(12))) continue;  // any of them where few are run
            const Shape shapes[] = {{B, Lq, H, D}, {B, Lk, Hk, D}, {B, Lk, Hk, D}, {B, Lq, H, D}};
            const auto run = [&](bool copied) {
                Random random(repeated);
                std::vector<Array> given, results;
                for (const Shape& shape : shapes) {
                    fill_normal(given.emplace_back(type, shape), random);
                    results.emplace_back(type, shape);
                }
                given[repeated].repeat(1);
                Array copy(type, shapes[repeated]);
                for (Index i = 0; i < copy.count(); ++i) copy.set(i, given[repeated].get(i));
                if (copied) given[repeated] = std::move(copy);
                const AttentionInputs in{.q = given[0].view(), .k = given[1].view(), .v = given[2].view()};
                attention_forward(in, {.o = results[3].view()}, {}, cuda());
                AttentionGradients grad;
                grad.d_o = given[3].view();
                grad.dq = results[0].view(), grad.dk = results[1].view(), grad.dv = results[2].view();
                attention_backward(in, grad, {}, cuda());
                std::vector<std::vector<double>> values;
                for (const Array& result : results) values.push_back(result.values());
                return values;
            };
            EXPECT_EQ(run(false), run(true)) << "D " << D << ", operand " << repeated;
        }
}

// A pool of pages that has none, whatever lengths on the GPU say: no key is seen.
TEST_F(CudaAttention, AnEmptyPoolOfPagesHasNoKeys) {
    constexpr Index B = 2, H = 2, D = 64;
    for (const DType type : {DType::bf16, DType::f32})
        for (const Index Lq : {1, 40}) {
            Random random(3);
            Array q(type, {B, Lq, H, D}), table(DType::i32, {B, 2}), used(DType::i32, {B}), o(type, {B, Lq, H, D});
            fill_normal(q, random);
            for (Index n = 0; n < B; ++n) used.set(n, 5);
            const GpuTensor on_q = GpuTensor::input(q.view()), on_table = GpuTensor::input(table.view()),
                            on_used = GpuTensor::input(used.view()), result = GpuTensor::result(o.view());
            const Tensor empty = Tensor(nullptr, type, {0, 16, H, D}).on({kDLCUDA, 0});
            AttentionInputs in{.q = on_q.view(), .k = empty, .v = empty};
            in.block_table = on_table.view(), in.cache_seqlens = on_used.view();
            AttentionOptions options;
            options.empty_row = EmptyRow::zero;
            attention_forward(in, {.o = result.view()}, options, cuda());
            result.copy_to(o.view());
            for (const double x : o.values()) ASSERT_EQ(x, 0);
        }
}

// Tensors on the GPU, in a workspace of exactly the bytes needed, between guard bytes: the bits are those of the
// library's own memory.
class CallersMemory {
  public:
    explicit CallersMemory(std::size_t bytes)
        : memory_(GpuTensor::result(Tensor(nullptr, DType::boolean, {static_cast<std::int64_t>(bytes)}))),
          bytes_(bytes) {}

    template <class Run>
    void run(Execution execution, const Run& pass) const {
        execution.workspace = {static_cast<std::byte*>(memory_.view().data()), bytes_};
        pass(execution);
        memory_.check_guards();
    }

  private:
    GpuTensor memory_;
    std::size_t bytes_;
};

TEST_F(CudaAttention, MoreHeadsThanAGridHasAreRefused) {
    constexpr std::int64_t H = 65536, D = 8;
    std::vector<float> x(H * D), o(H * D, -1);
    const auto rows = [&](std::vector<float>& data) { return Tensor(data.data(), DType::f32, {1, 1, H, D}); };
    EXPECT_THROW(attention_forward({.q = rows(x), .k = rows(x), .v = rows(x)}, {.o = rows(o)}, {}, cuda()),
                 Unsupported);
    EXPECT_EQ(o[0], -1);
}

TEST_F(CudaAttention, WorksInTheCallersMemory) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(20)); ++seed) {
        const FastAttention call = draw_unit_attention(seed);
        if (is_refused(call, true)) continue;
        std::map<std::string, GpuTensor> given, memory;
        AttentionInputs in;
        for (const auto& field : fields_of<AttentionInputs>)
            in.*field.tensor =
                given.emplace(field.name, GpuTensor::input(call.call().attention.*field.tensor)).first->second.view();
        in.cu_seqlens_q = call.call().attention.cu_seqlens_q;  // on the host: a mask's shape is checked by them
        in.cu_seqlens_k = call.call().attention.cu_seqlens_k;
        const GpuTensor d_o = GpuTensor::input(call.call().d_o);
        Results results;
        for (const char* name : {"o", "lse", "dq", "dk", "dv"}) {
            io::OwnedTensor host(io::output_dtype(call.call(), name), io::output_shape(call.call(), name));
            memory.emplace(name, GpuTensor::result(host.view()));
            results.emplace(name, host);
        }
        const AttentionOptions& options = call.call().attention_options;
        const AttentionOutputs out{.o = memory.at("o").view(), .lse = memory.at("lse").view()};
        CallersMemory(attention_forward_workspace(in, out, options, cuda())).run(cuda(), [&](const Execution& e) {
            attention_forward(in, out, options, e);
        });
        AttentionGradients grad;
        grad.d_o = d_o.view();
        grad.dq = memory.at("dq").view(), grad.dk = memory.at("dk").view(), grad.dv = memory.at("dv").view();
        CallersMemory(attention_backward_workspace(in, grad, options, cuda())).run(cuda(), [&](const Execution& e) {
            attention_backward(in, grad, options, e);
        });
        for (const auto& [name, host] : results) memory.at(name).copy_to(host.view());
        Results own = call.forward({"o", "lse"}, cuda());
        own.merge(call.backward({"dq", "dk", "dv"}, {}, cuda()));
        if (call.call().dlse) {  // which this test leaves out
            for (const char* name : {"dq", "dk", "dv"}) results.erase(name);
        }
        expect_same_bits(results, own, seed);
    }
}

// A packed call whose lengths lie on the GPU: nobody checks them, and rows from the last of them on are nobody's.
class PackedOnGpu {
  public:
    static constexpr Index H = 2, Hk = 1, D = 64;

    PackedOnGpu(DType type, Index all_rows, Index used) : rows_(all_rows), used_(used) {
        Random random(7);
        for (const auto& [name, heads] :
             {std::pair("q", H), std::pair("k", Hk), std::pair("v", Hk), std::pair("d_o", H)}) {
            Array t(type, {1, all_rows, heads, D});
            fill_normal(t, random);
            for (Index i = used * heads * D; i < t.count(); ++i) t.set(i, NAN);
            memory_.emplace(name, GpuTensor::input(t.view()));
        }
        Array sink(DType::f32, {H});
        fill_normal(sink, random);
        memory_.emplace("sink", GpuTensor::input(sink.view()));
        for (const char* name : {"o", "dq"}) add_result(name, Array(type, {1, all_rows, H, D}));
        for (const char* name : {"dk", "dv"}) add_result(name, Array(type, {1, all_rows, Hk, D}));
        add_result("lse", Array(DType::f32, {1, H, all_rows}));
        add_result("dsink", Array(DType::f32, {H}));
    }

    // Forward and backward over the first `rows` rows; results as bytes of those that are used.
    std::map<std::string, std::vector<double>> run(const Tensor& lengths, Index rows) {
        const auto first = [&](const char* name) {
            const Tensor& t = memory_.at(name).view();
            return Tensor(t.data(), t.dtype(), {1, rows, t.shape(2), D}).on(t.dlpack().device);
        };
        const Tensor& lse = memory_.at("lse").view();
        AttentionInputs in{.q = first("q"), .k = first("k"), .v = first("v"), .sink = memory_.at("sink").view()};
        in.cu_seqlens_q = in.cu_seqlens_k = lengths;
        const AttentionOutputs out{
            .o = first("o"),
            .lse = Tensor(lse.data(), lse.dtype(), {1, H, rows}, {H * rows_, rows_, 1}).on(lse.dlpack().device)};
        AttentionOptions options;
        options.causal = Causal::bottom_right;
        attention_forward(in, out, options, cuda());
        AttentionGradients grad{.o = out.o, .lse = out.lse, .d_o = first("d_o")};
        grad.dq = first("dq"), grad.dk = first("dk"), grad.dv = first("dv"), grad.dsink = memory_.at("dsink").view();
        attention_backward(in, grad, options, cuda());
        std::map<std::string, std::vector<double>> results;
        for (const auto& [name, host] : hosts_) {
            memory_.at(name).copy_to(host.view());
            const Index per_row = host.count() / (name == "lse" || name == "dsink" ? H : rows_);
            for (Index i = 0; i < host.count(); ++i)
                if (name == "dsink" || (name == "lse" ? i % rows_ : i / per_row) < used_)
                    results[name].push_back(host.get(i));
        }
        return results;
    }

  private:
    void add_result(const char* name, Array&& host) {
        memory_.emplace(name, GpuTensor::result(host.view()));
        hosts_.emplace(name, std::move(host));
    }

    Index rows_, used_;
    std::map<std::string, GpuTensor> memory_;
    std::map<std::string, Array> hosts_;
};

TEST_F(CudaAttention, LengthsOnTheGpuNeedNotEndWithTheRows) {
    constexpr Index used = 100, rows = 150;
    for (const DType type : {DType::bf16, DType::f32}) {
        Array lengths(DType::i32, {4});
        const double ends[] = {0, 40, 40, used};
        for (Index i = 0; i < 4; ++i) lengths.set(i, ends[i]);
        const GpuTensor on_gpu = GpuTensor::input(lengths.view());
        PackedOnGpu call(type, rows, used);
        const auto from_host = call.run(lengths.view(), used), results = call.run(on_gpu.view(), rows);
        for (const auto& [name, values] : from_host) EXPECT_EQ(values, results.at(name)) << name;
    }
}

// Whatever they are, nothing else is read or written: guard bytes, and AddressSanitizer where the GPU is the host.
TEST_F(CudaAttention, LengthsOnTheGpuMayBeWild) {
    // The last has more tiles than any 600 rows of three sequences.
    for (const auto& ends :
         {std::array<double, 4>{-5, 70, 1e15, 1e15}, {300, 400, 500, -1}, {0, 150, 100, 50}, {0, 600, 0, 600}}) {
        const Index rows = ends[3] == 600 ? 600 : 150;
        Array lengths(DType::i64, {4});
        for (Index i = 0; i < 4; ++i) lengths.set(i, ends[static_cast<std::size_t>(i)]);
        const GpuTensor on_gpu = GpuTensor::input(lengths.view());
        for (const DType type : {DType::bf16, DType::f32})
            EXPECT_NO_THROW(PackedOnGpu(type, rows, rows).run(on_gpu.view(), rows));
    }
}

}  // namespace
}  // namespace softdelta::test

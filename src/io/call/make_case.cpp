#include "io/call/make_case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numbers>
#include <numeric>
#include <optional>
#include <utility>

#include "core/tensor.h"
#include "io/call/call.h"
#include "io/call/operands.h"
#include "io/file/core_view.h"
#include "io/file/stored_type.h"
#include "io/file/text.h"

namespace softdelta::io {

namespace {

using std::int64_t;
using Shape = std::vector<int64_t>;

// splitmix64 and Box-Muller: the standard library's distributions differ between implementations.
class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}
    double uniform() {  // (0, 1)
        std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        return (static_cast<double>((x ^ (x >> 31)) >> 11) + 0.5) * 0x1p-53;
    }
    double normal() { return std::sqrt(-2 * std::log(uniform())) * std::cos(2 * std::numbers::pi * uniform()); }

  private:
    std::uint64_t state_;
};

// a + b and a·b of sizes, which may be any number.
int64_t sum(int64_t a, int64_t b) {
    int64_t c = 0;
    if (__builtin_add_overflow(a, b, &c)) throw CaseError("lengths: together they are too large");
    return c;
}
int64_t product(int64_t a, int64_t b) {
    int64_t c = 0;
    if (__builtin_mul_overflow(a, b, &c))
        throw CaseError("a size of " + std::to_string(a) + " times " + std::to_string(b) + " is too large");
    return c;
}

class Maker {
  public:
    explicit Maker(const MakeOptions& options, bool fills = true) : o_(options), random_(options.seed), fills_(fills) {}

    // Of all tensors.
    double bytes() const { return bytes_; }

    CaseFile make() {
        file_.metadata["op"] = o_.op;
        if (!std::isnan(o_.scale)) set("scale", o_.scale);
        file_.metadata["producer"] = "softdelta make, seed " + std::to_string(o_.seed);
        o_.op == "attention" ? make_attention() : make_delta();
        return std::move(file_);
    }

  private:
    void add(const std::string& name, DType type, const Shape& shape, const std::function<double()>& value) {
        const std::optional<std::size_t> bytes = dense_bytes(type, shape);
        if (!bytes) throw CaseError(name + ": shape " + shape_text(shape) + " is too large");
        bytes_ += static_cast<double>(*bytes);
        if (!fills_) return;
        OwnedTensor tensor(type, shape);
        const core::Tensor view = core_view(tensor.view());
        for (int64_t i = 0; i < tensor.count(); ++i) core::store(view, i, value());
        file_.tensors.insert_or_assign(name, tensor);
    }
    void add_normal(const std::string& name, DType type, const Shape& shape, double size = 1) {
        add(name, type, shape, [&, size] { return size * random_.normal(); });
    }
    // Rows of unit length, for rules that would grow without.
    void add_unit_rows(const std::string& name, const Shape& shape) {
        std::vector<double> row(static_cast<std::size_t>(shape.back()));
        std::size_t next = row.size();
        add(name, o_.dtype, shape, [&] {
            if (next == row.size()) {
                for (double& x : row) x = random_.normal();
                const double norm = std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 1e-30));
                for (double& x : row) x /= norm;
                next = 0;
            }
            return row[next++];
        });
    }
    // −2, −1, 1 or 2 beside few keys, else normal.
    void add_values(const std::string& name, DType type, const Shape& shape, double size) {
        if (o_.keys_like != "few") return add_normal(name, type, shape, size);
        add(name, type, shape, [&] {
            const double whole = random_.uniform() < 0.5 ? 1 : 2;
            return random_.uniform() < 0.5 ? -whole : whole;
        });
    }
    // Rows that are one of the first five unit vectors.
    void add_few_units(const std::string& name, const Shape& shape) {
        int64_t i = 0, unit = 0;
        add(name, o_.dtype, shape, [&] {
            if (i % shape[3] == 0)
                unit = static_cast<int64_t>(random_.uniform() * static_cast<double>(std::min<int64_t>(shape[3], 5)));
            return i++ % shape[3] == unit ? 1.0 : 0.0;
        });
    }
    // Rows that differ from one row of their head by half of its size.
    void add_alike(const std::string& name, const Shape& shape) {
        std::vector<double> common(static_cast<std::size_t>(shape[2] * shape[3]));
        for (double& x : common) x = random_.normal();
        std::size_t i = 0;
        const double unit = o_.l2norm ? 1 : 1 / std::sqrt(1.25 * static_cast<double>(shape[3]));
        add(name, o_.dtype, shape, [&, unit] { return unit * (common[i++ % common.size()] + 0.5 * random_.normal()); });
    }
    void add_cumulative(const std::string& name, const std::vector<int64_t>& lengths) {
        int64_t sum = 0;
        std::size_t next = 0;
        add(name, DType::i32, {static_cast<int64_t>(lengths.size()) + 1}, [&] {
            const int64_t entry = sum;
            if (next < lengths.size()) sum += lengths[next++];
            return static_cast<double>(entry);
        });
    }
    void set(const std::string& key, bool value) { file_.metadata[key] = value ? "true" : "false"; }
    void set(const std::string& key, double value) {
        char text[40];
        std::snprintf(text, sizeof text, "%.17g", value);
        file_.metadata[key] = text;
    }

    void make_attention() {
        const bool packed = !o_.lengths.empty();
        const std::vector<int64_t>& key_lengths = o_.key_lengths.empty() ? o_.lengths : o_.key_lengths;
        if (packed && key_lengths.size() != o_.lengths.size())
            throw CaseError("key lengths: " + std::to_string(key_lengths.size()) + " given, expected " +
                            std::to_string(o_.lengths.size()) + ", as many as lengths");
        const auto total = [](const std::vector<int64_t>& l) {
            return std::accumulate(l.begin(), l.end(), int64_t{0}, sum);
        };
        const auto longest = [](const std::vector<int64_t>& l) { return *std::max_element(l.begin(), l.end()); };
        const int64_t batch = packed ? 1 : o_.batch, rows = packed ? total(o_.lengths) : o_.queries;
        const int64_t keys = packed ? total(key_lengths) : o_.keys;
        const bool paged = o_.block_rows > 0;
        int64_t most_keys = packed ? longest(key_lengths) : keys;
        add_normal("q", o_.dtype, {batch, rows, o_.heads, o_.key_size});
        if (packed) add_cumulative("cu_seqlens_q", o_.lengths);
        if (paged) {
            most_keys = add_pages(packed ? static_cast<int64_t>(key_lengths.size()) : batch,
                                  [&](int64_t n) { return packed ? key_lengths[static_cast<std::size_t>(n)] : keys; });
        } else {
            add_keys("k", {batch, keys, o_.key_heads, o_.key_size});
            add_keys("v", {batch, keys, o_.key_heads, o_.value_size});
            if (packed) add_cumulative("cu_seqlens_k", key_lengths);
        }
        add_mask_and_bias(packed ? static_cast<int64_t>(o_.lengths.size()) : batch, packed ? longest(o_.lengths) : rows,
                          most_keys);
        if (o_.sink) add_normal("sink", DType::f32, {o_.heads});
        if (o_.alibi) add_slopes("alibi_slopes");
        if (o_.bias_slopes) add_slopes("bias_slopes");
        if (o_.gradients && !paged && o_.quantised == "none") {
            add_normal("do", o_.dtype, {batch, rows, o_.heads, o_.value_size});
            add_normal("dlse", DType::f32, {batch, o_.heads, rows}, 0.1);
        }
        file_.metadata["causal"] = o_.causal;
        if (o_.window_left >= 0) file_.metadata["window_left"] = std::to_string(o_.window_left);
        if (o_.window_right >= 0) file_.metadata["window_right"] = std::to_string(o_.window_right);
        if (o_.top_w > 0) file_.metadata["top_w"] = std::to_string(o_.top_w);
        if (o_.softcap > 0) set("softcap", o_.softcap);
        if (o_.empty_row != "minus_infinity") file_.metadata["empty_row"] = o_.empty_row;
    }

    // Keys and values of sequences in blocks, in no order; returns how many keys of a sequence the table has room for.
    int64_t add_pages(int64_t sequences, const std::function<int64_t(int64_t)>& length) {
        const auto blocks = [&](int64_t n) { return length(n) / o_.block_rows + (length(n) % o_.block_rows != 0); };
        int64_t entry = 0;
        add("cache_seqlens", DType::i32, {sequences}, [&] { return static_cast<double>(length(entry++)); });
        int64_t all = 0, most = 0;
        if (o_.lengths.empty() && sequences > 0) all = product(sequences, most = blocks(0));
        for (int64_t n = 0; n < sequences && !o_.lengths.empty(); ++n)
            all = sum(all, blocks(n)), most = std::max(most, blocks(n));
        std::vector<int64_t> order(fills_ ? static_cast<std::size_t>(all) : 0);
        std::iota(order.begin(), order.end(), 0);
        for (std::size_t i = order.size(); i > 1; --i)
            std::swap(order[i - 1], order[static_cast<std::size_t>(random_.uniform() * static_cast<double>(i))]);
        add_keys("k", {all, o_.block_rows, o_.key_heads, o_.key_size});
        add_keys("v", {all, o_.block_rows, o_.key_heads, o_.value_size});
        std::size_t next = 0;
        int64_t i = 0;
        add("block_table", DType::i32, {sequences, most}, [&] {  // what is not used is -1
            const int64_t n = i / most, block = i++ % most;
            return block < blocks(n) ? static_cast<double>(order[next++]) : -1.0;
        });
        return most * o_.block_rows;  // no more than k has rows
    }

    // Normal numbers as their type holds them: the largest of a block or row is 127, or 7 of 4 bits.
    void add_keys(const std::string& name, const Shape& shape) {
        if (o_.quantised == "none") return add_normal(name, o_.dtype, shape);
        const bool blocks = o_.quantised == "q8_0" || o_.quantised == "q4_0", halves = o_.quantised == "q4_0",
                   f8 = o_.quantised == "f8";
        const int64_t size = shape[3], run = blocks ? 32 : size;  // elements with one scale
        const double most = halves ? 7 : 127;
        std::vector<double> row(static_cast<std::size_t>(run)), scales;
        std::vector<double> numbers;
        for (int64_t left = fills_ ? shape[0] * shape[1] * shape[2] * (size / run) : 0; left > 0; --left) {
            double largest = 0;
            for (double& x : row) largest = std::max(largest, std::abs(x = random_.normal()));
            const double scale = f8 ? 0.5 : static_cast<double>(core::to_float(core::to_f16(largest / most)));
            const auto number = [&](std::size_t j) {
                return f8 ? row[j] / scale : std::clamp(std::nearbyint(row[j] / scale), -most, most);
            };
            for (std::size_t j = 0; j < row.size() / (halves ? 2 : 1); ++j)
                numbers.push_back(halves ? number(j) + 8 + 16 * (number(j + 16) + 8) : number(j));
            scales.push_back(scale);
        }
        std::size_t next = 0;
        const auto take = [&next](const std::vector<double>& from) { return [&] { return from[next++]; }; };
        Shape stored = shape;
        if (blocks) stored = {shape[0], shape[1], shape[2], size / 32, halves ? 16 : 32};
        add(name, halves ? DType::u8 : f8 ? DType::f8 : DType::i8, stored, take(numbers));
        next = 0;
        if (f8)
            add(name + "_scale", DType::f32, {1, 1, shape[2], 1}, [] { return 0.5; });
        else
            add(name + "_scale", DType::f16, {shape[0], shape[1], shape[2], size / run}, take(scales));
    }

    // As Press et al. (2022) have them for a power of two of heads.
    void add_slopes(const char* name) {
        double power = 0;
        add(name, DType::f32, {o_.heads}, [&] { return std::exp2(-8 * ++power / static_cast<double>(o_.heads)); });
    }

    void add_mask_and_bias(int64_t batch, int64_t rows, int64_t keys) {
        if (o_.mask == "random") {
            add("mask", DType::boolean, {batch, 1, rows, keys}, [&] { return random_.uniform() < 0.7 ? 1.0 : 0.0; });
        } else if (o_.mask == "padding") {
            int64_t i = 0, used = keys;
            add("mask", DType::boolean, {batch, 1, 1, keys}, [&] {
                if (i % keys == 0) used = 1 + static_cast<int64_t>(random_.uniform() * static_cast<double>(keys));
                return i++ % keys < used ? 1.0 : 0.0;
            });
        } else if (o_.mask == "dead_rows") {  // every fifth row, and a whole tile of 64, sees nothing
            int64_t i = 0;
            add("mask", DType::boolean, {batch, 1, rows, keys}, [&] {
                const int64_t row = i++ / keys % rows;
                return row % 5 == 2 || row / 64 == 1 ? 0.0 : random_.uniform() < 0.7 ? 1.0 : 0.0;
            });
        } else if (o_.mask != "none") {
            throw CaseError("mask: " + o_.mask + " given, expected none, random, padding or dead_rows");
        }
        if (o_.bias == "full")
            add_normal("bias", o_.dtype, {batch, o_.heads, rows, keys});
        else if (o_.bias == "row")
            add_normal("bias", o_.dtype, {1, 1, 1, keys});
        else if (o_.bias == "head")
            add_normal("bias", o_.dtype, {1, o_.heads, rows, keys});
        else if (o_.bias == "key_head")
            add_normal("bias", o_.dtype, {batch, o_.key_heads, rows, keys});
        else if (o_.bias == "padding")
            add_padding(batch, rows, keys);
        else if (o_.bias != "none")
            throw CaseError("bias: " + o_.bias + " given, expected none, full, row, head, key_head or padding");
    }

    // Left padding and causal as one finite bias: the first rows see nothing but masked keys.
    void add_padding(int64_t batch, int64_t rows, int64_t keys) {
        const double most = o_.dtype == DType::f16 ? 65504 : o_.dtype == DType::bf16 ? 3.3895e38 : 3.4028e38;
        const double value = std::isinf(o_.mask_value) ? o_.mask_value : std::clamp(o_.mask_value, -most, most);
        int64_t i = 0, padded = 0;
        add("bias", o_.dtype, {batch, 1, rows, keys}, [&] {
            const int64_t row = i / keys % rows, key = i % keys;
            if (row == 0 && key == 0) padded = static_cast<int64_t>(random_.uniform() * static_cast<double>(keys) / 2);
            ++i;
            return key < padded || key > row + keys - rows ? value : 0.0;
        });
    }

    bool takes_input(const char* name) const { return takes(*find_operation(o_.op), name); }

    void make_delta() {
        const bool packed = !o_.lengths.empty();
        const int64_t batch = packed ? 1 : o_.batch;
        const int64_t tokens =
            packed ? std::accumulate(o_.lengths.begin(), o_.lengths.end(), int64_t{0}, sum) : o_.tokens;
        const int64_t sequences = packed ? static_cast<int64_t>(o_.lengths.size()) : batch;
        const Shape value_shape{batch, tokens * o_.steps, o_.value_heads, o_.value_size};
        for (const std::string name : {"q", "k", "p"}) {
            const Shape key_shape{batch, name == "q" ? tokens : tokens * o_.steps, o_.heads, o_.key_size};
            if (!takes_input(name.c_str())) continue;
            if (o_.keys_like == "few")
                add_few_units(name, key_shape);
            else if (o_.keys_like == "alike")
                add_alike(name, key_shape);
            else if (o_.l2norm)
                add_normal(name, o_.dtype, key_shape);
            else
                add_unit_rows(name, key_shape);
        }
        add_values("v", o_.dtype, value_shape, 1);
        add_gate(batch, tokens);
        if (takes_input("beta"))
            add("beta", o_.dtype, {batch, tokens * o_.steps, o_.value_heads}, [&] {
                if (o_.keys_like == "few") return 1.0;
                if (o_.most_beta != 1) return o_.most_beta * random_.uniform();
                const double logit = random_.normal();
                return o_.beta_logits ? logit : 1 / (1 + std::exp(-logit));
            });
        if (packed) add_cumulative("cu_seqlens", o_.lengths);
        Shape state{sequences, o_.value_heads, o_.key_size, o_.value_size};
        if (o_.state_v_first) std::swap(state[2], state[3]);
        if (o_.initial_state) add_values("initial_state", DType::f32, state, 0.3);
        if (o_.gradients) {
            add_values("do", o_.dtype, {batch, tokens, o_.value_heads, o_.value_size}, 1);
            add_values("dfinal_state", DType::f32, state, 0.3);
        }
        set("use_qk_l2norm_in_kernel", o_.l2norm);
        if (o_.state_v_first) set("state_v_first", true);
        if (o_.steps > 1) file_.metadata["steps"] = std::to_string(o_.steps);
        if (o_.tiled_heads) file_.metadata["head_order"] = "tiled";
        if (o_.beta_logits) set("use_beta_sigmoid_in_kernel", true);
        if (o_.allow_neg_eigval) set("allow_neg_eigval", true);
    }

    void add_gate(int64_t batch, int64_t tokens) {
        if (!takes_input("g") || o_.gate == "none") return;
        if (o_.gate == "constant")
            return add("g_gamma", DType::f32, {o_.value_heads}, [&] { return -0.3 * random_.uniform(); });
        const bool channel = find_operation(o_.op)->rule->gate == core::Gate::channel;
        Shape shape{batch, tokens, o_.value_heads};
        if (channel) shape.push_back(o_.key_size);
        if (o_.raw_gate != "none") return add_raw_gate(shape, channel);
        add("g", DType::f32, shape, gate_value());
    }

    std::function<double()> gate_value() {
        const auto mild = [this] { return -std::log1p(std::exp(random_.normal())) / 8; };
        if (o_.gate == "mild") return mild;
        if (o_.gate == "uniform") return [this] { return o_.gate_value; };
        if (o_.gate == "spread") return [this] { return o_.gate_value * random_.uniform(); };
        if (o_.gate == "halves") return [this] { return random_.uniform() < 0.2 ? -std::numbers::ln2 : 0.0; };
        if (o_.gate == "steep")  // mostly forgetful, at times a token that wipes
            return [this, mild] {
                return random_.uniform() < 0.05 ? -1000.0 : random_.uniform() < 0.5 ? -20 * random_.uniform() : mild();
            };
        if (o_.gate == "wipe")
            return
                [this, mild] { return random_.uniform() < 0.05 ? -std::numeric_limits<double>::infinity() : mild(); };
        throw CaseError("gate: " + o_.gate +
                        " given, expected mild, steep, uniform, spread, halves, wipe, constant or none");
    }

    void add_raw_gate(const Shape& shape, bool channel) {
        if (o_.raw_gate != "softplus" && o_.raw_gate != "lower_bound")
            throw CaseError("raw gate: " + o_.raw_gate + " given, expected none, softplus or lower_bound");
        add_normal("g", o_.dtype, shape);
        add("A_log", DType::f32, {o_.value_heads}, [&] { return std::log(0.5 + random_.uniform()); });
        add("dt_bias", DType::f32, {channel ? o_.value_heads * o_.key_size : o_.value_heads},
            [&] { return std::log(std::expm1(0.001 + 0.1 * random_.uniform())); });
        set("use_gate_in_kernel", true);
        if (o_.raw_gate == "lower_bound") set("lower_bound", o_.lower_bound);
    }

    const MakeOptions& o_;
    Random random_;
    bool fills_;  // else the tensors are counted
    double bytes_ = 0;
    CaseFile file_;
};

void check(const MakeOptions& o) {
    if (find_operation(o.op) == nullptr) throw CaseError("op: no operation is called " + o.op);
    const auto at_least = [](const char* name, int64_t value, int64_t least) {
        if (value < least)
            throw CaseError(std::string(name) + ": " + std::to_string(value) + " given, expected " +
                            std::to_string(least) + " or more");
    };
    at_least("batch", o.batch, 0);
    at_least("queries", o.queries, 0);
    at_least("keys", o.keys, 0);
    at_least("tokens", o.tokens, 0);
    at_least("block rows", o.block_rows, 0);
    for (const auto& [name, size] : {std::pair{"heads", o.heads},
                                     {"key heads", o.key_heads},
                                     {"value heads", o.value_heads},
                                     {"key size", o.key_size},
                                     {"value size", o.value_size}})
        at_least(name, size, 1);
    for (const auto* lengths : {&o.lengths, &o.key_lengths})
        for (const int64_t length : *lengths) at_least("lengths", length, 0);
    at_least("window left", o.window_left, -1);
    at_least("window right", o.window_right, -1);
    const auto refuse = [](const char* name, double value, const char* expected) {
        throw CaseError(std::string(name) + ": " + std::to_string(value) + " given, expected " + expected);
    };
    if (std::isinf(o.scale)) refuse("scale", o.scale, "a finite number");
    if (!(o.softcap >= 0) || std::isinf(o.softcap)) refuse("softcap", o.softcap, "0 (off) or a positive number");
    if (std::isnan(o.mask_value) || o.mask_value == HUGE_VAL)
        refuse("mask value", o.mask_value, "a finite number or -inf");
    if (!std::isfinite(o.gate_value)) refuse("gate value", o.gate_value, "a finite number");
    if (!std::isfinite(o.most_beta) || o.most_beta < 0) refuse("most beta", o.most_beta, "0 or a positive number");
    if (o.keys_like != "drawn" && o.keys_like != "alike" && o.keys_like != "few")
        throw CaseError("keys like: " + o.keys_like + " given, expected drawn, alike or few");
    if (!std::isfinite(o.lower_bound) || o.lower_bound > 0)
        refuse("lower bound", o.lower_bound, "0 or a negative number");
    if (o.top_w == 0 || o.top_w < -1)
        throw CaseError("top w: " + std::to_string(o.top_w) + " given, expected -1 (off), or 1 or more");
    if (o.quantised != "none" && o.quantised != "q8_0" && o.quantised != "q4_0" && o.quantised != "i8" &&
        o.quantised != "f8")
        throw CaseError("quantised: " + o.quantised + " given, expected none, q8_0, q4_0, i8 or f8");
    if (o.quantised.starts_with("q") && (o.key_size % 32 != 0 || o.value_size % 32 != 0))
        throw CaseError("quantised: " + o.quantised + " given with sizes " + std::to_string(o.key_size) + " and " +
                        std::to_string(o.value_size) + ", expected multiples of 32");
    if (o.bias_slopes && o.bias == "none") throw CaseError("bias slopes: given without a bias, which they multiply");
    if (o.top_w > 0 && o.bias == "none") throw CaseError("top w: given without a bias, which it selects by");
    if (o.steps < 1 || o.steps > 64) throw CaseError("steps: " + std::to_string(o.steps) + " given, expected 1 to 64");
    if (o.raw_gate != "none" && o.gate != "mild")
        throw CaseError("gate: " + o.gate + " given together with a raw gate");
    const bool attention = o.op == "attention";
    const int64_t many = attention ? o.heads : o.value_heads, few = attention ? o.key_heads : o.heads;
    if (many % few != 0)
        throw CaseError(std::string(attention ? "heads" : "value heads") + ": " + std::to_string(many) +
                        " given, expected a multiple of " + std::to_string(few) +
                        (attention ? " (key heads)" : " (heads)"));
}

}  // namespace

CaseFile make_case(const MakeOptions& options) {
    check(options);
    CaseFile file = Maker(options).make();
    file.name = "make";
    call_of(file);  // refuses what contradicts itself
    return file;
}

double bytes_of_case(const MakeOptions& options) {
    check(options);
    Maker maker(options, false);
    maker.make();
    return maker.bytes();
}

}  // namespace softdelta::io

// GGML_OP_FLASH_ATTN_EXT: q [D, Lq, H, B], k [D, Lk, Hk, B], v [Dv, Lk, Hk, B]. The mask [Lk, Lq, H or 1, B or 1] in
// f16 is added to the scores; sinks [H]. The result is [Dv, H, Lq, B]. Shapes as ggml writes them, fastest first.
//
// Keys and values of q8_0 and q4_0 are read as they lie; those of other quantised types become f32 first, once for all
// rows of queries. They do so in ranges of sequences and keys, whose results are merged: a long cache takes no more
// memory than a short one. With ALiBi (max_bias ≠ 0) the mask, which holds positions then,
// is multiplied by a slope per head.
#include <softdelta/softdelta.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "operations/operations.h"
#include "operations/thresholds.h"
#include "operations/view.h"

namespace softdelta_ggml {

namespace {

struct Node {
    const ggml_tensor *q, *k, *v, *mask, *sinks;
    float scale, max_bias, softcap;
    std::int64_t most_seen;  // keys of a row, where the model says so; 0: it does not
    std::int64_t batch, queries, heads, keys, key_heads, size, value_size;
    float* o;

    explicit Node(const ggml_tensor* op)
        : q(op->src[0]),
          k(op->src[1]),
          v(op->src[2]),
          mask(op->src[3]),
          sinks(op->src[4]),
          scale(ggml_get_op_params_f32(op, 0)),
          max_bias(ggml_get_op_params_f32(op, 1)),
          softcap(ggml_get_op_params_f32(op, 2)),
          most_seen(ggml_get_op_params_i32(op, 4)),
          batch(q->ne[3]),
          queries(q->ne[1]),
          heads(q->ne[2]),
          keys(k->ne[1]),
          key_heads(k->ne[2]),
          size(q->ne[0]),
          value_size(v->ne[0]),
          o(static_cast<float*>(op->data)) {}
};

bool is_readable(const ggml_tensor* t) {
    DLDataType type;
    return element_type(t->type, type) && is_plain(t);
}

bool is_quantised(const ggml_tensor* t) {
    return ggml_is_quantized(t->type) && ggml_get_type_traits(t->type)->to_float != nullptr &&
           t->nb[0] == ggml_type_size(t->type);
}

// Blocks of 32 numbers, each after its scale in f16: 32 bytes, or 16 with two numbers each.
bool has_quantised_blocks(const ggml_tensor* t) {
    return t->type == GGML_TYPE_Q8_0 || t->type == GGML_TYPE_Q4_0;
}

// [D, L, H, B] as the library's [B, L, H, D], and its scales.
struct Operand {
    View view, scales;
};

// What one call of the library works on.
struct Range {
    std::int64_t sequence, sequences, key, keys;
};

Operand quantised_blocks_of(const ggml_tensor* t, const Range& r) {
    const bool halves = t->type == GGML_TYPE_Q4_0;
    const DLDataType type = {static_cast<std::uint8_t>(halves ? kDLUInt : kDLInt), 8, 1}, f16 = {kDLFloat, 16, 1};
    const std::int64_t blocks = t->ne[0] / 32, numbers = halves ? 16 : 32, block = numbers + 2;
    const auto bytes = [t](int dim) { return static_cast<std::int64_t>(t->nb[dim]); };
    char* data = row(t, r.key, 0, r.sequence);
    return {View(data + 2, type, {r.sequences, r.keys, t->ne[2], blocks, numbers},
                 {bytes(3), bytes(1), bytes(2), block, 1}),
            View(data, f16, {r.sequences, r.keys, t->ne[2], blocks},
                 {bytes(3) / 2, bytes(1) / 2, bytes(2) / 2, block / 2})};
}

bool is_expanded(const ggml_tensor* t) {
    return !is_readable(t) && !has_quantised_blocks(t);
}

// Rows of a tensor as they lie, or what they stand for, in f32.
Operand operand_of(const ggml_tensor* t, const Range& r, std::vector<float>& expanded, int threads) {
    if (has_quantised_blocks(t)) return quantised_blocks_of(t, r);
    const std::int64_t size = t->ne[0], heads = t->ne[2];
    DLDataType type;
    if (element_type(t->type, type))
        return {View(row(t, r.key, 0, r.sequence), type, {r.sequences, r.keys, heads, size},
                     {stride(t, 3), stride(t, 1), stride(t, 2), 1}),
                {}};
    const ggml_to_float_t to_float = ggml_get_type_traits(t->type)->to_float;
    const std::int64_t rows = r.keys * heads * r.sequences;
    expanded.resize(static_cast<std::size_t>(rows * size));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t i = 0; i < rows; ++i)
        to_float(row(t, r.key + i % r.keys, i / r.keys % heads, r.sequence + i / r.keys / heads),
                 expanded.data() + i * size, size);
    return {
        View(expanded.data(), f32, {r.sequences, r.keys, heads, size}, {r.keys * heads * size, size, r.keys * size, 1}),
        {}};
}

// ALiBi (Press et al. 2022): slopes are powers of 2^(−max_bias/n), n the largest power of two up to H; heads beyond n
// take the odd powers of its root.
float slope(const Node& x, std::int64_t head) {
    const auto n = static_cast<float>(std::int64_t{1} << static_cast<int>(std::floor(std::log2(x.heads))));
    const auto h = static_cast<float>(head);
    return h < n ? std::pow(std::exp2(-x.max_bias / n), h + 1)
                 : std::pow(std::exp2(-x.max_bias / 2 / n), 2 * (h - n) + 1);
}

View mask_view(const Node& x, const Range& r) {
    DLDataType type;
    element_type(x.mask->type, type);
    const bool shared = x.mask->ne[3] == 1;
    return View(row(x.mask, 0, 0, shared ? 0 : r.sequence) + static_cast<std::size_t>(r.key) * x.mask->nb[0], type,
                {shared ? 1 : r.sequences, x.mask->ne[2], x.queries, r.keys},
                {stride(x.mask, 3), stride(x.mask, 2), stride(x.mask, 1), 1});
}

// Which keys a mask lets its rows see, where position alone decides and rows see one key more than the row before:
//
//     0 0 0 −∞ −∞        visible = 3 − queries + 1 = 3 keys for the first row here, and 4 for the last
//     0 0 0  0 −∞
//
// Then the library needs no mask: it leaves out what is not seen. Returns how many keys the last row sees; 0: another
// mask.
std::int64_t causal_keys(const Node& x, int threads) {
    const ggml_tensor* mask = x.mask;
    if (mask == nullptr || x.max_bias != 0 || mask->ne[2] != 1 || mask->ne[3] != 1 || x.queries < causal_queries)
        return 0;
    constexpr ggml_fp16_t hidden = 0xFC00;  // −∞
    const auto* last = reinterpret_cast<const ggml_fp16_t*>(row(mask, x.queries - 1, 0, 0));
    const std::int64_t visible = std::find(last, last + x.keys, hidden) - last, first = visible - x.queries + 1;
    if (first < 1) return 0;
    bool causal = true;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(&& : causal)
    for (std::int64_t i = 0; i < x.queries; ++i) {
        const auto* numbers = reinterpret_cast<const ggml_fp16_t*>(row(mask, i, 0, 0));
        int wrong = 0;
        for (std::int64_t j = 0; j < first + i; ++j) wrong |= numbers[j];
        for (std::int64_t j = first + i; j < x.keys; ++j) wrong |= numbers[j] ^ hidden;
        causal = causal && wrong == 0;
    }
    return causal ? visible : 0;
}

// Results of a range: o [sequences, Lq, H, Dv] and lse [sequences, H, Lq], where it is wanted.
struct Result {
    float *o, *lse;
};

struct ResultViews {
    View o, lse;
    softdelta_attention_outputs out;

    ResultViews(const Node& x, std::int64_t sequences, const Result& result)
        : o(result.o, f32, {sequences, x.queries, x.heads, x.value_size},
            {x.queries * x.heads * x.value_size, x.heads * x.value_size, x.value_size, 1}),
          lse(result.lse, f32, {sequences, x.heads, x.queries}, {x.heads * x.queries, x.queries, 1}),
          out{sizeof(softdelta_attention_outputs), o.out(), lse.out()} {}
};

softdelta_execution execution_of(const Resources& resources) {
    softdelta_execution execution = softdelta_execution_default();
    execution.threads = resources.threads;
    return execution;
}

// causal: how many keys the last row sees, where position alone decides; 0: the mask does.
std::string attend(const Node& x, const Range& r, std::int64_t causal, const Result& result, Resources& resources) {
    std::vector<float> unused;
    Operand q = operand_of(x.q, {r.sequence, r.sequences, 0, x.queries}, unused, 1),
            k = operand_of(x.k, r, resources.keys, resources.threads),
            v = operand_of(x.v, r, resources.values, resources.threads);
    View bias, slopes, sink;
    if (causal == 0 && x.mask != nullptr) bias = mask_view(x, r);
    if (x.mask != nullptr && x.max_bias != 0) {
        resources.slopes.clear();
        for (std::int64_t h = 0; h < x.heads; ++h) resources.slopes.push_back(slope(x, h));
        slopes = View(resources.slopes.data(), f32, {x.heads}, {1});
    }
    if (x.sinks != nullptr && r.key == 0) sink = View(x.sinks->data, f32, {x.heads}, {1});  // it joins one range

    softdelta_attention_inputs in = softdelta_attention_inputs_default();
    in.q = q.view.get();
    in.k = k.view.get();
    in.v = v.view.get();
    in.k_scale = k.scales.get();
    in.v_scale = v.scales.get();
    in.bias = bias.get();
    in.bias_slopes = slopes.get();
    in.sink = sink.get();
    softdelta_attention_options options = softdelta_attention_options_default();
    options.scale = x.scale;
    options.softcap = x.softcap;
    if (causal != 0) {
        options.causal = SOFTDELTA_CAUSAL_BOTTOM_RIGHT;
        options.query_offset = causal - r.key - r.keys;  // the keys behind this range
    }
    const softdelta_execution execution = execution_of(resources);
    ResultViews views(x, r.sequences, result);
    if (softdelta_attention_forward(&in, &views.out, &options, &execution) != SOFTDELTA_OK)
        return softdelta_last_error();
    return "";
}

std::string merge(const Node& x, const Result& a, const Result& b, const Result& result, const Resources& resources) {
    ResultViews first(x, 1, a), second(x, 1, b), to(x, 1, result);
    const DLTensor *o[] = {first.out.o, second.out.o}, *lse[] = {first.out.lse, second.out.lse};
    const softdelta_execution execution = execution_of(resources);
    const softdelta_attention_merge_inputs in{sizeof in, o, lse, 2};
    if (softdelta_attention_merge(&in, &to.out, &execution) != SOFTDELTA_OK) return softdelta_last_error();
    return "";
}

// The first `keys` keys of one sequence in ranges of at most `most`.
std::string attend_in_ranges(const Node& x, std::int64_t sequence, std::int64_t keys, std::int64_t most,
                             std::int64_t causal, Resources& resources) {
    const std::int64_t rows = x.queries * x.heads, numbers = rows * x.value_size, ranges = (keys + most - 1) / most;
    std::vector<float> memory(static_cast<std::size_t>(2 * numbers + 3 * rows));
    float *o = memory.data(), *lse = o + 2 * numbers;
    Result sum{x.o + sequence * numbers, lse}, next{o, lse + rows}, part{o + numbers, lse + 2 * rows};
    if (ranges % 2 == 0) std::swap(sum, next);  // they take turns, and the last sum is the operation's result
    for (std::int64_t i = 0; i < ranges; ++i) {
        const Range r{sequence, 1, i * most, std::min(most, keys - i * most)};
        if (std::string error = attend(x, r, causal, i == 0 ? sum : part, resources); !error.empty()) return error;
        if (i == 0) continue;
        if (std::string error = merge(x, sum, part, next, resources); !error.empty()) return error;
        std::swap(sum, next);
    }
    return "";
}

}  // namespace

Support flash_attention_support(const ggml_tensor* op) {
    const Node x(op);
    if (x.q->type != GGML_TYPE_F32 || !is_readable(x.q)) return {};
    for (const ggml_tensor* t : {x.k, x.v})
        if (!(is_readable(t) || is_quantised(t)) || t->ne[3] != x.batch) return {};
    if (x.v->ne[2] != x.key_heads || x.heads % x.key_heads != 0 || x.keys < 1) return {};
    if (x.mask != nullptr) {
        if (x.mask->type != GGML_TYPE_F16 || !is_plain(x.mask)) return {};
        if (x.mask->ne[2] != 1 && x.mask->ne[2] != x.heads) return {};
        if (x.mask->ne[3] != 1 && x.mask->ne[3] != x.batch) return {};
        if (x.mask->ne[0] < x.keys || x.mask->ne[1] < x.queries) return {};
    }
    if (x.sinks != nullptr && x.sinks->type != GGML_TYPE_F32) return {};
    const std::int64_t work = x.batch * x.queries * x.keys * x.heads * (x.size + x.value_size);
    const std::int64_t rows = x.queries * (x.heads / x.key_heads);
    const bool sparse = x.most_seen > 0 && x.queries < sparse_queries && x.keys > sparse_keys * x.most_seen;
    return {true, work >= attention_work && !sparse &&
                      ((!is_expanded(x.k) && !is_expanded(x.v)) || rows >= attention_rows_expanded)};
}

std::string compute_flash_attention(const ggml_tensor* op, Resources& resources) {
    const Node x(op);
    const std::int64_t causal = causal_keys(x, resources.threads), keys = causal != 0 ? causal : x.keys;
    const std::int64_t of_key = x.key_heads * ((is_expanded(x.k) ? x.size : 0) + (is_expanded(x.v) ? x.value_size : 0));
    const std::int64_t most_keys = of_key == 0 ? keys * x.batch : expanded_numbers / of_key;
    if (most_keys < keys) {
        const std::int64_t blocks = std::max<std::int64_t>(most_keys / key_block, 1);
        for (std::int64_t i = 0; i < x.batch; ++i)
            if (std::string error = attend_in_ranges(x, i, keys, blocks * key_block, causal, resources); !error.empty())
                return error;
        return "";
    }
    const std::int64_t most = most_keys / keys, numbers = x.queries * x.heads * x.value_size;
    for (std::int64_t i = 0; i < x.batch; i += most) {
        const Range r{i, std::min(most, x.batch - i), 0, keys};
        if (std::string error = attend(x, r, causal, {x.o + i * numbers, nullptr}, resources); !error.empty())
            return error;
    }
    return "";
}

}  // namespace softdelta_ggml

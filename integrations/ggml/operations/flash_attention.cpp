// GGML_OP_FLASH_ATTN_EXT: q [D, Lq, H, B], k [D, Lk, Hk, B], v [Dv, Lk, Hk, B], mask [Lk, Lq, H or 1, B or 1] in f16,
// added to the scores, sinks [H]; the result is [Dv, H, Lq, B]. Shapes as ggml writes them, fastest first.
//
// Keys and values of q8_0 and q4_0 are read as they lie; those of other quantised types become f32 first, once for all
// rows of queries. With ALiBi (max_bias ≠ 0) the mask, which holds positions then, is multiplied by a slope per head.
#include <softdelta/softdelta.h>

#include <algorithm>
#include <cmath>

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
    // The first keys alone.
    void use_keys(std::int64_t keys) {
        view.resize(1, keys);
        scales.resize(1, keys);
    }
};

Operand quantised_blocks_of(const ggml_tensor* t) {
    const bool halves = t->type == GGML_TYPE_Q4_0;
    const DLDataType type = {static_cast<std::uint8_t>(halves ? kDLUInt : kDLInt), 8, 1}, f16 = {kDLFloat, 16, 1};
    const std::int64_t blocks = t->ne[0] / 32, numbers = halves ? 16 : 32, block = numbers + 2;
    const auto bytes = [t](int dim) { return static_cast<std::int64_t>(t->nb[dim]); };
    char* data = static_cast<char*>(t->data);
    return {
        View(data + 2, type, {t->ne[3], t->ne[1], t->ne[2], blocks, numbers}, {bytes(3), bytes(1), bytes(2), block, 1}),
        View(data, f16, {t->ne[3], t->ne[1], t->ne[2], blocks}, {bytes(3) / 2, bytes(1) / 2, bytes(2) / 2, block / 2})};
}

// A tensor as it lies, or what its rows stand for, in f32.
Operand operand_of(const ggml_tensor* t, std::vector<float>& expanded, int threads) {
    if (has_quantised_blocks(t)) return quantised_blocks_of(t);
    const std::int64_t size = t->ne[0], rows = t->ne[1], heads = t->ne[2], batch = t->ne[3];
    DLDataType type;
    if (element_type(t->type, type))
        return {View(t->data, type, {batch, rows, heads, size}, {stride(t, 3), stride(t, 1), stride(t, 2), 1}), {}};
    const ggml_to_float_t to_float = ggml_get_type_traits(t->type)->to_float;
    expanded.resize(static_cast<std::size_t>(size * rows * heads * batch));
    const std::int64_t all = rows * heads * batch;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t i = 0; i < all; ++i)
        to_float(row(t, i % rows, i / rows % heads, i / rows / heads), expanded.data() + i * size, size);
    return {View(expanded.data(), f32, {batch, rows, heads, size}, {size * rows * heads, size, size * rows, 1}), {}};
}

// ALiBi (Press et al. 2022): slopes are powers of 2^(−max_bias/n), n the largest power of two up to H; heads beyond n
// take the odd powers of its root.
float slope(const Node& x, std::int64_t head) {
    const auto n = static_cast<float>(std::int64_t{1} << static_cast<int>(std::floor(std::log2(x.heads))));
    const auto h = static_cast<float>(head);
    return h < n ? std::pow(std::exp2(-x.max_bias / n), h + 1)
                 : std::pow(std::exp2(-x.max_bias / 2 / n), 2 * (h - n) + 1);
}

View mask_view(const Node& x) {
    DLDataType type;
    element_type(x.mask->type, type);
    return View(x.mask->data, type, {x.mask->ne[3], x.mask->ne[2], x.queries, x.keys},
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
    const auto as_it_lies = [](const ggml_tensor* t) { return is_readable(t) || has_quantised_blocks(t); };
    const std::int64_t rows = x.queries * (x.heads / x.key_heads);
    const bool sparse = x.most_seen > 0 && x.queries < sparse_queries && x.keys > sparse_keys * x.most_seen;
    return {true, work >= attention_work && !sparse &&
                      ((as_it_lies(x.k) && as_it_lies(x.v)) || rows >= attention_rows_expanded)};
}

std::string compute_flash_attention(const ggml_tensor* op, Resources& resources) {
    Node x(op);
    const std::int64_t causal = causal_keys(x, resources.threads);
    std::vector<float> unused;
    Operand q = operand_of(x.q, unused, 1), k = operand_of(x.k, resources.keys, resources.threads),
            v = operand_of(x.v, resources.values, resources.threads);
    View bias, slopes, sink;
    const std::int64_t row = x.value_size * x.heads;
    View o(x.o, f32, {x.batch, x.queries, x.heads, x.value_size}, {row * x.queries, row, x.value_size, 1});
    if (causal != 0) {
        for (Operand* operand : {&k, &v}) operand->use_keys(causal);
    } else if (x.mask != nullptr) {
        bias = mask_view(x);
    }
    if (x.mask != nullptr && x.max_bias != 0) {
        resources.slopes.clear();
        for (std::int64_t h = 0; h < x.heads; ++h) resources.slopes.push_back(slope(x, h));
        slopes = View(resources.slopes.data(), f32, {x.heads}, {1});
    }
    if (x.sinks != nullptr) sink = View(x.sinks->data, f32, {x.heads}, {1});

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
    if (causal != 0) options.causal = SOFTDELTA_CAUSAL_BOTTOM_RIGHT;
    softdelta_execution execution = softdelta_execution_default();
    execution.threads = resources.threads;
    softdelta_attention_outputs out = {sizeof(softdelta_attention_outputs), o.out(), nullptr};
    if (softdelta_attention_forward(&in, &options, &execution, &out) != SOFTDELTA_OK) return softdelta_last_error();
    return "";
}

}  // namespace softdelta_ggml

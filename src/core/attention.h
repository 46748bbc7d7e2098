// Softmax attention: operands and options of one call, checked and with defaults filled in by api/.
#pragma once

#include "core/operands.h"
#include "core/quantised.h"

namespace softdelta::core {

enum class Causal { none, top_left, bottom_right };
enum class EmptyRow { minus_infinity, plus_infinity, zero };  // lse of a row without an allowed key and without a sink

struct AttentionInputs {
    Tensor q;              // [B, Lq, H, D]; packed [1, ΣLq, H, D]
    Tensor k;              // [B, Lk, Hk, D]; packed [1, ΣLk, Hk, D]; paged [blocks, block rows, Hk, D]
    Tensor v;              // as k, with Dv; k and v may be quantised numbers (core/quantised.h)
    Tensor mask;           // bool [B|1, H|Hk|1, Lq|1, Lk|1], true keeps; packed [N|1, H|Hk|1, max Lq|1, max Lk|1]
    Tensor bias;           // float, as mask; −∞ is the same as mask = false
    Tensor sink;           // [H] a logit without a value row; neither scaled, capped nor masked
    Tensor cu_seqlens_q;   // [N+1] i32|i64, with cu_seqlens_k; or with cache_seqlens, keys lying in N caches
    Tensor cu_seqlens_k;   // [N+1]
    Tensor cache_seqlens;  // [N] keys in use of each sequence
    Tensor block_table;    // [N, max blocks] i32|i64: block of k, v that holds keys [i·rows, (i+1)·rows)
    Tensor alibi_slopes;   // [H] −slope·|i + Lk − Lq − j| is added to the scores
    Tensor bias_slopes;    // [H] multiplies bias; −∞ stays −∞, whatever the slope
    Tensor k_scale;        // as k with D/32 or 1 last, of quantised numbers; each size may be 1 instead
    Tensor v_scale;        // as v
};

struct AttentionOptions {
    double scale = 0;
    Causal causal = Causal::none;
    Index window_left = -1;  // −1: unbounded
    Index window_right = -1;
    double softcap = 0;  // 0: off
    EmptyRow empty_row = EmptyRow::minus_infinity;
    Index top_w = -1;  // dynamic mask: keep the top_w largest biases of each row; −1: off
    Index shift = 0;   // position of query 0 minus that of key 0: moves the diagonal of causal and window
};

struct AttentionOutputs {
    Tensor o;    // [B, Lq, H, Dv]
    Tensor lse;  // [B, H, Lq], packed [1, H, ΣLq]
};

struct AttentionGradients {
    Tensor o, lse;                    // saved by the forward pass; optional, an engine may recompute them
    Tensor d_o;                       // [B, Lq, H, Dv]
    Tensor dlse;                      // [B, H, Lq] optional
    Tensor dq, dk, dv, dbias, dsink;  // each as its input; absent: not computed
};

template <>
struct InputsOf<AttentionGradients> {
    using type = AttentionInputs;
};

// Keys of a paged cache are [blocks, block rows, ..], and packed sequences lie in one batch row: api/ knows. N is B
// where nothing is packed.
template <>
inline constexpr auto operands_of<AttentionInputs> = std::to_array<Operand<AttentionInputs>>({
    {.name = "q", .tensor = &AttentionInputs::q, .shape = "B Lq H D", .need = needs::required},
    {.name = "k", .tensor = &AttentionInputs::k, .shape = "B Lk Hk D", .need = needs::required},
    {.name = "v", .tensor = &AttentionInputs::v, .shape = "B Lk Hk Dv", .need = needs::required},
    {.name = "mask", .tensor = &AttentionInputs::mask, .shape = "B|1 H|Hk|1 Lq|1 Lk|1", .kind = Kind::boolean},
    {.name = "bias", .tensor = &AttentionInputs::bias, .shape = "B|1 H|Hk|1 Lq|1 Lk|1"},
    {.name = "sink", .tensor = &AttentionInputs::sink, .shape = "H"},
    {.name = "cu_seqlens_q", .tensor = &AttentionInputs::cu_seqlens_q, .shape = "N+1", .kind = Kind::integer},
    {.name = "cu_seqlens_k", .tensor = &AttentionInputs::cu_seqlens_k, .shape = "N+1", .kind = Kind::integer},
    {.name = "cache_seqlens", .tensor = &AttentionInputs::cache_seqlens, .shape = "N", .kind = Kind::integer},
    {.name = "block_table", .tensor = &AttentionInputs::block_table, .shape = "N max_blocks", .kind = Kind::integer},
    {.name = "alibi_slopes", .tensor = &AttentionInputs::alibi_slopes, .shape = "H"},
    {.name = "bias_slopes", .tensor = &AttentionInputs::bias_slopes, .shape = "H"},
    {.name = "k_scale", .tensor = &AttentionInputs::k_scale, .shape = "B|1 Lk|1 Hk|1 D/32|1"},
    {.name = "v_scale", .tensor = &AttentionInputs::v_scale, .shape = "B|1 Lk|1 Hk|1 Dv/32|1"},
});
template <>
inline constexpr auto operands_of<AttentionOutputs> = std::to_array<Operand<AttentionOutputs>>({
    {.name = "o", .tensor = &AttentionOutputs::o, .shape = "B Lq H Dv", .written = true},
    {.name = "lse", .tensor = &AttentionOutputs::lse, .shape = "B H Lq", .written = true},
});
template <>
inline constexpr auto operands_of<AttentionGradients> = std::to_array<Operand<AttentionGradients>>({
    {.name = "o", .tensor = &AttentionGradients::o, .shape = "B Lq H Dv"},
    {.name = "lse", .tensor = &AttentionGradients::lse, .shape = "B H Lq"},
    {.name = "d_o", .tensor = &AttentionGradients::d_o, .shape = "B Lq H Dv", .need = needs::required},
    {.name = "dlse", .tensor = &AttentionGradients::dlse, .shape = "B H Lq"},
    {.name = "dq", .tensor = &AttentionGradients::dq, .written = true, .input = &AttentionInputs::q},
    {.name = "dk", .tensor = &AttentionGradients::dk, .written = true, .input = &AttentionInputs::k},
    {.name = "dv", .tensor = &AttentionGradients::dv, .written = true, .input = &AttentionInputs::v},
    {.name = "dbias", .tensor = &AttentionGradients::dbias, .written = true, .input = &AttentionInputs::bias},
    {.name = "dsink", .tensor = &AttentionGradients::dsink, .written = true, .input = &AttentionInputs::sink},
});

// Sequence n of a call: where its rows lie and how long it is.
struct AttentionSequence {
    Index batch;             // index into the batch dimension of q, o, lse: 0 when packed
    Index key_batch;         // of k and v, 0 when they are packed; the row of a block table
    Index mask_batch;        // of mask and bias
    Index q_begin, q_count;  // rows of q
    Index k_begin, k_count;  // rows of k; with a block table, key j lies in block j / rows, row j % rows
};

inline Index sequence_count(const AttentionInputs& in) {
    return in.cu_seqlens_q ? in.cu_seqlens_q.shape[0] - 1 : in.q.shape[0];
}

inline AttentionSequence sequence(const AttentionInputs& in, Index n) {
    const auto at = [](const Tensor& t, Index i) { return load_index(t, i * t.stride[0]); };
    AttentionSequence s{n, n, n, 0, in.q.shape[1], 0, in.k.shape[1]};
    if (in.cu_seqlens_q) {
        s.batch = 0;
        s.q_begin = at(in.cu_seqlens_q, n);
        s.q_count = at(in.cu_seqlens_q, n + 1) - s.q_begin;
    }
    if (in.cu_seqlens_k) {
        s.key_batch = 0;
        s.k_begin = at(in.cu_seqlens_k, n);
        s.k_count = at(in.cu_seqlens_k, n + 1) - s.k_begin;
    }
    if (in.cache_seqlens) s.k_count = at(in.cache_seqlens, n);
    return s;
}

// The offset of key j of a sequence in k or v, head hk; through the block table when there is one.
inline Index key_offset(const AttentionInputs& in, const Tensor& t, const AttentionSequence& s, Index hk, Index j) {
    if (!in.block_table) return s.key_batch * t.stride[0] + (s.k_begin + j) * t.stride[1] + hk * t.stride[2];
    const Index rows = t.shape[1];
    const Index block = load_index(in.block_table, in.block_table.offset({s.key_batch, j / rows}));
    return block * t.stride[0] + (j % rows) * t.stride[1] + hk * t.stride[2];
}

// Row j of k or v (`t`), n elements, whatever it is stored as.
template <class T>
void load_key_row(const AttentionInputs& in, const Tensor& t, const AttentionSequence& s, Index hk, Index j, Index n,
                  T* out) {
    if (!is_quantised(t.dtype)) return load_row(t, key_offset(in, t, s, hk, j), 3, n, out);
    const Tensor& scale = &t == &in.v ? in.v_scale : in.k_scale;
    load_quantised_row(t, key_offset(in, t, s, hk, j), scale, key_offset(in, scale, s, hk, j), n, out);
}

// Which head of a mask or bias serves query head h: the head dimension is H, Hk or 1.
inline Index shared_head(const Tensor& t, Index h, Index heads) {
    return t.shape[1] == 1 ? 0 : h / (heads / t.shape[1]);
}

// What multiplies the bias of query head h.
inline double bias_slope(const AttentionInputs& in, Index h) {
    return in.bias_slopes ? load(in.bias_slopes, in.bias_slopes.offset({h})) : 1;
}

}  // namespace softdelta::core

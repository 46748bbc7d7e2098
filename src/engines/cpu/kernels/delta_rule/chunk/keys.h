// Loading the rows of a key head for a chunk: l2norm, and products of rows that all value heads share.
//     q, p [n, K] · kᵀ [K, n] → q kᵀ, p kᵀ [n, n] for i ≥ j
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/pack.h"
#include "engines/cpu/kernels/delta_rule/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Temporary operands of q kᵀ and p kᵀ.
template <class P>
struct PairScratch {
    Element<P>*q, *p;      // [n, K] as A
    Element<P>*k, *right;  // [n, K], and its transpose in panels
    Element<P>* buffer;    // for packing

    PairScratch(const ChunkSizes<P>& sizes, Scratch& scratch) {
        const Index size = sizes.rows * sizes.key_row() / P::depth;
        q = scratch.take<Element<P>>(size);
        p = scratch.take<Element<P>>(size);
        k = scratch.take<Element<P>>(size);
        right = scratch.take<Element<P>>(round_up(sizes.rows, NR) * depth_of<P>(sizes.keys));
        buffer = scratch.take<Element<P>>(W * sizes.key_row() / P::depth);
    }
};

// normalise() where Σx² is beyond f32, and 1e-6 nothing beside it.
[[gnu::noinline]] inline float normalise_large(float* x, Index n) {
    constexpr float small = 0x1p-80F;
    F square = splat(0.0F);
    for (Index m = 0; m < n; m += W) {
        const F part = load(x + m) * splat(small);
        store(x + m, part);
        square = fma(part, part, square);
    }
    const float factor = 1 / __builtin_sqrtf(sum(square));
    for (Index m = 0; m < n; m += W) store(x + m, load(x + m) * splat(factor));
    return factor * small;
}

// x ← x / √(Σx² + 1e-6); gives the factor.
inline float normalise(float* x, Index n) {
    F square = splat(0.0F);
    for (Index m = 0; m < n; m += W) square = fma(load(x + m), load(x + m), square);
    const float squares = sum(square);
    if (!(squares < __builtin_inff())) return normalise_large(x, n);
    const float factor = 1 / __builtin_sqrtf(squares + 1e-6F);
    for (Index m = 0; m < n; m += W) store(x + m, load(x + m) * splat(factor));
    return factor;
}

inline void load_key_rows(const DeltaRows& t, const Tokens& at, Index K, bool l2norm, Index row, float* out,
                          float* factors) {
    prefetch_first(t, at, K);
    for (Index i = 0; i < at.n; ++i) {
        prefetch_ahead(t, at, i, K);
        load_token(t, at, i, K, out + i * row);
        if (l2norm) factors[i] = normalise(out + i * row, K);
    }
}

// out_ij = Σ_m left_im right_jm for i ≥ j, rows of `out_row` floats; whole vectors around them mean nothing.
template <class P>
void multiply_pairs(Index n, const Element<P>* left, Index left_step, PackedB<P> right, float* out, Index out_row) {
    Range columns[largest_chunk / row_tile<P> + 1];
    for (Index m = 0, t = 0; m < n; m += row_tile<P>, ++t) columns[t] = {0, m + row_tile<P>};
    product<P>(n, round_up(n, W), {left, left_step, 1}, right, {out, out_row}, columns);
}

// The same for a few rows, dot by dot.
inline constexpr Index few_rows = 4;

// For i ≥ j, or only i > j.
inline void multiply_few_pairs(Index n, Index columns, const float* left, const float* right, Index row, bool diagonal,
                               float* out, Index out_row) {
    for (Index i = 0; i < n; ++i)
        for (Index j = 0; j < i + (diagonal ? 1 : 0); ++j) {
            F product = splat(0.0F);
            for (Index m = 0; m < columns; m += W)
                product = fma(load(left + i * row + m), load(right + j * row + m), product);
            out[i * out_row + j] = sum(product);
        }
}

// Without q nothing is read from the state: its rows and products are left out.
template <class P>
void load_keys(const DeltaHeads& heads, const Tokens& at, const KeyChunk<P>& keys, PairScratch<P>& s) {
    const Index K = heads.key_size;
    if (heads.reads()) load_key_rows(heads.q, at, K, heads.l2norm, keys.row, keys.q, keys.q_factor);
    load_key_rows(heads.k, at, K, heads.l2norm, keys.row, keys.k, keys.k_factor);
    if (keys.has_p()) load_key_rows(heads.p, at, K, heads.l2norm, keys.row, keys.p, keys.p_factor);
    if (heads.has_channel_gate()) return;
    if (at.n <= few_rows) {
        if (heads.reads())
            multiply_few_pairs(at.n, round_up(K, W), keys.q, keys.k, keys.row, true, keys.qk, keys.pair_row);
        if (heads.erases())
            multiply_few_pairs(at.n, round_up(K, W), keys.p, keys.k, keys.row, false, keys.pk, keys.pair_row);
        return;
    }
    const Index left_step = keys.row / P::depth;
    if (!heads.reads() && !heads.erases()) return;
    const Element<P>* k = as_a<P>(keys.k, at.n, keys.row, s.k);
    const auto rows = [&](Index j) { return Row{k + j * left_step, P::depth == 1 ? DType::f32 : DType::bf16, 1}; };
    pack_b_transposed<P>(at.n, K, rows, s.buffer, s.right);
    const PackedB<P> right{s.right, depth_of<P>(K)};
    if (heads.reads())
        multiply_pairs<P>(at.n, as_a<P>(keys.q, at.n, keys.row, s.q), left_step, right, keys.qk, keys.pair_row);
    if (!heads.erases()) return;
    const Element<P>* p = keys.has_p() ? as_a<P>(keys.p, at.n, keys.row, s.p) : k;
    multiply_pairs<P>(at.n, p, left_step, right, keys.pk, keys.pair_row);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

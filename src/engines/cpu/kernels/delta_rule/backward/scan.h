// The scan backwards (docs/math.md, "Backward"), blind to rules and gates: panel by panel of value columns
//     dU  = write_key dS' + scoreᵀ dO
//     solve (I + erase_score)ᵀ dR = dU
//     dS  = state_decay∘dS' + read_queryᵀ dO − erase_keyᵀ dR
// and then, over all value columns, the gradients of what the scan was given.
//
//     [write_key | scoreᵀ] [n, K + n] · [dS' ; dO] [K + n, V] → dU [n, V] → dR [n, V]
//     [read_queryᵀ | −erase_keyᵀ] [K, 2n] · [dO ; dR] [2n, V] + decayed dS' → dS [K, V]
//     dO, dR [n, V] · Sᵀ [V, K] and U [n, V] · dS'ᵀ [V, K] → gradients of the folded rows [n, K]
//     dO, dR [n, V] · Uᵀ [V, n] → dscore, derase_score [n, n]
#pragma once

#include "engines/cpu/kernels/delta_rule/backward/operands.h"
#include "engines/cpu/kernels/delta_rule/chunk/nonfinite.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// What a tile of rows of dU and dR is made of.
template <class P>
struct SolveOperands {
    MatrixA<P> write_key;
    const Element<P>* state;  // dS'
    Index keys;
    MatrixA<P> score;
    const Element<P>* d_o;  // rows from the tile on
    Index later;
    MatrixA<P> erase_score;
    const Element<P>* dR;  // rows below the tile
    Index below;
    const float* own;  // −erase_score of the tile's rows among themselves; null: nothing is erased
    Index own_row;
};

// dU of the tile, and what rows below erase of it; then substitution from the last row up.
template <class P, int rows, int vectors>
[[gnu::noinline]] void solve_tile_backward(const SolveOperands<P>& x, float* out) {
    F sums[rows][vectors];
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) sums[i][n] = splat(0.0F);
    accumulate_product<P, rows, vectors>(sums, x.write_key, x.state, x.keys);
    accumulate_product<P, rows, vectors>(sums, x.score, x.d_o, x.later);
    if (x.own != nullptr) {
        accumulate_product<P, rows, vectors>(sums, x.erase_score, x.dR, x.below);
#pragma GCC unroll 12
        for (int j = rows - 1; j > 0; --j)
#pragma GCC unroll 12
            for (int i = 0; i < j; ++i) {
                const F factor = load_factor(x.own + j * x.own_row + i);
#pragma GCC unroll 2
                for (int n = 0; n < vectors; ++n) sums[i][n] = multiply_add_factor(factor, sums[j][n], sums[i][n]);
            }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) store(out + (i * vectors + n) * W, sums[i][n]);
}

template <class P>
using SolveTileBackward = void (*)(const SolveOperands<P>&, float*);

template <class P, int vectors, std::size_t... rows>
constexpr std::array<SolveTileBackward<P>, MR> solve_tiles_backward(std::index_sequence<rows...>) {
    return {solve_tile_backward<P, static_cast<int>(rows) + 1, vectors>...};
}

template <class P, class Between>
void solve_backward(bool erases, const ReversedOperands<P>& f, Index K, const Element<P>* state,
                    const typename ChunkGradients<P>::Panel& x, Between&& between) {
    static constexpr auto wide = solve_tiles_backward<P, 2>(std::make_index_sequence<MR>{});
    static constexpr auto narrow = solve_tiles_backward<P, 1>(std::make_index_sequence<MR>{});
    const auto from = [](MatrixA<P> a, Index row, Index k) {
        return MatrixA<P>{a.data + row * a.row + k * a.step, a.row, a.step};
    };
    const Index depth = depth_of<P>(f.n);
    for (Index end = f.n, m = (f.n - 1) / MR * MR; m >= 0; end = m, m -= MR) {
        between();
        const Index first = m / P::depth, below = depth_of<P>(end);
        (x.width == W ? narrow : wide)[static_cast<std::size_t>(end - m - 1)](
            {from(f.write_key, m, 0), state, depth_of<P>(K), from(f.score, m, first), x.d_o_right + first * x.width,
             depth - first, from(f.erase_score, m, below), x.dR_right + below * x.width, depth - below,
             erases ? f.erase_score_f32 + m * f.erase_score_row + m : nullptr, f.erase_score_row},
            x.dR + m * x.width);
        if constexpr (P::depth == 2) round_to_pairs(end - m, x.width, x.dR + m * x.width, x.dR_right + first * x.width);
    }
}

// Depths of row tiles whose row j sees the rows i ≥ j, and i ≤ j.
template <class P>
struct Triangles {
    Range later[largest_chunk / row_tile<P> + 1], earlier[largest_chunk / row_tile<P> + 1];
    Range columns[largest_chunk / row_tile<P> + 1];  // i ≥ j in floats

    explicit Triangles(Index n) {
        for (Index m = 0, t = 0; m < n; m += row_tile<P>, ++t) {
            const Index end = n - m < row_tile<P> ? n : m + row_tile<P>;
            later[t] = {m / P::depth, depth_of<P>(n)};
            earlier[t] = {0, depth_of<P>(end)};
            columns[t] = {0, end};
        }
    }
};

// Rows of dR once more, where dO is not finite: rows below it do not see it. dO keeps what its columns leave in dS.
template <class P, class Between>
[[gnu::noinline]] void solve_again(bool erases, const ReversedOperands<P>& f, Index K, const Element<P>* state,
                                   const typename ChunkGradients<P>::Panel& x, Between&& between) {
    NonfiniteRows rows(x.width);
    rows.clear(f.n, x.d_o, false);
    as_b(f.n, x.width, x.d_o, x.d_o_right);
    solve_backward(erases, f, K, state, x, between);
    rows.spread(f.n, x.dR, x.width);
    rows.put_back(f.n, x.d_o);
    as_b(f.n, x.width, x.d_o, x.d_o_right);
    as_b(f.n, x.width, x.dR, x.dR_right);
}

// dO and dS' are there. state: dS' becomes dS; rows dR of the panels are made, dU where nothing is erased. `between` is
// called between register tiles.
template <class P, class Between>
void scan_backward(bool erases, const ReversedOperands<P>& f, Index K, const StateOnly& state,
                   const ChunkGradients<P>& d, Between&& between) {
    const Index depth = depth_of<P>(f.n);
    for (Index c = 0; c < d.columns; c += NR) {
        const auto x = d.panel(c, f.n);
        const auto own = state.panel(c);
        as_b(f.n, x.width, x.d_o, x.d_o_right);
        const Element<P>* leaving = as_b(K, x.width, own.state, x.state);
        solve_backward(erases, f, K, leaving, x, between);
        if (!last_rows_are_finite(f.n, x.width, x.dR)) solve_again(erases, f, K, leaving, x, between);
        product<P>(K, x.width, f.read_query, {x.d_o_right, erases && f.joined ? 2 * depth : depth},
                   {own.state, x.width, Start::scale, f.state_decay}, nullptr, nullptr, between);
        if (erases && !f.joined)
            product<P>(K, x.width, f.erase_key, {x.dR_right, depth}, {own.state, x.width, Start::add}, nullptr, nullptr,
                       between);
    }
}

// Gradients of read_query, write_key, state_decay, score, and of the negatives of erase_key and erase_score. state:
// the transposed entering state; saved_U: [n, V]. `between` is called between register tiles.
template <class P, class Between>
void scan_gradients(bool erases, Index n, Index K, Index V, const float* state, const Element<P>* saved_U,
                    const ChunkGradients<P>& d, Between&& between) {
    const Index keys = round_up(K, W), depth = depth_of<P>(V);
    for (Index m = 0; m < keys; m += W) {
        const Index first = m / NR * NR;
        const Index width = keys - first < NR ? W : NR;
        const Index at = first * V + (m - first);
        F sum = splat(0.0F);
        for (Index v = 0; v < V; ++v) sum = fma(load(state + at + v * width), load(d.dstate + at + v * width), sum);
        store(d.dstate_decay + m, sum);
    }
    const PackedB<P> entering{as_b(V, keys, state, d.state_right), depth};
    const PackedB<P> leaving{as_b(V, keys, d.dstate, d.dstate_right), depth};
    const MatrixA<P> d_o{d.d_o, d.value_row, 1}, dR{d.dR, d.value_row, 1};
    product<P>(n, keys, d_o, entering, {d.dq, d.key_row}, nullptr, nullptr, between);
    product<P>(n, keys, {saved_U, d.value_row, 1}, leaving, {d.dk, d.key_row}, nullptr, nullptr, between);
    const auto rows = [&](Index i) {
        return Row{saved_U + i * d.value_row, P::depth == 1 ? DType::f32 : DType::bf16, 1};
    };
    pack_b_transposed<P>(n, V, rows, d.buffer, d.U_right);
    const Triangles<P> triangle(n);
    product<P>(n, round_up(n, W), d_o, {d.U_right, depth}, {d.dscore, d.pair_row}, triangle.columns);
    if (!erases) return;
    product<P>(n, keys, dR, entering, {d.de, d.key_row}, nullptr, nullptr, between);
    product<P>(n, round_up(n, W), dR, {d.U_right, depth}, {d.derase_score, d.pair_row}, triangle.columns);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

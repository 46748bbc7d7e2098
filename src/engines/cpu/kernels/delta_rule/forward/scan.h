// The scan of a chunk (docs/math.md, "Forward"), blind to rules and gates: panel by panel of value columns
//     solve (I + erase_score) U = β∘v − erase_key S
//     o  = read_query S + score U            one product with the state and U
//     S' = state_decay∘S + write_keyᵀ U
//
//     [read_query | score] [n, K + n] · [S ; U] [K + n, V] → o [n, V];  write_keyᵀ [K, n] · U [n, V] + decayed S → S'
//     [K, V]
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/nonfinite.h"
#include "engines/cpu/kernels/delta_rule/chunk/pack.h"
#include "engines/cpu/kernels/delta_rule/forward/solve.h"
#include "engines/cpu/kernels/delta_rule/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Rows β∘v of the chunk to the panels whose first columns lie in `part`; v: `width` values of a row from there on.
// buffer: a row of value columns.
template <class P, class Rows>
void load_values(Index n, Index width, const Rows& v, const float* beta, float* buffer, Range part,
                 const StatePanels<P>& state) {
    for (Index i = 0; i < n; ++i) {
        const float* x = stored_row(v(i), width, buffer, FloatProduct{});
        const F factor = splat(beta[i]);
        for (Index c = part.begin; c < part.end; c += NR) {
            const auto panel = state.panel(c);
            for (Index m = 0; m < panel.width; m += W)
                store(panel.rows + i * panel.width + m, factor * load(x + (c - part.begin) + m));
        }
    }
}

// o once more, where a row of U is not finite: rows above it do not see it. U keeps what its columns leave in the
// state.
template <class P>
[[gnu::noinline]] void read_again(const Folded<P>& f, const typename StatePanels<P>::Panel& panel, const Range* depths,
                                  float* o, Index o_row) {
    NonfiniteRows rows(panel.width);
    rows.clear(f.n, panel.operand_rows, true);
    product<P>(f.n, panel.width, {f.read, f.row, 1}, {panel.operand, f.key_depth + depth_of<P>(f.n)}, {o, o_row},
               nullptr, depths);
    rows.spread(f.n, o, o_row);
    rows.put_back(f.n, panel.operand_rows);
}

// The panels whose first columns lie in `part`; the rows of values are loaded. o: [n, V] with o_row floats between
// rows, whole panels are written. writes: whether the state becomes S', or stays.
template <class P>
void scan(bool erases, const Folded<P>& f, Index K, Range part, const StatePanels<P>& state, float* o, Index o_row,
          Prefetch& ahead, bool writes = true) {
    Range depths[largest_chunk / row_tile<P> + 1];
    for (Index m = 0, t = 0; m < f.n; m += row_tile<P>, ++t)
        depths[t] = {0, f.key_depth + depth_of<P>(f.n - m < row_tile<P> ? f.n : m + row_tile<P>)};
    const Index panels = (part.end - part.begin + NR - 1) / NR;
    const Index tiles = (erases ? 2 : 1) * (round_up(f.n, MR) / MR) + round_up(K, MR) / MR;
    const Index lines = ahead.lines() / (panels * tiles) + 1;
    const auto fetch = [&] { ahead.next(lines); };
    for (Index c = part.begin; c < part.end; c += NR) {
        const auto panel = state.panel(c);
        if constexpr (P::depth == 2) round_to_pairs(K, panel.width, panel.state, panel.operand);
        if (erases)
            solve(f, panel, ahead, lines);
        else if constexpr (P::depth == 2)
            round_to_pairs(f.n, panel.width, panel.rows, panel.operand_rows);
        product<P>(f.n, panel.width, {f.read, f.row, 1}, {panel.operand, f.key_depth + depth_of<P>(f.n)},
                   {o + c, o_row}, nullptr, depths, fetch);
        if (!first_rows_are_finite<P>(f.n, panel.width, o + c, o_row)) read_again(f, panel, depths, o + c, o_row);
        if (!writes) continue;
        product<P>(K, panel.width, f.write(), {panel.operand_rows, depth_of<P>(f.n)},
                   {panel.state, panel.width, Start::scale, f.state_decay}, nullptr, nullptr, fetch);
    }
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

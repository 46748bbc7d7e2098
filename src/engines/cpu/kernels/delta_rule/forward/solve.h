// Solves (I + erase_score) U = β∘v − erase_key S for a panel of value columns: row tile by row tile a product with the
// state and the rows of U above, then substitution within the tile, in registers.
//     [−erase_key | −erase_score] [n, K + n] · [S ; U above] [K + n, V] + β∘v [n, V] → U [n, V]
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/fold.h"
#include "engines/cpu/kernels/delta_rule/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// own: −erase_score of the tile's rows among themselves.
template <class P, int rows, int vectors>
[[gnu::noinline]] void solve_tile(const Element<P>* a, Index a_row, const Element<P>* b, Index depth,
                                  const float* right_side, const float* own, Index own_row, Element<P>* out) {
    F sums[rows][vectors];
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) sums[i][n] = load(right_side + (i * vectors + n) * W);
    accumulate_product<P, rows, vectors, true>(sums, {a, a_row, 1}, b, depth);
#pragma GCC unroll 12
    for (int j = 0; j < rows - 1; ++j)
#pragma GCC unroll 12
        for (int i = j + 1; i < rows; ++i) {
            const F factor = load_factor(own + i * own_row + j);
#pragma GCC unroll 2
            for (int n = 0; n < vectors; ++n) sums[i][n] = multiply_add_factor(factor, sums[j][n], sums[i][n]);
        }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i += P::depth)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) {
            const F second = i + 1 < rows ? sums[i + 1 < rows ? i + 1 : i][n] : splat(0.0F);
            store_neighbours(out + (i / P::depth * vectors + n) * W, sums[i][n], second, P{});
        }
}

template <class P>
using SolveTile = void (*)(const Element<P>*, Index, const Element<P>*, Index, const float*, const float*, Index,
                           Element<P>*);

template <class P, int vectors, std::size_t... rows>
constexpr std::array<SolveTile<P>, MR> solve_tiles(std::index_sequence<rows...>) {
    return {solve_tile<P, static_cast<int>(rows) + 1, vectors>...};
}

// Asks for so many lines of what comes next before each row tile.
template <class P>
void solve(const Folded<P>& f, const typename StatePanels<P>::Panel& x, Prefetch& ahead, Index lines) {
    static constexpr auto wide = solve_tiles<P, 2>(std::make_index_sequence<MR>{});
    static constexpr auto narrow = solve_tiles<P, 1>(std::make_index_sequence<MR>{});
    for (Index m = 0; m < f.n; m += MR) {
        ahead.next(lines);
        const auto height = static_cast<std::size_t>(f.n - m < MR ? f.n - m : MR);
        (x.width == W ? narrow : wide)[height - 1](f.erase + m * f.row, f.row, x.operand, f.key_depth + m / P::depth,
                                                   x.rows + m * x.width, f.erase_score + m * f.erase_score_row + m,
                                                   f.erase_score_row, x.operand_rows + m / P::depth * x.width);
    }
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

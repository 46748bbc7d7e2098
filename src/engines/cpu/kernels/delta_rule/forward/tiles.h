// The scan of a chunk (scan.h) by matrix tiles, for what TileFold has folded: a few panels of value columns at once
//     P  = p S                                           all rows at once, two by two tiles
//     U  = β∘v + erase∘P − erase_score U                 row tile by row tile: substitution in registers,
//     o  = read∘(q S) + score U                          beside it q S
//     S' = state_decay∘S + kᵀ (write∘U), with gates of a channel state_decay∘(S + kᵀ U)
// Panels wait for the first cache more than for tiles: so two of them share what is read of keys and queries.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/nonfinite.h"
#include "engines/cpu/kernels/delta_rule/chunk/tiles.h"
#include "engines/cpu/kernels/simd/sixteen_bits.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

template <class P>
class TileScan {
    using Tiles = typename P::Tiles;

  public:
    TileScan(const DeltaHeads& heads, Index columns, Scratch& scratch)
        : heads_(heads), columns_(columns), is_copied_(heads.value_size % W != 0) {
        const bool used = fits_tiles<P>(heads);
        const Index rows = used ? largest_chunk : 0;
        erased_ = scratch.take<float>(most_panels * rows * NR);
        read_ = scratch.take<float>(most_panels * rows * NR);
        above_ = scratch.take<float>(used ? most_panels * tile_size * NR : 0);
        update_ = scratch.take<float>(used ? 2 * two_tiles * NR : 0);
        written_ = scratch.take<std::uint32_t>(most_panels * rows / 2 * NR);
        zeros_ = scratch.take<std::uint16_t>(used ? columns : 0);
        values_ = scratch.take<std::uint16_t>(used && is_copied_ ? rows * columns : 0);
    }

    // store(i, c, width, sums): row i of o from value column c on; sums(m): a vector of it. writes: as in scan.h.
    // is_rounded: the chunk before left the state's operands.
    template <class Store>
    void run(const Tokens& at, const TileChunk& x, Range part, const StatePanels<P>& state, const Store& store_row,
             Prefetch& ahead, bool writes, bool is_rounded) {
        if constexpr (Tiles::exist) {
            load_values(at, x, part);
            const Index groups = (part.end - part.begin + most_panels * NR - 1) / (most_panels * NR);
            lines_ = ahead.lines() / (groups * steps_of_group) + 1;
            Panel panels[most_panels];
            for (Index c = part.begin, count = 0; c < part.end; c += count * NR) {
                for (count = 0; count < most_panels && c + count * NR < part.end; ++count) {
                    panels[count] = state.panel(c + count * NR);
                    if (panels[count].width == W) break;
                }
                if (count > 0)
                    run_group<2>(x, c, panels, count, store_row, ahead, writes, is_rounded);
                else
                    run_group<1>(x, c, panels, count = 1, store_row, ahead, writes, is_rounded);
            }
        }
    }

  private:
    using Panel = typename StatePanels<P>::Panel;
    static constexpr Index most_panels = 2;  // so many share what is read of keys and queries
    static constexpr Index panel_size = largest_chunk * NR;
    static constexpr Index steps_of_group = 24;

    // Where the rows of v are; zeros behind the last one.
    void load_values(const Tokens& at, const TileChunk& x, Range part) {
        for (Index c = 0; c < columns_; ++c) zeros_[c] = 0;
        const Index width = min(part.end, heads_.value_size) - part.begin;
        for (Index i = 0; i < x.rows; ++i) {
            rows_[i] = zeros_;
            if (i >= x.n) continue;
            rows_[i] = static_cast<const std::uint16_t*>(row_at(heads_.v, at.head, at.begin + i, 1).data);
            if (!is_copied_) continue;
            std::uint16_t* to = values_ + i * columns_;
            for (Index c = 0; c < columns_; ++c) to[c] = 0;
            for (Index c = part.begin; c < part.begin + width; ++c) to[c] = rows_[i][c];
            rows_[i] = to;
        }
    }

    // A column of a product of 32 rows, a part of whose depth is multiplied at a time: tiles 0 and 1 keep its sums.
    struct Column {
        const std::uint32_t* a;
        Index a_row;
        const std::uint32_t* b;
        Index b_row;
        float* c;
        Index c_row;

        SOFTDELTA_INLINE void begin() const {
            Tiles::template clear<0>();
            Tiles::template clear<1>();
        }
        SOFTDELTA_INLINE void step(Index k) const {
            Tiles::template read<3>(b + k * tile_size * b_row, b_row);
            Tiles::template read<2>(a + k * tile_size, a_row);
            Tiles::template multiply_add<0, 2, 3>();
            Tiles::template read<2>(a + k * tile_size + tile_size * a_row, a_row);
            Tiles::template multiply_add<1, 2, 3>();
        }
        SOFTDELTA_INLINE void end() const {
            Tiles::template write<0>(c, c_row);
            Tiles::template write<1>(c + tile_size * c_row, c_row);
        }
    };

    // is_rounded: the panels' operands hold the state; afterwards they do.
    template <int vectors, class Store>
    void run_group(const TileChunk& x, Index c, const Panel* panels, Index count, const Store& store_row,
                   Prefetch& ahead, bool writes, bool is_rounded) const {
        constexpr Index width = vectors * W;
        for (Index p = 0; !is_rounded && p < count; ++p)
            round_to_pairs(x.keys, width, panels[p].state, panels[p].operand);
        const auto multiply_rows = [&](const std::uint32_t* rows, float* out) {
            for (Index i = 0; i < x.rows; i += two_tiles)
                for (Index p = 0; p < count; ++p) {
                    ahead.next(lines_);
                    multiply_two_rows<Tiles, vectors>(rows + i * x.row, x.row, panels[p].operand, width,
                                                      x.keys / two_tiles, out + p * panel_size + i * width, width);
                }
        };
        multiply_rows(x.p, erased_);
        if constexpr (vectors == 1) {
            multiply_rows(x.q, read_);
            for (Index t = 0; t < x.rows / tile_size; ++t) {
                if (t > 0) multiply_above<vectors>(x, t, 0, panels[0].operand_rows);
                solve_tile<vectors>(x, t, c, 0, 0, panels[0].operand_rows, [](Index) {});
            }
        } else {
            solve_and_read(x, c, panels, count, ahead);
        }
        for (Index i = 0; i < x.rows; i += two_tiles)
            for (Index p = 0; p < count; ++p) {
                ahead.next(lines_);
                multiply_scores<vectors>(x, i, p, panels[p].operand_rows);
            }
        start_update<vectors>(x, 0, 0, 0);
        for (Index p = 0; p < count; ++p)
            if (!first_rows_are_finite<P>(x.rows, width, erased_ + p * panel_size, width))
                multiply_scores_again<vectors>(x, p, panels[p].operand_rows);
        for (Index i = 0; i < x.n; ++i) {
            const F factor = splat(x.read[i]);
            for (Index p = 0; p < count; ++p) {
                const Index at = p * panel_size + i * width;
                store_row(i, c + p * NR, width,
                          [&](Index m) { return fma(factor, load(read_ + at + m), load(erased_ + at + m)); });
            }
        }
        const Index updates = writes ? x.keys / two_tiles * count : 0;
        for (Index u = 0; u < updates; ++u) {
            ahead.next(lines_);
            if (u + 1 < updates) start_update<vectors>(x, u + 1, (u + 1) / count * two_tiles, (u + 1) % count);
            const Panel& panel = panels[u % count];
            update_state<vectors>(x, u / count * two_tiles, update_ + u % 2 * two_tiles * NR, panel);
        }
    }

    // U, and read_ ← q S: a column of q S is multiplied while two vectors of U are solved. Between what writes a part
    // of an operand and what reads it, as between a product and what reads that, stands another one's work.
    void solve_and_read(const TileChunk& x, Index c, const Panel* panels, Index count, Prefetch& ahead) const {
        const Index steps = x.keys / two_tiles, tiles = x.rows / tile_size;
        const auto solve = [&](Index t, Index p, int half) {
            const Index i = t / 2 * two_tiles, n = t % 2 * W;  // tile t makes one of the two columns of its rows
            const Column column{
                x.q + i * x.row, x.row, panels[p].operand + n, NR, read_ + p * panel_size + i * NR + n, NR};
            if (half == 0) column.begin();
            const Index first = half == 0 ? 0 : (steps + 1) / 2, last = half == 0 ? (steps + 1) / 2 : steps;
            solve_tile<2>(
                x, t, c, p, half * W, panels[p].operand_rows, [&](Index k) __attribute__((always_inline)) {
                    if (first + k < last) column.step(first + k);
                });
            if (half == 1) column.end();
        };
        const auto above = [&](Index t, Index p) {
            ahead.next(lines_);
            if (t > 0 && t < tiles) multiply_above<2>(x, t, p, panels[p].operand_rows);
        };
        for (Index t = 0; t < tiles; ++t) {
            solve(t, 0, 0);
            if (count == 2) above(t, 1);
            solve(t, 0, 1);
            if (count == 2) solve(t, 1, 0);
            above(t + 1, 0);
            if (count == 2) solve(t, 1, 1);
        }
    }

    // Channels m … m + 32 of a panel: the state decays and takes what was written, and is rounded for the next chunk.
    template <int vectors>
    SOFTDELTA_INLINE void update_state(const TileChunk& x, Index m, const float* update, const Panel& panel) const {
        constexpr Index width = vectors * W;
        float* to = panel.state + m * width;
        std::uint32_t* rounded = panel.operand + m / 2 * width;
        const bool channel = heads_.has_channel_gate();
        const auto run = [&](auto next) {
            for (Index i = 0; i < two_tiles; i += 2) {
                const F decay = splat(x.state_decay[m + i]), second_decay = splat(x.state_decay[m + i + 1]);
#pragma GCC unroll 2
                for (Index n = 0; n < width; n += W) {
                    const Index at = i * width + n;
                    const F first = next(decay, load(to + at), load(update + at)),
                            second = next(second_decay, load(to + at + width), load(update + at + width));
                    store(to + at, first);
                    store(to + at + width, second);
                    store(rounded + i / 2 * width + n, bf16_pairs(first, second));
                }
            }
        };
        if (channel)
            run([](F decay, F state, F written) { return decay * (state + written); });
        else
            run([](F decay, F state, F written) { return fma(decay, state, written); });
    }

    // above_ ← −erase_score of tile t by the rows of U above it.
    template <int vectors>
    void multiply_above(const TileChunk& x, Index t, Index p, const std::uint32_t* U_rows) const {
        constexpr Index width = vectors * W;
        float* above = above_ + p * tile_size * NR;
        const std::uint32_t* a = x.erase_score + t * tile_size * TileChunk::score_row;
        Tiles::template clear<4>();
        if constexpr (vectors == 2) Tiles::template clear<5>();
        for (Index k = 0; k < (t + 1) / 2; ++k) {
            Tiles::template read<2>(a + k * tile_size, TileChunk::score_row);
            Tiles::template read<3>(U_rows + k * tile_size * width, width);
            Tiles::template multiply_add<4, 2, 3>();
            if constexpr (vectors == 2) {
                Tiles::template read<3>(U_rows + k * tile_size * width + W, width);
                Tiles::template multiply_add<5, 2, 3>();
            }
        }
        Tiles::template write<4>(above, width);
        if constexpr (vectors == 2) Tiles::template write<5>(above + W, width);
    }

    // U of tile t, columns c + m …, and write∘U. The rest of two tiles of U is cleared, for products read it.
    // between(k), k < 4, is called on the way.
    template <int vectors, class Between>
    [[gnu::noinline]] void solve_tile(const TileChunk& x, Index t, Index c, Index p, Index m, std::uint32_t* U_rows,
                                      const Between& between) const {
        constexpr Index width = vectors * W;
        const Index first = t * tile_size;
        const float* erased = erased_ + p * panel_size + first * width + m;
        const float* above = above_ + p * tile_size * NR + m;
        F sums[tile_size];
#pragma GCC unroll 16
        for (int i = 0; i < tile_size; ++i) {
            const F value = as_floats(load_u16(rows_[first + i] + c + p * NR + m) << 16);
            sums[i] = fma(splat(x.erase[first + i]), load(erased + i * width), splat(x.beta[first + i]) * value);
        }
        between(0);
        if (t > 0)
#pragma GCC unroll 16
            for (int i = 0; i < tile_size; ++i) sums[i] = sums[i] + load(above + i * width);
        const float* own = x.own + first * tile_size;
#pragma GCC unroll 16
        for (int j = 0; j < tile_size - 1; ++j) {
#pragma GCC unroll 16
            for (int i = j + 1; i < tile_size; ++i) sums[i] = fma(splat(own[i * tile_size + j]), sums[j], sums[i]);
            if (j == 2) between(1);
            if (j == 5) between(2);
            if (j == 8) between(3);
        }
        std::uint32_t* out = U_rows + first / 2 * width + m;
        std::uint32_t* written = written_ + p * panel_size / 2 + first / two_tiles * tile_size * width + m;
        const Index tile = first % two_tiles;
#pragma GCC unroll 16
        for (int i = 0; i < tile_size; i += 2) {
            store(out + i / 2 * width, bf16_pairs(sums[i], sums[i + 1]));
            const Index place = tile / 8 + sixteen_bits::place(i) / 2;
            store(written + place * width,
                  bf16_pairs(splat(x.write[first + i]) * sums[i], splat(x.write[first + i + 1]) * sums[i + 1]));
        }
        if (t % 2 == 0)
            for (Index i = 0; i < tile_size / 2; ++i) store(out + (tile_size / 2 + i) * width, U(0U));
    }

    // erased_ ← score U, rows i … i + 32; what was there is used up.
    template <int vectors>
    void multiply_scores(const TileChunk& x, Index i, Index p, const std::uint32_t* U_rows) const {
        constexpr Index width = vectors * W;
        multiply_two_rows<Tiles, vectors>(x.score + i * TileChunk::score_row, TileChunk::score_row, U_rows, width,
                                          i / two_tiles + 1, erased_ + p * panel_size + i * width, width);
    }

    // The same, where a row of U is not finite: rows above it do not see it.
    template <int vectors>
    [[gnu::noinline]] void multiply_scores_again(const TileChunk& x, Index p, std::uint32_t* U_rows) const {
        NonfiniteRows rows(vectors * W);
        rows.clear(x.rows, U_rows, true);
        for (Index i = 0; i < x.rows; i += two_tiles) multiply_scores<vectors>(x, i, p, U_rows);
        rows.spread(x.rows, erased_ + p * panel_size, vectors * W);
        rows.put_back(x.rows, U_rows);
    }

    // The u-th product kᵀ (write∘U), channels m … m + 32 of panel p, to one half of update_.
    template <int vectors>
    void start_update(const TileChunk& x, Index u, Index m, Index p) const {
        constexpr Index width = vectors * W;
        multiply_two_rows<Tiles, vectors>(x.written + m * TileChunk::written_row, TileChunk::written_row,
                                          written_ + p * panel_size / 2, width, x.rows / two_tiles,
                                          update_ + u % 2 * two_tiles * NR, width);
    }

    const DeltaHeads& heads_;
    Index columns_, lines_ = 0;
    bool is_copied_;                            // rows of v, which end within a vector
    const std::uint16_t* rows_[largest_chunk];  // of v
    float* erased_;                             // [panels][n, width] p S, then score U
    float* read_;                               // [panels][n, width] q S
    float* above_;                              // [panels][16, width] −erase_score U
    float* update_;                             // [2][32, width]
    std::uint32_t* written_;                    // B [panels][n, width] write∘U
    std::uint16_t *zeros_, *values_;            // [V]; [n, V]
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

// A chunk folded for matrix tiles. Rows of q and k are multiplied as the caller stored them wherever a factor belongs
// to a whole row: l2norm, scale, β and the gates that channels share are worked into the results of products, and into
// U where it is written to the state. So no row is rounded again, and tiles read rows that were only copied. Gates of a
// channel are worked into the rows, factored at the chunk's start.
//
//     q, p           [n, K]  A    rows, p is k unless the rule has its own; with gates of a channel q∘e^G, p∘e^E
//     written        [K, n]  A    kᵀ; with gates of a channel (k∘e^−G)ᵀ; of 32 tokens in the order of separate()
//     score          [n, n]  A    tril
//     erase_score    [n, n]  A    −erase_score left of the tiles on the diagonal,
//     own            [n, 16] f32  and in these
//     read, erase, write  [n]     factors of the rows of q S and p S, and of U under kᵀ
//
// n is filled up with zeros to two tiles of rows: products take two by two.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/channel_gate.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr Index two_tiles = 2 * tile_size;
inline constexpr Index most_tile_keys = 256;

// Whether chunks of these heads are folded so; it depends on what memory depends on, and no more. What a chunk does not
// fit, as steep gates of a channel, goes by the operands of Folded. So does a p beside gates that the channels share,
// and a k that erases from the previous state.
template <class P>
bool fits_tiles(const DeltaHeads& heads) {
    const bool fits = heads.rule.own_p ? heads.has_channel_gate() : heads.rule.erase == core::Erase::from_decayed_state;
    return P::Tiles::exist && fits && heads.key_size % two_tiles == 0 && heads.key_size <= most_tile_keys;
}

struct TileChunk {
    Index n = 0, rows = 0;  // rows: n filled up
    Index keys, row;        // K; words between rows of q and p
    std::uint32_t *q, *p, *written, *score, *erase_score;
    float* own;
    float *read, *erase, *write, *beta;  // [n]
    float* state_decay;                  // [K]
    static constexpr Index written_row = largest_chunk / 2;
    static constexpr Index score_row = largest_chunk / 2 + tile_size;

    // keys: 0 where no chunk is folded so.
    TileChunk(Index size, Scratch& scratch) : keys(size), row(row_of(size)) {
        const Index most = size == 0 ? 0 : largest_chunk;
        for (std::uint32_t** x : {&q, &p}) *x = scratch.take<std::uint32_t>(most * row);
        written = scratch.take<std::uint32_t>(size * written_row);
        for (std::uint32_t** x : {&score, &erase_score}) *x = scratch.take<std::uint32_t>(most * score_row);
        own = scratch.take<float>(most * tile_size);
        for (float** x : {&read, &erase, &write, &beta}) *x = scratch.take<float>(most);
        state_decay = scratch.take<float>(size);
    }

    static constexpr Index row_of(Index size) { return size / 2 + tile_size; }
    void set_rows(Index count) { n = count, rows = round_up(count, two_tiles); }
};

// C [32, 16·vectors] ← A [32, K]·B [K, 16·vectors], column by column, so that few tiles are in use
// (gemm/tile_microkernel.h); steps: of 32 numbers of K.
template <class Tiles, int vectors>
SOFTDELTA_INLINE void multiply_two_rows(const std::uint32_t* a, Index a_row, const std::uint32_t* b, Index b_row,
                                        Index steps, float* c, Index c_row) {
    for (int n = 0; n < vectors; ++n) {
        Tiles::template clear<0>();
        Tiles::template clear<1>();
        for (Index k = 0; k < steps; ++k) {
            Tiles::template read<3>(b + k * tile_size * b_row + n * W, b_row);
            Tiles::template read<2>(a + k * tile_size, a_row);
            Tiles::template multiply_add<0, 2, 3>();
            Tiles::template read<2>(a + k * tile_size + tile_size * a_row, a_row);
            Tiles::template multiply_add<1, 2, 3>();
        }
        Tiles::template write<0>(c + n * W, c_row);
        Tiles::template write<1>(c + n * W + tile_size * c_row, c_row);
    }
}

// W numbers of bf16.
SOFTDELTA_INLINE F load_half(const std::uint32_t* p) {
    return as_floats(load_u16(reinterpret_cast<const std::uint16_t*>(p)) << 16);
}

// Makes TileChunk. What value heads of a key head share stays from one to the next.
template <class P>
class TileFold {
  public:
    TileFold(const DeltaHeads& heads, Scratch& scratch) : heads_(heads), used_(fits_tiles<P>(heads)) {
        const Index rows = used_ ? largest_chunk : 0;
        right_ = scratch.take<std::uint32_t>(rows * heads.key_size / 2);
        pairs_ = scratch.take<float>(2 * rows * pair_row);
        q_factor_ = scratch.take<float>(rows);
        k_factor_ = scratch.take<float>(rows);
        p_factor_ = heads.rule.own_p ? scratch.take<float>(rows) : k_factor_;
        k_ = scratch.take<std::uint32_t>(heads.rule.own_p ? rows * TileChunk::row_of(heads.key_size) : 0);
        halves_ = scratch.take<std::uint32_t>(rows * tile_size);
    }

    bool is_used() const { return used_; }

    // Whether the first n rows of a chunk of `rows` are folded so; their gates are loaded and steady.
    bool fits(Index rows, Index n, const GateChunk& gates) const {
        if (!used_ || rows <= few_rows || !heads_.reads()) return false;
        for (const DeltaRows* t : {&heads_.q, &heads_.k, &heads_.p, &heads_.v})
            if (t->data != nullptr && t->column != 1) return false;  // they are read as they lie
        return !heads_.has_channel_gate() || ChannelGates(gates, heads_.key_size).range(-1, n) <= mildest_range;
    }

    // is_loaded: x holds the rows of this key head, folded for another value head. Gives whether it was done: rows that
    // must be normalised before they are multiplied are left to Folded.
    bool run(const Tokens& at, const GateChunk& gates, bool is_loaded, TileChunk& x) {
        if constexpr (P::Tiles::exist) {
            const bool channel = heads_.has_channel_gate();
            if (channel || !is_loaded) {
                x.set_rows(at.n);
                const Tokens rows{at.head / heads_.group, at.begin, at.n};
                std::uint32_t* k = heads_.rule.own_p ? k_ : x.p;
                load_rows(heads_.q, rows, x, x.q, q_factor_);
                load_rows(heads_.k, rows, x, k, k_factor_);
                if (k != x.p) load_rows(heads_.p, rows, x, x.p, p_factor_);
                if (heads_.l2norm && !(fits_products(x, x.q, q_factor_) && fits_products(x, k, k_factor_) &&
                                       fits_products(x, x.p, p_factor_)))
                    return false;
                for (Index m = 0; m < x.keys; m += two_tiles)
                    if (!channel)
                        transpose_keys(m, k + m / 2, x.row, x);
                    else if (k == x.p)
                        fold_channels<false>(rows, gates, m, k, x);
                    else
                        fold_channels<true>(rows, gates, m, k, x);
                multiply_pairs(x.q, x, pairs_);
                multiply_pairs(x.p, x, pairs_ + largest_chunk * pair_row);
                if (channel) multiply_short_rows(rows, gates);
            }
            for (Index i = 0; i < x.rows; ++i) x.beta[i] = i < x.n ? gates.beta[i] : 0.0F;
            if (channel)
                fold_scores(gates, x);
            else
                fold_shared(gates, x);
        }
        return true;
    }

  private:
    static constexpr Index pair_row = largest_chunk;

    // Rows as they are, and what l2norm multiplies them by.
    void load_rows(const DeltaRows& t, const Tokens& at, const TileChunk& x, std::uint32_t* out, float* factors) const {
        for (Index first = 0; first < x.rows; first += W) {
            F squares[W];
            for (Index r = 0; r < W; ++r) {
                const Index i = first + r;
                std::uint32_t* to = out + i * x.row;
                const auto* from = static_cast<const std::uint32_t*>(row_at(t, at.head, at.begin + i, 1).data);
                F even = splat(0.0F), odd = splat(0.0F);
                for (Index m = 0; m < x.keys / 2; m += W) {
                    const U words = i < at.n && t.has(at.begin + i) ? load(from + m) : U(0U);
                    store(to + m, words);
                    const F a = as_floats(words << 16), b = as_floats(words & U(0xffff0000U));
                    even = fma(a, a, even);
                    odd = fma(b, b, odd);
                }
                squares[r] = even + odd;
            }
            const F square = reduce_rows(squares, [](F a, F b) { return a + b; });
            store(factors + first, heads_.l2norm ? splat(1.0F) / sqrt(square + splat(1e-6F)) : splat(1.0F));
        }
    }

    // Whether no product of two such rows leaves f32, though their l2norm may. A row with an Inf or NaN spoils its
    // results in any form, and does not choose that of earlier ones.
    bool fits_products(const TileChunk& x, const std::uint32_t* rows, const float* factors) const {
        constexpr float least = 0x1p-63F;
        for (Index i = 0; i < x.n; ++i)
            if (factors[i] < least && is_finite(rows + i * x.row, x.keys / 2)) return false;
        return true;
    }
    static bool is_finite(const std::uint32_t* pairs, Index n) {
        constexpr std::uint32_t exponent = 0x7f80;
        for (Index i = 0; i < n; ++i)
            if ((pairs[i] & exponent) == exponent || (pairs[i] >> 16 & exponent) == exponent) return false;
        return true;
    }

    // 32 channels of kᵀ from rows [n, 32], as B of the pairs of rows and as A of what is written.
    void transpose_keys(Index m, const std::uint32_t* rows, Index row, const TileChunk& x) const {
        std::uint32_t* right = right_ + m / 2 * largest_chunk;
        for (Index j = 0; j < x.rows; j += W) {
            U block[W];
            for (Index r = 0; r < W; ++r) block[r] = load(rows + (j + r) * row);
            transpose(block);
            for (Index r = 0; r < W; ++r) store(right + r * largest_chunk + j, block[r]);
        }
        std::uint32_t* written = x.written + m * TileChunk::written_row;
        for (Index r = 0; r < W; ++r, right += largest_chunk, written += 2 * TileChunk::written_row)
            for (Index j = 0; j < x.rows; j += two_tiles) {
                U even, odd;
                P::Tiles::separate(load(right + j), load(right + j + W), even, odd);
                store(written + j / 2, even);
                store(written + TileChunk::written_row + j / 2, odd);
            }
    }

    // Rows with gates of a channel. Their sum in f32 is as exact as it must be here: it is at most mildest_range, and
    // what it becomes is rounded to bf16.
    template <bool own_p>
    void fold_channels(const Tokens& at, const GateChunk& gates, Index m, const std::uint32_t* k,
                       const TileChunk& x) const {
        constexpr int vectors = 2;
        F sum[vectors], up[vectors], down[vectors];
        for (int c = 0; c < vectors; ++c) sum[c] = splat(0.0F), up[c] = down[c] = splat(1.0F);
        k += m / 2;
        for (Index i = 0; i < x.rows; ++i, k += x.row) {
            std::uint32_t *q = x.q + i * x.row + m / 2, *p = x.p + i * x.row + m / 2;
            const bool decays = i < x.n && (!own_p || heads_.g.has(at.begin + i));
            const bool reads = !own_p || heads_.q.has(at.begin + i);
            F erased[vectors], read[vectors], key[vectors];
#pragma GCC unroll 2
            for (int c = 0; c < vectors; ++c) {
                const F before = up[c];
                if (decays) {
                    sum[c] = fma(load(gates.g + i * gates.row + m + c * W), splat(log2_e), sum[c]);
                    up[c] = exp2_for_bf16(sum[c]);
                    down[c] = reciprocal_for_bf16(up[c]);
                }
                key[c] = load_half(k + c * W / 2);
                erased[c] = (own_p ? load_half(p + c * W / 2) : key[c]) * (own_p && gates.exclusive ? before : up[c]);
                read[c] = load_half(q + c * W / 2) * up[c];
                key[c] = key[c] * down[c];
            }
            if (reads) store_bf16(q, read[0], read[1]);
            store_bf16(p, erased[0], erased[1]);
            store_bf16(halves_ + i * tile_size, key[0], key[1]);
        }
        for (int c = 0; c < vectors; ++c) store(x.state_decay + m + c * W, exp2(sum[c]));
        transpose_keys(m, halves_, tile_size, x);
    }

    // left [n, K]·kᵀ where rows see columns, and beside the diagonal.
    void multiply_pairs(const std::uint32_t* left, const TileChunk& x, float* out) const {
        using Tiles = typename P::Tiles;
        for (Index i = 0; i < x.rows; i += two_tiles)
            for (Index j = 0; j <= i; j += two_tiles) {
                multiply_two_rows<Tiles, 2>(left + i * x.row, x.row, right_ + j, largest_chunk, x.keys / two_tiles,
                                            out + i * pair_row + j, pair_row);
            }
    }

    // Pairs of short rows of q once more, from rows as the caller stored them.
    void multiply_short_rows(const Tokens& at, const GateChunk& gates) const {
        const auto rows_of = [&](const DeltaRows& t) {
            return [&t, &at](Index i, Index m) {
                return load_half(static_cast<const std::uint32_t*>(row_at(t, at.head, at.begin + i, 1).data) + m / 2);
            };
        };
        const auto q = rows_of(heads_.q), k = rows_of(heads_.k);
        for (Index i = 0; i < at.n; ++i) {
            const auto own = [&](Index m) { return q(i, m); };
            if (heads_.q.has(at.begin + i) && is_short(heads_.l2norm, q_factor_[i], heads_.key_size, own))
                ChannelGates(gates, heads_.key_size).multiply_short_row(i, own, k, 1, pairs_ + i * pair_row);
        }
    }

    // Scores of tile (t, s) from pairs; decay(i): what they are multiplied by, row by row of the tile.
    template <class Decay>
    SOFTDELTA_INLINE void fold_tile(Index t, Index s, const float* read, const float* erase, const Decay& decay,
                                    const TileChunk& x) const {
        for (Index r = 0; r < tile_size; ++r) {
            const Index i = t * tile_size + r;
            const float* pairs = pairs_ + i * pair_row + s * tile_size;
            const F own = decay(r);
            F score = splat(read[r]) * (load(pairs) * own);
            F erased = splat(erase[r]) * (load(pairs + largest_chunk * pair_row) * own);
            std::uint32_t* to = x.erase_score + i * TileChunk::score_row + s * tile_size / 2;
            if (s == t) {
                const F row = splat(static_cast<float>(r));
                score = select(iota() <= row, score, splat(0.0F));
                erased = select(iota() < row, erased, splat(0.0F));
                store(x.own + i * tile_size, erased);
                erased = splat(0.0F);
            }
            store_bf16(x.score + i * TileChunk::score_row + s * tile_size / 2, score);
            store_bf16(to, erased);
        }
    }

    // Zeros right of the diagonal, where products of two tiles read.
    void clear_right(Index t, const TileChunk& x) const {
        for (Index r = 0; r < tile_size; ++r) {
            const Index at = (t * tile_size + r) * TileChunk::score_row + (t + 1) * tile_size / 2;
            store_bf16(x.score + at, splat(0.0F));
            store_bf16(x.erase_score + at, splat(0.0F));
        }
    }

    // Factors of rows that l2norm, scale and β make.
    void make_factors(const TileChunk& x) const {
        for (Index i = 0; i < x.rows; i += W) {
            store(x.read + i, splat(heads_.scale) * load(q_factor_ + i));
            store(x.erase + i, (splat(0.0F) - load(x.beta + i)) * load(p_factor_ + i));
            store(x.write + i, load(k_factor_ + i));
        }
    }

    void fold_scores(const GateChunk& /*gates*/, const TileChunk& x) const {
        make_factors(x);
        for (Index t = 0; t < x.rows / tile_size; ++t) {
            for (Index s = 0; s <= t; ++s) {
                const F keys = load(k_factor_ + s * tile_size);
                fold_tile(
                    t, s, x.read + t * tile_size, x.erase + t * tile_size, [&](Index) { return keys; }, x);
            }
            if (t % 2 == 0) clear_right(t, x);
        }
    }

    // e^(G_i − G_j) is factored at the last row of a tile of columns; on the diagonal it is made pair by pair.
    void fold_shared(const GateChunk& gates, const TileChunk& x) const {
        sum_gates(x.n, gates);
        for (Index i = x.n; i < x.rows; ++i) gates.G[i] = gates.G[x.n - 1], gates.G_rest[i] = gates.G_rest[x.n - 1];
        make_factors(x);
        alignas(64) float read[tile_size], erase[tile_size];
        for (Index t = 0; t < x.rows / tile_size; ++t) {
            const Index first = t * tile_size;
            const F G = load(gates.G + first), G_rest = load(gates.G_rest + first);
            for (Index s = 0; s < t; ++s) {
                const Index last = s * tile_size + tile_size - 1;
                const F anchor = splat(gates.G[last]), anchor_rest = splat(gates.G_rest[last]);
                const F later = exp_of_difference(G, G_rest, anchor, anchor_rest);
                store(read, load(x.read + first) * later);
                store(erase, load(x.erase + first) * later);
                const F earlier = load(k_factor_ + s * tile_size) *
                                  exp_of_difference(anchor, anchor_rest, load(gates.G + s * tile_size),
                                                    load(gates.G_rest + s * tile_size));
                fold_tile(
                    t, s, read, erase, [&](Index) { return earlier; }, x);
            }
            const F keys = load(k_factor_ + first);
            const auto decay = [&](Index r) {
                const Mask seen = iota() <= splat(static_cast<float>(r));
                const F sum = splat(gates.G[first + r]), rest = splat(gates.G_rest[first + r]);
                return keys * exp_of_difference(select(seen, sum, G), rest, G, G_rest);  // no exponent is positive
            };
            fold_tile(t, t, x.read + first, x.erase + first, decay, x);
            if (t % 2 == 0) clear_right(t, x);
        }
        const F last = splat(gates.G[x.n - 1]), last_rest = splat(gates.G_rest[x.n - 1]);
        for (Index i = 0; i < x.rows; i += W) {
            const F sum = load(gates.G + i), rest = load(gates.G_rest + i), decay = exp_of_sum(sum, rest);
            store(x.read + i, load(x.read + i) * decay);
            store(x.erase + i, load(x.erase + i) * decay);
            store(x.write + i, load(x.write + i) * exp_of_difference(last, last_rest, sum, rest));
        }
        const F state_decay = exp_of_sum(last, last_rest);
        for (Index m = 0; m < x.keys; m += W) store(x.state_decay + m, state_decay);
    }

    const DeltaHeads& heads_;
    bool used_;
    std::uint32_t* right_;                     // B [K, n]: kᵀ, with gates of a channel (k∘e^−G)ᵀ
    float* pairs_;                             // [2, n, n] q kᵀ, p kᵀ
    float *q_factor_, *k_factor_, *p_factor_;  // [n]
    std::uint32_t* k_;                         // [n, K] rows of k beside those of p
    std::uint32_t* halves_;                    // [n, 32] k∘e^−G of some channels
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

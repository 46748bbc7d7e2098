// Operands of a head as the matrix tiles that steps of the backward pass read, packed once for all steps, in groups of
// 32 rows or keys. A group is left out, and its steps are computed otherwise, where an operand is not finite.
#pragma once

#include <cmath>

#include "engines/cpu/kernels/attention/backward/rows.h"
#include "engines/cpu/kernels/gemm/tile_products.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// How a group may be used.
enum class Packed : std::uint32_t { whole, has_dead_rows, left_out };

struct PackedRows {
    Packed* state;                     // [group]
    std::uint32_t *queries_t, *d_o_t;  // [group, 2 × 16 rows, D / 32 tiles] B: 32 numbers of 16 rows
    std::uint32_t *queries, *d_o;      // [D / 16 columns, group] B: 32 rows of 16 columns
    float *shift, *delta;              // [row] a probability is 2^(product·slope + shift); −scale·delta

    static PackedRows take(const AttentionHead& head, Scratch& memory) {
        const Index groups = head.rows() / square, q = groups * square * head.size / 2,
                    d_o = groups * square * head.value_size / 2;
        PackedRows m;
        m.state = memory.take<Packed>(groups);
        m.queries_t = memory.take<std::uint32_t>(q);
        m.queries = memory.take<std::uint32_t>(q);
        m.d_o_t = memory.take<std::uint32_t>(d_o);
        m.d_o = memory.take<std::uint32_t>(d_o);
        m.shift = memory.take<float>(groups * square);
        m.delta = memory.take<float>(groups * square);
        return m;
    }
};

struct PackedKeys {
    Packed* state;                 // [group]
    std::uint32_t *keys, *values;  // [group, D / 32, 2 tiles] A: 16 keys of 32 numbers
    std::uint32_t* keys_t;         // [D / 16 columns, group] A: 16 columns of 32 keys

    static PackedKeys take(const AttentionHead& head, Scratch& memory) {
        const Index groups = head.keys / square, k = groups * square * head.size / 2;
        PackedKeys m;
        m.state = memory.take<Packed>(groups);
        m.keys = memory.take<std::uint32_t>(k);
        m.keys_t = memory.take<std::uint32_t>(k);
        m.values = memory.take<std::uint32_t>(groups * square * head.value_size / 2);
        return m;
    }
};

inline constexpr Index most_packed = 512;  // numbers of a row

inline bool fits_tiles(const AttentionHead& head) {
    return head.bf16_products && head.size % square == 0 && head.value_size % square == 0 &&
           max(head.size, head.value_size) <= most_packed;
}

template <class Part>
Index packed_bytes(const AttentionHead& head) {
    if (!fits_tiles(head)) return 0;
    Scratch memory(nullptr);
    Part::take(head, memory);
    return static_cast<Index>(memory.used());
}

// Whether a head is computed by tiles where its groups are whole.
inline bool packs(const AttentionHead& head, const AttentionGradient& gradient) {
    return gradient.packed_rows != nullptr && fits_tiles(head) && keeps_products(head) && head.top_w < 0 &&
           head.q.column == 1 && head.k.column == 1 && head.v.column == 1 && gradient.d_o.column == 1 &&
           gradient.dq != nullptr && gradient.dk != nullptr && gradient.dv != nullptr && gradient.dbias.data == nullptr;
}

template <class P>
struct PackTiles {
    using Word = Element<P>;

    // 32 rows of n numbers as tiles [n / 32, 2] of A. False when one is not finite: of a bf16 whose exponent is all
    // ones the sum below has its highest bit.
    static bool copy_rows(const Word* const (&rows)[square], Index n, Word* tiles) {
        U sum(0);
        for (Index i = 0; i < square; ++i)
            for (Index c = 0; c < n / square; ++c) {
                const U words = load(rows[i] + c * W);
                sum = sum | ((words & U(0x7f807f80U)) + U(0x00800080U));
                store(tiles + c * 2 * tile_words + i * W, words);
            }
        return all((sum & U(0x80008000U)) == U(0));
    }

    // Of such tiles, rows 2i and 2i + 1 as pairs of columns [16·c, 16·c + 16).
    SOFTDELTA_INLINE static U pairs_of_rows(const Word* tiles, Index c, Index i) {
        const auto* row =
            reinterpret_cast<const std::uint16_t*>(tiles + c / 2 * 2 * tile_words + 2 * i * W) + c % 2 * W;
        return load_u16(row) | (load_u16(row + 2 * W) << 16);
    }

    SOFTDELTA_INLINE static void store_tile(const U (&tile)[W], Word* out) {
        for (Index i = 0; i < W; ++i) store(out + i * W, tile[i]);
    }

    // Groups of keys [first, last).
    static void keys(const AttentionHead& head, const AttentionGradient& gradient, Index first, Index last) {
        Scratch memory(gradient.packed_keys);
        const PackedKeys out = PackedKeys::take(head, memory);
        const auto copy = [&](const KeyRows& t, Index n, Index g, Word* tiles) {
            const Word* rows[square];
            for (Index i = 0; i < square; ++i) {
                rows[i] = static_cast<const Word*>(key_row(t, g * square + i).data);
                if (g + 1 < last) prefetch_row(key_row(t, (g + 1) * square + i), n);
            }
            return copy_rows(rows, n, tiles + g * (square / 2) * n);
        };
        for (Index g = first; g < last; ++g) {
            const bool finite = copy(head.k, head.size, g, out.keys) && copy(head.v, head.value_size, g, out.values);
            out.state[g] = finite ? Packed::whole : Packed::left_out;
            const Word* tiles = out.keys + g * (square / 2) * head.size;
            for (Index c = 0; c < head.size / tile_size; ++c) {
                U tile[W];
                for (Index i = 0; i < W; ++i) tile[i] = pairs_of_rows(tiles, c, i);
                transpose(tile);
                store_tile(tile, out.keys_t + (c * (head.keys / square) + g) * tile_words);
            }
        }
    }

    // Groups of rows [first, last); what prepare() says of them is known. A row that sees nothing is zeros.
    static void rows(const AttentionHead& head, const AttentionGradient& gradient, Index first, Index last) {
        Scratch memory(gradient.packed_rows);
        const PackedRows out = PackedRows::take(head, memory);
        const float slope = score_scale(head) * log2_e;
        for (Index g = first; g < last; ++g) {
            Packed state = Packed::whole;
            for (Index r = g * square; r < (g + 1) * square; ++r) {
                const bool dead = gradient.lse[r] == infinity;
                const float high = dead ? 0 : gradient.maximum[r] * slope;
                out.shift[r] = dead ? 0 : -high - gradient.lse[r];
                out.delta[r] = dead ? 0 : -gradient.delta[r] * head.scale;
                if (dead && state == Packed::whole) state = Packed::has_dead_rows;
                // The rounding error of a larger one would be that of probabilities.
                if (!(std::abs(high) <= largest_saved_lse)) state = Packed::left_out;
            }
            if (!tiles(head, gradient, head.q, head.size, g, last, out.queries_t, out.queries) ||
                !tiles(head, gradient, gradient.d_o, head.value_size, g, last, out.d_o_t, out.d_o))
                state = Packed::left_out;
            out.state[g] = state;
        }
    }

    static bool tiles(const AttentionHead& head, const AttentionGradient& gradient, const QueryRows& t, Index n,
                      Index g, Index last, Word* tiles_t, Word* tiles) {
        alignas(64) static constexpr Word zeros[most_packed / 2] = {};
        const Word* rows[square];
        for (Index i = 0; i < square; ++i) {
            const Index r = g * square + i;
            rows[i] = gradient.lse[r] == infinity ? zeros : static_cast<const Word*>(query_row(head, t, r).data);
            if (g + 1 < last) prefetch_row(query_row(head, t, r + square), n);
        }
        tiles_t += g * (square / 2) * n;
        alignas(64) Word as_a[square * most_packed / 2];
        if (!copy_rows(rows, n, as_a)) return false;
        U tile[W];
        for (Index c = 0; c < n / tile_size; ++c) {
            for (Index i = 0; i < W; ++i) tile[i] = pairs_of_rows(as_a, c, i);
            store_tile(tile, tiles + (c * (head.rows() / square) + g) * tile_words);
        }
        for (Index c = 0; c < n / tile_size; ++c) {
            for (Index i = 0; i < W; ++i) tile[i] = load(as_a + c * tile_words + i * W);
            transpose(tile);
            store_tile(tile, tiles_t + (c % 2 * (n / square) + c / 2) * tile_words);
        }
        return true;
    }
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

// Keys and values of a head as the matrix tiles that the forward pass multiplies, each 16 rows of 16 words, one after
// the other. They are packed once for all units of a head, in parts of 128 keys. Where the level has no tiles, or few
// rows see a range of keys, units pack what they need.
//
// Quantised numbers are sums of two bf16, high and low. Of keys both lie side by side in a row, which meets each query
// twice; of values the low ones are operands of their own.
#pragma once

#include "engines/cpu/kernels/attention/mask.h"
#include "engines/cpu/kernels/gemm/tile_products.h"
#include "engines/cpu/kernels/scratch.h"
#include "engines/cpu/kernels/simd/sixteen_bits.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

struct TileOperands {
    static constexpr Index part_keys = 128, part_steps = part_keys / square, part_tiles = part_keys / tile_size;
    using Taken = std::uint64_t;

    std::uint32_t* keys;    // [key tile, D / 32] B: 32 numbers of 16 keys
    std::uint32_t* values;  // [part, Dv / 16, step] B: 32 keys of 16 columns, in the order of sixteen_bits::place()
    std::uint32_t* low_values = nullptr;  // the same; null: there are none
    // [part, 2] bits of values that hold an Inf or a NaN. They are zeros in the operand, since 0·∞ is NaN where a row
    // does not see the key, and are added where it is seen.
    Taken* taken;
    float* norms;           // [part] the largest sum of squares of a key; ∞ where one is not finite
    Index chunks, columns;  // D / 32, twice that of quantised keys, Dv / 16, rounded up

    // Of `keys` keys.
    static TileOperands take(const AttentionHead& head, Index keys, Scratch& memory) {
        TileOperands m;
        const Index parts = (keys + part_keys - 1) / part_keys;
        m.chunks = chunks_of(head);
        m.columns = (head.value_size + tile_size - 1) / tile_size;
        m.keys = memory.take<std::uint32_t>(parts * part_tiles * m.chunks * tile_words);
        const Index of_values = parts * part_steps * m.columns * tile_words;
        m.values = memory.take<std::uint32_t>(of_values);
        if (head.v.scale != nullptr) m.low_values = memory.take<std::uint32_t>(of_values);
        m.taken = memory.take<Taken>(parts * 2);
        m.norms = memory.take<float>(parts);
        return m;
    }

    static Index chunks_of(const AttentionHead& head) {
        return (head.size + square - 1) / square * (head.k.scale == nullptr ? 1 : 2);
    }

    std::uint32_t* key_tile(Index key) const { return keys + key / tile_size * chunks * tile_words; }
    // The first of 32 keys and the columns that begin with this one; those of the next are part_steps tiles further.
    std::uint32_t* value_tile(Index key, Index column = 0) const {
        const Index part = key / part_keys;
        return values + ((part * columns + column) * part_steps + key % part_keys / square) * tile_words;
    }
    // Of the same place as these values.
    std::uint32_t* low_tile(const std::uint32_t* of_values) const { return low_values + (of_values - values); }
};

template <class P>
class PackOperands {
    using Word = Element<P>;

  public:
    // Of one row for each of 16 keys, and of a pair of them.
    static Index staging(const AttentionHead& head) {
        return (W + 2) * round_up(max(head.size, head.value_size), square);
    }

    PackOperands(const AttentionHead& head, const TileOperands& out, Word* staging)
        : head_(head), out_(out), staging_(staging) {}

    // Keys [first, last), at most a part, which begins at key `at` of the operands; zeros up to a multiple of 32.
    void part(Index first, Index last, Index at) const {
        TileOperands::Taken* taken = out_.taken + at / TileOperands::part_keys * 2;
        taken[0] = taken[1] = 0;
        float* norm = out_.norms + at / TileOperands::part_keys;
        F squares = splat(0.0F);
        for (Index j = first; j < last; j += square, at += square) {
            for (Index t = 0; t < square; t += W) {
                const F some = keys(j + t, last, out_.key_tile(at + t));
                squares = select(some > squares, some, squares) + some * splat(0.0F);  // NaN of what is not finite
            }
            if (values(j, last, out_.value_tile(at))) continue;
            for (Index i = 0; i < min(square, last - j); ++i) {
                if (is_finite(key_row(head_.v, j + i), head_.value_size)) continue;
                clear(i, out_.value_tile(at));
                if (out_.low_values != nullptr) clear(i, out_.low_tile(out_.value_tile(at)));
                const Index bit = at % TileOperands::part_keys + i;
                taken[bit / 64] |= TileOperands::Taken{1} << bit % 64;
            }
        }
        *norm = all(squares == squares) ? maximum(squares) : infinity;
    }

  private:
    // Low numbers follow round_up(n, square) high ones.
    const Word* row(const KeyRows& t, Index n, Index j, Index last, Index slot) const {
        const Index count = round_up(n, square);
        auto* own = reinterpret_cast<std::uint16_t*>(staging_ + slot * count);
        if (j + square < last) prefetch_row(key_row(t, j + square), n);
        if (j >= last)
            for (Index i = 0; i < 2 * count; ++i) own[i] = 0;
        else if (t.scale == nullptr)
            return reinterpret_cast<const Word*>(stored_row(key_row(t, j), n, own, P{}));
        else
            split(key_row(t, j), n, own);
        return reinterpret_cast<const Word*>(own);
    }

    void split(Row row, Index n, std::uint16_t* out) const {
        const Index count = round_up(n, square);
        auto* numbers = reinterpret_cast<float*>(staging_ + W * count);  // behind all rows of keys or values
        load_row(row, n, numbers);
        for (Index i = round_up(n, W); i < count; ++i) numbers[i] = 0;
        for (Index i = 0; i < count; i += square) {
            const F first = load(numbers + i), second = load(numbers + i + W);
            store_bf16(reinterpret_cast<Word*>(out + i), first, second);
            const auto rest = [](F x, const std::uint16_t* high) {
                const F low = x - as_floats(load_u16(high) << 16);
                return select(abs(low) < F(infinity), low, splat(0.0F));  // of Inf and NaN there is no rest
            };
            store_bf16(reinterpret_cast<Word*>(out + count + i), rest(first, out + i), rest(second, out + i + W));
        }
    }

    // Returns the sum of squares of each key.
    F keys(Index first, Index last, Word* out) const {
        const Word* from[W];
        F squares = splat(0.0F);
        for (Index r = 0; r < W; ++r) from[r] = row(head_.k, head_.size, first + r, last, r);
        for (Index c = 0; c < out_.chunks; ++c, out += tile_words) {
            U block[W];
            for (Index r = 0; r < W; ++r) block[r] = load(from[r] + c * W);
            transpose(block);
            for (Index r = 0; r < W; ++r) {
                store(out + r * W, block[r]);
                squares = P::multiply_add(as_floats(block[r]), as_floats(block[r]), squares);
            }
        }
        return squares;
    }

    // False when a number is not finite: of a bf16 whose exponent is all ones the sum below has its highest bit.
    bool values(Index first, Index last, Word* out) const {
        U sum(0);
        for (Index r = 0; r < W; ++r) {
            const auto half = [&](Index i) {
                return reinterpret_cast<const std::uint16_t*>(
                    row(head_.v, head_.value_size, first + sixteen_bits::key_at(2 * r + i), last, i));
            };
            const std::uint16_t *a = half(0), *b = half(1);
            for (Index n = 0; n < out_.columns; ++n) {
                const U words = load_u16(a + n * W) | (load_u16(b + n * W) << 16);
                sum = sum | ((words & U(0x7f807f80U)) + U(0x00800080U));
                Word* to = out + n * TileOperands::part_steps * tile_words + r * W;
                store(to, words);
                if (out_.low_values == nullptr) continue;
                const Index low = round_up(head_.value_size, square) + n * W;
                store(out_.low_tile(to), load_u16(a + low) | (load_u16(b + low) << 16));
            }
        }
        return all((sum & U(0x80008000U)) == U(0));
    }

    void clear(Index key, Word* out) const {
        const Index at = sixteen_bits::place(key);
        for (Index n = 0; n < out_.columns; ++n) {
            Word* words = out + n * TileOperands::part_steps * tile_words + at / 2 * W;
            store(words, load(words) & U(at % 2 == 0 ? 0xffff0000U : 0x0000ffffU));
        }
    }

    const AttentionHead& head_;
    const TileOperands& out_;
    Word* staging_;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

// Matrix tiles, and what multiplies pairs beside them, by the vectors of the emulated level.
// Not inlined: a kernel has hundreds of products, which sanitizers would make minutes of compiling.
#pragma once

#include "engines/cpu/kernels/simd/emulated/bf16_pairs.h"
#include "engines/cpu/kernels/simd/sixteen_bits.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

#define SOFTDELTA_LEVEL_HAS_TILES
// A tile that is read before it was written, or after the object is gone, holds NaN.
class MatrixTiles {
  public:
    static constexpr bool exist = true, are_granted = false;
    MatrixTiles() { forget(); }
    ~MatrixTiles() { forget(); }
    MatrixTiles(const MatrixTiles&) = delete;
    MatrixTiles& operator=(const MatrixTiles&) = delete;

    template <int tile>
    __attribute__((noinline)) static void clear() {
        for (float& x : tiles_[tile]) x = 0;
    }
    template <int tile, class T>
    __attribute__((noinline)) static void read(const T* p, Index row) {
        static_assert(sizeof(T) == 4);
        for (Index i = 0; i < 16; ++i) __builtin_memcpy(tiles_[tile] + i * W, p + i * row, 64);
    }
    template <int tile>
    __attribute__((noinline)) static void write(float* p, Index row) {
        for (Index i = 0; i < 16; ++i) __builtin_memcpy(p + i * row, tiles_[tile] + i * W, 64);
    }
    template <int tile, int at, class T>
    static void read_whole(const T* p) {
        read<tile>(p + at * 256, 16);
    }
    template <int tile, int at>
    static void write_whole(float* p) {
        write<tile>(p + at * 256, 16);
    }
    template <int sums, int a, int b>
    __attribute__((noinline)) static void multiply_add() {
        for (Index m = 0; m < 16; ++m)
            for (Index k = 0; k < 16; ++k)
                store(tiles_[sums] + m * W, multiply_add_pairs(splat(tiles_[a][m * W + k]), load(tiles_[b] + k * W),
                                                               load(tiles_[sums] + m * W)));
    }

    // NaN where no line of the cache begins.
    static void store_past_caches(std::uint32_t* p, F x, F y) {
        const bool begins = reinterpret_cast<std::uintptr_t>(p) % 64 == 0;
        store_bf16(p, begins ? x : splat(__builtin_nanf("")), y);
    }

    // Two vectors as words of neighbours, rounded to nearest even.
    static U neighbours(F x, F y) {
        alignas(64) std::uint32_t words[W];
        store_bf16(words, x, y);
        return load(words);
    }

    // Exponentials in 16 bits.
    class Exponentials {
      public:
        // slope: of exponents, as fixed point of 16 bits.
        explicit Exponentials(F slope) : slope_(slope) {}
        // 2^((score·slope + offset) / 256) of 32 scores, in the order of sixteen_bits::place(); offset: on top of the
        // magic number. Not bounded: a score may be anything, NaN stays NaN.
        template <bool bounded>
        U of(F first, F second, F offset) const {
            const U sums[] = {as_words(fma(first, slope_, offset)), as_words(fma(second, slope_, offset))};
            const auto half = [&](std::size_t i) {
                auto bits = static_cast<std::int32_t>(sums[i / W].lanes[i % W]);
                if (!bounded && (bits & 0x7fffffff) > 0x7f800000) bits = 0x7f800000;
                if (!bounded && bits < 0) bits = 0;
                // 32 bits, as the instruction has them
                const auto fixed = static_cast<std::int32_t>(
                    static_cast<std::uint32_t>(bits) -
                    static_cast<std::uint32_t>(sixteen_bits::magic_bits - sixteen_bits::bias));
                const int x = fixed < 0 ? 0 : fixed > 0xffff ? 0xffff : fixed;
                const int rest = x - sixteen_bits::corrections[static_cast<std::size_t>(x >> 2 & 63)];
                return static_cast<std::uint32_t>((rest < 0 ? 0 : rest) >> 1);
            };
            return in_order(half);
        }
        // Of 32 bits, rounded to nearest even.
        static U round(F first, F second) {
            const U words = neighbours(first, second);
            return in_order([&](std::size_t i) { return words.lanes[i / 2] >> i % 2 * 16 & 0xffffU; });
        }
        // sums + both numbers of each word.
        F add(U words, F sums) const { return multiply_add_pairs(as_floats(words), as_floats(U(0x3f803f80U)), sums); }

      private:
        template <class Half>
        static U in_order(Half&& half) {
            const auto at = [&](std::size_t i) {
                return half(static_cast<std::size_t>(sixteen_bits::key_at(static_cast<int>(i))));
            };
            return U::of([&](std::size_t i) { return at(2 * i) | at(2 * i + 1) << 16; });
        }
        F slope_;
    };

    // Halves of words as pairs {x, y}: of halves 8i … 8i + 3 in `low`, of 8i + 4 … 8i + 7 in `high`.
    static void interleave(U x, U y, U& low, U& high) {
        const auto pairs = [&](std::size_t first) {
            return U::of([&](std::size_t i) {
                const std::size_t half = i / 4 * 8 + first + i % 4, shift = half % 2 * 16;
                return (x.lanes[half / 2] >> shift & 0xffffU) | (y.lanes[half / 2] >> shift << 16);
            });
        };
        low = pairs(0);
        high = pairs(4);
    }
    // First and second halves of 32 words, in the order of sixteen_bits::place().
    static void separate(U x, U y, U& first, U& second) {
        const auto halves = [&](std::uint32_t shift) {
            const auto half = [&](std::size_t place) {
                const auto i = static_cast<std::size_t>(sixteen_bits::key_at(static_cast<int>(place)));
                return (i < W ? x : y).lanes[i % W] >> shift & 0xffffU;
            };
            return U::of([&](std::size_t i) { return half(2 * i) | half(2 * i + 1) << 16; });
        };
        first = halves(0);
        second = halves(16);
    }

  private:
    static void forget() {
        for (auto& tile : tiles_)
            for (float& x : tile) x = __builtin_nanf("");
    }
    alignas(64) static inline thread_local float tiles_[8][256];
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

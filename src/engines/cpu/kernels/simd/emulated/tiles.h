// Matrix tiles, and what multiplies pairs beside them, by the vectors of the emulated level.
#pragma once

#include "engines/cpu/kernels/simd/emulated/bf16_pairs.h"

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
    static void clear() {
        for (float& x : tiles_[tile]) x = 0;
    }
    template <int tile, class T>
    static void read(const T* p, Index row) {
        static_assert(sizeof(T) == 4);
        for (Index i = 0; i < 16; ++i) __builtin_memcpy(tiles_[tile] + i * W, p + i * row, 64);
    }
    template <int tile>
    static void write(float* p, Index row) {
        for (Index i = 0; i < 16; ++i) __builtin_memcpy(p + i * row, tiles_[tile] + i * W, 64);
    }
    template <int sums, int a, int b>
    static void multiply_add() {
        for (Index m = 0; m < 16; ++m)
            for (Index k = 0; k < 16; ++k)
                store(tiles_[sums] + m * W, multiply_add_pairs(splat(tiles_[a][m * W + k]), load(tiles_[b] + k * W),
                                                               load(tiles_[sums] + m * W)));
    }

    // Two vectors as words of neighbours, rounded to nearest even.
    static U neighbours(F x, F y) {
        alignas(64) std::uint32_t words[W];
        store_bf16(words, x, y);
        return load(words);
    }

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

  private:
    static void forget() {
        for (auto& tile : tiles_)
            for (float& x : tile) x = __builtin_nanf("");
    }
    alignas(64) static inline thread_local float tiles_[8][256];
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

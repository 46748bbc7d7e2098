// Matrix tiles: registers of 16 rows of 16 words that multiply pairs of bf16. Level amxbf16 has them.
#pragma once

#include "engines/cpu/kernels/simd/vector.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

struct NoTiles {
    static constexpr bool exist = false;
};

#if defined(__AMX_BF16__)

// A thread has an object of this class while it multiplies: it makes each of its eight tiles 16 rows of 16 words, and
// gives them back. The assembly tells the compiler that memory is read and written, which the intrinsics do not.
class MatrixTiles {
  public:
    static constexpr bool exist = true;
    MatrixTiles() {
        struct alignas(64) {
            std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
            std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            std::uint8_t tile_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } const layout;
        asm volatile("ldtilecfg %0" ::"m"(layout));
    }
    ~MatrixTiles() { asm volatile("tilerelease"); }
    MatrixTiles(const MatrixTiles&) = delete;
    MatrixTiles& operator=(const MatrixTiles&) = delete;

    template <int tile>
    SOFTDELTA_INLINE static void clear() {
        asm volatile("tilezero %%tmm%c0" ::"i"(tile));
    }
    template <int tile, class T>
    SOFTDELTA_INLINE static void read(const T* p, Index row) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row * 4), "i"(tile) : "memory");
    }
    template <int tile>
    SOFTDELTA_INLINE static void write(float* p, Index row) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row * 4), "i"(tile) : "memory");
    }
    template <int sums, int a, int b>
    SOFTDELTA_INLINE static void multiply_add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
    }
};

#else

using MatrixTiles = NoTiles;

#endif

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

// Level amxbf16: matrix tiles of AMX, and what multiplies pairs beside them.
#pragma once

#include <bit>

#include "engines/cpu/kernels/simd/x86/x86_bf16.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

#define SOFTDELTA_LEVEL_HAS_TILES
// A thread has an object of this class while it multiplies: it makes each of its eight tiles 16 rows of 16 words, and
// gives them back. The assembly tells the compiler that memory is read and written, which the intrinsics do not.
class MatrixTiles {
  public:
    static constexpr bool exist = true, are_granted = true;
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

    // Two vectors as words of neighbours, rounded to nearest even.
    SOFTDELTA_INLINE static U neighbours(F x, F y) { return std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)); }

    // Halves of words as pairs {x, y}: of halves 8i … 8i + 3 in `low`, of 8i + 4 … 8i + 7 in `high`.
    SOFTDELTA_INLINE static void interleave(U x, U y, U& low, U& high) {
        low = _mm512_unpacklo_epi16(x, y);
        high = _mm512_unpackhi_epi16(x, y);
    }
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

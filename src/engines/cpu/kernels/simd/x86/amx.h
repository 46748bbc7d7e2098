// Level amxbf16: matrix tiles of AMX, and what multiplies pairs beside them.
#pragma once

#include <bit>

#include "engines/cpu/kernels/simd/sixteen_bits.h"
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
    // Others see what store_past_caches() stored before they see anything that follows.
    ~MatrixTiles() { asm volatile("sfence\n\ttilerelease" ::: "memory"); }
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
    // The whole tile `at` tiles from p: its rows are neighbours.
    template <int tile, int at, class T>
    SOFTDELTA_INLINE static void read_whole(const T* p) {
        asm volatile("tileloadd %c2(%0,%1,1), %%tmm%c3" ::"r"(p), "r"(64L), "i"(at * 1024), "i"(tile) : "memory");
    }
    template <int tile, int at>
    SOFTDELTA_INLINE static void write_whole(float* p) {
        asm volatile("tilestored %%tmm%c3, %c2(%0,%1,1)" ::"r"(p), "r"(64L), "i"(at * 1024), "i"(tile) : "memory");
    }
    template <int sums, int a, int b>
    SOFTDELTA_INLINE static void multiply_add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
    }

    // As store_bf16(), where a line of the cache begins.
    SOFTDELTA_INLINE static void store_past_caches(std::uint32_t* p, F x, F y) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(p), std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)));
    }

    // Two vectors as words of neighbours, rounded to nearest even.
    SOFTDELTA_INLINE static U neighbours(F x, F y) { return std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)); }

    // Exponentials in 16 bits. The assembly keeps constants in registers, which the compiler would make anew.
    class Exponentials {
      public:
        // slope: of exponents, as fixed point of 16 bits.
        SOFTDELTA_INLINE explicit Exponentials(F slope)
            : slope_(slope),
              table_(_mm512_load_si512(sixteen_bits::corrections.data())),
              shift_(_mm512_set1_epi32(sixteen_bits::magic_bits - sixteen_bits::bias)),
              ones_(_mm512_set1_epi32(0x3f803f80)),
              low_bytes_(0x5555555555555555U) {
            asm("" : "+v"(slope_), "+v"(table_), "+v"(shift_), "+v"(ones_), "+Yk"(low_bytes_));
        }
        // 2^((score·slope + offset) / 256) of 32 scores, in the order of sixteen_bits::place(); offset: on top of the
        // magic number. Not bounded: a score may be anything, NaN stays NaN.
        template <bool bounded>
        SOFTDELTA_INLINE U of(F first, F second, F offset) const {
            const auto fixed = [&](F score) {
                __m512 x = _mm512_fmadd_ps(score, slope_, offset);
                if constexpr (!bounded)  // ∞ of NaN, 0 of what is negative
                    x = _mm512_fixupimm_ps(x, x, _mm512_set1_epi32(0x08580855), 0);
                return _mm512_sub_epi32(_mm512_castps_si512(x), shift_);
            };
            const __m512i x = _mm512_packus_epi32(fixed(first), fixed(second));
            const __m512i correction = _mm512_maskz_permutexvar_epi8(low_bytes_, _mm512_srli_epi16(x, 2), table_);
            return _mm512_srli_epi16(_mm512_subs_epu16(x, correction), 1);
        }
        // Of 32 bits, rounded to nearest even.
        SOFTDELTA_INLINE static U round(F first, F second) {
            return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), neighbours(first, second));
        }
        // sums + both numbers of each word.
        SOFTDELTA_INLINE F add(U words, F sums) const {
            return _mm512_dpbf16_ps(sums, (__m512bh) static_cast<__m512i>(words), (__m512bh)ones_);
        }

      private:
        __m512 slope_;
        __m512i table_, shift_, ones_;
        __mmask64 low_bytes_;
    };

    // Halves of words as pairs {x, y}: of halves 8i … 8i + 3 in `low`, of 8i + 4 … 8i + 7 in `high`.
    SOFTDELTA_INLINE static void interleave(U x, U y, U& low, U& high) {
        low = _mm512_unpacklo_epi16(x, y);
        high = _mm512_unpackhi_epi16(x, y);
    }
    // First and second halves of 32 words, in the order of sixteen_bits::place().
    SOFTDELTA_INLINE static void separate(U x, U y, U& first, U& second) {
        const __m512i lower = _mm512_set1_epi32(0xffff);
        first = _mm512_packus_epi32(_mm512_and_si512(x, lower), _mm512_and_si512(y, lower));
        second = _mm512_packus_epi32(_mm512_srli_epi32(x, 16), _mm512_srli_epi32(y, 16));
    }
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

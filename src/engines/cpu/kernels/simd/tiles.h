// Matrix tiles: registers of 16 rows of 16 words that multiply pairs of bf16. Level amxbf16 has them.
#pragma once

#if defined(SOFTDELTA_EMULATED_TILES)
#include "engines/cpu/kernels/simd/emulated/tiles.h"
#elif defined(__AMX_BF16__)
#include "engines/cpu/kernels/simd/x86/amx.h"
#endif

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

struct NoTiles {
    static constexpr bool exist = false;
};

#if !defined(SOFTDELTA_EMULATED_TILES) && !defined(__AMX_BF16__)
using MatrixTiles = NoTiles;
#endif

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

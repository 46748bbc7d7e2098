// Matrix tiles: registers of 16 rows of 16 words that multiply pairs of bf16. Level amxbf16 has them.
#pragma once

#include "engines/cpu/kernels/simd/level.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

struct NoTiles {
    static constexpr bool exist = false, are_granted = false;
};

#if !defined(SOFTDELTA_LEVEL_HAS_TILES)
using MatrixTiles = NoTiles;
#endif

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

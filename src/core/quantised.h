// Keys and values of 8 or 4 bits: a number is what its type says times a scale.
//
//     i8, f8            [.., D]          one scale for a row, or for all rows of a head, or for all: scale [.., 1]
//     i8, f8 in blocks  [.., D/32, 32]   a scale for each block: [.., D/32] (ggml's q8_0: i8, f16)
//     u8 in blocks      [.., D/32, 16]   byte b of a block holds element b in its low half and element b + 16 in its
//                                        high half, each plus 8 (ggml's q4_0)
//
// api/ makes one shape of them: values [.., D] with Tensor::block, scales [.., D/32 or 1] with a stride of 0 where one
// serves many.
#pragma once

#include "core/tensor.h"

namespace softdelta::core {

inline constexpr Index quantised_block = 32;  // elements of a block
inline constexpr Index bytes_of_halves = 16;  // that hold a block of u8

// n elements of the row at `offset`, whose scales begin at `scale_offset`.
template <class T>
void load_quantised_row(const Tensor& t, Index offset, const Tensor& scale, Index scale_offset, Index n, T* out) {
    const bool halves = t.dtype == DType::u8;
    for (Index c = 0; c < n; ++c) {
        const Index block = t.block > 0 ? c / t.block : 0, in = t.block > 0 ? c % t.block : c;
        const Index place = halves ? in % bytes_of_halves : in;
        double x = load(t, offset + block * t.block_stride + place * t.stride[3]);
        if (halves) x = static_cast<double>((static_cast<int>(x) >> (in < bytes_of_halves ? 0 : 4) & 15) - 8);
        out[c] = static_cast<T>(x * load(scale, scale_offset + block * scale.stride[3]));
    }
}

}  // namespace softdelta::core

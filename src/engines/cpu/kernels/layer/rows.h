// Rows of the caller's tensors as floats, and back.
#pragma once

#include "engines/cpu/kernels/gemm/rows.h"
#include "engines/cpu/kernels/layer/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline Row layer_row(const LayerRows& t, Index i) {
    return {static_cast<const std::byte*>(t.data) + i * t.row * static_cast<Index>(core::size_of(t.dtype)), t.dtype,
            t.column};
}

// n columns of row i as f32, zeros up to the next multiple of W; all zeros when not given.
inline void load_layer_row(const LayerRows& t, Index i, Index n, float* out) {
    if (t.data != nullptr) return load_row(layer_row(t, i), n, out);
    for (Index c = 0; c < n; c += W) store(out + c, splat(0.0F));
}

inline void store_layer_row(const float* x, Index n, const LayerRows& t, Index i) {
    const Row to = layer_row(t, i);
    store_row(x, n, const_cast<void*>(to.data), to.dtype, to.step);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

// Strided rows of any storage type, made into floats and back.
#pragma once

#include "engines/cpu/kernels/gemm/quantised.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// A row in memory: element i at data + i·step, step in elements. Quantised numbers have scales.
struct Row {
    const void* data;
    core::DType dtype;
    Index step;
    const void* scale = nullptr;
    const Scales* scales = nullptr;
};

template <class T>
SOFTDELTA_INLINE void load_elements(const T* data, Index step, Index n, float* out) {
    if (step == 1) {
        Index i = 0;
        for (; i + W <= n; i += W) store(out + i, load(data + i));
        if (i < n) store(out + i, load_partial(data + i, n - i));
    } else {
        alignas(64) T part[W] = {};
        for (Index i = 0; i < n; i += W) {
            const Index count = n - i < W ? n - i : W;
            for (Index j = 0; j < W; ++j) part[j] = j < count ? data[(i + j) * step] : T{};
            store(out + i, load(part));
        }
    }
}

// n elements as f32; zeros up to the next multiple of W.
inline void load_row(Row row, Index n, float* out) {
    if (row.dtype == core::DType::f32)
        load_elements(static_cast<const float*>(row.data), row.step, n, out);
    else if (row.dtype == core::DType::bf16)
        load_elements(static_cast<const core::bf16*>(row.data), row.step, n, out);
    else if (row.scales == nullptr)
        load_elements(static_cast<const core::f16*>(row.data), row.step, n, out);
    else
        for (Index i = 0; i < n; i += W)
            store(out + i, load_quantised(row.dtype, row.data, row.step, row.scale, *row.scales, i, n - i));
}

template <class T>
SOFTDELTA_INLINE void store_elements(const float* in, Index n, Index step, T* data) {
    alignas(64) T part[W];
    for (Index i = 0; i < n; i += W) {
        const F x = load(in + i);
        if (step == 1 && i + W <= n) {
            store(data + i, x);
        } else {
            store(part, x);
            for (Index j = 0; j < W && i + j < n; ++j) data[(i + j) * step] = part[j];
        }
    }
}

// n elements rounded to the row's type; `in` is read up to the next multiple of W.
inline void store_row(const float* in, Index n, void* data, core::DType dtype, Index step) {
    if (dtype == core::DType::f32)
        store_elements(in, n, step, static_cast<float*>(data));
    else if (dtype == core::DType::bf16)
        store_elements(in, n, step, static_cast<core::bf16*>(data));
    else
        store_elements(in, n, step, static_cast<core::f16*>(data));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

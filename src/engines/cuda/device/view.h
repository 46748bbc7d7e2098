// Tensors as kernels see them: plain data, passed by value.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/tensor.h"

namespace softdelta::cuda {

using core::DType;
using core::Index;

// Element (i0, i1, …) lies at data + Σ i·stride. No data: absent.
struct View {
    void* data = nullptr;
    DType dtype = DType::f32;
    Index stride[5] = {};

    __host__ __device__ explicit operator bool() const { return data != nullptr; }
};

inline View view_of(const core::Tensor& t) {
    View v;
    if (!t || t.count() == 0) return v;
    v.data = t.data;
    v.dtype = t.dtype;
    for (int i = 0; i < t.rank && i < 5; ++i) {
        const auto dim = static_cast<std::size_t>(i);
        v.stride[i] = t.shape[dim] == 1 ? 0 : t.stride[dim];
    }
    return v;
}

// Whether rows of 16-bit elements are whole units of 16 bytes.
__host__ __device__ inline bool has_whole_rows(const View& v, int channels) {
    return v.stride[3] == 1 && channels % 8 == 0 && v.stride[0] % 8 == 0 && v.stride[1] % 8 == 0 &&
           v.stride[2] % 8 == 0 && reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0;
}

__device__ inline float to_float(float x) {
    return x;
}
__device__ inline float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ inline float to_float(__half x) {
    return __half2float(x);
}
__device__ inline void assign(float* to, float x) {
    *to = x;
}
__device__ inline void assign(__nv_bfloat16* to, float x) {
    *to = __float2bfloat16_rn(x);
}
__device__ inline void assign(__half* to, float x) {
    *to = __float2half_rn(x);
}

// use(data) with the pointer's type: the type is looked up once for all elements that `use` visits.
template <class Use>
__device__ inline void with_type(const View& v, Use&& use) {
    switch (v.dtype) {
        case DType::f32:
            return use(static_cast<float*>(v.data));
        case DType::bf16:
            return use(static_cast<__nv_bfloat16*>(v.data));
        case DType::f16:
            return use(static_cast<__half*>(v.data));
        default:
            return;
    }
}

__device__ inline float load(const View& v, Index offset) {
    float x = 0;
    with_type(v, [&](const auto* data) { x = to_float(data[offset]); });
    return x;
}

__device__ inline void store(const View& v, Index offset, float x) {
    with_type(v, [&](auto* data) { assign(data + offset, x); });
}

// Elements [first, first + n) of a row of `size`; 0 beyond it.
template <int n>
__device__ inline void load_row(const View& v, Index offset, Index step, int first, int size, float (&out)[n]) {
    with_type(v, [&](const auto* data) {
#pragma unroll
        for (int i = 0; i < n; ++i) out[i] = first + i < size ? to_float(data[offset + (first + i) * step]) : 0.0F;
    });
}

__device__ inline Index load_index(const View& v, Index offset) {
    return v.dtype == DType::i32 ? static_cast<const std::int32_t*>(v.data)[offset]
                                 : static_cast<const std::int64_t*>(v.data)[offset];
}

}  // namespace softdelta::cuda

// Neighbouring channels of a tensor: four at a time where they lie side by side, or one.
#pragma once

#include "engines/cuda/view.h"

namespace softdelta::cuda {

constexpr int most_neighbours = 4;

// Whether groups of four neighbours along the last dimension are aligned.
inline bool has_neighbours(const core::Tensor& t) {
    if (!t || t.count() == 0) return true;
    const View v = view_of(t);
    const int last = t.rank - 1;
    for (int i = 0; i < last; ++i)
        if (v.stride[i] % most_neighbours != 0) return false;
    return t.shape[static_cast<std::size_t>(last)] % most_neighbours == 0 && v.stride[last] == 1 &&
           reinterpret_cast<std::uintptr_t>(t.data) % (most_neighbours * core::size_of(t.dtype)) == 0;
}

template <class T>
struct alignas(most_neighbours * sizeof(T)) Neighbours {
    T x[most_neighbours];
};

template <int n>
__device__ inline void load_neighbours(const View& v, Index offset, float (&out)[n]) {
    with_type(v, [&](const auto* data) {
        if constexpr (n == 1) {
            out[0] = to_float(data[offset]);
        } else {
            using T = std::remove_cvref_t<decltype(*data)>;
            const auto four = *reinterpret_cast<const Neighbours<T>*>(data + offset);
#pragma unroll
            for (int i = 0; i < n; ++i) out[i] = to_float(four.x[i]);
        }
    });
}

template <int n>
__device__ inline void store_neighbours(const View& v, Index offset, const float (&x)[n]) {
    with_type(v, [&](auto* data) {
        if constexpr (n == 1) {
            assign(data + offset, x[0]);
        } else {
            using T = std::remove_cvref_t<decltype(*data)>;
            Neighbours<T> four;
#pragma unroll
            for (int i = 0; i < n; ++i) assign(four.x + i, x[i]);
            *reinterpret_cast<Neighbours<T>*>(data + offset) = four;
        }
    });
}

// Elements first … first + n − 1 of a tensor of one dimension; absent: `otherwise`.
template <int n>
__device__ inline void load_weights(const View& v, Index first, float otherwise, float (&out)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) out[i] = v ? load(v, (first + i) * v.stride[0]) : otherwise;
}

}  // namespace softdelta::cuda

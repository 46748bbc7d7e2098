// Neighbouring channels of tensors: four at a time where they lie side by side in one type, or one.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "engines/cuda/device/view.h"
#include "engines/cuda/tile/unroll.h"

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

// In place of a type: elements of any, which is looked up at each access.
struct AnyType {};

// use(data) with the pointer's type.
template <class T, class Use>
__device__ void with_known_type(const View& v, Use&& use) {
    if constexpr (std::is_same_v<T, AnyType>)
        with_type(v, use);
    else
        use(static_cast<T*>(v.data));
}

template <class Type, int n>
__device__ inline void load_neighbours(const View& v, Index offset, float (&out)[n]) {
    with_known_type<Type>(v, [&](const auto* data) {
        if constexpr (n == 1) {
            out[0] = to_float(data[offset]);
        } else {
            using T = std::remove_cvref_t<decltype(*data)>;
            const auto four = *reinterpret_cast<const Neighbours<T>*>(data + offset);
            unrolled<n>([&](int i) { out[i] = to_float(four.x[i]); });
        }
    });
}

template <class Type, int n>
__device__ inline void store_neighbours(const View& v, Index offset, const float (&x)[n]) {
    with_known_type<Type>(v, [&](auto* data) {
        if constexpr (n == 1) {
            assign(data + offset, x[0]);
        } else {
            using T = std::remove_cvref_t<decltype(*data)>;
            Neighbours<T> four;
            unrolled<n>([&](int i) { assign(four.x + i, x[i]); });
            *reinterpret_cast<Neighbours<T>*>(data + offset) = four;
        }
    });
}

// Elements first … first + n − 1 of a tensor of one dimension; absent: `otherwise`.
template <int n>
__device__ inline void load_weights(const View& v, Index first, float otherwise, float (&out)[n]) {
    unrolled<n>([&](int i) { out[i] = otherwise; });
    with_type(v, [&](const auto* data) {
        unrolled<n>([&](int i) {
            if (data != nullptr) out[i] = to_float(data[(first + i) * v.stride[0]]);
        });
    });
}

// Groups of four neighbours of one type in all of these tensors: use(T{}, four); else use(AnyType{}, one).
template <class Use>
void with_neighbours(const std::initializer_list<const core::Tensor*>& tensors, const Use& use) {
    const DType type = (*tensors.begin())->dtype;
    for (const core::Tensor* t : tensors)
        if (*t && (t->dtype != type || !has_neighbours(*t))) return use(AnyType{}, std::integral_constant<int, 1>{});
    constexpr std::integral_constant<int, most_neighbours> four;
    if (type == DType::bf16) return use(__nv_bfloat16{}, four);
    return type == DType::f16 ? use(__half{}, four) : use(float{}, four);
}

}  // namespace softdelta::cuda

// Rows of a tensor to and from dense memory in loops that compilers make vectors of: the type is asked for once a row.
// load_row and store_row (tensor.h) ask for every element and take any type: they are for the reference and stages.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "core/tensor.h"

namespace softdelta::core {

// As to_bf16 and to_f16 of an f64, without branches.
inline bf16 round_to_bf16(float x) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;  // a carry runs into the exponent
    const std::uint32_t nan = (bits >> 16 & 0x8000u) | 0x7fc0u;
    return {static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}
inline f16 round_to_f16(float x) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), size = bits & 0x7fffffffu;
    const std::uint32_t normal = (size - (112u << 23) + 0xfffu + (size >> 13 & 1)) >> 13;
    // The numbers just above 1/2 are as far apart as subnormal ones: the addition rounds.
    const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(size) + 0.5F) - (126u << 23);
    const std::uint32_t small = 0u - ((size - (113u << 23)) >> 31);  // a mask: compilers branch around an addition
    const std::uint32_t finite = (subnormal & small) | (normal & ~small), nan = size > 0x7f800000u ? 0x200u : 0u;
    const std::uint32_t result = std::min(finite, 0x7c00u) | nan;  // infinity from 65520 on
    return {static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | result)};
}

// As to_float, without branches.
inline float widen(float x) {
    return x;
}
inline double widen(double x) {
    return x;
}
inline float widen(bf16 x) {
    return to_float(x);
}
inline float widen(f16 x) {
    const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
    const std::uint32_t rest = static_cast<std::uint32_t>(x.bits & 0x7fffu) << 13;
    const std::uint32_t finite = std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest) * 0x1p112f);
    return std::bit_cast<float>(sign | finite | (rest >= 0x0f800000u ? 0x7f800000u : 0u));
}

template <class Element, class T>
Element narrow(T x) {
    if constexpr (std::is_floating_point_v<Element>)
        return static_cast<Element>(x);
    else if constexpr (std::is_same_v<T, float>)
        return std::is_same_v<Element, bf16> ? Element{round_to_bf16(x).bits} : Element{round_to_f16(x).bits};
    else
        return std::is_same_v<Element, bf16> ? Element{to_bf16(x).bits} : Element{to_f16(x).bits};
}

// use(element, step): a pointer to the element at `offset` of a float type, and how far the next one along `dim` is. A
// step of 1 is a number that the compiler knows.
template <class Use>
void with_row(const Tensor& t, Index offset, int dim, const Use& use) {
    const Index step = t.stride[static_cast<std::size_t>(dim)];
    const auto with = [&](auto* data) {
        step == 1 ? use(data + offset, std::integral_constant<Index, 1>()) : use(data + offset, step);
    };
    switch (t.dtype) {
        case DType::f64:
            return with(static_cast<double*>(t.data));
        case DType::f32:
            return with(static_cast<float*>(t.data));
        case DType::bf16:
            return with(static_cast<bf16*>(t.data));
        default:
            return with(static_cast<f16*>(t.data));
    }
}

// n elements of a float type along dimension `dim`, starting at `offset` (T = double or float).
template <class T>
void read_row(const Tensor& t, Index offset, int dim, Index n, T* out) {
    with_row(t, offset, dim, [&](const auto* from, auto step) {
        for (Index i = 0; i < n; ++i) out[i] = static_cast<T>(widen(from[i * step]));
    });
}
template <class T>
void write_row(const Tensor& t, Index offset, int dim, Index n, const T* in) {
    with_row(t, offset, dim, [&]<class Element>(Element* to, auto step) {
        for (Index i = 0; i < n; ++i) to[i * step] = narrow<Element>(in[i]);
    });
}

}  // namespace softdelta::core

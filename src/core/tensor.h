// A strided view of memory that the caller owns, and reading and writing it as f64.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/device.h"
#include "core/dtype.h"

namespace softdelta::core {

using Index = std::int64_t;

// Element (i0, i1, …) lies at data + Σ i·stride, strides in elements (any sign, zero repeats). Rank 0: absent.
struct Tensor {
    static constexpr int max_rank = 6;

    void* data = nullptr;
    DType dtype = DType::f64;
    int rank = 0;
    std::array<Index, max_rank> shape{};
    std::array<Index, max_rank> stride{};
    Device device{};
    // Of quantised numbers (core/quantised.h): elements of the last dimension in blocks, each with a scale. Element c
    // lies at c / block · block_stride + c % block · stride; 0: no blocks.
    Index block = 0, block_stride = 0;

    explicit operator bool() const { return rank > 0; }

    Index count() const {
        Index n = 1;
        for (int i = 0; i < rank; ++i) n *= shape[static_cast<std::size_t>(i)];
        return n;
    }

    // The offset of an element, in elements. A dimension of size 1 is broadcast: its index is not used.
    Index offset(std::initializer_list<Index> index) const {
        Index at = 0;
        std::size_t dim = 0;
        for (const Index i : index) {
            at += shape[dim] == 1 ? 0 : i * stride[dim];
            ++dim;
        }
        return at;
    }
};

inline double load(const Tensor& t, Index offset) {
    switch (t.dtype) {
        case DType::f64:
            return static_cast<const double*>(t.data)[offset];
        case DType::f32:
            return static_cast<double>(static_cast<const float*>(t.data)[offset]);
        case DType::bf16:
            return static_cast<double>(to_float(static_cast<const bf16*>(t.data)[offset]));
        case DType::f16:
            return static_cast<double>(to_float(static_cast<const f16*>(t.data)[offset]));
        case DType::boolean:
            return static_cast<const std::uint8_t*>(t.data)[offset] != 0 ? 1.0 : 0.0;
        case DType::i32:
            return static_cast<double>(static_cast<const std::int32_t*>(t.data)[offset]);
        case DType::i64:
            return static_cast<double>(static_cast<const std::int64_t*>(t.data)[offset]);
        case DType::i8:
            return static_cast<double>(static_cast<const std::int8_t*>(t.data)[offset]);
        case DType::u8:
            return static_cast<double>(static_cast<const std::uint8_t*>(t.data)[offset]);
        case DType::f8:
            return static_cast<double>(to_float(static_cast<const f8*>(t.data)[offset]));
    }
    return 0;
}

inline Index load_index(const Tensor& t, Index offset) {
    return t.dtype == DType::i32 ? static_cast<const std::int32_t*>(t.data)[offset]
                                 : static_cast<const std::int64_t*>(t.data)[offset];
}

inline void store(const Tensor& t, Index offset, double value) {
    switch (t.dtype) {
        case DType::f64:
            static_cast<double*>(t.data)[offset] = value;
            break;
        case DType::f32:
            static_cast<float*>(t.data)[offset] = static_cast<float>(value);
            break;
        case DType::bf16:
            static_cast<bf16*>(t.data)[offset] = to_bf16(value);
            break;
        case DType::f16:
            static_cast<f16*>(t.data)[offset] = to_f16(value);
            break;
        case DType::boolean:
            static_cast<std::uint8_t*>(t.data)[offset] = value != 0;
            break;
        case DType::i32:
            static_cast<std::int32_t*>(t.data)[offset] = static_cast<std::int32_t>(value);
            break;
        case DType::i64:
            static_cast<std::int64_t*>(t.data)[offset] = static_cast<std::int64_t>(value);
            break;
        case DType::i8:
            static_cast<std::int8_t*>(t.data)[offset] = static_cast<std::int8_t>(value);
            break;
        case DType::u8:
            static_cast<std::uint8_t*>(t.data)[offset] = static_cast<std::uint8_t>(value);
            break;
        case DType::f8:
            static_cast<f8*>(t.data)[offset] = to_f8(value);
            break;
    }
}

// n elements along dimension `dim`, starting at `offset`, to and from a dense row (T = double or float).
template <class T>
void load_row(const Tensor& t, Index offset, int dim, Index n, T* out) {
    const Index step = t.stride[static_cast<std::size_t>(dim)];
    for (Index i = 0; i < n; ++i) out[i] = static_cast<T>(load(t, offset + i * step));
}

template <class T>
void store_row(const Tensor& t, Index offset, int dim, Index n, const T* in) {
    const Index step = t.stride[static_cast<std::size_t>(dim)];
    for (Index i = 0; i < n; ++i) store(t, offset + i * step, static_cast<double>(in[i]));
}

}  // namespace softdelta::core

// Parts of tensors, and tensors compared bit by bit: what a sequence of a call is alone.
#pragma once

#include <cstring>
#include <string>

#include "io/file/core_view.h"
#include "support/array.h"

namespace softdelta::test {

// Elements [begin, begin + count) of dimension dim; nothing of nothing.
inline Tensor part_of(const Tensor& t, std::size_t dim, Index begin, Index count) {
    if (!t) return t;
    Shape shape(t.shape().begin(), t.shape().end());
    shape[dim] = count;
    const Index bytes = begin * t.stride()[dim] * static_cast<Index>(core::size_of(io::core_type(t.dtype())));
    return {static_cast<std::byte*>(t.data()) + bytes, t.dtype(), shape, t.stride()};
}

// Tokens [begin, begin + count) of a batch row, of a tensor [B, T, …].
inline Tensor tokens_of(const Tensor& t, Index batch, Index begin, Index count) {
    return t ? part_of(part_of(t, 0, batch, 1), 1, begin, count) : t;
}

// The first element of two arrays of one shape that has other bits; −1: none. Every NaN is the same.
inline Index first_difference(const Array& a, const Array& b) {
    for (Index i = 0; i < a.count(); ++i) {
        const double x = a.get(i), y = b.get(i);
        if (std::memcmp(&x, &y, sizeof x) != 0 && (x == x || y == y)) return i;
    }
    return -1;
}

}  // namespace softdelta::test

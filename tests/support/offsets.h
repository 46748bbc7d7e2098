// Where the elements of a tensor lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "softdelta/softdelta.hpp"

namespace softdelta::test {

// visit(offset) for every element, row-major; offsets in elements, from the first one. Counted on without a division:
// tests spend much of their time here.
template <class Visit>
void for_each_offset(const Tensor& t, const Visit& visit) {
    const std::size_t rank = t.rank();
    if (t.count() == 0) return;
    if (rank == 0) return visit(0);
    std::vector<std::int64_t> index(rank);
    const std::int64_t length = t.shape(rank - 1), step = t.stride()[rank - 1];
    for (std::int64_t row = 0;;) {
        for (std::int64_t i = 0; i < length; ++i) visit(row + i * step);
        std::size_t dim = rank - 1;
        for (;;) {  // the next row
            if (dim-- == 0) return;
            row += t.stride()[dim];
            if (++index[dim] < t.shape(dim)) break;
            row -= index[dim] * t.stride()[dim];
            index[dim] = 0;
        }
    }
}

// use(a number of as many bytes as an element has), so that copying one needs no call.
template <class Use>
void with_element(const Tensor& t, const Use& use) {
    switch (core::size_of(static_cast<core::DType>(t.dtype()))) {
        case 1:
            return use(std::uint8_t{});
        case 2:
            return use(std::uint16_t{});
        case 4:
            return use(std::uint32_t{});
        default:
            return use(std::uint64_t{});
    }
}

}  // namespace softdelta::test

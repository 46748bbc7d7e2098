// Tensors with their own memory, any layout, filled at random.
#pragma once

#include <cstdint>
#include <vector>

#include "softdelta/softdelta.hpp"
#include "support/random.h"

namespace softdelta::test {

using Index = std::int64_t;
using Shape = std::vector<Index>;

// From SOFTDELTA_SEED, else `otherwise`.
std::uint64_t first_seed(std::uint64_t otherwise = 1);

// A tensor with its own memory; elements are counted row-major whatever the strides. A moved array keeps its memory.
class Array {
  public:
    Array() = default;
    Array(DType dtype, const Shape& shape) : Array(dtype, shape, nullptr) {}
    // Dimensions in any order in memory, either direction, with gaps.
    Array(DType dtype, const Shape& shape, Random& layout) : Array(dtype, shape, &layout) {}
    Array(Array&&) = default;
    Array& operator=(Array&&) = default;

    const Tensor& view() const { return view_; }
    Index count() const { return view_ ? view_.count() : 0; }
    double get(Index element) const;
    void set(Index element, double value) const;
    double get(const Shape& index) const;
    void set(const Shape& index, double value) const;
    std::vector<double> values() const;
    // All elements along a dimension become one and the same: its stride is zero.
    void repeat(std::size_t dim);

  private:
    Array(DType dtype, const Shape& shape, Random* layout);
    std::vector<std::uint64_t> memory_;
    Tensor view_;
    bool row_major_ = true;
};

// The same of one of the first `dims` dimensions, and of some others of them.
void repeat_some(Array& array, std::size_t dims, Random& random);

// Fills with standard normal numbers.
void fill_normal(const Array& array, Random& random);

}  // namespace softdelta::test

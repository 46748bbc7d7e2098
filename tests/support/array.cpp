#include "support/array.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "io/file/core_view.h"

namespace softdelta::test {

namespace {

Index offset_of(const Tensor& t, Index element) {
    Index offset = 0;
    for (std::size_t dim = t.rank(); dim-- > 0;) {
        offset += element % t.shape(dim) * t.stride()[dim];
        element /= t.shape(dim);
    }
    return offset;
}

// As much of it as reading and writing an element needs.
core::Tensor elements_of(const Tensor& t) {
    core::Tensor elements;
    elements.data = t.data();
    elements.dtype = io::core_type(t.dtype());
    return elements;
}

Index element_of(const Tensor& t, const Shape& index) {
    Index element = 0;
    for (std::size_t dim = 0; dim < t.rank(); ++dim) element = element * t.shape(dim) + index[dim];
    return element;
}

}  // namespace

std::uint64_t first_seed(std::uint64_t otherwise) {
    const char* given = std::getenv("SOFTDELTA_SEED");
    return given != nullptr ? std::strtoull(given, nullptr, 10) : otherwise;
}

Array::Array(DType dtype, const Shape& shape, Random* layout) : row_major_(layout == nullptr) {
    Shape stride(shape.size());
    std::vector<std::size_t> order(shape.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    if (layout != nullptr) std::shuffle(order.begin(), order.end(), *layout);
    const auto draw = [layout](Index high) {
        return layout != nullptr ? std::uniform_int_distribution<Index>(0, high)(*layout) : 0;
    };
    Index step = 1 + draw(1), start = 0;
    for (std::size_t i = shape.size(); i-- > 0;) {
        const std::size_t dim = order[i];
        const Index size = std::max<Index>(shape[dim], 1);
        stride[dim] = step;
        if (draw(3) == 3) {
            stride[dim] = -step;
            start += (size - 1) * step;
        }
        step *= size + draw(1);
    }
    memory_.resize(static_cast<std::size_t>(step));  // 8 bytes an element are enough for any type
    const std::size_t bytes = core::size_of(static_cast<core::DType>(dtype));
    auto* first = reinterpret_cast<unsigned char*>(memory_.data()) + static_cast<std::size_t>(start) * bytes;
    view_ = Tensor(first, dtype, shape, stride);
}

double Array::get(Index element) const {
    return core::load(elements_of(view_), row_major_ ? element : offset_of(view_, element));
}
void Array::set(Index element, double value) const {
    core::store(elements_of(view_), row_major_ ? element : offset_of(view_, element), value);
}
double Array::get(const Shape& index) const {
    return get(element_of(view_, index));
}
void Array::set(const Shape& index, double value) const {
    set(element_of(view_, index), value);
}

std::vector<double> Array::values() const {
    std::vector<double> all(static_cast<std::size_t>(count()));
    for (Index i = 0; i < count(); ++i) all[static_cast<std::size_t>(i)] = get(i);
    return all;
}

void Array::repeat(std::size_t dim) {
    Shape stride(view_.stride().begin(), view_.stride().end());
    stride[dim] = 0;
    row_major_ = false;
    view_ = Tensor(view_.data(), view_.dtype(), view_.shape(), stride);
}

void repeat_some(Array& array, std::size_t dims, Random& random) {
    const std::size_t first = random() % dims;
    for (std::size_t dim = 0; dim < dims; ++dim)
        if (dim == first || random() % 4 == 0) array.repeat(dim);
}

void fill_normal(const Array& array, Random& random) {
    Normal normal;
    for (Index i = 0; i < array.count(); ++i) array.set(i, normal(random));
}

}  // namespace softdelta::test

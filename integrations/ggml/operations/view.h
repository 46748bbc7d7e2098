// A ggml tensor as the library sees it: sizes from the slowest to the fastest, strides in elements.
#pragma once

#include <softdelta/softdelta.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "ggml-impl.h"

namespace softdelta_ggml {

inline constexpr DLDataType f32 = {kDLFloat, 32, 1};

// What the library computes on; false: a type that it does not read.
inline bool element_type(ggml_type type, DLDataType& out) {
    switch (type) {
        case GGML_TYPE_F32:
            out = {kDLFloat, 32, 1};
            return true;
        case GGML_TYPE_F16:
            out = {kDLFloat, 16, 1};
            return true;
        case GGML_TYPE_BF16:
            out = {kDLBfloat, 16, 1};
            return true;
        default:
            return false;
    }
}

// A strided view of at most five dimensions.
class View {
  public:
    static constexpr int most = 5;

    View() = default;
    View(void* data, DLDataType type, std::initializer_list<std::int64_t> shape,
         std::initializer_list<std::int64_t> strides) {
        tensor.data = data;
        tensor.device = {kDLCPU, 0};
        tensor.dtype = type;
        for (const std::int64_t size : shape) shape_[static_cast<std::size_t>(tensor.ndim++)] = size;
        std::size_t i = 0;
        for (const std::int64_t stride : strides) strides_[i++] = stride;
    }

    const DLTensor* get() {
        tensor.shape = shape_.data();
        tensor.strides = strides_.data();
        return tensor.data == nullptr ? nullptr : &tensor;
    }
    DLTensor* out() { return const_cast<DLTensor*>(get()); }

  private:
    DLTensor tensor{};
    std::array<std::int64_t, most> shape_{}, strides_{};
};

// The row at these places of dimensions 1, 2 and 3.
inline char* row(const ggml_tensor* t, std::int64_t i1, std::int64_t i2, std::int64_t i3) {
    return static_cast<char*>(t->data) + static_cast<std::size_t>(i1) * t->nb[1] +
           static_cast<std::size_t>(i2) * t->nb[2] + static_cast<std::size_t>(i3) * t->nb[3];
}

// Elements from one entry of dimension `dim` to the next.
inline std::int64_t stride(const ggml_tensor* t, int dim) {
    return static_cast<std::int64_t>(t->nb[dim] / ggml_type_size(t->type));
}

// Whether strides are whole elements and rows lie without gaps.
inline bool is_plain(const ggml_tensor* t) {
    const std::size_t size = ggml_type_size(t->type);
    for (int i = 0; i < GGML_MAX_DIMS; ++i)
        if (t->nb[i] % size != 0) return false;
    return t->nb[0] == size;
}

}  // namespace softdelta_ggml

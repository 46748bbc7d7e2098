// A tensor of softdelta.hpp as one of core, which reads and writes single elements.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/tensor.h"
#include "softdelta/softdelta.hpp"

namespace softdelta::io {

inline core::DType core_type(DType type) {
    return static_cast<core::DType>(type);  // api/enums.cpp holds that they are the same
}

inline core::Tensor core_view(const Tensor& t) {
    core::Tensor view;
    view.data = t.data();
    view.dtype = core_type(t.dtype());
    view.rank = static_cast<int>(t.rank());
    std::copy(t.shape().begin(), t.shape().end(), view.shape.begin());
    std::copy(t.stride().begin(), t.stride().end(), view.stride.begin());
    return view;
}

// Entry i of a vector of lengths or indices.
inline std::int64_t load_index(const Tensor& t, std::int64_t i) {
    return core::load_index(core_view(t), i * t.stride()[0]);
}

}  // namespace softdelta::io

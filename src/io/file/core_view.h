// A tensor of softdelta.hpp as one of core, which reads and writes single elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

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

// A dense tensor as one row.
inline core::Tensor core_row(const Tensor& t) {
    core::Tensor row;
    row.data = t.data();
    row.dtype = core_type(t.dtype());
    row.rank = 1;
    row.shape[0] = t.count();
    row.stride[0] = 1;
    return row;
}

// A vector of lengths or indices as plain numbers; of an absent one, none.
inline std::vector<std::int64_t> load_indices(const Tensor& t) {
    std::vector<std::int64_t> numbers(static_cast<std::size_t>(t ? t.count() : 0));
    const core::Tensor view = core_view(t);
    for (std::size_t i = 0; i < numbers.size(); ++i)
        numbers[i] = core::load_index(view, static_cast<std::int64_t>(i) * view.stride[0]);
    return numbers;
}

}  // namespace softdelta::io

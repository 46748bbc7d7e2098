// Tensors of a file as operands and results of a call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "io/file/case_file.h"
#include "io/file/stored_type.h"
#include "io/file/text.h"

namespace softdelta::io {

inline std::vector<std::int64_t> shape_of(const Tensor& t) {
    return {t.shape().begin(), t.shape().end()};
}

// What a result, or the gradient of one, must be.
inline void expect_float_of_shape(const std::string& name, const Tensor& t, const std::vector<std::int64_t>& shape) {
    if (!is_float(t.dtype()))
        fail(name + ": type " + std::string(stored_type(t.dtype()).name) + ", expected F64, F32, BF16 or F16");
    if (!std::ranges::equal(t.shape(), shape))
        fail(name + ": shape " + shape_text(t.shape()) + ", expected " + shape_text(shape));
}

}  // namespace softdelta::io

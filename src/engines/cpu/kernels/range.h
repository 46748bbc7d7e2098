// A range of rows, keys, columns or steps of a depth.
#pragma once

#include "core/tensor.h"

namespace softdelta::kernels {

struct Range {
    core::Index begin, end;
    bool empty() const { return begin >= end; }
    bool contains(core::Index i) const { return begin <= i && i < end; }
};

}  // namespace softdelta::kernels

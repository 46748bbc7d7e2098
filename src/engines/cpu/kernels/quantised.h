// Where the scales of a row of quantised numbers lie (core/quantised.h). A row without blocks has blocks with the same
// scale.
#pragma once

#include "core/quantised.h"

namespace softdelta::kernels {

struct Scales {
    core::DType dtype = core::DType::f32;
    core::Index step = 0;        // elements from the scale of a block to the next
    core::Index block_step = 0;  // bytes from a block to the next
};

}  // namespace softdelta::kernels

// What engines for f32 and 16 bits say of tensors of f64.
#pragma once

#include <string>

#include "core/operands.h"

namespace softdelta::engines {

// "q is f64, expected f32, bf16 or f16", of the first tensor of a structure that is; "": none is.
template <class Struct>
std::string refuse_f64(const Struct& tensors) {
    std::string reason;
    core::for_each_given(tensors, [&](const auto& operand, const core::Tensor& t) {
        if (reason.empty() && t.dtype == core::DType::f64)
            reason = std::string(operand.name) + " is f64, expected f32, bf16 or f16";
    });
    return reason;
}

}  // namespace softdelta::engines

// The gated norm after a delta rule: operands and options of one call.
//
//     y = weight · x / √(mean x² + epsilon) · gate(z)      over the D channels of a head
#pragma once

#include "core/layer/activation.h"
#include "core/operands.h"

namespace softdelta::core {

struct NormInputs {
    Tensor x;       // [B, T, H, D]
    Tensor z;       // [B, T, H, D]; absent without a gate
    Tensor weight;  // [D]; absent: 1
};

struct NormOptions {
    Activation gate = Activation::none;
    double epsilon = 1e-6;
};

struct NormOutputs {
    Tensor y;  // [B, T, H, D]
};

struct NormGradients {
    Tensor dy;               // [B, T, H, D]
    Tensor dx, dz, dweight;  // each as its input; absent: not computed
};

template <>
struct InputsOf<NormGradients> {
    using type = NormInputs;
};

template <>
inline constexpr auto operands_of<NormInputs> = std::to_array<Operand<NormInputs>>({
    {.name = "x", .tensor = &NormInputs::x, .shape = "B T H D", .need = needs::required},
    {.name = "z", .tensor = &NormInputs::z, .shape = "B T H D"},
    {.name = "weight", .tensor = &NormInputs::weight, .shape = "D"},
});
template <>
inline constexpr auto operands_of<NormOutputs> = std::to_array<Operand<NormOutputs>>({
    {.name = "y", .tensor = &NormOutputs::y, .shape = "B T H D", .need = needs::required, .written = true},
});
template <>
inline constexpr auto operands_of<NormGradients> = std::to_array<Operand<NormGradients>>({
    {.name = "dy", .tensor = &NormGradients::dy, .shape = "B T H D", .need = needs::required},
    {.name = "dx", .tensor = &NormGradients::dx, .written = true, .input = &NormInputs::x},
    {.name = "dz", .tensor = &NormGradients::dz, .written = true, .input = &NormInputs::z},
    {.name = "dweight", .tensor = &NormGradients::dweight, .written = true, .input = &NormInputs::weight},
});

}  // namespace softdelta::core

// The causal convolution before a delta rule: operands and options of one call.
//
//     y_t = act(bias + Σ_{i<W} weight_i · x_{t−W+1+i})      per channel
//
// Tokens before the first one of a sequence are those of its state, oldest first, or zeros.
#pragma once

#include "core/layer/activation.h"
#include "core/operands.h"
#include "core/sequence.h"

namespace softdelta::core {

struct ConvolutionInputs {
    Tensor x;              // [B, T, C]
    Tensor weight;         // [C, W], the last one is the newest token's
    Tensor bias;           // [C]; absent: 0
    Tensor initial_state;  // [N, C, S] the S ≥ W − 1 tokens before the first; absent: 0
    Tensor cu_seqlens;     // [N+1] i32|i64; then B = 1
    Tensor state_indices;  // [N] i32|i64: initial and final state of sequence n are entry state_indices[n] of a pool;
                           // −1: padding, no sequence
    Tensor final_state_indices;  // [N] the final state's entry instead; −1: it is not written
    Tensor has_initial_state;    // [N] bool; false: sequence n begins from 0; absent: none does
};

struct ConvolutionOptions {
    Activation activation = Activation::none;  // or silu
};

struct ConvolutionOutputs {
    Tensor y;            // [B, T, C]
    Tensor final_state;  // [N, C, S] the last S tokens; may be initial_state itself
};

struct ConvolutionGradients {
    Tensor dy;                                  // [B, T, C]; absent: 0
    Tensor dfinal_state;                        // as final_state; absent: 0
    Tensor dx, dweight, dbias, dinitial_state;  // each as its input; absent: not computed
};

template <>
struct InputsOf<ConvolutionGradients> {
    using type = ConvolutionInputs;
};

template <>
inline constexpr auto operands_of<ConvolutionInputs> = std::to_array<Operand<ConvolutionInputs>>({
    {.name = "x", .tensor = &ConvolutionInputs::x, .shape = "B T C", .need = needs::required},
    {.name = "weight", .tensor = &ConvolutionInputs::weight, .shape = "C W", .need = needs::required},
    {.name = "bias", .tensor = &ConvolutionInputs::bias, .shape = "C"},
    {.name = "initial_state", .tensor = &ConvolutionInputs::initial_state, .shape = "N C S"},
    {.name = "cu_seqlens", .tensor = &ConvolutionInputs::cu_seqlens, .shape = "N+1", .kind = Kind::integer},
    {.name = "state_indices", .tensor = &ConvolutionInputs::state_indices, .shape = "N", .kind = Kind::integer},
    {.name = "final_state_indices",
     .tensor = &ConvolutionInputs::final_state_indices,
     .shape = "N",
     .kind = Kind::integer},
    {.name = "has_initial_state", .tensor = &ConvolutionInputs::has_initial_state, .shape = "N", .kind = Kind::boolean},
});
template <>
inline constexpr auto operands_of<ConvolutionOutputs> = std::to_array<Operand<ConvolutionOutputs>>({
    {.name = "y", .tensor = &ConvolutionOutputs::y, .shape = "B T C", .written = true},
    {.name = "final_state", .tensor = &ConvolutionOutputs::final_state, .shape = "N C S", .written = true},
});
template <>
inline constexpr auto operands_of<ConvolutionGradients> = std::to_array<Operand<ConvolutionGradients>>({
    {.name = "dy", .tensor = &ConvolutionGradients::dy, .shape = "B T C"},
    {.name = "dfinal_state", .tensor = &ConvolutionGradients::dfinal_state, .shape = "N C S"},
    {.name = "dx", .tensor = &ConvolutionGradients::dx, .written = true, .input = &ConvolutionInputs::x},
    {.name = "dweight", .tensor = &ConvolutionGradients::dweight, .written = true, .input = &ConvolutionInputs::weight},
    {.name = "dbias", .tensor = &ConvolutionGradients::dbias, .written = true, .input = &ConvolutionInputs::bias},
    {.name = "dinitial_state",  // also without an initial_state, and therefore with a shape of its own
     .tensor = &ConvolutionGradients::dinitial_state,
     .shape = "N C S",
     .written = true},
});

using ConvolutionSequence = TokenSequence;

inline Index sequence_count(const ConvolutionInputs& in) {
    return in.cu_seqlens ? in.cu_seqlens.shape[0] - 1 : in.x.shape[0];
}

inline ConvolutionSequence sequence(const ConvolutionInputs& in, Index n) {
    return pool_sequence(in, in.x.shape[1], n);
}

}  // namespace softdelta::core

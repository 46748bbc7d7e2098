// The causal convolution and the gated norm as the kernels see them, and what kernels offer. Formulas are those of
// docs/math.md, "Around the rules".
#pragma once

#include <cstddef>

#include "core/dtype.h"
#include "core/layer/activation.h"
#include "core/tensor.h"

namespace softdelta::kernels {

// Rows of one tensor: row i, column c at data + i·row + c·column, in elements. Null: not given.
struct LayerRows {
    void* data = nullptr;
    core::DType dtype = core::DType::f32;
    core::Index row = 0, column = 0;
};

// Some channels of one sequence.
struct ConvolutionChannels {
    core::Index tokens = 0;    // of the sequence: T
    core::Index channels = 0;  // at most ConvolutionKernels::most_channels
    core::Index width = 1;     // W, at most ConvolutionKernels::most_width
    bool silu = false;
    LayerRows x;              // [T, channels]
    LayerRows weight;         // [W, channels]
    LayerRows bias;           // [1, channels]
    LayerRows initial_state;  // [S, channels]
    core::Index kept = 0;     // S
};

struct ConvolutionGradients {
    LayerRows dy;            // [T, channels]; null: 0
    LayerRows dfinal_state;  // [S, channels]; null: 0
    LayerRows dx;            // [T, channels]; here and below, null: not wanted
    LayerRows dinitial_state;
    double* sums = nullptr;   // [W + 1, columns] dweight and dbias are added to
    core::Index columns = 0;  // from row to row of them
    core::Index kept = 0;     // S
};

struct ConvolutionKernels {
    core::Index most_width, most_channels;
    std::size_t scratch;  // bytes of a thread
    // Weights of some channels into the scratch memory, for `forward` and `backward` of any sequences with them.
    void (*load_weights)(const ConvolutionChannels& in, std::byte* scratch);
    // y of tokens [begin, end).
    void (*forward)(const ConvolutionChannels& in, core::Index begin, core::Index end, std::byte* scratch,
                    const LayerRows& y);
    // The last S tokens. `to` may be initial_state itself.
    void (*final_state)(const ConvolutionChannels& in, std::byte* scratch, const LayerRows& to);
    // dx of tokens [begin, end), sums over them.
    void (*backward)(const ConvolutionChannels& in, core::Index begin, core::Index end, std::byte* scratch,
                     const ConvolutionGradients& grad);
    // Gradient of the initial state.
    void (*initial_state)(const ConvolutionChannels& in, std::byte* scratch, const ConvolutionGradients& grad);
};

// Rows of D channels.
struct NormRows {
    core::Index rows = 0, channels = 0;
    LayerRows x, z;    // [rows, D]
    LayerRows weight;  // [1, D]
    core::Activation gate = core::Activation::none;
    double epsilon = 0;
};

struct NormGradients {
    LayerRows dy;            // [rows, D]
    LayerRows dx, dz;        // null: not wanted
    double* sums = nullptr;  // [D] dweight is added to; null: not wanted
};

struct NormKernels {
    std::size_t (*scratch)(core::Index channels);  // bytes of a thread
    void (*forward)(const NormRows& in, std::byte* scratch, const LayerRows& y);
    void (*backward)(const NormRows& in, std::byte* scratch, const NormGradients& grad);
};

}  // namespace softdelta::kernels

// What one instruction set offers: plain functions and the sizes they work with. Nothing here depends on an ISA.
#pragma once

#include "core/tensor.h"
#include "engines/cpu/kernels/attention/head.h"
#include "engines/cpu/kernels/delta_rule/head.h"
#include "engines/cpu/kernels/layer/head.h"

namespace softdelta::kernels {

using core::Index;

// Multiply-adds between registers, as fast as the machine can: products are measured against them.
struct Ceiling {
    void (*run)(Index repeats) = nullptr;  // null: the level has no such instruction
    Index flops = 0;                       // of one repeat; a multiply-add is two
};

// A loop of one kind of instruction, to learn where the time of products by matrix tiles goes.
struct Loop {
    enum class Products {
        none,
        idle,
        registers,
        cached
    };  // operands that are cleared, in registers, read from a cache
    const char* name;
    void (*run)(Index repeats);
    Index operations;  // of one repeat
    Products products;
};

struct Table {
    const char* name{};     // as SOFTDELTA_ISA spells it
    Index vector_floats{};  // f32 lanes of a vector
    bool matrix_tiles{};    // multiply pairs of bf16
    bool asks_for_tiles{};  // the system must grant them to the process

    Ceiling multiply_add_f32{};
    Ceiling multiply_add_bf16{};  // products of bf16 pairs, summed in f32

    const Loop* loops{};                  // of a level with matrix tiles
    Index loop_count{}, product_flops{};  // flops: of an operation that is a product

    // Reads count floats, a multiple of 8 vectors, one after the other.
    void (*read_memory)(const float* data, Index count){};

    const AttentionForward* attention_forward{};
    const AttentionDecode* attention_decode{};
    const AttentionBackward* attention_backward{};
    const DeltaForward* delta_forward{};
    const DeltaSplit* delta_split{};
    const DeltaStep* delta_step{};
    const DeltaBackward* delta_backward{};
    const DeltaBackwardSplit* delta_backward_split{};
    const ConvolutionKernels* convolution{};
    const NormKernels* norm{};
};

}  // namespace softdelta::kernels

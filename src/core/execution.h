// How a call is computed, as opposed to what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace softdelta::core {

// A tensor that the stages engine fills, by the name that kernels give to it.
struct Stage {
    std::string_view name;
    Tensor tensor;
};

struct Execution {
    int threads = 0;                  // 0: OpenMP's default
    bool float_products = false;      // fast: bf16 operands are multiplied as f32, not by bf16 dot products
    bool bf16_products = false;       // fast: by bf16 dot products where they exist; neither: by the faster ones
    void* workspace = nullptr;        // fast: memory of the caller instead of allocation
    std::size_t workspace_size = 0;   // bytes
    Index chunk_size = 64;            // stages: rows of a chunk or tile, 16, 32 or 64
    std::uint64_t rounding_seed = 0;  // stages_f32: not 0 rounds operands and stored tensors stochastically
    bool float_gate_sums = false;     // stages_f32: gates are summed in f32
    bool float_scores = false;        // reference: attention's scores are rounded to f32
    std::vector<Stage> stages;        // stages: what to write besides the results
    void* stream = nullptr;           // cuda: the stream that the call works on
    void* kept = nullptr;             // cuda, delta rules: what the forward pass leaves for the backward pass
    std::size_t kept_size = 0;        // bytes
};

}  // namespace softdelta::core

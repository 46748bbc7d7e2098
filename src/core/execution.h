// How a call is computed, as opposed to what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/parallel_for.h"
#include "core/tensor.h"

namespace softdelta::core {

// A tensor that the stages engine fills, by the name that kernels give to it.
struct Stage {
    std::string_view name;
    Tensor tensor;
};

// How products of bf16 operands are computed: by dot products of bf16 where they are faster, never, or where they
// exist.
enum class Bf16Products { automatic, f32, bf16 };

// The largest calls that a workspace is for.
struct Limits {
    Index sequences, tokens, keys;
};

struct Execution {
    int threads = 0;                                       // 0: OpenMP's default
    ParallelFor parallel_for;                              // the caller's threads; default: OpenMP's
    Bf16Products bf16_products = Bf16Products::automatic;  // fast
    void* workspace = nullptr;                             // fast: memory of the caller instead of allocation
    std::size_t workspace_size = 0;                        // bytes
    Index chunk_size = 64;                                 // stages: rows of a chunk or tile, 1, 16, 32, 64, 96, 128
    std::uint64_t rounding_seed = 0;  // stages_f32: not 0 rounds operands and stored tensors stochastically
    bool shortcuts = false;           // stages_f32: errs as kernels do that save work (softdelta/judge.h)
    bool float_scores = false;        // reference: attention's scores are rounded to f32
    std::vector<Stage> stages;        // stages: what to write besides the results
    void* stream = nullptr;           // cuda: the stream that the call works on
    void* kept = nullptr;             // cuda, delta rules: what the forward pass leaves for the backward pass
    std::size_t kept_size = 0;        // bytes
};

}  // namespace softdelta::core

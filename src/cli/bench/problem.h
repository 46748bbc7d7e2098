// Calls worth timing: an operation with operands of its own, and the work that counts.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "io/file/case_file.h"
#include "softdelta/softdelta.hpp"

namespace softdelta::cli {

// What bounds a call: multiply-adds of a type, memory that is read, or memory that is read and written.
enum class Limit { f32, bf16, read, copy };

struct Problem {
    Limit limit = Limit::f32;
    double work = 0;                             // unmasked flops (a multiply-add is two), or bytes moved
    std::function<void(const Execution&)> call;  // owns its operands
};

// backward alone: o and lse are saved before; training: forward and backward.
enum class Pass { forward, backward, backward_bias, training };
enum class Extra { none, mask, bias, row_bias };  // [1,1,S,S], [1,H,S,S], [1,H,1,S]

struct AttentionShape {
    std::int64_t heads = 8, key_heads = 8, queries = 2048, keys = 2048, head_size = 64;
    DType dtype = DType::f32;
    Causal causal = Causal::none;
    std::int64_t window = -1;  // keys that a query sees
    Extra extra = Extra::none;
    Pass pass = Pass::forward;
    std::int64_t batch = 1, value_size = 0;    // 0: as head_size
    bool sink = false, shared_values = false;  // v: the first columns of k, as of absorbed MLA
};

struct DeltaShape {
    Rule rule = Rule::gated_delta_rule;
    std::int64_t tokens = 2048, heads = 16, value_heads = 16, head_size = 128;
    DType dtype = DType::f32;
    Pass pass = Pass::forward;
    std::int64_t layers = 0;                 // above 0: each takes one step, with a state of its own
    std::int64_t batch = 1, value_size = 0;  // 0: as head_size
    bool normalises = true;                  // q and k
};

struct ConvolutionShape {
    DType dtype = DType::f32;
    Pass pass = Pass::forward;
    std::int64_t batch = 1, tokens = 4096, channels = 8192, width = 4;
    std::int64_t layers = 0;  // above 0: each takes one step, with a state of its own
};

struct NormShape {
    DType dtype = DType::f32;
    Pass pass = Pass::forward;
    std::int64_t batch = 1, tokens = 4096, heads = 32, head_size = 128;
    Activation gate = Activation::silu;
};

Problem make_attention(const AttentionShape& shape);
Problem make_attention_decode(std::int64_t length, DType dtype, bool paged);
Problem make_delta(const DeltaShape& shape);
Problem make_convolution(const ConvolutionShape& shape);
Problem make_norm(const NormShape& shape);

// Named problems of `softdelta bench`; made when their turn comes.
struct Entry {
    std::string name;
    std::function<Problem()> make;
};
std::vector<Entry> attention_entries();
std::vector<Entry> delta_entries();
std::vector<Entry> layer_entries();

// Operands: uniform numbers in [low, high), the same for the same seed.
io::OwnedTensor random_tensor(DType dtype, std::vector<std::int64_t> shape, std::uint64_t seed, double low = -1,
                              double high = 1);

inline const char* type_name(DType dtype) {
    return dtype == DType::f32 ? "f32" : dtype == DType::bf16 ? "bf16" : "f16";
}

}  // namespace softdelta::cli

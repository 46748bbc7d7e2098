// Inputs for a call, made from shapes, options and a seed: the same file on every machine.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "io/file/case_file.h"

namespace softdelta::io {

struct MakeOptions {
    std::string op = "gated_delta_rule";
    std::uint64_t seed = 1;
    DType dtype = DType::bf16;  // of q, k, v, p, beta, bias, raw g and d_o; gates, states, sinks and dlse are f32
    bool gradients = true;      // add the gradients that a backward pass starts from

    double scale = std::numeric_limits<double>::quiet_NaN();  // NaN: the default of the operation

    std::int64_t batch = 1, heads = 2, key_size = 64, value_size = 64;  // B H K|D V|Dv
    std::int64_t queries = 256, keys = 256, key_heads = 2;              // attention: Lq Lk Hk
    std::int64_t tokens = 256, value_heads = 2;                         // delta rules: T HV
    std::vector<std::int64_t> lengths, key_lengths;                     // packed sequences, instead of batch and length
    std::int64_t block_rows = 0;                                        // other than 0: keys in blocks of so many rows

    std::string causal = "none";  // none, top_left, bottom_right
    std::int64_t window_left = -1, window_right = -1, top_w = -1;
    double softcap = 0;
    std::string empty_row = "minus_infinity";  // plus_infinity, zero
    std::string mask = "none";                 // none, random, padding, dead_rows
    std::string bias = "none";                 // none, full, row (keys only), head, key_head, padding
    double mask_value = -1e10;                 // of bias padding: what hides keys, as models add it; −∞: for good
    bool sink = false;
    std::string quantised = "none";           // k and v of fewer bits: q8_0, q4_0, i8 (a scale per row), f8 (per head)
    bool alibi = false, bias_slopes = false;  // slopes of each head: 2^(−8/H), 2^(−16/H), …

    std::string keys_like =
        "drawn";                // alike: of one head they resemble each other; few: 5 units, whole numbers beside them
    std::string gate = "mild";  // mild, steep, uniform, spread, halves, wipe, constant (g_gamma), none
    double gate_value = -1;     // of uniform; spread: evenly from it to 0 (halves: −ln 2 at times, 0 else)
    double most_beta = 1;       // other than 1: evenly from 0 to it
    bool l2norm = true, initial_state = true, state_v_first = false;
    std::string raw_gate = "none";  // none, softplus, lower_bound
    double lower_bound = -5;
    bool tiled_heads = false;  // head_order tiled
    std::int64_t steps = 1;
    bool beta_logits = false, allow_neg_eigval = false;
};

// Throw CaseError naming an option that is out of range.
CaseFile make_case(const MakeOptions& options);
// Of its tensors, before they are made.
double bytes_of_case(const MakeOptions& options);

}  // namespace softdelta::io

// Attention calls drawn at random: shapes, options, broadcasts, layouts and numbers, all from one seed. A failing test
// prints the seed; SOFTDELTA_SEED=<seed> draws that call first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "softdelta/softdelta.hpp"
#include "support/array.h"

namespace softdelta::test {

struct AttentionRanges {
    Index batch = 2, queries = 6, keys = 8, key_heads = 2, group = 3, channels = 5;  // largest sizes drawn
    Index shortest = 0;                                                              // queries, keys
    std::vector<DType> dtypes{DType::f64};  // most tensors of a call have the same
    bool pages = false;                     // draw caches in blocks, too
    bool repeats = false;                   // draw strides of zero, too, of any operand
    bool quantised = false;                 // draw keys and values of 8 or 4 bits, too
    bool units = false;     // channels and most lengths of keys are multiples of 8, what enters products is dense
    bool plain = false;     // neither mask nor bias, window, sinks, slopes
    bool extremes = false;  // draw finite numbers for −∞ in a bias, sinks of ±∞, scales of 0, 1e-30 and 1e8, too
};

struct RandomAttention {
    std::uint64_t seed = 0;
    Array q, k, v, mask, bias, sink, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table, alibi_slopes, bias_slopes;
    Array d_o, dlse;  // gradients of the results
    // Of quantised numbers: what a call is given. k and v then hold what they stand for, in f64.
    Array k_numbers, v_numbers, k_scale, v_scale;
    bool v_in_k = false;    // v is the first Dv channels of k
    bool far_bias = false;  // numbers in the bias that swallow scores, or digits of them
    Shape score_shape;      // [N, H, Lq, Lk], the longest of packed sequences
    AttentionInputs inputs;
    AttentionOptions options;
    std::vector<std::string> features;  // what the draw has, as "bias heads Hk"

    Shape o_shape() const;
    Shape lse_shape() const;
    std::string describe() const;
};

RandomAttention draw_attention(std::uint64_t seed, const AttentionRanges& ranges = {});

}  // namespace softdelta::test

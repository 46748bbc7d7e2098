// A drawn attention call for the fast engine: inputs, results and workspace each beside an unreadable page, results as
// dense tensors that the judge takes.
#pragma once

#include <string>
#include <vector>

#include "support/guarded_results.h"
#include "support/random_attention.h"

namespace softdelta::test {

using Results = DenseResults;

class FastAttention {
  public:
    explicit FastAttention(RandomAttention&& drawn);

    const RandomAttention& drawn() const { return drawn_; }
    const io::Call& call() const { return call_; }
    // The call whose truth is wanted: with a far bias, scores are what f32 keeps of them.
    const io::Call& judged_call() const { return judged_call_; }
    std::string describe() const { return drawn_.describe(); }

    // Every result that the call can have; a part of them, o or a gradient at least.
    Names forward_names() const;
    Names gradient_names() const;
    Names some(const Names& all) const;

    // Computes results in layouts drawn by the call's seed, in a workspace of exactly the bytes needed or in memory of
    // the engine's own. Throws when a byte was written that belongs to none.
    Results forward(const Names& names, const Execution& execution, Memory memory = Memory::own) const;
    // saved: o and lse of a forward pass, or nothing.
    Results backward(const Names& names, const Results& saved, const Execution& execution,
                     Memory memory = Memory::own) const;
    // One result of the reference for the judged call, in f64.
    io::OwnedTensor truth(const std::string& name) const;

  private:
    Guarded own(const Tensor& t) const { return Guarded::input(t, side_); }

    RandomAttention drawn_;
    Side side_;
    Guarded q_, k_, v_, mask_, bias_, sink_, cu_seqlens_q_, cu_seqlens_k_, cache_seqlens_, block_table_, alibi_slopes_,
        bias_slopes_, k_scale_, v_scale_, d_o_, dlse_;
    Array kept_bias_;
    io::Call call_, judged_call_;
};

// A call with every option of the contract, and junk in all that it hides. Seeds take turns in register tiles and their
// rests, several blocks of queries and keys, wide heads, few queries over many keys, and batches of both.
FastAttention draw_fast_attention(std::uint64_t seed);

// Calls of 16-bit tensors in whole units of 16 bytes, mostly up to 128 channels: those that kernels for them take.
FastAttention draw_unit_attention(std::uint64_t seed);
// The same with a bias, and with neither mask nor slopes nor soft cap.
FastAttention draw_biased_attention(std::uint64_t seed);
// Queries of bf16 beside keys or values of 8 or 4 bits, or both.
FastAttention draw_quantised_attention(std::uint64_t seed);
// Packed: many sequences of a few rows, few of hundreds, and some between.
FastAttention draw_packed_attention(std::uint64_t seed);
// f32 of sizes far from 1 and of rows that differ in size.
FastAttention draw_f32_attention(std::uint64_t seed);
// Biases that mask by huge numbers, some rows whole.
FastAttention draw_padded_attention(std::uint64_t seed);

// The same with few queries over many keys, up to 576 channels.
FastAttention draw_step_attention(std::uint64_t seed);
// Up to 576 channels, and any number of queries: at times more than a kernel of few queries takes in a turn.
FastAttention draw_wide_attention(std::uint64_t seed);
// One query and key head over so many keys that they are cut into as many ranges as there may be.
FastAttention draw_long_step_attention(std::uint64_t seed);

// What is wrong with the results of a forward pass, or with gradients; nothing: an empty text.
std::string judge_results(const FastAttention& call, const Results& results);
std::string judge_gradients(const FastAttention& call, Results gradients);

// Elements row-major.
std::vector<double> values(const io::OwnedTensor& t);
void set(const io::OwnedTensor& t, std::size_t element, double value);

}  // namespace softdelta::test

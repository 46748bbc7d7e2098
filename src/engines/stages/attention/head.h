// One query head of one sequence, tile by tile: its operands in T, its scores, and its online softmax.
#pragma once

#include <cmath>
#include <numbers>
#include <vector>

#include "core/attention.h"
#include "core/execution.h"
#include "engines/stages/attention/mask.h"
#include "engines/stages/attention/tiles.h"
#include "engines/stages/rounding.h"

namespace softdelta::stages::attention {

// The scratch of one thread and what it holds now. A call goes enter → enter_queries → load_tile → scores.
template <class T>
class Head {
  public:
    Head(const core::AttentionInputs& in, const core::AttentionOptions& options, const core::Execution& execution);

    void enter(Index sequence, Index h);
    void enter_queries(Index begin);  // the tile of queries that starts at `begin`
    bool load_tile(Index begin);      // the tile of keys that starts at `begin`; false: nothing of it is visible

    // s = softcap(scale · q kᵀ) + bias of the current tile, −∞ where a key is not allowed. The slope ds/d(scale · q
    // kᵀ), of the softcap, is kept when there is a softcap.
    void compute_scores();

    // The softmax of the current queries over all their keys: o [rows, Dv] and lse [rows], as stored in these types.
    // A row without a key or a sink, or whose sink is +∞, has o = 0, lse = +∞: then e^(s − lse) is 0 as it should.
    void attend(Rounding& rounding, core::DType o_type, core::DType lse_type, Tile<T> o, Tile<T> lse);

    // Probabilities of the current queries are e^(s − subtrahend − log_sum), as attend or use_lse left them: 0 and lse,
    // or, where lse is so large that it swallows the log of the sum, the largest score and that log.
    Tile<T> subtrahend() { return tile_in(largest_, query_count_, 1); }
    Tile<T> log_sum() { return tile_in(sum_, query_count_, 1); }
    bool keeps_probabilities(T lse) const { return base_2_ || std::isinf(lse) || std::abs(lse) <= T(1024); }
    void use_lse(Index i, T lse);
    // With shortcuts, scores and these numbers are in base 2, as most kernels for GPUs have them.
    T per_score() const { return base_2_ ? std::numbers::log2e_v<T> : T(1); }
    T per_exponent() const { return base_2_ ? std::numbers::ln2_v<T> : T(1); }

    // Of the current queries, rows of q, o and their gradients [B, Lq, H, ·] …
    void load_rows(const Tensor& t, Tile<T> rows);
    void store_rows(const Tensor& t, const Tile<T>& rows) const;
    // … and numbers [B, H, Lq]; lse of a row without a key as the options say.
    void load_numbers(const Tensor& t, Tile<T> numbers) const;
    void store_numbers(const Tensor& t, const Tile<T>& numbers) const;
    void store_lse(const Tensor& t, const Tile<T>& lse);

    const core::AttentionSequence& sequence() const { return sequence_; }
    Index index() const { return h_; }
    Index query_begin() const { return query_begin_; }
    Index query_count() const { return query_count_; }
    Index key_begin() const { return key_begin_; }
    Index key_count() const { return key_count_; }
    Index chunk_size() const { return chunk_; }

    Tile<T> q() { return tile_in(q_, query_count_, in_.q.shape[3]); }
    Tile<T> k() { return key_rows(k_, in_.k.shape[3]); }
    Tile<T> v() { return key_rows(v_, in_.v.shape[3]); }
    Tile<T> s() { return tile_in(s_, query_count_, key_count_); }
    Tile<T> slope() { return tile_in(slope_, query_count_, key_count_); }

  private:
    // All keys are held when several tiles of queries use them, one tile of keys otherwise.
    bool holds_all_keys() const { return sequence_.q_count > chunk_; }
    Tile<T> key_rows(Buffer<T>& buffer, Index size) {
        return {buffer.data() + (holds_all_keys() ? key_begin_ * size : 0), key_count_, size};
    }
    Index query(Index i) const { return sequence_.q_begin + query_begin_ + i; }  // its place in q
    void load_keys();
    void disturb_scores();
    void absorb_tile(Rounding& rounding, Tile<T> o, Tile<T> largest, Tile<T> sum);

    const core::AttentionInputs& in_;
    const core::AttentionOptions& options_;
    Index chunk_;
    std::uint64_t seed_;  // of disturbed scores; 0: none
    bool base_2_;
    core::AttentionSequence sequence_{};
    Index h_ = 0;
    Index query_begin_ = 0, query_count_ = 0, key_begin_ = 0, key_count_ = 0;
    Coverage coverage_ = Coverage::empty;
    AttentionMask<T> mask_;
    std::vector<bool> seen_keys_;  // filled when a key is not finite
    Buffer<T> q_, k_, v_, s_, slope_, addend_, largest_, sum_, shown_lse_;
};

}  // namespace softdelta::stages::attention

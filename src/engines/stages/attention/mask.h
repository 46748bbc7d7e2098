// Which keys the queries of a tile see. Causal, window, lengths, mask, bias with its slopes and the dynamic mask become
// one matrix of addends: the bias where a query sees a key, −∞ where it does not. The softmax knows none of their
// names.
#pragma once

#include <vector>

#include "core/attention.h"

namespace softdelta::stages::attention {

using core::Index;
using core::Tensor;

enum class Coverage {
    empty,   // no query of the tile sees a key of it
    full,    // every query sees every key, and there is no bias
    partial  // add the addends
};

// Of one sequence and query head. T: type of the addends.
template <class T>
class AttentionMask {
  public:
    AttentionMask() = default;
    AttentionMask(const core::AttentionInputs& in, const core::AttentionOptions& options,
                  const core::AttentionSequence& sequence, Index head);

    // The queries of the tiles that follow …
    void set_queries(Index begin, Index count);
    // … and the keys of one; partial: addend [queries, count] is filled.
    Coverage load_tile(Index begin, Index count, T* addend);

    // Whether query i sees a key; whether any query sees key j. Each reads rows of the mask from end to end.
    bool sees_any_key(Index i);
    std::vector<bool> seen_keys();

  private:
    // The top_w largest addends of a row: those above `value`, and those equal to it up to key `last`.
    struct TopK {
        T value;
        Index last;
        bool keeps(T addend, Index j) const { return addend > value || (addend == value && j <= last); }
    };
    struct KeyRange {
        Index begin, end;
    };

    KeyRange key_range(Index i) const;  // what position alone allows query i: ascending in i
    void load_addends(Index i, Index begin, Index count, T* addend) const;
    void apply_slopes(Index i, Index begin, Index count, T* addend) const;
    void hide_below_top_k(const TopK& top_k, Index begin, Index count, T* addend) const;
    TopK find_top_k(Index i);
    const std::vector<T>& load_whole_row(Index i);

    Tensor mask_, bias_;
    Index batch_ = 0, mask_head_ = 0, bias_head_ = 0;
    Index queries_ = 0, keys_ = 0;  // of the sequence
    Index low_ = 0, high_ = 0;      // query i sees keys i + low … i + high
    Index top_w_ = -1;              // −1: all
    bool has_slopes_ = false;
    T bias_slope_ = 1, alibi_slope_ = 0;  // of the head
    Index begin_ = 0, count_ = 0;         // the queries of the tiles
    std::vector<TopK> top_k_;             // [queries of the tiles]
    std::vector<T> row_, candidates_;     // [keys]
};

}  // namespace softdelta::stages::attention

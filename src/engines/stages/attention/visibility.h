// What a tile of scores may see. Causal, window, lengths, mask, bias and the dynamic mask become one matrix of addends:
// the bias where a key is allowed, −∞ where it is not. The softmax knows none of their names.
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
class Visibility {
  public:
    Visibility() = default;
    Visibility(const core::AttentionInputs& in, const core::AttentionOptions& options,
               const core::AttentionSequence& sequence, Index head);

    // Queries [begin, begin + count) look from now on …
    void look_from(Index begin, Index count);
    // … at keys [begin, begin + count); partial: addend [queries, count] is filled.
    Coverage look_at(Index begin, Index count, T* addend);

    // Whether query i sees a key; whether any query sees key j. Each reads rows of the mask from end to end.
    bool sees_any_key(Index i);
    std::vector<bool> seen_keys();

  private:
    // What the dynamic mask keeps of a row: addends above `value`, and those equal to it up to key `last`.
    struct Cut {
        T value;
        Index last;
        bool keeps(T addend, Index j) const { return addend > value || (addend == value && j <= last); }
    };
    struct KeyRange {
        Index begin, end;
    };

    KeyRange range(Index i) const;  // what position alone allows query i: ascending in i
    void load_addends(Index i, Index begin, Index count, T* addend) const;
    void hide_cut_keys(const Cut& cut, Index begin, Index count, T* addend) const;
    Cut find_cut(Index i);
    const std::vector<T>& load_whole_row(Index i);

    Tensor mask_, bias_;
    Index batch_ = 0, mask_head_ = 0, bias_head_ = 0;
    Index queries_ = 0, keys_ = 0;     // of the sequence
    Index low_ = 0, high_ = 0;         // query i sees keys i + low … i + high
    Index top_w_ = -1;                 // −1: all
    Index begin_ = 0, count_ = 0;      // the queries that look
    std::vector<Cut> cuts_;            // [queries that look]
    std::vector<T> row_, candidates_;  // [keys]
};

}  // namespace softdelta::stages::attention

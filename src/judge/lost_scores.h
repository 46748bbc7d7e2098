// Rows of attention whose scores f32 cannot keep: beside a mask of -1e10 all scores of a row become one number. Which
// probabilities come out depends on how a kernel rounds, not on whether it is right (docs/math.md, "Limits of error").
// Calls have no quantised numbers here: io::ExpandedCall makes them so.
#pragma once

#include <string>
#include <vector>

#include "judge/blocks.h"

namespace softdelta::judge {

struct LostScores {
    std::vector<std::int64_t> shape;  // of lse, [B, H, Lq]
    std::vector<char> rows;           // of lse: 1 where scores are lost; empty: nowhere
    std::int64_t count = 0;
    double largest = 0;  // |lse| of them

    bool any() const { return count > 0; }
    // The marks in the order of a result's rows; empty for results that are sums over queries.
    std::vector<char> marks(const std::string& result) const;
};

// No score is larger.
double largest_score(const io::Call& call);

double scale_of(const io::Call& call);
// Of the rows of [B, T, H, W].
double largest_norm(const Tensor& t);

LostScores find_lost_scores(const io::Call& call, int threads);

// What holds for such rows however scores were rounded: o lies between the values, dq within a bound.
class RowBounds {
  public:
    explicit RowBounds(const io::Call& call);
    // The first element of the marked rows that is outside; −1: none. o and dq; nothing is known of other results.
    std::int64_t first_outside(const std::string& result, const Tensor& tensor, const std::vector<char>& marks) const;

  private:
    std::vector<double> low_, high_, dq_;  // [Hk, Dv], [Hk, Dv], [Hk]
    std::int64_t key_heads_ = 1, group_ = 1;
};

}  // namespace softdelta::judge

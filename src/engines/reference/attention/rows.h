// The query rows that read one key head of one sequence: which keys each may see, their scores, their softmax.
#pragma once

#include <vector>

#include "core/attention.h"
#include "engines/reference/attention/product.h"

namespace softdelta::reference {

struct Range {
    Index begin, end;
    Index count() const { return end - begin; }
};

// Row r is query r / group of head key_head·group + r % group: the heads of a group are neighbours.
struct KeyHead {
    const core::AttentionInputs* in;
    const core::AttentionOptions* options;
    core::AttentionSequence sequence;
    Index key_head;
    bool float_scores;

    Index group() const { return in->q.shape[2] / in->k.shape[2]; }
    Index rows() const { return sequence.q_count * group(); }
    Index query(Index r) const { return r / group(); }
    Index head(Index r) const { return key_head * group() + r % group(); }

    // Where row r begins in a tensor like q [B, Lq, H, D], like lse [B, H, Lq], like a mask [B, H, Lq, Lk].
    Index query_offset(const core::Tensor& t, Index r) const;
    Index lse_offset(const core::Tensor& t, Index r) const;
    Index mask_offset(const core::Tensor& t, Index r) const;

    // The keys that causal and window leave to row r, or to some of the rows: neither end ever falls as r grows.
    Range keys(Index r) const;
    Range keys(Range rows) const;
};

// All (sequence, key head) of a call, sequences outermost.
std::vector<KeyHead> key_heads(const core::AttentionInputs& in, const core::AttentionOptions& options,
                               bool float_scores);

// Memory of one thread; keys is the most that its rows may see.
struct RowScratch {
    RowScratch(const core::AttentionInputs& in, Index keys);
    std::vector<double> tile;      // [tile_keys, channels], or transposed
    std::vector<double> channels;  // [max(D, Dv)]
    std::vector<double> bias;      // [keys]
    std::vector<Index> order;      // [keys]
};

// Rows of a tensor like q, times a factor, into out [rows, channels].
void load_queries(const KeyHead& head, const core::Tensor& t, Range rows, double factor, Matrix out);

// out [rows, keys] = x [rows, channels] · tᵀ, t one of k and v.
void dot_keys(const KeyHead& head, const core::Tensor& t, Range keys, Index rows, Matrix x, Matrix out,
              RowScratch& scratch);

// out [rows, channels] = weight [rows, keys] · t. A key of weight 0 is not looked at.
void sum_keys(const KeyHead& head, const core::Tensor& t, Range keys, Index rows, Matrix weight, Matrix out,
              RowScratch& scratch);

struct Softmax {
    double lse;   // sink included; of a row without keys and sink what the options say
    double sink;  // probability of the sink; 0 without one, or where it is −∞
};

// In place, row r: x = scale·q·k over `keys` becomes probabilities, 0 where row r may not see. With a softcap, slope
// (when not null) gets its derivative at x.
Softmax softmax_row(const KeyHead& head, Index r, Range keys, double* x, double* slope, RowScratch& scratch);

}  // namespace softdelta::reference

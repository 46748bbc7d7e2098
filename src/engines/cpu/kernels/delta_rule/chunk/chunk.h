// A chunk of tokens as the scan sees it: operands of products, and the states they meet (docs/math.md, "Fold" and
// "Forward"). Only the fold knows a rule.
#pragma once

#include "engines/cpu/kernels/delta_rule/head.h"
#include "engines/cpu/kernels/gemm/pack.h"
#include "engines/cpu/kernels/scratch.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr Index largest_chunk = 64;

// Sizes of what a chunk of a head needs.
template <class P>
struct ChunkSizes {
    Index keys, values, rows;  // K, V, most rows of a chunk

    // Floats of a row of q, k, p or channel gates. An odd number of vectors, so that a column of them meets all of the
    // cache's sets.
    Index key_row() const {
        const Index vectors = round_up(keys, W * P::depth) / (W * P::depth);
        return (vectors + (vectors + 1) % 2) * W * P::depth;
    }
    // Floats of a row of pairs of tokens.
    Index pair_row() const { return round_up(rows, W * P::depth) + W; }
    // Elements of [keys | pairs] in an operand.
    Index operand_row() const { return round_up(depth_of<P>(keys) + pair_row() / P::depth, W); }
    Index value_columns() const { return round_up(values, W); }
};

// Rows of the key head, and what its value heads share.
template <class P>
struct KeyChunk {
    Index row, pair_row;  // floats between rows
    float *q, *k, *p;     // [n, K]; p is k unless the rule has its own
    float *qk, *pk;       // [n, n] q kᵀ and p kᵀ for i ≥ j; not with channel gates

    KeyChunk(const ChunkSizes<P>& sizes, bool own_p, Scratch& scratch)
        : row(sizes.key_row()),
          pair_row(sizes.pair_row()),
          q(scratch.take<float>(sizes.rows * row)),
          k(scratch.take<float>(sizes.rows * row)),
          p(own_p ? scratch.take<float>(sizes.rows * row) : k),
          qk(scratch.take<float>(sizes.rows * pair_row)),
          pk(scratch.take<float>(sizes.rows * pair_row)) {}

    // Rows from i on.
    KeyChunk from(Index i) const {
        KeyChunk part = *this;
        part.q += i * row, part.k += i * row, part.p += i * row;
        part.qk += i * pair_row + i, part.pk += i * pair_row + i;
        return part;
    }
};

// A value head's chunk of n rows, folded. What erases is stored negative: products add.
template <class P>
struct Folded {
    Index n = 0;
    Index key_depth, row;   // elements of keys in an operand's row, between rows
    Element<P>* read;       // [n, K | n] read_query, score
    Element<P>* erase;      // [n, K | n] −erase_key, −erase_score
    Element<P>* write_key;  // [depth of n, K], write_row elements between rows
    Index write_row;
    float* state_decay;  // [K]
    float* erase_score;  // [n, n] −erase_score in f32
    Index erase_score_row;

    Folded(const ChunkSizes<P>& sizes, Scratch& scratch)
        : key_depth(depth_of<P>(sizes.keys)),
          row(sizes.operand_row()),
          read(scratch.take<Element<P>>(sizes.rows * row)),
          erase(scratch.take<Element<P>>(sizes.rows * row)),
          write_key(scratch.take<Element<P>>(depth_of<P>(sizes.rows) * sizes.key_row())),
          write_row(sizes.key_row()),
          state_decay(scratch.take<float>(sizes.key_row())) {
        if constexpr (P::depth == 1) {
            erase_score = erase + key_depth;
            erase_score_row = row;
        } else {
            erase_score_row = sizes.pair_row();
            erase_score = scratch.take<float>(sizes.rows * erase_score_row);
        }
    }
};

// The state of a value head, in panels of value columns: [K, V] in f32, under it the rows U of a chunk, so that both
// are one right operand of depth K + n. With pairs the operand is a rounded copy.
template <class P>
class StatePanels {
  public:
    StatePanels(const ChunkSizes<P>& sizes, Index heads, Scratch& scratch)
        : keys_(sizes.keys), rows_(sizes.rows), columns_(sizes.value_columns()) {
        operand_ = scratch.take<Element<P>>(heads * (depth_of<P>(keys_) + depth_of<P>(rows_)) * columns_);
        if constexpr (P::depth == 2) state_ = scratch.take<float>(heads * (keys_ + rows_) * columns_);
    }

    // Of a later head.
    StatePanels head(Index hv) const {
        StatePanels other = *this;
        other.operand_ += hv * (depth_of<P>(keys_) + depth_of<P>(rows_)) * columns_;
        if constexpr (P::depth == 2) other.state_ += hv * (keys_ + rows_) * columns_;
        return other;
    }

    Index columns() const { return columns_; }

    struct Panel {
        Index width;
        float* state;         // [K, width]
        float* rows;          // [n, width] β∘v; of floats replaced by U
        Element<P>* operand;  // [depth of K | depth of n, width] the state and U
        Element<P>* operand_rows;
    };

    // The panel that begins at column c.
    Panel panel(Index c) const {
        Panel x{columns_ - c < NR ? W : NR, nullptr, nullptr, nullptr, nullptr};
        x.operand = operand_ + c * (depth_of<P>(keys_) + depth_of<P>(rows_));
        x.operand_rows = x.operand + depth_of<P>(keys_) * x.width;
        if constexpr (P::depth == 1) {
            x.state = x.operand;
        } else {
            x.state = state_ + c * (keys_ + rows_);
        }
        x.rows = x.state + keys_ * x.width;
        return x;
    }

  private:
    Index keys_, rows_, columns_;
    Element<P>* operand_;
    float* state_ = nullptr;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

// The operands of a chunk: n rows of a key head, and of a value head that reads it. Names are those of docs/math.md, in
// brackets those of flash-linear-attention. A and B are a product's left and right operand (kernels/gemm); with pairs
// of bf16 an element is two neighbours along the depth.
//
//     operand                        shape       packed as                     made by            read by
//     q, k, p                        [n, K]      rows of floats                keys.h             fold, unfold
//     q kᵀ, p kᵀ                     [n, n]      rows of floats, i ≥ j         keys.h             fold, unfold
//     g, β                           [n, K|1]    rows of floats                gate.h             fold, unfold
//     G, E                           [n]         two parts in f32              fold.h             fold, unfold
//     read_query | score (Aqk)       [n, K | n]  A, one row                    fold.h,            scan
//     −erase_key | −erase_score (L)  [n, K | n]  A, one row                    channel_gate.h     solve
//     write_key (kg)                 [n, K]      A of write_keyᵀ: depth is n                      scan
//     state_decay                    [K]         floats                                           scan
//     state S (h)                    [K, V]      B, in panels of columns       states.h, scan     solve, scan
//     U (v_new)                      [n, V]      B, under the state            solve              scan
// and in the backward pass (backward/operands.h):
//     the folded operands            transposed  A                             Reversed           backward/scan.h
//     S, dS'                         [V, K]      B, in panels of keys          states.h           backward/scan.h
//     dO, dR                         [n, V]      A, and B in panels            results.h, scan.h  backward/scan.h
//     U                              [n, V]      A; Uᵀ as B                    the forward sweep  backward/scan.h
//     dscore, derase_score           [n, n]      rows of floats; A both ways   backward/scan.h    unfold
#pragma once

#include "engines/cpu/kernels/delta_rule/head.h"
#include "engines/cpu/kernels/gemm/pack.h"
#include "engines/cpu/kernels/scratch.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr Index largest_chunk = longest_chunk;

// Sizes of what a chunk of a head needs.
template <class P>
struct ChunkSizes {
    Index keys, values, rows;  // K, V, most rows of a chunk

    // Floats of a row of q, k, p or channel gates. An odd number of vectors, so that consecutive rows map to
    // different cache sets.
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
    Index row, pair_row;                    // floats between rows
    float *q, *k, *p;                       // [n, K]; p is k unless the rule has its own
    float *qk, *pk;                         // [n, n] q kᵀ and p kᵀ for i ≥ j; not with channel gates
    float *q_factor, *k_factor, *p_factor;  // [n] by which l2norm multiplied the rows; else not set

    KeyChunk(const ChunkSizes<P>& sizes, const core::Rule& rule, Scratch& scratch)
        : row(sizes.key_row()),
          pair_row(sizes.pair_row()),
          q(scratch.take<float>(sizes.rows * row)),
          k(scratch.take<float>(sizes.rows * row)),
          p(rule.own_p ? scratch.take<float>(sizes.rows * row) : k),
          qk(scratch.take<float>(sizes.rows * pair_row)),
          pk(scratch.take<float>(sizes.rows * pair_row)),
          q_factor(scratch.take<float>(sizes.rows)),
          k_factor(scratch.take<float>(sizes.rows)),
          p_factor(rule.own_p ? scratch.take<float>(sizes.rows) : k_factor) {}

    bool has_p() const { return p != k; }

    // Rows from i on.
    KeyChunk from(Index i) const {
        KeyChunk part = *this;
        part.q += i * row, part.k += i * row, part.p += i * row;
        part.qk += i * pair_row + i, part.pk += i * pair_row + i;
        part.q_factor += i, part.k_factor += i, part.p_factor += i;
        return part;
    }
};

// Gates and β of a value head's chunk, their sums, and the factors of its rows.
struct GateChunk {
    float *g, *g_rest;  // [n], or [n, K] in rows of row; g_rest only of raw gates: their sum is meant
    Index row;
    float* beta;                                    // [n]
    float *G, *G_rest;                              // [n] in two parts; only of gates that the channels share
    float *E, *E_rest;                              // [n] the same of E
    bool exclusive;                                 // E is the sum without the row's own gate, else G
    float *read_decay, *erase_decay, *write_decay;  // [n] scale·e^G, −β e^E, e^(G_last − G)
    float* bias;                                    // [K]

    template <class P>
    GateChunk(const ChunkSizes<P>& sizes, bool channel, bool before_decay, Scratch& scratch, bool raw = false)
        : row(sizes.key_row()), exclusive(before_decay) {
        const Index size = channel ? sizes.rows * row : sizes.pair_row();
        g = scratch.take<float>(size);
        g_rest = raw ? scratch.take<float>(size) : nullptr;
        for (float** x : {&beta, &G, &G_rest, &read_decay, &erase_decay, &write_decay})
            *x = scratch.take<float>(sizes.pair_row());
        E = G, E_rest = G_rest;
        if (before_decay) E = scratch.take<float>(sizes.pair_row()), E_rest = scratch.take<float>(sizes.pair_row());
        bias = scratch.take<float>(row);
    }

    // Rows from i on.
    GateChunk from(Index i, bool channel) const {
        GateChunk part = *this;
        part.g += channel ? i * row : i;
        if (g_rest != nullptr) part.g_rest += channel ? i * row : i;
        part.beta += i;
        return part;
    }
};

// A value head's chunk of n rows, folded. What erases is stored negative: products add.
template <class P>
struct Folded {
    Index n = 0;
    Index key_depth, row;   // elements of keys in an operand's row, between rows
    Index read_size;        // elements from a row of `read` to the same row of `erase`
    Element<P>* read;       // [n, K | n] read_query, score
    Element<P>* erase;      // [n, K | n] −erase_key, −erase_score
    Element<P>* write_key;  // [depth of n, K], write_row elements between rows
    Index write_row;
    float* state_decay;  // [K]
    // Of gates of a channel: the most that they sum up to where rows are factored at the chunk's start, else ∞. Where
    // they are kept, as for the backward pass, both factors: e^G and e^−G [n, K] in panels of channels.
    float fall = __builtin_inff();
    float *left = nullptr, *right = nullptr;
    float* erase_score;  // [n, n] −erase_score in f32
    Index erase_score_row;
    // Rows that matrix tiles read behind those of `erase`.
    static constexpr Index padding = P::Tiles::exist ? row_tile<P> : 0;
    Element<P>* write_rows = nullptr;  // write_keyᵀ [K, depth of n], as matrix tiles read it
    static constexpr Index write_rows_row = largest_chunk / P::depth;

    Folded(const ChunkSizes<P>& sizes, Scratch& scratch) : Folded(sizes, false, scratch) {}

    Folded(const ChunkSizes<P>& sizes, bool keeps_factors, Scratch& scratch)
        : key_depth(depth_of<P>(sizes.keys)),
          row(sizes.operand_row()),
          read_size(round_up((sizes.rows + padding) * row, cache_line / static_cast<Index>(sizeof(Element<P>)))),
          read(scratch.take<Element<P>>(2 * read_size)),
          erase(read + read_size),
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
        if (keeps_factors)
            for (float** x : {&left, &right}) *x = scratch.take<float>(sizes.rows * round_up(sizes.keys, W));
        if constexpr (P::Tiles::exist)
            write_rows = scratch.take<Element<P>>(round_up(sizes.keys, row_tile<P>) * write_rows_row);
    }

    // By matrix tiles A lies row by row: write_keyᵀ is transposed once for all value columns.
    void prepare_write(Index K) const {
        if constexpr (P::Tiles::exist)
            for (Index m = 0; m < K; m += row_tile<P>)
                for (Index k = 0; k < depth_of<P>(n); k += tile_size)
                    copy_a(write_key + m + k * write_row, 1, write_row, min(K - m, row_tile<P>),
                           min(depth_of<P>(n) - k, tile_size), write_rows + m * write_rows_row + k, write_rows_row);
    }
    // write_keyᵀ [K, n]
    MatrixA<P> write() const {
        if constexpr (P::Tiles::exist) return {write_rows, write_rows_row, 1};
        return {write_key, 1, write_row};
    }
};

// The state of a value head, in panels of value columns: [K, V] in f32, under it the rows U of a chunk, so that both
// are one B of depth K + n. With pairs B is a rounded copy.
template <class P>
class StatePanels {
  public:
    StatePanels(const ChunkSizes<P>& sizes, Index heads, Scratch& scratch)
        : keys_(sizes.keys),
          rows_(P::Tiles::exist ? round_up(sizes.rows, 2 * tile_size) : sizes.rows),  // tiles read rows two by two
          columns_(sizes.value_columns()) {
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

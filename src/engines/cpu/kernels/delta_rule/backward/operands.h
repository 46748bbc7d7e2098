// The operands of a chunk in the backward pass (docs/math.md, "Backward"): the folded chunk transposed, and the
// gradients of what the scan sees. chunk/operands.h lists them with those of the forward pass.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/pack.h"
#include "engines/cpu/kernels/delta_rule/chunk/states.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// A state [K, V] as floats in panels, alone.
using StateOnly = StatePanels<FloatProduct>;

// The operands of a folded chunk as the backward scan reads them.
template <class P>
struct ReversedOperands {
    Index n;
    MatrixA<P> write_key;          // [n, K], depth along keys
    MatrixA<P> read_query;         // [K, n], depth along tokens
    MatrixA<P> erase_key;          // [K, n] negative
    MatrixA<P> score;              // [n, n] transposed: row j, depth along i
    MatrixA<P> erase_score;        // [n, n] negative and transposed
    const float* erase_score_f32;  // [n, n] negative, not transposed
    Index erase_score_row;
    const float* state_decay;
    bool joined;  // depth goes on from the last row of read_query to the first of erase_key: one operand of depth 2·n
};

// Transposes the operands of a folded chunk: of floats by their strides; pairs are copied, two tokens to a word instead
// of two channels.
template <class P>
class Reversed {
  public:
    Reversed(const ChunkSizes<P>& sizes, Scratch& scratch) : rows_(sizes.rows), row_(sizes.operand_row() * P::depth) {
        if constexpr (P::depth == 2) {
            read_ = scratch.take<Element<P>>(2 * depth_of<P>(rows_) * row_);
            erase_ = read_ + depth_of<P>(rows_) * row_;
            write_key_ = scratch.take<Element<P>>(sizes.rows * sizes.key_row() / P::depth);
        }
    }

    ReversedOperands<P> of(const Folded<P>& f) const {
        copy(f);
        return operands(f);
    }

    // What of() copies, and what it then gives.
    void copy(const Folded<P>& f) const {
        if constexpr (P::depth == 2) {
            pair_rows(f.n, f.row, f.read, read_);
            pair_rows(f.n, f.row, f.erase, erase_);
            for (Index i = 0; i < f.n; ++i)
                for (Index m = 0; m < f.write_row; m += W) {
                    const U words = load(f.write_key + i / 2 * f.write_row + m);
                    store_u16(reinterpret_cast<std::uint16_t*>(write_key_ + i * f.write_row / 2) + m,
                              i % 2 == 0 ? words : words >> 16);
                }
        }
    }
    ReversedOperands<P> operands(const Folded<P>& f) const {
        const Index key_depth = f.key_depth * P::depth;
        if constexpr (P::depth == 1) {
            return {f.n,
                    {f.write_key, f.write_row, 1},
                    {f.read, 1, f.row},
                    {f.erase, 1, f.row},
                    {f.read + key_depth, 1, f.row},
                    {f.erase + key_depth, 1, f.row},
                    f.erase_score,
                    f.erase_score_row,
                    f.state_decay,
                    f.n * f.row == f.read_size};
        } else {
            return {f.n,
                    {write_key_, f.write_row / 2, 1},
                    {read_, 1, row_},
                    {erase_, 1, row_},
                    {read_ + key_depth, 1, row_},
                    {erase_ + key_depth, 1, row_},
                    f.erase_score,
                    f.erase_score_row,
                    f.state_decay,
                    depth_of<P>(f.n) == depth_of<P>(rows_)};
        }
    }

  private:
    // Rows of n, two bf16 of a row in each word, to words of two rows.
    void pair_rows(Index n, Index row, const Element<P>* rows, Element<P>* out) const {
        const auto* stored = reinterpret_cast<const std::uint16_t*>(rows);
        for (Index i = 0; i < n; i += 2)
            for (Index m = 0; m < 2 * row; m += W) {
                const U second = i + 1 < n ? load_u16(stored + (i + 1) * 2 * row + m) : U(0U);
                store(out + i / 2 * row_ + m, load_u16(stored + i * 2 * row + m) | (second << 16));
            }
    }

    Index rows_, row_;  // most rows; words between pairs of rows
    Element<P>*read_ = nullptr, *erase_ = nullptr, *write_key_ = nullptr;
};

// Memory of the backward pass of a chunk.
template <class P>
struct ChunkGradients {
    Index key_row, pair_row, value_row, columns;  // floats, floats, elements between rows; value columns
    float *dq, *dk, *de;           // [n, K] of read_query, write_key, −erase_key; then of q, k, and p without β
    float *dscore, *derase_score;  // [n, n] of score, −erase_score
    float* dstate_decay;           // [K]
    Element<P>*d_o, *dR, *U;       // [n, V] as A
    float* dstate;                 // [V, K] the transposed gradient of the leaving state …
    Element<P>*dstate_right, *state_right;  // … and it and the entering state as B
    Element<P>* U_right;                    // [V, n] transposed panels
    Element<P>* buffer;                     // for packing
    float* v;                               // [V]
    float* dbeta;                           // [n]
    float* dg;                              // [n], or [n, K] in rows of key_row

    ChunkGradients(const ChunkSizes<P>& sizes, bool channel, Scratch& scratch)
        : key_row(sizes.key_row()),
          pair_row(sizes.pair_row()),
          value_row(a_row_length<P>(sizes.values)),
          columns(sizes.value_columns()) {
        const Index n = sizes.rows, keys = round_up(sizes.keys, W);
        for (float** x : {&dq, &dk, &de}) *x = scratch.take<float>(n * key_row);
        for (float** x : {&dscore, &derase_score}) *x = scratch.take<float>(n * pair_row);
        dstate_decay = scratch.take<float>(key_row);
        for (Element<P>** x : {&d_o, &dR, &U}) *x = scratch.take<Element<P>>(n * value_row);
        dstate = scratch.take<float>(transposed_state(sizes));
        rows_ = scratch.take<float>(2 * n * columns);
        if constexpr (P::depth == 2) {
            dstate_right = scratch.take<Element<P>>(depth_of<P>(sizes.values) * keys);
            state_right = scratch.take<Element<P>>(depth_of<P>(sizes.values) * keys);
            right_rows_ = scratch.take<Element<P>>(2 * depth_of<P>(n) * columns);
            right_state_ = scratch.take<Element<P>>(depth_of<P>(sizes.keys) * NR);
        } else {
            dstate_right = dstate, state_right = nullptr;
        }
        U_right = scratch.take<Element<P>>(depth_of<P>(sizes.values) * round_up(n, NR));
        buffer = scratch.take<Element<P>>(W * value_row);
        v = scratch.take<float>(columns);
        dbeta = scratch.take<float>(pair_row);
        dg = scratch.take<float>(channel ? n * key_row : pair_row);
    }

    struct Panel {
        Index width;
        float *d_o, *dR;                  // [n, width]
        Element<P>*d_o_right, *dR_right;  // the same as B
        Element<P>* state;                // room for a state as B; not with floats
    };

    // The panel of n rows that begins at column c.
    Panel panel(Index c, Index n) const {
        Panel x{columns - c < NR ? W : NR, nullptr, nullptr, nullptr, nullptr, nullptr};
        x.d_o = rows_ + c * 2 * n;
        x.dR = x.d_o + n * x.width;
        if constexpr (P::depth == 1) {
            x.d_o_right = x.d_o, x.dR_right = x.dR;
        } else {
            x.d_o_right = right_rows_ + c * 2 * depth_of<P>(n);
            x.dR_right = x.d_o_right + depth_of<P>(n) * x.width;
            x.state = right_state_;
        }
        return x;
    }

  private:
    float* rows_;
    Element<P>*right_rows_ = nullptr, *right_state_ = nullptr;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

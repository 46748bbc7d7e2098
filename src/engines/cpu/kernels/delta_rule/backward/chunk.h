// What the backward pass of a chunk works with: states and U as the forward sweep saved them, operands along the value
// columns, and gradients of what the scan sees (docs/math.md, "Backward").
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/fold.h"
#include "engines/cpu/kernels/delta_rule/chunk/states.h"
#include "engines/cpu/kernels/delta_rule/forward/scan.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// A state [K, V] as floats in panels, alone.
using StateOnly = StatePanels<FloatProduct>;

// Floats of a transposed state: [V, K] in panels of keys.
template <class P>
constexpr Index transposed_state(const ChunkSizes<P>& sizes) {
    return sizes.values * round_up(sizes.keys, W);
}

// States are [K, V] in panels of value columns; out: [V, K] in panels of keys, 0 beyond K.
template <class P>
void transpose_state(Index K, Index V, const StatePanels<P>& state, float* out) {
    const Index keys = round_up(K, W);
    for (Index v = 0; v < V; v += W) {
        const auto panel = state.panel(v / NR * NR);
        const float* from = panel.state + v % NR;
        for (Index m = 0; m < keys; m += W) {
            const Index first = m / NR * NR;
            const Index width = keys - first < NR ? W : NR;
            float* to = out + first * V + v * width + (m - first);
            U block[W];
            for (Index r = 0; r < W; ++r) block[r] = m + r < K ? as_words(load(from + (m + r) * panel.width)) : U(0U);
            transpose(block);
            for (Index r = 0; r < W && v + r < V; ++r) store(to + r * width, as_floats(block[r]));
        }
    }
}

// The way back.
template <class P>
void restore_state(Index K, Index V, const float* transposed, const StatePanels<P>& state) {
    const Index keys = round_up(K, W);
    for (Index v = 0; v < round_up(V, W); v += W) {
        const auto panel = state.panel(v / NR * NR);
        for (Index m = 0; m < keys; m += W) {
            const Index first = m / NR * NR;
            const Index width = keys - first < NR ? W : NR;
            const float* from = transposed + first * V + v * width + (m - first);
            U block[W];
            for (Index r = 0; r < W; ++r) block[r] = v + r < V ? as_words(load(from + r * width)) : U(0U);
            transpose(block);
            for (Index r = 0; r < W && m + r < K; ++r)
                store(panel.state + (m + r) * panel.width + v % NR, as_floats(block[r]));
        }
    }
}

// Panels of floats, `depth` rows, as the right operand of a product.
inline const float* as_right(Index /*depth*/, Index /*columns*/, const float* panels, float* /*out*/) {
    return panels;
}
inline const std::uint32_t* as_right(Index depth, Index columns, const float* panels, std::uint32_t* out) {
    for (Index c = 0; c < columns; c += NR)
        round_to_pairs(depth, columns - c < NR ? W : NR, panels + c * depth, out + c * depth_of<PairProduct>(depth));
    return out;
}

// U of a chunk, from the panel that begins at column c to left operands.
inline void save_rows(Index n, Index c, Index width, const float* rows, Index out_row, float* out) {
    for (Index i = 0; i < n; ++i)
        for (Index m = 0; m < width; m += W) store(out + i * out_row + c + m, load(rows + i * width + m));
}
inline void save_rows(Index n, Index c, Index width, const std::uint32_t* pairs, Index out_row, std::uint32_t* out) {
    for (Index i = 0; i < n; ++i)
        for (Index m = 0; m < width; m += W) {
            const U words = load(pairs + i / 2 * width + m);
            store_u16(reinterpret_cast<std::uint16_t*>(out + i * out_row) + c + m, i % 2 == 0 ? words : words >> 16);
        }
}

// Memory of the backward pass of a chunk.
template <class P>
struct ChunkGradients {
    Index key_row, pair_row, value_row, columns;  // floats, floats, elements between rows; value columns
    float *dq, *dk, *de;           // [n, K] of read_query, write_key, −erase_key; then of q, k, and p without β
    float *dscore, *derase_score;  // [n, n] of score, −erase_score
    float* dstate_decay;           // [K]
    Element<P>*d_o, *dR;           // [n, V] left operands
    float* dstate;                 // [V, K] the transposed gradient of the leaving state …
    Element<P>*dstate_right, *state_right;  // … and it and the entering state as right operands
    Element<P>* U_right;                    // [V, n] transposed panels
    Element<P>* stage;                      // for packing
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
        for (Element<P>** x : {&d_o, &dR}) *x = scratch.take<Element<P>>(n * value_row);
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
        stage = scratch.take<Element<P>>(W * value_row);
        v = scratch.take<float>(columns);
        dbeta = scratch.take<float>(pair_row);
        dg = scratch.take<float>(channel ? n * key_row : pair_row);
    }

    struct Panel {
        Index width;
        float *d_o, *dR;                  // [n, width]
        Element<P>*d_o_right, *dR_right;  // the same as right operands
        Element<P>* state;                // room for a state as a right operand; not with floats
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

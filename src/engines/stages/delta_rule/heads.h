// One sequence and head as the chunk form sees it: rows normalised, gates made and summed, β made; and the adjoint of
// that preparation, which stores the gradients (docs/math.md, "Preparation").
#pragma once

#include <vector>

#include "core/delta_rule.h"
#include "core/execution.h"
#include "engines/stages/delta_rule/tiles.h"
#include "engines/stages/rounding.h"

namespace softdelta::stages::delta {

// Rows of the sequence's key head, [tokens, K] each; p is empty unless the rule has its own.
template <class T>
struct KeyHead {
    Tile<T> q, k, p;
    Column<T> q_norm, k_norm, p_norm;  // 1/√(Σx² + 1e-6); empty without l2norm

    void load(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaSequence& s, Index h,
              Rounding& rounding);
};

// A run of tokens that goes through the chunk form at once.
struct Piece {
    Index begin, count;  // tokens, from the sequence's start
};

// One value head of the sequence.
template <class T>
struct ValueHead {
    Tile<T> v;                  // [tokens, V]
    Column<T> beta;             // [tokens]
    Tile<double> G, E;          // [tokens, K|1] gate sums within each piece; E is empty where it is G
    std::vector<Piece> pieces;  // chunks, but single tokens where positive gates raise G inside a chunk

    void load(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaSequence& s, Index hv,
              const core::Execution& execution, Rounding& rounding);
};

// Parts of the sums over tokens, of one sequence and value head.
struct GateSums {
    double dA_log = 0, dg_gamma = 0;
    Line<double> dbias;  // [K|1]
};

// Gradients of one value head, over tokens.
template <class T>
struct ValueGradients {
    Tile<T> dv;       // [tokens, V]
    Column<T> dbeta;  // [tokens]
    Tile<T> dg;       // [tokens, K|1]

    // Through β's logits and the raw gate to the caller's tensors.
    GateSums store(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaGradients& grad,
                   const core::DeltaSequence& s, Index hv, Rounding& rounding);
};

// dq, dk, dp of a key head, summed over its value heads, through l2norm to the caller's tensors.
template <class T>
struct KeyGradients {
    Tile<T> dq, dk, dp;  // [tokens, K]

    void clear(const KeyHead<T>& head);
    void store(const core::DeltaGradients& grad, const core::DeltaSequence& s, Index h, const KeyHead<T>& head,
               Rounding& rounding, Index steps);
};

// Rows of x, rounded to the tensor's type, to rows from `begin` on of head h of a tensor [B, nT, heads, ·]. With
// `steps` [B, T, heads, ·]: those of last steps.
template <class T>
void store_rows(const Tensor& t, const core::DeltaSequence& s, Index h, Index begin, Tile<T>& x, Rounding& rounding,
                Index steps = 1) {
    if (!t) return;
    rounding.stored(x.data(), x.size(), t.dtype);
    for (Index i = 0; i < x.rows(); ++i)
        if (const Index at = core::token_ended(s.begin + begin + i, steps); at >= 0)
            core::store_row(t, t.offset({s.batch, at, h, 0}), 3, x.cols(), x.row(i).data());
}

}  // namespace softdelta::stages::delta

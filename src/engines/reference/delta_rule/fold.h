// What tokens bring to the recurrence of the delta rules: operands as dense f64 rows with l2 norm, gate and beta
// applied (fold), and the way back from gradients of these rows to gradients of the operands (unfold; docs/math.md).
#pragma once

#include <vector>

#include "core/delta_rule.h"
#include "engines/reference/delta_rule/step.h"

namespace softdelta::reference {

// Rows of steps [begin, begin + count) of one batch row; with one step a token they are its tokens.
struct Segment {
    Index batch, begin, count;
};

// Rows of one key head, [count, K]. q carries the scale; p only where the rule has its own. Or their gradients.
struct KeyRows {
    KeyRows(Index tokens, Index K);
    void clear();
    std::vector<double> q, k, p;
};

// Rows of one value head: e^g [count, K] (1 without a gate), beta [count], v [count, columns]. Or gradients of g, beta,
// v. Columns from V on are zero: they fill the last tile of the state.
struct ValueRows {
    ValueRows(Index tokens, Index K, Index V);
    void clear();
    std::vector<double> gate, beta, v;
};

// Gradients that sum over the tokens of one (sequence, value head).
struct GateSums {
    double A_log = 0;
    double g_gamma = 0;
    std::vector<double> bias;  // one per gate channel
};

// Columns of a dense row of V values.
constexpr Index columns_of(Index V) {
    return tile_count(V) * tile_columns;
}

// Gates per token and value head: K, or 1.
Index gate_channels(const core::DeltaInputs& in, const core::DeltaOptions& options);

void fold_keys(const core::DeltaInputs& in, const core::DeltaOptions& options, const Segment& segment, Index head,
               KeyRows& rows);
void fold_values(const core::DeltaInputs& in, const core::DeltaOptions& options, const Segment& segment, Index head,
                 ValueRows& rows);

// What token t of the rows means to tile `tile` of the state, and where its gradients are collected.
Token token_at(const core::DeltaInputs& in, const KeyRows& keys, const ValueRows& values, Index t, Index tile);
TokenGradients gradients_at(const core::DeltaInputs& in, KeyRows& keys, ValueRows& values, Index t, Index tile);

// [B, nT, HV, V] rows of one head into [count, columns], and back; with `steps` [B, T, HV, V], in the rows of last
// steps.
void load_values(const core::Tensor& t, const Segment& segment, Index head, std::vector<double>& rows, Index steps = 1);
void store_values(const core::Tensor& t, const Segment& segment, Index head, const std::vector<double>& rows,
                  Index steps = 1);

// From gradients of the folded rows to those of q, k, p; of v, beta, g, whichever are wanted.
void unfold_keys(const core::DeltaInputs& in, const core::DeltaOptions& options, const Segment& segment, Index head,
                 KeyRows& d, const core::DeltaGradients& grad);
void unfold_values(const core::DeltaInputs& in, const core::DeltaOptions& options, const Segment& segment, Index head,
                   const ValueRows& d, const core::DeltaGradients& grad, GateSums& sums);

}  // namespace softdelta::reference

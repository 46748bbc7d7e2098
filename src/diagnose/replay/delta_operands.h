// The operands of a delta-rule call in f64: rows of heads after l2norm, gates and β as the rule wants them.
#pragma once

#include <vector>

#include "diagnose/replay/changer.h"
#include "diagnose/replay/delta_chunk.h"

namespace softdelta::diagnose {

// A chunk of a sequence: which rows it has.
struct Place {
    Index sequence, batch, begin, count;
    bool first, last;  // of its sequence
};

// A gate and its derivatives by the raw gate and by A_log.
struct GateValue {
    double g = 0, raw_slope = 1, A_slope = 0;
};

class DeltaInputs64 {
  public:
    explicit DeltaInputs64(const io::Call& call);

    const io::Call& call;
    core::Rule rule;
    double scale;
    double scale_of_value_size;  // for the default scale
    Index steps;                 // of a token: rows here are steps, those of q and d_o 0 but for the last of a token
    Dense q, k, p, v, g, g_gamma, beta, initial_state, A_log, gate_bias, d_o, dfinal_state;

    Index value_heads() const { return v.size(2); }
    Index key_head(Index hv, const Mistakes& mistakes) const;
    Index channels() const { return rule.gate == core::Gate::channel ? q.size(3) : 1; }
    bool has_gate() const { return g || g_gamma; }
    bool is_gated(Index row) const { return row % steps == 0; }
    Index sequence_count() const { return sequences_; }
    // Chunks of all sequences, in order.
    const std::vector<Place>& chunks() const { return chunks_; }

    DeltaOperands operands(const Place& at, Index hv, const Mistakes& mistakes, Changer& changer) const;
    GateValue gate(Index b, Index t, Index hv, Index channel, const Mistakes& mistakes) const;
    double beta_of(Index b, Index t, Index hv, const Mistakes& mistakes) const;
    double beta_slope(Index b, Index t, Index hv, const Mistakes& mistakes) const;
    // State n of a tensor of states as [K, V]; zeros of an absent one.
    Matrix state(const Dense& t, Index n, Index hv) const;

  private:
    Matrix key_rows(const Dense& t, const Place& at, Index h, bool norm, Index offset) const;
    void fill_gates(const Place& at, Index hv, const Mistakes& mistakes, Changer& changer, DeltaOperands& out) const;

    Index sequences_ = 0;
    std::vector<Place> chunks_;
};

// Rows of tokens [B, T, ..] as those of their last steps [B, nT, ..], others 0; and back.
Dense in_last_steps(const Dense& tokens, Index steps);
Dense of_last_steps(const Dense& rows, Index steps);

// r of y = x r, r = (Σx² + 1e-6)^-1/2
double inverse_norm(const Eigen::Ref<const Eigen::RowVectorXd>& x);

}  // namespace softdelta::diagnose

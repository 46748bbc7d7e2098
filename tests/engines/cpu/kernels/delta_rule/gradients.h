// What the stages in f64 make of a chunk on the way back.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk.h"

namespace softdelta::test {

class TrueGradients {
  public:
    TrueGradients(const Chunk& chunk, const Truth& forward)
        : n_(chunk.shape.n),
          K_(chunk.shape.K),
          V_(chunk.shape.V),
          erases_(chunk.shape.erases()),
          h(chunk.call.initial_state, K_, V_, V_),
          dh(chunk.call.dfinal_state, K_, V_, V_),
          d_o(chunk.call.d_o, n_, V_, V_),
          U(forward.U()),
          du(n_, V_),
          dR(n_, V_) {
        Execution execution;
        execution.engine = "stages_f64";
        want("du", {1, n_, 1, V_}, execution);
        want("dAqk", {1, n_, 1, 64}, execution);
        if (erases_) want("dL_solve", {1, n_, 1, 64}, execution);
        RandomDelta call = dense_copy(chunk.call);
        call.options.scale = chunk.scale();
        results_ = backward_results(call, execution);
        du = Matrix(stages_.at("du"), n_, V_, V_);
        dR = erases_ ? transposed(forward.inverse()) * du : du;
    }

    // Of read_query, write_key, state_decay, and of the negative erase_key, as the scan makes them.
    Matrix read_query() const { return d_o * transposed(h); }
    Matrix write_key() const { return U * transposed(dh); }
    Matrix erase_key() const { return dR * transposed(h); }
    std::vector<double> state_decay() const {
        std::vector<double> x;
        for (Index m = 0; m < K_; ++m) {
            x.push_back(0);
            for (Index c = 0; c < V_; ++c) x.back() += h(m, c) * dh(m, c);
        }
        return x;
    }
    Matrix score() const { return {stages_.at("dAqk"), n_, n_, 64}; }
    // Of the negative erase_score.
    Matrix erase_score() const {
        Matrix x(n_, n_);
        for (Index i = 0; erases_ && i < n_; ++i)
            for (Index j = 0; j < n_; ++j) x(i, j) = -stages_.at("dL_solve").get(i * 64 + j);
        return x;
    }
    Matrix dinitial_state() const { return {results_.at("dinitial_state"), K_, V_, V_}; }

    // Of the caller's operands: dq, dk and dp [n, K], dg [n, K|1].
    Matrix result(const std::string& name, Index columns) const { return {results_.at(name), n_, columns, columns}; }

  private:
    void want(const std::string& name, const Shape& shape, Execution& execution) {
        stages_[name] = Array(DType::f64, shape);
        execution.stages.wanted.push_back({name, stages_[name].view()});
    }

    Index n_, K_, V_;
    bool erases_;
    Results stages_, results_;

  public:
    Matrix h, dh, d_o, U;  // h enters the chunk; dh is the gradient of the state that leaves
    Matrix du, dR;         // of U, and of β∘v
};

// The gradients of a chunk's rows and pairs in f32, as the scan leaves them for the unfold.
inline void fill(float* rows, Index row, const Matrix& x) {
    for (Index i = 0; i < x.rows(); ++i)
        for (Index j = 0; j < x.columns(); ++j) rows[i * row + j] = static_cast<float>(x(i, j));
}

}  // namespace softdelta::test

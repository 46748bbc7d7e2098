// One chunk of one value head of the small delta-rule kernel.
#pragma once

#include "core/delta_rule.h"
#include "judge/fault.h"
#include "judge/small_delta.h"

namespace softdelta::test {

using MatrixD = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXf;

// What all chunks share.
struct DeltaKernel {
    core::Rule rule;
    float scale;
    DType storage;
    DeltaMistake mistake, second = DeltaMistake::none;
    Faulty* fault = nullptr;

    bool is(DeltaMistake m) const { return mistake == m || second == m; }
    Matrix r(const Matrix& x) const { return round_to(storage, x); }
};

// n rows; Kg gate channels, 1 or K, each of which rules K / Kg columns.
struct DeltaChunk {
    Matrix q, k, p, v, d_o;    // [n, K], d_o and v [n, V]
    Vector beta;               // [n]
    MatrixD G, E;              // [n, Kg] sums of the gate, inclusive; what p is decayed by
    Matrix S;                  // [K, V] entering
    Matrix score, A;           // [n, n]
    Matrix beta_v, erase_key;  // β v [n, V], β p e^E [n, K]
    Matrix u, w, v_new, o;     // [n, V], w [n, K]
    Matrix dq, dk, dp, dv;     // of q, k, p as they are here
    Matrix dbeta, dg;          // [n, 1], [n, Kg] before the reverse sum,
    Matrix dg_erase;           // and the part of it by way of E
};

// S entering → S leaving; fills what lies between.
Matrix forward(const DeltaKernel& kernel, DeltaChunk& chunk);

// dS leaving → dS entering; fills the gradients.
Matrix backward(const DeltaKernel& kernel, DeltaChunk& chunk, const Matrix& dS_out);

}  // namespace softdelta::test

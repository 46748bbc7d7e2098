// The chunk form of the delta rules in f64 (docs/math.md), one chunk of one value head, written so that it can be told
// to make mistakes.
#pragma once

#include "core/delta_rule.h"
#include "diagnose/catalogue/mistake.h"
#include "diagnose/replay/changer.h"
#include "diagnose/replay/dense.h"

namespace softdelta::diagnose {

struct DeltaKernel {
    core::Rule rule;
    double scale = 1;
    const Mistakes& mistakes;
    Changer& at;

    bool has(Mistake m) const { return mistakes.has(m); }
};

// n rows; Kg gate channels, 1 or K.
struct DeltaOperands {
    Matrix q, k, p;  // [n, K] after l2norm
    Matrix v, d_o;   // [n, V]
    Vector beta;     // [n]
    Matrix G, E;     // [n, Kg] sums of the gate, inclusive; what p is decayed by
};

struct DeltaForward {
    Matrix S;                  // [K, V] entering
    Matrix score, A;           // [n, n]
    Matrix erase_key, beta_v;  // [n, K], [n, V]
    Matrix w, v_new, o;        // [n, K], [n, V], [n, V]
};

struct DeltaBackward {
    Matrix dS;              // [K, V] entering
    Matrix dq, dk, dp, dv;  // of q, k, p, v as they are here; dk without the path through p
    Vector dbeta;           // [n]
    Matrix dG, dE;          // [n, Kg] before the reverse sum
};

// Fills `out`; S is the state that enters, and then the one that leaves.
void forward(const DeltaKernel& kernel, const DeltaOperands& in, Matrix& S, DeltaForward& out);

// Fills `out`, out.dS with what enters the chunk before; dS is the gradient of the state that leaves.
void backward(const DeltaKernel& kernel, const DeltaOperands& in, const DeltaForward& kept, const Matrix& dS,
              DeltaBackward& out);

}  // namespace softdelta::diagnose

// The scan between fold and unfold, blind to gates and rules: the equations of docs/math.md, "Forward" and "Backward",
// in the words of the literature (Yang et al. 2024, "Parallelizing linear transformers with the delta rule"). Every
// operand of a product that a kernel holds in the storage type goes through Rounding once.
#pragma once

#include "engines/stages/delta_rule/fold.h"

namespace softdelta::stages::delta {

// The forward pass of a chunk, kept for the backward pass.
template <class T>
struct Scan {
    Tile<T> h;       // [K, V] the entering state, as products read it
    Tile<T> A;       // [n, n] (I + erase_score)⁻¹
    Tile<T> w;       // [n, K] A·erase_key
    Tile<T> beta_v;  // [n, V] β∘v
    Tile<T> u;       // [n, V] A·(β∘v)
    Tile<T> U;       // [n, V] v_new = u − w h
};

// The backward pass of a chunk.
template <class T>
struct ScanGradients {
    Tile<T> d_o;       // [n, V] given
    Tile<T> dh;        // [K, V] of the state that leaves, as products read it
    Tile<T> dv_local;  // [n, V] scoreᵀ dO
    Tile<T> dU;        // [n, V] dv_local + write_key dS'
    Tile<T> dR;        // [n, V] Aᵀ dU, the gradient of β∘v
    Tile<T> dw;        // [n, K] −dU hᵀ
    Tile<T> dA;        // [n, n] dU (β∘v)ᵀ + dw·erase_keyᵀ
    Tile<T> dL;        // [n, n] −stril(Aᵀ dA Aᵀ)
    Tile<T> dL_solve;  // [n, n] −stril(dR Uᵀ), which is the same
    Tile<T> product;   // scratch
};

// o [n, V] ← read_query h + score U; state [K, V] goes from the entering to the leaving one.
template <class T>
void scan_forward(bool erases, const Chunk<T>& c, Folded<T>& f, Rounding& rounding, Scan<T>& x, Tile<T>& state,
                  Tile<T>& o);

// state: only the first `rows` rows of a chunk have been written.
template <class T>
void advance_state(const Chunk<T>& c, const Scan<T>& x, Index rows, FoldScratch<T>& scratch, Tile<T>& state);

// dstate [K, V] goes from the gradient of the leaving to that of the entering state; d receives those of f.
// With rounding, what is erased gets its gradient through w and A, as in kernels; else by the solve, which is shorter
// and loses less. wants_inverse: dw, dA and dL are filled in any case.
template <class T>
void scan_backward(bool erases, bool wants_inverse, const Folded<T>& f, const Scan<T>& x, Rounding& rounding,
                   ScanGradients<T>& dx, FoldedGradients<T>& d, Tile<T>& dstate);

}  // namespace softdelta::stages::delta

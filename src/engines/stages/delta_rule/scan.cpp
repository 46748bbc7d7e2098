#include "engines/stages/delta_rule/scan.h"

#include <cmath>
#include <limits>

#include "engines/stages/products.h"

namespace softdelta::stages::delta {

namespace {

template <class T>
void round(Rounding& rounding, Tile<T>& x) {
    rounding.operand(x.data(), x.size());
}

template <class T>
void clear_upper(Tile<T>& x, bool diagonal) {
    for (Index i = 0; i < x.rows(); ++i) x.row(i).tail(x.cols() - i - (diagonal ? 0 : 1)).setZero();
}

// out ← lower·x, or out + lower·x, as one product. The zeros above the diagonal multiply what is not finite in x there,
// and 0·∞ is NaN. So it is taken out, and only rows from it on become NaN.
template <class T>
void multiply_lower(const Tile<T>& lower, const Tile<T>& x, bool adds, Tile<T>& out) {
    const auto multiply = [&](const Tile<T>& right) {
        if (adds)
            add_product(1, lower, right, out);
        else
            stages::multiply(1, lower, right, out);
    };
    if (x.allFinite()) return multiply(x);
    Tile<T> finite = x;
    for (Index i = 0; i < x.size(); ++i)
        if (!std::isfinite(x.data()[i])) finite.data()[i] = 0;
    multiply(finite);
    for (Index i = 0; i < x.rows(); ++i)
        for (Index c = 0; c < x.cols(); ++c)
            if (!std::isfinite(x(i, c))) out.col(c).tail(x.rows() - i).setConstant(std::numeric_limits<T>::quiet_NaN());
}

// The gradient of the inverse, as kernels have it. The outer triangle is essential, the inner one is only tidy.
template <class T>
void take_inverse_gradient(const Folded<T>& f, const Scan<T>& x, Rounding& rounding, ScanGradients<T>& dx) {
    multiply_bt(-1, dx.dU, x.h, dx.dw);
    round(rounding, dx.dw);
    multiply_bt(1, dx.dU, x.beta_v, dx.dA);
    add_product_bt(1, dx.dw, f.erase_key, dx.dA);
    clear_upper(dx.dA, false);
    round(rounding, dx.dA);
    multiply_bt(1, dx.dA, x.A, dx.product);
    round(rounding, dx.product);
    multiply_at(-1, x.A, dx.product, dx.dL);
    clear_upper(dx.dL, true);
}

}  // namespace

template <class T>
void scan_forward(bool erases, const Chunk<T>& c, Folded<T>& f, Rounding& rounding, Scan<T>& x, Tile<T>& state,
                  Tile<T>& o) {
    const Index n = c.rows();
    x.h = state;
    round(rounding, x.h);
    x.U = c.v;
    if (erases) {
        x.A.setIdentity(n, n);
        f.erase_score.template triangularView<Eigen::UnitLower>().solveInPlace(x.A);
        round(rounding, x.A);
        x.beta_v = c.v.array().colwise() * c.beta.array();
        round(rounding, x.beta_v);
        multiply_lower(x.A, f.erase_key, false, x.w);
        multiply_lower(x.A, x.beta_v, false, x.u);
        round(rounding, x.w);
        round(rounding, x.u);
        x.U = x.u;
        add_product(-1, x.w, x.h, x.U);
    }
    round(rounding, x.U);
    multiply(1, f.read_query, x.h, o);
    multiply_lower(f.score, x.U, true, o);
    state.array().colwise() *= f.state_decay.array();
    add_product_at(1, f.write_key, x.U, state);
}

template <class T>
void advance_state(const Chunk<T>& c, const Scan<T>& x, Index rows, FoldScratch<T>& scratch, Tile<T>& state) {
    const Index channels = c.G.cols();
    const double* last = c.G.row(rows - 1).data();
    scratch.decay.resize(rows + 1, channels);  // of each row's key, and of the state
    const Line<double> none = Line<double>::Zero(channels);
    for (Index i = 0; i <= rows; ++i)
        subtract(last, i < rows ? c.G.row(i).data() : none.data(), channels, scratch.decay.row(i).data());
    exponentiate(scratch.decay.data(), scratch.decay.size());
    decay_rows(c.k.topRows(rows), scratch.decay.topRows(rows), scratch.left);
    for (Index m = 0; m < state.rows(); ++m) state.row(m) *= scratch.decay(rows, channels == 1 ? 0 : m);
    add_product_at(1, scratch.left, x.U.topRows(rows), state);
}

template <class T>
void scan_backward(bool erases, bool wants_inverse, const Folded<T>& f, const Scan<T>& x, Rounding& rounding,
                   ScanGradients<T>& dx, FoldedGradients<T>& d, Tile<T>& dstate) {
    dx.dh = dstate;
    round(rounding, dx.dh);
    multiply_at(1, f.score, dx.d_o, dx.dv_local);
    dx.dU = dx.dv_local;
    add_product(1, f.write_key, dx.dh, dx.dU);
    round(rounding, dx.dU);
    multiply_bt(1, dx.d_o, x.h, d.read_query);
    multiply_bt(1, x.U, dx.dh, d.write_key);
    d.state_decay = x.h.cwiseProduct(dx.dh).rowwise().sum();
    multiply_bt(1, dx.d_o, x.U, d.score);
    clear_upper(d.score, false);
    dstate.array().colwise() *= f.state_decay.array();
    add_product_at(1, f.read_query, dx.d_o, dstate);
    if (!erases) return;
    multiply_at(1, x.A, dx.dU, dx.dR);
    multiply_bt(-1, dx.dR, x.U, dx.dL_solve);
    clear_upper(dx.dL_solve, true);
    if (wants_inverse || rounding.active()) take_inverse_gradient(f, x, rounding, dx);
    if (rounding.active()) {
        multiply_at(1, x.A, dx.dw, d.erase_key);
        d.erase_score = dx.dL;
    } else {
        multiply_bt(-1, dx.dR, x.h, d.erase_key);
        d.erase_score = dx.dL_solve;
    }
    add_product_at(-1, x.w, dx.dU, dstate);
}

template void scan_forward(bool, const Chunk<double>&, Folded<double>&, Rounding&, Scan<double>&, Tile<double>&,
                           Tile<double>&);
template void scan_forward(bool, const Chunk<float>&, Folded<float>&, Rounding&, Scan<float>&, Tile<float>&,
                           Tile<float>&);
template void advance_state(const Chunk<double>&, const Scan<double>&, Index, FoldScratch<double>&, Tile<double>&);
template void advance_state(const Chunk<float>&, const Scan<float>&, Index, FoldScratch<float>&, Tile<float>&);
template void scan_backward(bool, bool, const Folded<double>&, const Scan<double>&, Rounding&, ScanGradients<double>&,
                            FoldedGradients<double>&, Tile<double>&);
template void scan_backward(bool, bool, const Folded<float>&, const Scan<float>&, Rounding&, ScanGradients<float>&,
                            FoldedGradients<float>&, Tile<float>&);

}  // namespace softdelta::stages::delta

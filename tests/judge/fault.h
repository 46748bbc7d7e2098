// One change at one place of a small kernel, as the tests draw them. Shares nothing with what diagnoses.
#pragma once

#include <cmath>
#include <string>

#include "judge/floats.h"

namespace softdelta::test {

struct Fault {
    std::string place, change;
};

// A small kernel's own numbers, wrong at the place of its fault.
class Faulty {
  public:
    explicit Faulty(const Fault& fault = {}) : fault_(fault) {}

    float scale = 1, group = 1;

    bool is(const char* place, const char* change) const { return fault_.place == place && fault_.change == change; }
    bool at(const char* place) const { return fault_.place == place; }

    float number(const char* place, float x) const { return at(place) ? factor() * x : x; }

    // Rows, products of rows, states. beta: of the rows.
    template <class Column>
    void matrix(const char* place, Matrix& x, const Column& beta) {
        if (!at(place)) return;
        const std::string& c = fault_.change;
        if (c == "times beta") x = beta.asDiagonal() * x;
        if (c == "over beta") x = beta.cwiseInverse().asDiagonal() * x;
        matrix(place, x);
    }
    void matrix(const char* place, Matrix& x) {
        if (!at(place)) return;
        const std::string& c = fault_.change;
        x *= factor();
        rows(x);
        if (c == "transposed") x = Matrix(x.transpose());
        if (c == "without its diagonal") x.diagonal().setZero();
        if (c == "in bf16") x = round_to(DType::bf16, x);
        if (c == "first keys lost") x.leftCols(std::min<Index>(64, x.cols())).setZero();
        if (c == "last keys lost") x.rightCols(x.cols() - (x.cols() - 1) / 64 * 64).setZero();
        if (c == "one") x.setOnes();
        if (c == "sigmoid") x = (1 + (-x.array()).exp()).inverse().matrix();
        if (c == "summed once more")
            for (Index i = 1; i < x.rows(); ++i) x.row(i) += x.row(i - 1);
        if (c == "of the chunk before") {
            const Matrix own = x;
            for (Index i = 0; i < x.rows(); ++i)
                for (Index j = 0; j < x.cols(); ++j)
                    x(i, j) = i < before_.rows() && j < before_.cols() ? before_(i, j) : 0;
            before_ = own;
        }
    }
    void rows(Matrix& x) const {
        const std::string& c = fault_.change;
        const Index n = x.rows();
        if (n == 0) return;
        const Matrix own = x;
        if (c == "row before")
            for (Index i = 1; i < n; ++i) x.row(i) = own.row(i - 1);
        if (c == "row after")
            for (Index i = 0; i + 1 < n; ++i) x.row(i) = own.row(i + 1);
        if (c == "tail lost") x.bottomRows(n % 16).setZero();
        if (c == "first row lost") x.row(0).setZero();
        if (c == "last row lost") x.row(n - 1).setZero();
        for (Index i = 48; c == "rows 48 to 63 lost" && i < n; i += 64)
            x.middleRows(i, std::min<Index>(16, n - i)).setZero();
        if (c == "every row of 16 lost")
            for (Index i = 15; i < n; i += 16) x.row(i).setZero();
        if (c == "two rows before")
            for (Index i = 2; i < n; ++i) x.row(i) = own.row(i - 2);
    }
    // Sums of gates that go into an exponential.
    template <class X>
    X exponent(const char* place, const X& x) const {
        if (!at(place)) return x;
        const std::string& c = fault_.change;
        X y = x;
        if (c == "no decay") y.setZero();
        if (c == "decay twice") y = 2 * x;
        if (c == "base 2") y = 0.6931471805599453 * x;
        if (c == "over ln 2 in the exponent") y = 1.4426950408889634 * x;
        for (Index i = 0; i < x.rows(); ++i) {
            if (c == "without its own gate") y.row(i) = i == 0 ? X(0 * x.row(0)) : X(x.row(i - 1));
            if (c == "with the next gate" && i + 1 < x.rows()) y.row(i) = x.row(i + 1);
            if (c == "not summed" && i > 0) y.row(i) = x.row(i) - x.row(i - 1);
            if (c == "summed by 16 rows" && i >= 16) y.row(i) = x.row(i) - x.row(i - i % 16 - 1);
        }
        return y;
    }
    // Which row of its sequence an operand is read from.
    Index row(const char* place, Index i, Index n) const {
        const Index to = is(place, "row before")        ? i - 1
                         : is(place, "row after")       ? i + 1
                         : is(place, "two rows before") ? i - 2
                                                        : i;
        return to < 0 || to >= n ? i : to;
    }
    // Which head is taken for one.
    Index head(Index h, Index heads) const {
        const std::string& c = fault_.change;
        return c == "first head"    ? 0
               : c == "head before" ? std::max<Index>(h - 1, 0)
               : c == "head after"  ? std::min(h + 1, heads - 1)
                                    : h;
    }
    void restart() { before_ = Matrix(); }
    const std::string& change() const { return fault_.change; }
    const std::string& place() const { return fault_.place; }

  private:
    float factor() const {
        const std::string& c = fault_.change;
        return c == "missing"       ? 0
               : c == "doubled"     ? 2
               : c == "halved"      ? 0.5f
               : c == "negated"     ? -1
               : c == "times scale" ? scale
               : c == "over scale"  ? 1 / scale
               : c == "times ln 2"  ? 0.6931472f
               : c == "over ln 2"   ? 1.442695f
               : c == "times group" ? group
               : c == "over group"  ? 1 / group
                                    : 1;
    }

    Fault fault_;
    Matrix before_;
};

}  // namespace softdelta::test

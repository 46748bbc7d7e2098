#include "diagnose/replay/changer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace softdelta::diagnose {

namespace {

constexpr Index tail_tile = 16, tile = 64;

// Row i is what row i + by should be, where there is one.
template <class M>
void shift_rows(M&& x, Index by) {
    const Matrix right = x;
    for (Index i = 0; i < x.rows(); ++i)
        if (i + by >= 0 && i + by < x.rows()) x.row(i) = right.row(i + by);
}

Index row_offset_of(Change change) {
    return change == Change::row_before        ? -1
           : change == Change::row_after       ? 1
           : change == Change::two_rows_before ? -2
                                               : 0;
}

template <class M>
void change_rows(Change change, M&& x, bool may_shift = true) {
    if (x.rows() == 0) return;
    switch (change) {
        case Change::row_before:
        case Change::row_after:
        case Change::two_rows_before:
            if (may_shift) shift_rows(x, row_offset_of(change));
            return;
        case Change::tail_lost:
            x.bottomRows(x.rows() % tail_tile).setZero();
            return;
        case Change::first_row_lost:
            x.topRows(1).setZero();
            return;
        case Change::last_row_lost:
            x.bottomRows(1).setZero();
            return;
        case Change::last_warp_lost:
            for (Index i = 0; i < x.rows(); ++i)
                if (i % tile >= tile - tail_tile) x.row(i).setZero();
            return;
        case Change::last_of_16_lost:
            for (Index i = tail_tile - 1; i < x.rows(); i += tail_tile) x.row(i).setZero();
            return;
        default:
            return;
    }
}

}  // namespace

double to_bf16_and_back(double x) {
    return static_cast<double>(core::to_float(core::to_bf16(x)));
}

double factor_of(Change change, double scale, double group) {
    switch (change) {
        case Change::missing:
            return 0;
        case Change::doubled:
            return 2;
        case Change::halved:
            return 0.5;
        case Change::negated:
            return -1;
        case Change::times_scale:
            return scale;
        case Change::over_scale:
            return 1 / scale;
        case Change::times_ln2:
            return std::numbers::ln2;
        case Change::over_ln2:
            return 1 / std::numbers::ln2;
        case Change::times_group:
            return group;
        case Change::over_group:
            return 1 / group;
        default:
            return 1;
    }
}

Index Changer::row_offset(std::string_view place) const {
    for (const Point& p : mistakes_.points())
        if (p.place == place && row_offset_of(p.change) != 0) return row_offset_of(p.change);
    return 0;
}

double Changer::value(std::string_view place, double x) const {
    for (const Point& p : mistakes_.points())
        if (p.place == place) x *= factor(p.change);
    return x;
}

void Changer::value(std::string_view place, Matrix& x, const Vector* beta, bool operand) {
    for (std::size_t i = 0; i < mistakes_.points().size(); ++i) {
        const Point& p = mistakes_.points()[i];
        if (p.place != place) continue;
        x *= factor(p.change);
        if (beta != nullptr && p.change == Change::times_beta) x = beta->asDiagonal() * x;
        if (beta != nullptr && p.change == Change::over_beta) x = beta->cwiseInverse().asDiagonal() * x;
        change_rows(p.change, x, !operand);
        const Index columns = x.cols() % tile == 0 ? std::min(tile, x.cols()) : x.cols() % tile;
        switch (p.change) {
            case Change::transposed:
                if (x.rows() == x.cols()) x.transposeInPlace();
                break;
            case Change::without_diagonal:
                for (Index j = 0; j < std::min(x.rows(), x.cols()); ++j) x(j, j) = 0;
                break;
            case Change::first_tile_lost:
                x.leftCols(std::min(tile, x.cols())).setZero();
                break;
            case Change::last_tile_lost:
                x.rightCols(columns).setZero();
                break;
            case Change::bf16:
                x = x.unaryExpr(&to_bf16_and_back);
                break;
            case Change::one:
                x.setOnes();
                break;
            case Change::squashed:
                x = x.unaryExpr([](double y) { return 1 / (1 + std::exp(-y)); });
                break;
            case Change::cumulated:
                for (Index r = 1; r < x.rows(); ++r) x.row(r) += x.row(r - 1);
                break;
            case Change::stale: {
                Matrix before = Matrix::Zero(x.rows(), x.cols());
                const Index rows = std::min(x.rows(), stale_[i].rows()), cols = std::min(x.cols(), stale_[i].cols());
                before.topLeftCorner(rows, cols) = stale_[i].topLeftCorner(rows, cols);
                stale_[i] = x;
                x = before;
                break;
            }
            default:
                break;
        }
    }
}

void Changer::value(std::string_view place, Vector& x, const Vector* beta, bool operand) {
    if (!mistakes_.changes(place)) return;
    Matrix column = x;
    value(place, column, beta, operand);
    x = column.col(0);
}

Matrix Changer::exponents(std::string_view place, Matrix X) const {
    for (const Point& p : mistakes_.points()) {
        if (p.place != place) continue;
        if (p.change == Change::undecayed) X.setZero();
        if (p.change == Change::twice) X *= 2;
        if (p.change == Change::base_2) X *= std::numbers::ln2;
        if (p.change == Change::base_over_ln2) X /= std::numbers::ln2;
        if (p.change == Change::decay_of_row_after) shift_rows(X, 1);
        if (p.change == Change::unsummed || p.change == Change::summed_by_tile) {
            const Index rows = p.change == Change::unsummed ? 1 : tail_tile;
            for (Index i = X.rows(); i-- > rows;) X.row(i) -= X.row(i / rows * rows - 1).eval();
        }
        if (p.change != Change::decay_of_row_before) continue;
        shift_rows(X, -1);
        X.row(0).setZero();
    }
    return X;
}

Index other_head(Change change, Index h, Index heads) {
    return change == Change::head_before  ? std::max<Index>(h - 1, 0)
           : change == Change::head_after ? std::min(h + 1, heads - 1)
           : change == Change::first_head ? 0
                                          : h;
}

void Changer::written(const io::Call& call, Results& results) const {
    for (const Point& p : mistakes_.points()) {
        constexpr std::string_view suffix = ", as written";
        if (!p.place.ends_with(suffix)) continue;
        const auto found = results.find(std::string(p.place.substr(0, p.place.size() - suffix.size())));
        if (found == results.end()) continue;
        Dense& x = found->second;
        if (is_factor(p.change)) {
            for (Index i = 0; i < x.count(); ++i) x[i] *= factor(p.change);
            continue;
        }
        if (x.shape().size() < 3) continue;
        const bool state = found->first == "final_state" || found->first == "dinitial_state";
        const bool lse = found->first == "lse";
        const bool keys = call.is_attention && (found->first == "dk" || found->first == "dv");
        const io::Bounds& bounds = keys                ? call.packing.keys
                                   : call.is_attention ? call.packing.queries
                                                       : call.packing.tokens;
        const bool of_steps = !call.is_attention && !state && x.size(1) == call.delta.v.shape(1);
        const Index rows_of_token = of_steps ? call.delta_options.steps : 1;
        const Dense right = x;
        const Index sequences = bounds.empty() ? x.size(0) : static_cast<Index>(bounds.size()) - 1;
        const std::size_t head_dim = state || lse ? 1 : 2;
        for (Index n = 0; n < (state ? x.size(0) : sequences); ++n)
            for (Index h = 0; h < x.size(head_dim); ++h) {
                const Index from_head = other_head(p.change, h, x.size(head_dim));
                if (state) {
                    x.block(n, h) = right.block(p.change == Change::first_sequence ? 0 : n, from_head);
                    if (p.change == Change::transposed && x.size(2) == x.size(3)) x.block(n, h).transposeInPlace();
                    if (p.change == Change::bf16) x.block(n, h) = x.block(n, h).unaryExpr(&to_bf16_and_back).eval();
                    continue;
                }
                const auto at = static_cast<std::size_t>(n);
                const Index batch = bounds.empty() ? n : 0, begin = bounds.empty() ? 0 : bounds[at] * rows_of_token;
                const Index rows_all = lse ? x.size(2) : x.size(1);
                const Index count = bounds.empty() ? rows_all : bounds[at + 1] * rows_of_token - begin;
                if (lse) {
                    const auto place = [&](Index head) { return (batch * x.size(1) + head) * x.size(2) + begin; };
                    Matrix column(count, 1);
                    for (Index i = 0; i < count; ++i) column(i, 0) = right[place(from_head) + i];
                    change_rows(p.change, column);
                    for (Index i = 0; i < count; ++i) x[place(h) + i] = column(i, 0);
                    continue;
                }
                Matrix rows = right.rows(batch, begin, count, from_head);
                change_rows(p.change, rows);
                x.rows(batch, begin, count, h) = rows;
            }
    }
}

}  // namespace softdelta::diagnose

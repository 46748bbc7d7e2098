#include "diagnose/replay/attention_call.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/attention.h"
#include "diagnose/replay/attention_seen.h"
#include "diagnose/replay/changer.h"

namespace softdelta::diagnose {

namespace {

using M = Mistake;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr const char* dead_rows = "p of rows without a key";

// Keys or values of one head of a sequence, through the block table when there is one. What is not finite is taken to
// be hidden from every query.
Matrix key_rows(const io::Call& call, const Dense& t, const AttentionPlace& at, Index hk) {
    const auto finite = [](double x) { return std::isfinite(x) ? x : 0; };
    if (!call.attention.block_table) return t.rows(at.key_batch, at.k_begin, at.k_count, hk).unaryExpr(finite);
    const Dense table(call.attention.block_table);
    Matrix rows(at.k_count, t.size(3));
    for (Index j = 0; j < at.k_count; ++j) {
        const auto block = static_cast<Index>(table[at.key_batch * table.size(1) + j / t.size(1)]);
        rows.row(j) = t.rows(block, j % t.size(1), 1, hk).row(0);
    }
    return rows.unaryExpr(finite);
}

// As a tensor's type holds it.
double stored(const Tensor& like, double x) {
    if (like.dtype() == DType::bf16) return to_bf16_and_back(x);
    if (like.dtype() == DType::f16) return static_cast<double>(core::to_float(core::to_f16(x)));
    return like.dtype() == DType::f32 ? static_cast<double>(static_cast<float>(x)) : x;
}

// One query head of one sequence, `count` of its rows at a time.
class HeadRun {
  public:
    HeadRun(const AttentionCall& c, const Mistakes& mistakes, const AttentionPlace& at, Index h, Results& results)
        : c_(c),
          mistakes_(mistakes),
          change_(mistakes, c.scale, static_cast<double>(c.q.size(2)) / static_cast<double>(c.k.size(2))),
          scale_(change_.value("scale", c.scale)),
          at_(at),
          h_(h),
          results_(results),
          backward_(results.count("dq") != 0) {
        const Index heads = c.k.size(2), group = c.q.size(2) / heads;
        hk_ = has(M::query_head_modulo) ? h % heads : h / group;
        Index sink_head = h;
        for (const Point& p : mistakes.points()) {
            if (p.place == "key head") hk_ = other_head(p.change, hk_, heads);
            if (p.place == "sink") sink_head = other_head(p.change, h, c.q.size(2));
        }
        if (c.sink) sink_ = change_.value("sink", c.sink[sink_head]);
        first_of_group_ = h % group == 0;
        k_ = key_rows(c.call, c.k, at, hk_);
        v_ = key_rows(c.call, c.v, at, hk_);
        change_.value("k", k_);
        change_.value("v", v_);
        dk_ = Matrix::Zero(k_.rows(), k_.cols());
        dv_ = Matrix::Zero(v_.rows(), v_.cols());
    }

    void run() {
        bool lost = false;  // the backward pass ends here
        const Index rows = at_once() ? std::max<Index>(at_.q_count, 1) : attention_tile;
        for (Index i = 0; i < at_.q_count; i += rows) {
            score(i, std::min(rows, at_.q_count - i));
            forward();
            lost = lost || (has(M::rows_lost_after_dead_tile) && is_dead());
            if (backward_ && !lost) backward();
        }
        if (!backward_) return;
        const auto add = [&](const char* name, const Matrix& d) {
            const std::string place = std::string("sum over heads of ") + name;
            const Index hk = change_.has(place, Change::modulo) ? h_ % c_.k.size(2) : hk_;
            View to = results_.at(name).rows(at_.key_batch, at_.k_begin, at_.k_count, hk);
            if (has(M::last_query_head_of_group) || change_.has(place, Change::last_only)) to.setZero();
            if (first_of_group_ || !change_.has(place, Change::first_only)) to += d;
        };
        add("dk", dk_);
        add("dv", dv_);
    }

  private:
    // Rows may come from another tile.
    bool at_once() const {
        constexpr Index most = 1 << 22;  // scores
        return at_.q_count * at_.k_count <= most && std::ranges::any_of(mistakes_.points(), [](const Point& p) {
                   return p.change == Change::row_before || p.change == Change::row_after ||
                          p.change == Change::two_rows_before || p.change == Change::first_row_lost ||
                          p.change == Change::last_row_lost || p.change == Change::tail_lost;
               });
    }
    bool has(Mistake m) const { return mistakes_.has(m); }
    // i and j count from the first row and the first key of the tile.
    bool seen(Index i, Index j) const {
        return seen_[static_cast<std::size_t>(i)][static_cast<std::size_t>(first_key_ + j)] != 0;
    }
    double bias(Index i, Index j) const { return addend_of(c_, at_, h_, first_ + i, first_key_ + j); }

    // The keys from the first to the last that a row of the tile sees; all of them, when a mistake reaches others too.
    void find_keys() {
        first_key_ = 0, keys_ = k_.rows();
        if (has(M::mask_ignored_backward) || has(M::dbias_last_tile) || has(M::dbias_last_head)) return;
        if (std::ranges::any_of(mistakes_.points(), [](const Point& p) {
                return is_of_tiles(p.change) || p.change == Change::not_a_number;
            }))
            return;
        const auto hidden = [this](Index j) {
            return std::none_of(seen_.begin(), seen_.end(),
                                [j](const auto& row) { return row[static_cast<std::size_t>(j)] != 0; });
        };
        while (keys_ > 0 && hidden(keys_ - 1)) --keys_;
        while (first_key_ < keys_ && hidden(first_key_)) ++first_key_;
        keys_ -= first_key_;
    }

    // Of each tile of rows those tiles of keys, after one that none of them sees.
    void lose_tiles() {
        const auto right = seen_;
        const auto rows = static_cast<Index>(right.size()), all = k_.rows();
        for (Index i = 0; i < rows; ++i) {
            const auto first = right.begin() + i / attention_tile * attention_tile,
                       last = right.begin() + std::min(i / attention_tile * attention_tile + attention_tile, rows);
            for (Index j = attention_tile; j < all; j += attention_tile) {
                const bool dead = std::none_of(first, last, [j](const auto& row) {
                    return std::any_of(row.begin() + j - attention_tile, row.begin() + j,
                                       [](char s) { return s != 0; });
                });
                auto& row = seen_[static_cast<std::size_t>(i)];
                if (dead) std::fill(row.begin() + j, row.begin() + std::min(j + attention_tile, all), 0);
            }
        }
    }

    auto keys() const { return k_.middleRows(first_key_, keys_); }
    auto values() const { return v_.middleRows(first_key_, keys_); }

    // s = softcap(scale q kᵀ) + bias of rows [first, first + count)
    void score(Index first, Index count) {
        // A matrix of Eigen that gets another size frees its memory, and again in its destructor where there is no
        // new: so all begin empty.
        for (Matrix* m : {&q_, &o_, &s_, &slope_, &p_, &unscaled_}) *m = Matrix();
        lse_ = Vector();
        dead_.assign(static_cast<std::size_t>(count), false);
        first_ = first;
        q_ = c_.q.rows(at_.batch, at_.q_begin + first, count, h_);
        change_.value("q", q_);
        seen_.resize(static_cast<std::size_t>(count));
        for (Index i = 0; i < count; ++i)
            find_seen(c_, mistakes_, at_, h_, first + i, seen_[static_cast<std::size_t>(i)]);
        if (change_.has("tile seen", Change::stale)) lose_tiles();
        if (change_.has(dead_rows, Change::unmasked))
            for (auto& row : seen_)
                if (std::ranges::find(row, 1) == row.end()) std::ranges::fill(row, 1);
        find_keys();
        const double cap = has(M::softcap_ignored) ? 0 : change_.value("softcap", c_.call.attention_options.softcap);
        s_ = multiply_bt(q_, keys());
        if (has(M::value_size_in_scale))
            s_ /= std::sqrt(static_cast<double>(v_.cols()));
        else if (!has(M::scores_without_scale))
            s_ *= scale_;
        change_.value("q kᵀ", s_);
        slope_ = Matrix::Ones(s_.rows(), s_.cols());
        for (Index i = 0; i < s_.rows(); ++i)
            for (Index j = 0; j < s_.cols(); ++j) {
                const double b = (has(M::bias_scaled) ? c_.scale : 1) * change_.value("bias", bias(i, j));
                if (has(M::softcap_after_bias)) s_(i, j) += b;
                if (cap > 0) {
                    const double y = std::tanh(s_(i, j) / cap);
                    s_(i, j) = cap * y;
                    slope_(i, j) = 1 - y * y;
                }
                if (!has(M::softcap_after_bias)) s_(i, j) += b;
            }
        change_.value("slope", slope_);
    }

    // A kernel that goes over tiles of keys without rescaling what it has summed when the maximum grows: e^(s − m) with
    // the m of its tile.
    void keep_maxima(Index i, double top) {
        Vector tile_top = Vector::Constant(keys_, top);
        double running = sink_;
        for (Index begin = 0; begin < keys_; begin += attention_tile) {
            const Index end = std::min(begin + attention_tile, keys_);
            for (Index j = begin; j < end; ++j)
                if (seen(i, j)) running = std::max(running, s_(i, j));
            tile_top.segment(begin, end - begin).setConstant(running);
        }
        for (Index j = 0; j < keys_; ++j)
            if (seen(i, j)) unscaled_(i, j) = std::exp(s_(i, j) - tile_top[j]);
    }

    // No row of the tile sees a key.
    bool is_dead() const { return (lse_.array() == -infinity).all(); }

    double empty_lse() const {
        switch (c_.call.attention_options.empty_row) {
            case EmptyRow::minus_infinity:
                return -infinity;
            case EmptyRow::plus_infinity:
                return infinity;
            case EmptyRow::zero:
                break;
        }
        return 0;
    }

    void forward() {
        const Index rows = q_.rows();
        lse_ = Vector::Constant(rows, -infinity);
        p_ = Matrix::Zero(rows, keys_);
        const bool tiled = mistakes_.changes("sum of o") || mistakes_.changes("sum of l");
        unscaled_ = Matrix::Zero(tiled ? rows : 0, keys_);
        for (Index i = 0; i < rows; ++i) {
            double top = sink_;
            for (Index j = 0; j < s_.cols(); ++j)
                if (seen(i, j)) top = std::max(top, s_(i, j));
            dead_[static_cast<std::size_t>(i)] = top == -infinity;
            if (top == -infinity) continue;
            double keys = 0;
            for (Index j = 0; j < s_.cols(); ++j)
                if (seen(i, j)) keys += p_(i, j) = std::exp(s_(i, j) - top);
            if (tiled) keep_maxima(i, top);
            if (mistakes_.changes("sum of l")) keys = sum_of_tiles(i);
            keys = change_.value("l", keys);
            const double with_sink = keys + std::exp(sink_ - top);
            const bool kept = change_.has("sum of o", Change::not_rescaled);
            if (kept) p_.row(i) = unscaled_.row(i);
            if (change_.has("sum of o", Change::last_only)) p_.row(i).head(last_tile()).setZero();
            if (change_.has("sum of o", Change::first_only))
                p_.row(i).tail(std::max<Index>(keys_ - attention_tile, 0)).setZero();
            if (!has(M::o_not_normalised)) p_.row(i) /= has(M::sink_not_in_sum) ? keys : with_sink;
            const double sum = has(M::sink_not_in_lse) || has(M::sink_not_in_sum) ? keys : with_sink;
            lse_[i] = change_.value("m in lse", has(M::lse_without_maximum) ? 0 : top) +
                      change_.value("ln l in lse", std::log(sum));
        }
        change_.value("p", p_);
        o_ = multiply(p_, values());
        for (Index i = 0; i < rows; ++i) {
            if (!dead_[static_cast<std::size_t>(i)]) continue;
            o_.row(i).setZero();
            if (has(M::dead_row_nan) || change_.has(dead_rows, Change::not_a_number))
                o_.row(i).setConstant(std::nan(""));
            if (has(M::dead_row_mean)) o_.row(i) = v_.colwise().mean();
        }
        if (has(M::delta_after_rounding))
            o_ = o_.unaryExpr([this](double x) { return stored(c_.call.attention.v, x); });
        change_.value("o", o_);
        results_.at("o").rows(at_.batch, at_.q_begin + first_, rows, h_) = o_;
        for (Index i = 0; i < rows; ++i)
            results_.at("lse")[lse_place(i)] =
                (lse_[i] == -infinity ? empty_lse() : lse_[i]) / (has(M::lse_log2) ? std::numbers::ln2 : 1);
    }

    Index last_tile() const { return std::max<Index>(keys_ - 1, 0) / attention_tile * attention_tile; }

    double sum_of_tiles(Index i) const {
        const auto row = p_.row(i);
        if (change_.has("sum of l", Change::not_rescaled)) return unscaled_.row(i).sum();
        if (change_.has("sum of l", Change::last_only)) return row.tail(keys_ - last_tile()).sum();
        if (change_.has("sum of l", Change::first_only)) return row.head(std::min(attention_tile, keys_)).sum();
        return row.sum();
    }

    Index lse_place(Index i) const { return (at_.batch * c_.q.size(2) + h_) * c_.q.size(1) + at_.q_begin + first_ + i; }

    void backward() {
        Matrix d_o = c_.d_o.rows(at_.batch, at_.q_begin + first_, q_.rows(), h_);
        change_.value("do", d_o);
        Matrix dp = multiply_bt(d_o, values());
        change_.value("dp", dp);
        Vector D = d_o.cwiseProduct(o_).rowwise().sum();
        change_.value("D", D);
        Matrix p = Matrix::Zero(dp.rows(), dp.cols()), ds = p;
        for (Index i = 0; i < p.rows(); ++i) {
            if (lse_[i] == -infinity && change_.has(dead_rows, Change::not_a_number)) {
                p.row(i).setConstant(std::nan(""));
                ds.row(i).setConstant(std::nan(""));
            }
            if (lse_[i] == -infinity) continue;
            const double dlse = change_.value("dlse", c_.dlse ? c_.dlse[lse_place(i)] : 0);
            double delta = has(M::without_delta) ? 0 : D[i];
            if (!has(M::dlse_ignored)) delta += has(M::dlse_sign) ? dlse : -dlse;
            for (Index j = 0; j < p.cols(); ++j)
                if (seen(i, j) || has(M::mask_ignored_backward)) {
                    p(i, j) = std::exp(s_(i, j) - lse_[i]);
                    ds(i, j) = change_.value("p in ds", p(i, j)) * (dp(i, j) - delta);
                }
            if (!c_.sink) continue;
            const double weight = has(M::dsink_without_p) ? 1 : std::exp(sink_ - lse_[i]);
            results_.at("dsink")[h_] += (has(M::dsink_sign) ? 1 : -1) * weight * delta;
        }
        if (c_.bias) add_bias_gradient(ds);
        if (!has(M::without_softcap_slope)) ds = ds.cwiseProduct(slope_).eval();
        change_.value("ds", ds);
        const auto scale = [this](M without, M twice) {
            return has(without) ? 1 : has(twice) ? scale_ * scale_ : scale_;
        };
        Matrix ds_q = ds, ds_k = ds;
        change_.value("ds in dq", ds_q);
        change_.value("ds in dk", ds_k);
        change_.value("p in dv", p);
        if (change_.has("sum of dq", Change::last_only)) ds_q.leftCols(last_tile()).setZero();
        if (change_.has("sum of dq", Change::first_only))
            ds_q.rightCols(std::max<Index>(keys_ - attention_tile, 0)).setZero();
        results_.at("dq").rows(at_.batch, at_.q_begin + first_, q_.rows(), h_) =
            multiply(ds_q, keys(), scale(M::dq_without_scale, M::dq_scaled_twice));
        const auto add = [&](const char* place, Matrix& sum, const Matrix& d) {
            if (change_.has(place, Change::last_only)) sum.setZero();
            if (first_ == 0 || !change_.has(place, Change::first_only)) sum.middleRows(first_key_, keys_) += d;
        };
        add("sum of dk", dk_, multiply_at(ds_k, q_, scale(M::dk_without_scale, M::dk_scaled_twice)));
        add("sum of dv", dv_, multiply_at(has(M::dv_from_ds) ? ds : p, d_o));
    }

    void add_bias_gradient(const Matrix& ds) {
        Dense& dbias = results_.at("dbias");
        const double factor = (has(M::dbias_scaled) ? c_.scale : 1) * (c_.bias_slopes ? c_.bias_slopes[h_] : 1);
        for (Index i = 0; i < ds.rows(); ++i)
            for (Index j = 0; j < ds.cols(); ++j) {
                const Index column = has(M::dbias_over_keys) ? first_ + i : first_key_ + j;
                double& to = dbias[place_in(dbias, at_, c_.q.size(2), h_, first_ + i, column)];
                if (has(M::dbias_last_tile) && i == 0) to = 0;
                const bool first = (dbias.size(2) > 1 || first_ + i == 0) && (dbias.size(3) > 1 || j == 0);
                if (has(M::dbias_last_head) && first) to = 0;
                to += factor * ds(i, j);
                if (has(M::dbias_rounded_by_tile) && i + 1 == ds.rows()) to = stored(c_.call.attention.bias, to);
            }
    }

    const AttentionCall& c_;
    const Mistakes& mistakes_;
    Changer change_;
    double scale_;
    AttentionPlace at_;
    Index h_, hk_ = 0;
    bool first_of_group_ = true;
    Results& results_;
    bool backward_;
    double sink_ = -infinity;
    Matrix k_, v_, dk_, dv_;  // [Lk, D], [Lk, Dv]
    Index first_ = 0;         // row of the tile
    Index first_key_ = 0, keys_ = 0;
    Matrix q_, o_;                     // [rows, D], [rows, Dv]
    Matrix s_, slope_, p_, unscaled_;  // [rows, keys]
    Vector lse_;                       // [rows]
    std::vector<bool> dead_;           // rows without a key
    std::vector<std::vector<char>> seen_;
};

}  // namespace

AttentionCall::AttentionCall(const io::Call& c)
    : call(c),
      scale(std::isnan(c.attention_options.scale) ? 1 / std::sqrt(static_cast<double>(c.attention.q.shape(3)))
                                                  : c.attention_options.scale),
      q(c.attention.q),
      k(c.attention.k),
      v(c.attention.v),
      mask(c.attention.mask),
      bias(c.attention.bias),
      sink(c.attention.sink),
      alibi_slopes(c.attention.alibi_slopes),
      bias_slopes(c.attention.bias_slopes),
      d_o(c.d_o),
      dlse(c.dlse) {}

Results AttentionCall::run(const Mistakes& mistakes) const {
    Results results = make_results(call);
    for (Index n = 0; n < attention_sequences(*this); ++n)
        for (Index h = 0; h < q.size(2); ++h)
            HeadRun(*this, mistakes, attention_place(call, mistakes, n), h, results).run();
    Changer(mistakes, scale, static_cast<double>(q.size(2)) / static_cast<double>(k.size(2))).written(call, results);
    return results;
}

}  // namespace softdelta::diagnose

#include "engines/stages/attention/head.h"

#include <algorithm>
#include <cmath>

namespace softdelta::stages::attention {

namespace {

// Bits for one score: the same whenever it is formed.
std::uint64_t draw_for_score(std::uint64_t seed, Index head, Index query, Index key) {
    std::uint64_t x = seed;
    for (const Index i : {head, query, key}) {
        x += 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(i);
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x ^= x >> 31;
    }
    return x;
}

}  // namespace

template <class T>
Head<T>::Head(const core::AttentionInputs& in, const core::AttentionOptions& options, const core::Execution& execution)
    : in_(in),
      options_(options),
      chunk_(execution.chunk_size),
      seed_(std::is_same_v<T, float> ? execution.rounding_seed : 0),
      base_2_(execution.shortcuts) {}

template <class T>
void Head<T>::enter(Index sequence, Index h) {
    sequence_ = core::sequence(in_, sequence);
    h_ = h;
    mask_ = AttentionMask<T>(in_, options_, sequence_, h);
    seen_keys_.clear();
    if (!holds_all_keys()) return;
    key_begin_ = 0;
    key_count_ = sequence_.k_count;
    load_keys();
}

// Keys that no query sees contribute nothing, whatever is stored there.
template <class T>
void Head<T>::load_keys() {
    const Index held = holds_all_keys() ? sequence_.k_count : chunk_;
    tile_in(k_, held, in_.k.shape[3]);
    tile_in(v_, held, in_.v.shape[3]);
    Tile<T> keys = k(), values = v();
    const Index hk = h_ / (in_.q.shape[2] / in_.k.shape[2]);
    for (Index j = 0; j < key_count_; ++j) {
        const Index key = key_begin_ + j;
        core::load_key_row(in_, in_.k, sequence_, hk, key, keys.cols(), keys.row(j).data());
        core::load_key_row(in_, in_.v, sequence_, hk, key, values.cols(), values.row(j).data());
        if (keys.row(j).allFinite() && values.row(j).allFinite()) continue;
        if (seen_keys_.empty()) seen_keys_ = mask_.seen_keys();
        if (seen_keys_[static_cast<std::size_t>(key)]) continue;
        keys.row(j).setZero();
        values.row(j).setZero();
    }
}

template <class T>
void Head<T>::enter_queries(Index begin) {
    query_begin_ = begin;
    query_count_ = std::min(chunk_, sequence_.q_count - begin);
    mask_.set_queries(begin, query_count_);
    load_rows(in_.q, q());
}

template <class T>
bool Head<T>::load_tile(Index begin) {
    key_begin_ = begin;
    key_count_ = std::min(chunk_, sequence_.k_count - begin);
    coverage_ = mask_.load_tile(begin, key_count_, tile_in(addend_, query_count_, key_count_).data());
    if (coverage_ != Coverage::empty && !holds_all_keys()) load_keys();
    return coverage_ != Coverage::empty;
}

template <class T>
void Head<T>::compute_scores() {
    Tile<T> score = s();
    multiply_bt(1, q(), k(), score);  // [rows, D] · [keys, D]ᵀ
    score *= static_cast<T>(options_.scale);
    if (options_.softcap > 0) {
        const T cap = static_cast<T>(options_.softcap);
        const auto x = score.array() / cap;
        slope().array() = (T(-2) * x.abs()).exp();  // e, then 1 − tanh² = 4e / (1 + e)², which does not cancel
        slope().array() = T(4) * slope().array() / (T(1) + slope().array()).square();
        score.array() = cap * x.tanh();
    }
    if (coverage_ == Coverage::partial) {
        const auto addend = tile_in(addend_, query_count_, key_count_).array();
        constexpr T hidden = -std::numeric_limits<T>::infinity();
        if (seed_ != 0) disturb_scores();
        score.array() = (addend == hidden).select(hidden, score.array() + addend);
    } else if (seed_ != 0) {
        disturb_scores();
    }
    if (base_2_) score *= per_score();
}

// Kernels round large scores differently: they multiply by scale or log2 e sooner or later, add the bias before or
// after. Up to an ulp of the score itself, and a quarter of one of its sum with the bias: less than half, so that
// where the bias swallows all scores they stay equal, as in every kernel.
template <class T>
void Head<T>::disturb_scores() {
    constexpr float large = 0x1p4f, unit = 0x1p-23f;  // of smaller ones other rounding hides it
    Tile<T> score = s();
    const bool partial = coverage_ == Coverage::partial;
    const Tile<T> addend = tile_in(addend_, query_count_, key_count_);
    constexpr T hidden = -std::numeric_limits<T>::infinity();
    if (!(score.array().abs() >= T(large)).any() &&
        !(partial && (addend.array().abs() >= T(large) && addend.array() > hidden).any()))
        return;
    for (Index i = 0; i < score.rows(); ++i)
        for (Index j = 0; j < score.cols(); ++j) {
            const float x = static_cast<float>(score(i, j)), b = partial ? static_cast<float>(addend(i, j)) : 0;
            const float size = std::max(std::abs(x), std::abs(b));
            if (!(size >= large) || !std::isfinite(size)) continue;
            const std::uint64_t bits = draw_for_score(seed_, h_, query(i), key_begin_ + j);
            const float own = static_cast<float>(bits >> 40) * 0x1p-23f - 1;
            const float shared = static_cast<float>(bits & 0xffffffu) * 0x1p-23f - 1;
            const float ulp = std::nextafter(std::abs(x + b), HUGE_VALF) - std::abs(x + b);
            score(i, j) = static_cast<T>(x + own * unit * x + (std::isfinite(ulp) ? shared * ulp / 4 : 0));
        }
}

// Adds the current tile to the running softmax: o and sum are relative to e^largest. No exponent is positive.
template <class T>
void Head<T>::absorb_tile(Rounding& rounding, Tile<T> o, Tile<T> largest, Tile<T> sum) {
    Tile<T> p = s();
    for (Index i = 0; i < p.rows(); ++i) {
        auto row = p.row(i).array();
        const T before = largest(i, 0);
        largest(i, 0) = std::max(before, row.maxCoeff());
        if (largest(i, 0) == -std::numeric_limits<T>::infinity()) {
            row.setZero();
            continue;
        }
        row = (row - largest(i, 0)) * per_exponent();
        exponentiate(row);
        const T decay = std::exp((before - largest(i, 0)) * per_exponent());
        sum(i, 0) = sum(i, 0) * decay + row.sum();
        o.row(i) *= decay;
    }
    rounding.operand(p.data(), p.size());
    add_product(1, p, v(), o);  // [rows, keys] · [keys, Dv]
}

template <class T>
void Head<T>::attend(Rounding& rounding, core::DType o_type, core::DType lse_type, Tile<T> o, Tile<T> lse) {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    const T sink = in_.sink ? static_cast<T>(core::load(in_.sink, in_.sink.offset({h_}))) * per_score() : -infinity;
    Tile<T> largest = subtrahend(), sum = log_sum();
    largest.setConstant(sink);  // a sink is a first key without a value
    sum.setConstant(sink > -infinity ? T(1) : T(0));
    o.setZero();
    for (Index j = 0; j < sequence_.k_count && sink != infinity; j += chunk_) {
        if (!load_tile(j)) continue;
        compute_scores();
        absorb_tile(rounding, o, largest, sum);
    }
    for (Index i = 0; i < query_count_; ++i) {
        const bool empty = sum(i, 0) == 0;
        const T log_sum = empty ? infinity : std::log(sum(i, 0)) * per_score();
        lse(i, 0) = empty ? infinity : (largest(i, 0) + log_sum) * per_exponent();
        if (!empty) o.row(i) /= sum(i, 0);
        if (empty) largest(i, 0) = 0;
        sum(i, 0) = log_sum;
    }
    rounding.stored(o.data(), o.size(), o_type);
    rounding.stored(lse.data(), lse.size(), lse_type);
    for (Index i = 0; i < query_count_; ++i)
        if (keeps_probabilities(lse(i, 0))) use_lse(i, lse(i, 0));
}

// A row without a key has lse = −∞ or another convention: no exponential of it is more than 0.
template <class T>
void Head<T>::use_lse(Index i, T lse) {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    subtrahend()(i, 0) = 0;
    log_sum()(i, 0) = lse == -infinity ? infinity : lse * per_score();
}

// A query that sees no key contributes nothing, whatever is stored there.
template <class T>
void Head<T>::load_rows(const Tensor& t, Tile<T> rows) {
    for (Index i = 0; i < rows.rows(); ++i) {
        auto row = rows.row(i);
        core::load_row(t, t.offset({sequence_.batch, query(i), h_, 0}), 3, rows.cols(), row.data());
        if (!row.allFinite() && !mask_.sees_any_key(query_begin_ + i)) row.setZero();
    }
}

template <class T>
void Head<T>::store_rows(const Tensor& t, const Tile<T>& rows) const {
    for (Index i = 0; i < rows.rows(); ++i)
        core::store_row(t, t.offset({sequence_.batch, query(i), h_, 0}), 3, rows.cols(), rows.row(i).data());
}

template <class T>
void Head<T>::load_numbers(const Tensor& t, Tile<T> numbers) const {
    core::load_row(t, t.offset({sequence_.batch, h_, query(0)}), 2, numbers.size(), numbers.data());
}

template <class T>
void Head<T>::store_numbers(const Tensor& t, const Tile<T>& numbers) const {
    core::store_row(t, t.offset({sequence_.batch, h_, query(0)}), 2, numbers.size(), numbers.data());
}

template <class T>
void Head<T>::store_lse(const Tensor& t, const Tile<T>& lse) {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    const bool has_sink =
        in_.sink && core::load(in_.sink, in_.sink.offset({h_})) > -std::numeric_limits<double>::infinity();
    const T empty = has_sink                                               ? infinity
                    : options_.empty_row == core::EmptyRow::minus_infinity ? -infinity
                    : options_.empty_row == core::EmptyRow::plus_infinity  ? infinity
                                                                           : T(0);
    Tile<T> shown = tile_in(shown_lse_, lse.rows(), 1);
    shown.array() = (lse.array() == infinity).select(empty, lse.array());
    store_numbers(t, shown);
}

template class Head<double>;
template class Head<float>;

}  // namespace softdelta::stages::attention

#include "engines/stages/attention/mask.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <limits>

namespace softdelta::stages::attention {

namespace {

template <class T>
constexpr T minus_infinity = -std::numeric_limits<T>::infinity();

// A row of it can then be read by its stride alone.
Tensor repeat_single_key(Tensor t) {
    if (t && t.shape[3] == 1) t.stride[3] = 0;
    return t;
}

}  // namespace

template <class T>
AttentionMask<T>::AttentionMask(const core::AttentionInputs& in, const core::AttentionOptions& options,
                                const core::AttentionSequence& sequence, Index head)
    : mask_(repeat_single_key(in.mask)),
      bias_(repeat_single_key(in.bias)),
      batch_(sequence.mask_batch),
      queries_(sequence.q_count),
      keys_(sequence.k_count),
      top_w_(options.top_w),
      has_slopes_(in.bias_slopes || in.alibi_slopes),
      bias_slope_(static_cast<T>(core::bias_slope(in, head))) {
    const Index heads = in.q.shape[2];
    if (in.alibi_slopes) alibi_slope_ = static_cast<T>(core::load(in.alibi_slopes, in.alibi_slopes.offset({head})));
    if (mask_) mask_head_ = core::shared_head(mask_, head, heads);
    if (bias_) bias_head_ = core::shared_head(bias_, head, heads);

    const Index diagonal = options.shift + (options.causal == core::Causal::top_left ? 0 : keys_ - queries_);
    const Index far = keys_ + queries_ + std::abs(options.shift);  // beyond every key, from every query
    const auto reach = [far](Index window) { return window < 0 ? far : std::min(window, far); };
    low_ = diagonal - reach(options.window_left);
    high_ = diagonal + reach(options.window_right);
    if (options.causal != core::Causal::none) high_ = std::min(high_, diagonal);
}

template <class T>
auto AttentionMask<T>::key_range(Index i) const -> KeyRange {
    return {std::max<Index>(0, i + low_), std::min(keys_, i + high_ + 1)};
}

// bias_slope·bias − alibi_slope·|i + Lk − Lq − j|: −∞ stays −∞, and a finite number stays finite.
template <class T>
void AttentionMask<T>::apply_slopes(Index i, Index begin, Index count, T* addend) const {
    constexpr T most = std::numeric_limits<T>::max();
    for (Index j = 0; j < count; ++j) {
        if (addend[j] == minus_infinity<T>) continue;
        const auto distance = static_cast<T>(std::abs(i + keys_ - queries_ - (begin + j)));
        addend[j] = std::clamp(bias_slope_ * addend[j] - alibi_slope_ * distance, -most, most);
    }
}

// Everything but the dynamic mask.
template <class T>
void AttentionMask<T>::load_addends(Index i, Index begin, Index count, T* addend) const {
    if (bias_) {
        core::load_row(bias_, bias_.offset({batch_, bias_head_, i, begin}), 3, count, addend);
    } else {
        std::fill_n(addend, count, T(0));
    }
    if (has_slopes_) apply_slopes(i, begin, count, addend);
    if (mask_) {
        const Index at = mask_.offset({batch_, mask_head_, i, begin});
        for (Index j = 0; j < count; ++j)
            if (core::load(mask_, at + j * mask_.stride[3]) == 0) addend[j] = minus_infinity<T>;
    }
    const auto [low, high] = key_range(i);
    const Index first = std::clamp<Index>(low - begin, 0, count), last = std::clamp<Index>(high - begin, first, count);
    std::fill(addend, addend + first, minus_infinity<T>);
    std::fill(addend + last, addend + count, minus_infinity<T>);
}

template <class T>
void AttentionMask<T>::hide_below_top_k(const TopK& top_k, Index begin, Index count, T* addend) const {
    for (Index j = 0; j < count; ++j)
        if (!top_k.keeps(addend[j], begin + j)) addend[j] = minus_infinity<T>;
}

// Keeps the top_w largest addends of row i, ties to the lower key.
template <class T>
auto AttentionMask<T>::find_top_k(Index i) -> TopK {
    row_.resize(static_cast<std::size_t>(keys_));
    load_addends(i, 0, keys_, row_.data());
    candidates_.clear();
    std::copy_if(row_.begin(), row_.end(), std::back_inserter(candidates_), [](T x) { return x > minus_infinity<T>; });
    if (static_cast<Index>(candidates_.size()) <= top_w_) return {minus_infinity<T>, -1};

    const auto smallest_kept = candidates_.begin() + (top_w_ - 1);
    std::nth_element(candidates_.begin(), smallest_kept, candidates_.end(), std::greater<T>());
    const T value = *smallest_kept;
    Index ties = top_w_ - std::count_if(row_.begin(), row_.end(), [value](T x) { return x > value; });
    Index last = -1;
    while (ties > 0)
        if (row_[static_cast<std::size_t>(++last)] == value) --ties;
    return {value, last};
}

template <class T>
void AttentionMask<T>::set_queries(Index begin, Index count) {
    begin_ = begin;
    count_ = count;
    top_k_.clear();
    if (top_w_ < 0) return;
    for (Index i = begin; i < begin + count; ++i) top_k_.push_back(find_top_k(i));
}

template <class T>
Coverage AttentionMask<T>::load_tile(Index begin, Index count, T* addend) {
    const KeyRange first = key_range(begin_), last = key_range(begin_ + count_ - 1);
    if (last.end <= begin || first.begin >= begin + count) return Coverage::empty;
    const bool whole = last.begin <= begin && first.end >= begin + count;
    if (whole && !mask_ && !bias_ && !has_slopes_ && top_w_ < 0) return Coverage::full;

    for (Index r = 0; r < count_; ++r) {
        load_addends(begin_ + r, begin, count, addend + r * count);
        if (top_w_ >= 0) hide_below_top_k(top_k_[static_cast<std::size_t>(r)], begin, count, addend + r * count);
    }
    const bool all_hidden = std::all_of(addend, addend + count_ * count, [](T x) { return x == minus_infinity<T>; });
    return all_hidden ? Coverage::empty : Coverage::partial;
}

template <class T>
const std::vector<T>& AttentionMask<T>::load_whole_row(Index i) {
    const TopK top_k = top_w_ < 0 ? TopK{} : find_top_k(i);
    row_.resize(static_cast<std::size_t>(keys_));
    load_addends(i, 0, keys_, row_.data());
    if (top_w_ >= 0) hide_below_top_k(top_k, 0, keys_, row_.data());
    return row_;
}

template <class T>
bool AttentionMask<T>::sees_any_key(Index i) {
    const std::vector<T>& row = load_whole_row(i);
    return std::any_of(row.begin(), row.end(), [](T x) { return x != minus_infinity<T>; });
}

template <class T>
std::vector<bool> AttentionMask<T>::seen_keys() {
    std::vector<bool> seen(static_cast<std::size_t>(keys_));
    for (Index i = 0; i < queries_; ++i) {
        const std::vector<T>& row = load_whole_row(i);
        for (std::size_t j = 0; j < row.size(); ++j)
            if (row[j] != minus_infinity<T>) seen[j] = true;
    }
    return seen;
}

template class AttentionMask<double>;
template class AttentionMask<float>;

}  // namespace softdelta::stages::attention

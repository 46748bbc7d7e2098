#include "diagnose/replay/attention_seen.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

namespace softdelta::diagnose {

namespace {

using M = Mistake;

bool is_seen(const AttentionCall& c, const Mistakes& mistakes, const AttentionPlace& at, Index h, Index i, Index j) {
    const AttentionOptions& options = c.call.attention_options;
    const bool top_left = options.causal == Causal::top_left ||
                          (options.causal == Causal::bottom_right && mistakes.has(M::top_left_for_bottom_right));
    const Index diagonal = i + (top_left ? 0 : at.k_count - at.q_count);
    const Index last = diagonal + mistakes.has(M::causal_one_more) - mistakes.has(M::causal_strict);
    if (options.causal != Causal::none && j > last && !mistakes.has(Point{"causal", Change::missing})) return false;
    const Index far = at.q_count + at.k_count;  // beyond every key, from every query
    Index left = std::min(options.window_left, far), right = std::min(options.window_right, far);
    if (mistakes.has(Point{"window", Change::missing})) left = right = far;
    if (mistakes.has(Point{"window", Change::doubled})) left *= 2, right *= 2;
    if (mistakes.has(Point{"window", Change::halved})) left /= 2, right /= 2;
    left += mistakes.has(M::window_left_off_by_one), right += mistakes.has(M::window_right_off_by_one);
    const Index middle = mistakes.has(M::window_from_top_left) ? i : diagonal;
    if (options.window_left >= 0 && j < middle - left) return false;
    if (options.window_right >= 0 && j > middle + right) return false;
    const Index heads = c.q.size(2);
    if (c.bias && c.bias[place_in(c.bias, at, heads, h, i, j)] == -std::numeric_limits<double>::infinity())
        return false;
    if (!c.mask || mistakes.has(Point{"mask", Change::missing})) return true;
    AttentionPlace masked = at;
    if (mistakes.has(M::mask_of_first_batch)) masked.index = 0;
    return c.mask[place_in(c.mask, masked, heads, h, i, j)] != 0;
}

// Dynamic mask: the top_w largest biases stay, ties to the lower index.
void keep_largest(const AttentionCall& c, const AttentionPlace& at, Index h, Index i, std::vector<char>& seen) {
    std::vector<Index> order;
    for (Index j = 0; j < at.k_count; ++j)
        if (seen[static_cast<std::size_t>(j)]) order.push_back(j);
    const auto bias = [&](Index j) { return addend_of(c, at, h, i, j); };
    std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return bias(a) > bias(b); });
    for (auto rank = static_cast<std::size_t>(c.call.attention_options.top_w); rank < order.size(); ++rank)
        seen[static_cast<std::size_t>(order[rank])] = 0;
}

}  // namespace

AttentionPlace attention_place(const io::Call& call, const Mistakes& mistakes, Index n) {
    const AttentionInputs& in = call.attention;
    const io::Bounds &queries = call.packing.queries, &keys = call.packing.keys;
    const auto i = static_cast<std::size_t>(n);
    AttentionPlace place{n, n, n, 0, in.q.shape(1), 0, in.k.shape(1)};
    if (!queries.empty()) place.batch = 0, place.q_begin = queries[i], place.q_count = queries[i + 1] - place.q_begin;
    if (!keys.empty()) {
        place.key_batch = 0, place.k_begin = keys[i], place.k_count = keys[i + 1] - place.k_begin;
        constexpr Index leak = 3;
        if (mistakes.has(M::sequences_leak))
            place.k_count = std::min(place.k_count + leak, in.k.shape(1) - place.k_begin);
    }
    if (in.cache_seqlens) place.k_count = static_cast<Index>(Dense(in.cache_seqlens)[n]);
    return place;
}

double addend_of(const AttentionCall& c, const AttentionPlace& at, Index h, Index i, Index j) {
    double sum = c.bias ? c.bias[place_in(c.bias, at, c.q.size(2), h, i, j)] : 0;
    if (sum == -std::numeric_limits<double>::infinity()) return sum;
    if (c.bias_slopes) sum *= c.bias_slopes[h];
    if (c.alibi_slopes) sum -= c.alibi_slopes[h] * static_cast<double>(std::abs(i + at.k_count - at.q_count - j));
    return sum;
}

void find_seen(const AttentionCall& c, const Mistakes& mistakes, const AttentionPlace& at, Index h, Index i,
               std::vector<char>& seen) {
    seen.resize(static_cast<std::size_t>(at.k_count));
    for (Index j = 0; j < at.k_count; ++j) seen[static_cast<std::size_t>(j)] = is_seen(c, mistakes, at, h, i, j);
    if (c.call.attention_options.top_w >= 0 && c.bias) keep_largest(c, at, h, i, seen);
    if (!mistakes.has(M::tile_lost_after_empty_one)) return;
    for (Index j = attention_tile; j < at.k_count; j += attention_tile) {
        const auto begin = seen.begin() + j, end = seen.begin() + std::min(j + attention_tile, at.k_count);
        if (std::none_of(begin - attention_tile, begin, [](char s) { return s != 0; })) std::fill(begin, end, 0);
    }
}

}  // namespace softdelta::diagnose

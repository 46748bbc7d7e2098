#include "engines/reference/attention/rows.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace softdelta::reference {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr Index tile_keys = 64;

// Dynamic mask: of the keys that a row still sees, the `kept` with the largest bias stay, ties to the lower index.
void keep_largest(Index kept, Index keys, double* bias, Index* order) {
    Index seen = 0;
    for (Index j = 0; j < keys; ++j)
        if (bias[j] != -infinity) order[seen++] = j;
    if (seen <= kept) return;
    const auto rank = [bias](Index j) { return std::isnan(bias[j]) ? infinity : bias[j]; };  // NaN must show
    const auto before = [rank](Index a, Index b) { return rank(a) > rank(b) || (rank(a) == rank(b) && a < b); };
    std::nth_element(order, order + kept, order + seen, before);
    for (Index i = kept; i < seen; ++i) bias[order[i]] = -infinity;
}

// ALiBi: −slope·|i + Lk − Lq − j| for key j of row r.
void add_alibi(const KeyHead& head, Index r, Range keys, double* row) {
    const core::Tensor& slopes = head.in->alibi_slopes;
    const double slope = core::load(slopes, slopes.offset({head.head(r)}));
    const Index diagonal = head.query(r) + head.sequence.k_count - head.sequence.q_count;
    for (Index j = keys.begin; j < keys.end; ++j) row[j] -= slope * static_cast<double>(std::abs(diagonal - j));
}

// What is added to the scores of row r: its bias or 0, and −∞ for every key that it may not see.
void load_bias(const KeyHead& head, Index r, Range keys, RowScratch& scratch) {
    const core::Tensor &mask = head.in->mask, &bias = head.in->bias;
    const auto step = [](const core::Tensor& t) { return t.shape[3] == 1 ? 0 : t.stride[3]; };
    double* row = scratch.bias.data() - keys.begin;
    std::fill_n(scratch.bias.data(), keys.count(), -infinity);
    const Range near = head.keys(r);
    std::fill(row + near.begin, row + near.end, 0.0);
    if (bias) {
        const Index at = head.mask_offset(bias, r);
        const double slope = core::bias_slope(*head.in, head.head(r));
        for (Index j = near.begin; j < near.end; ++j) {
            const double x = core::load(bias, at + j * step(bias));
            row[j] = x == -infinity ? x : slope * x;
        }
    }
    if (head.in->alibi_slopes) add_alibi(head, r, near, row);
    if (mask) {
        const Index at = head.mask_offset(mask, r);
        for (Index j = near.begin; j < near.end; ++j)
            if (core::load(mask, at + j * step(mask)) == 0) row[j] = -infinity;
    }
    if (head.options->top_w >= 0)
        keep_largest(head.options->top_w, keys.count(), scratch.bias.data(), scratch.order.data());
}

void cap_scores(double cap, Index n, double* x, double* slope) {
    for (Index j = 0; j < n; ++j) {
        const double u = x[j] / cap;
        x[j] = cap * std::tanh(u);
        const double c = slope != nullptr ? std::cosh(u) : 1;
        if (slope != nullptr) slope[j] = 1 / (c * c);  // 1 − tanh² has no digits left where tanh saturates
    }
}

// A score as f32 keeps it. What is beyond its range stays the largest number.
double to_float_score(double x, double bias) {
    constexpr double most = std::numeric_limits<float>::max();
    const double score = static_cast<double>(static_cast<float>(x)) + bias;
    return std::isnan(score) ? score : static_cast<double>(static_cast<float>(std::clamp(score, -most, most)));
}

double empty_lse(core::EmptyRow convention) {
    switch (convention) {
        case core::EmptyRow::minus_infinity:
            return -infinity;
        case core::EmptyRow::plus_infinity:
            return infinity;
        case core::EmptyRow::zero:
            break;
    }
    return 0;
}

}  // namespace

Index KeyHead::query_offset(const core::Tensor& t, Index r) const {
    return t.offset({sequence.batch, sequence.q_begin + query(r), head(r), 0});
}

Index KeyHead::lse_offset(const core::Tensor& t, Index r) const {
    return t.offset({sequence.batch, head(r), sequence.q_begin + query(r)});
}

Index KeyHead::mask_offset(const core::Tensor& t, Index r) const {
    return t.offset({sequence.mask_batch, core::shared_head(t, head(r), in->q.shape[2]), query(r), 0});
}

Range KeyHead::keys(Index r) const {
    const Index count = sequence.k_count, far = sequence.q_count + count + std::abs(options->shift);
    const bool top_left = options->causal == core::Causal::top_left;
    const Index diagonal = query(r) + options->shift + (top_left ? 0 : count - sequence.q_count);
    const auto reach = [far](Index window) { return window < 0 ? far : std::min(window, far); };
    const Index right = options->causal == core::Causal::none ? reach(options->window_right)
                                                              : std::min<Index>(reach(options->window_right), 0);
    return {std::clamp<Index>(diagonal - reach(options->window_left), 0, count),
            std::clamp<Index>(diagonal + right + 1, 0, count)};
}

Range KeyHead::keys(Range rows) const {
    return rows.count() > 0 ? Range{keys(rows.begin).begin, keys(rows.end - 1).end} : Range{0, 0};
}

std::vector<KeyHead> key_heads(const core::AttentionInputs& in, const core::AttentionOptions& options,
                               bool float_scores) {
    std::vector<KeyHead> heads;
    for (Index n = 0; n < core::sequence_count(in); ++n)
        for (Index h = 0; h < in.k.shape[2]; ++h)
            heads.push_back({&in, &options, core::sequence(in, n), h, float_scores});
    return heads;
}

RowScratch::RowScratch(const core::AttentionInputs& in, Index keys)
    : channels(static_cast<std::size_t>(std::max(in.q.shape[3], in.v.shape[3]))),
      bias(static_cast<std::size_t>(keys)),
      order(static_cast<std::size_t>(in.bias ? keys : 0)) {
    tile.resize(channels.size() * tile_keys);
}

void load_queries(const KeyHead& head, const core::Tensor& t, Range rows, double factor, Matrix out) {
    for (Index r = rows.begin; r < rows.end; ++r) {
        double* row = out.row(r - rows.begin);
        core::load_row(t, head.query_offset(t, r), 3, t.shape[3], row);
        for (Index c = 0; c < t.shape[3]; ++c) row[c] *= factor;
    }
}

void dot_keys(const KeyHead& head, const core::Tensor& t, Range keys, Index rows, Matrix x, Matrix out,
              RowScratch& scratch) {
    const Index channels = t.shape[3];
    const Matrix tile{scratch.tile.data(), tile_keys};  // [channels, tile_keys]
    for (Index begin = keys.begin; begin < keys.end; begin += tile_keys) {
        const Index count = std::min(tile_keys, keys.end - begin), at = begin - keys.begin;
        for (Index j = 0; j < count; ++j) {
            core::load_key_row(*head.in, t, head.sequence, head.key_head, begin + j, channels, scratch.channels.data());
            for (Index c = 0; c < channels; ++c) tile.row(c)[j] = scratch.channels[static_cast<std::size_t>(c)];
        }
        for (Index r = 0; r < rows; ++r) std::fill_n(out.row(r) + at, count, 0.0);
        add_product(Terms::all, rows, channels, count, x, tile, {out.data + at, out.row_stride});
    }
}

void sum_keys(const KeyHead& head, const core::Tensor& t, Range keys, Index rows, Matrix weight, Matrix out,
              RowScratch& scratch) {
    const Index channels = t.shape[3];
    const Matrix tile{scratch.tile.data(), channels};  // [tile_keys, channels]
    for (Index r = 0; r < rows; ++r) std::fill_n(out.row(r), channels, 0.0);
    for (Index begin = keys.begin; begin < keys.end; begin += tile_keys) {
        const Index count = std::min(tile_keys, keys.end - begin), at = begin - keys.begin;
        for (Index j = 0; j < count; ++j)
            core::load_key_row(*head.in, t, head.sequence, head.key_head, begin + j, channels, tile.row(j));
        add_product(Terms::weighted, rows, count, channels, {weight.data + at, weight.row_stride}, tile, out);
    }
}

Softmax softmax_row(const KeyHead& head, Index r, Range keys, double* x, double* slope, RowScratch& scratch) {
    const Index n = keys.count();
    const core::Tensor& sink_logits = head.in->sink;
    const double sink = sink_logits ? core::load(sink_logits, sink_logits.offset({head.head(r)})) : -infinity;
    load_bias(head, r, keys, scratch);
    const double* bias = scratch.bias.data();
    if (head.options->softcap != 0) cap_scores(head.options->softcap, n, x, slope);

    double top = sink;
    bool empty = true;
    for (Index j = 0; j < n; ++j) {
        if (bias[j] == -infinity) continue;
        x[j] = head.float_scores ? to_float_score(x[j], bias[j]) : x[j] + bias[j];
        top = std::max(top, x[j]);
        empty = false;
    }
    const bool has_sink = sink != -infinity;
    if (empty || sink == infinity) {
        std::fill_n(x, n, 0.0);
        return has_sink ? Softmax{sink, 1} : Softmax{empty_lse(head.options->empty_row), 0};
    }
    double sum = has_sink ? std::exp(sink - top) : 0;
    for (Index j = 0; j < n; ++j) sum += x[j] = bias[j] == -infinity ? 0 : std::exp(x[j] - top);
    for (Index j = 0; j < n; ++j) x[j] = bias[j] == -infinity ? 0 : x[j] / sum;
    return {top + std::log(sum), has_sink ? std::exp(sink - top) / sum : 0};
}

}  // namespace softdelta::reference

#include "support/attention_seen.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace softdelta::test {

namespace {

using Flags = std::vector<bool>;

Index entry(const Array& a, Index i) {
    return static_cast<Index>(a.get(i));
}

// Lengths of sequence n, and where its rows lie.
struct Sequence {
    Index Lq, Lk, q_begin, k_begin;
};

Index sequence_count(const RandomAttention& call) {
    return call.cu_seqlens_q.view() ? call.cu_seqlens_q.count() - 1 : call.inputs.q.shape(0);
}

Sequence sequence(const RandomAttention& call, Index n) {
    const Array &q = call.cu_seqlens_q, &k = call.cu_seqlens_k;
    const Index Lq = call.inputs.q.shape(1), Lk = call.inputs.k.shape(1);
    Sequence s{Lq, Lk, n * Lq, n * Lk};
    if (q.view()) s.Lq = entry(q, n + 1) - entry(q, n), s.q_begin = entry(q, n);
    if (k.view()) s.Lk = entry(k, n + 1) - entry(k, n), s.k_begin = entry(k, n);
    if (call.cache_seqlens.view()) s.Lk = entry(call.cache_seqlens, n);
    return s;
}

Index key_row(const RandomAttention& call, Index n, Index k_begin, Index j) {
    if (!call.block_table.view()) return k_begin + j;
    const Index rows = call.inputs.k.shape(1), pages = call.block_table.view().shape(1);
    return entry(call.block_table, n * pages + j / rows) * rows + j % rows;
}

bool in_window(const AttentionOptions& o, Index i, Index j, const Sequence& s) {
    const Index diagonal = o.causal == Causal::top_left ? i : i + s.Lk - s.Lq;
    if (o.causal != Causal::none && j > diagonal) return false;
    if (o.window_left >= 0 && diagonal - j > o.window_left) return false;  // no sum with a window: it may be 2⁶³ − 1
    return o.window_right < 0 || j - diagonal <= o.window_right;
}

// The top_w keys of largest bias, ties to the lower index.
void select(const RandomAttention& call, SeenRow& row) {
    const auto w = static_cast<std::size_t>(call.options.top_w);
    if (call.options.top_w < 0 || w >= row.keys.size()) return;
    std::vector<std::pair<double, Index>> order;
    for (const Index j : row.keys) order.emplace_back(-addend_of(call, row, j), j);
    std::sort(order.begin(), order.end());
    order.resize(w);
    row.keys.clear();
    for (const auto& [bias, j] : order) row.keys.push_back(j);
}

// rows: of a tensor [.., C], whose rows the flags count. Where rows share memory, those that are seen keep it.
void fill_rows(const Array& a, const Flags& seen, double junk) {
    if (!a.view() || a.count() == 0) return;
    const Index width = a.view().shape(3);
    if (a.count() / width != static_cast<Index>(seen.size())) return;  // a scale that rows share
    const std::vector<double> before = a.values();
    for (const bool write : {false, true})
        for (Index i = 0; i < a.count(); ++i)
            if (seen[static_cast<std::size_t>(i / width)] == write)
                a.set(i, write ? before[static_cast<std::size_t>(i)] : junk);
}

Flags flags(const Tensor& t) {
    return Flags(static_cast<std::size_t>(t.shape(0) * t.shape(1) * t.shape(2)));
}

}  // namespace

double plane_value(const RandomAttention& call, const Array& a, const SeenRow& row, Index key) {
    const Tensor& t = a.view();
    if (!t) return 0;
    const Index head = row.head * t.shape(1) / call.inputs.q.shape(2);
    return a.get(
        {t.shape(0) == 1 ? 0 : row.sequence, head, t.shape(2) == 1 ? 0 : row.query, t.shape(3) == 1 ? 0 : key});
}

double addend_of(const RandomAttention& call, const SeenRow& row, Index key) {
    const auto kept = [&](double x) {
        constexpr double most = std::numeric_limits<float>::max();
        return call.far_bias ? static_cast<double>(static_cast<float>(std::clamp(x, -most, most))) : x;
    };
    const double bias = plane_value(call, call.bias, row, key);
    const double sloped = call.bias_slopes.view() ? kept(call.bias_slopes.get(row.head) * bias) : bias;
    if (!call.alibi_slopes.view()) return sloped;
    const auto distance = static_cast<double>(std::abs(row.diagonal - key));
    return kept(sloped - kept(call.alibi_slopes.get(row.head) * distance));
}

std::vector<SeenRow> seen_rows(const RandomAttention& call) {
    const Index H = call.inputs.q.shape(2), Hk = call.inputs.k.shape(2);
    std::vector<SeenRow> rows;
    for (Index n = 0; n < sequence_count(call); ++n) {
        const Sequence s = sequence(call, n);
        for (Index h = 0; h < H; ++h)
            for (Index i = 0; i < s.Lq; ++i) {
                SeenRow row{n, h, h * Hk / H, i, s.q_begin + i, i + s.Lk - s.Lq, {}, {}};
                for (Index j = 0; j < s.Lk; ++j) {
                    if (!in_window(call.options, i, j, s)) continue;
                    if (call.mask.view() && plane_value(call, call.mask, row, j) == 0) continue;
                    if (plane_value(call, call.bias, row, j) != -INFINITY) row.keys.push_back(j);
                }
                select(call, row);
                for (const Index j : row.keys) row.key_rows.push_back(key_row(call, n, s.k_begin, j));
                rows.push_back(std::move(row));
            }
    }
    return rows;
}

void fill_unseen(const RandomAttention& call, double junk) {
    const Index H = call.inputs.q.shape(2), Hk = call.inputs.k.shape(2);
    Flags rows = flags(call.inputs.q), keys = flags(call.inputs.k);
    for (const SeenRow& row : seen_rows(call)) {
        rows[static_cast<std::size_t>(row.row * H + row.head)] = !row.keys.empty();
        for (const Index j : row.key_rows) keys[static_cast<std::size_t>(j * Hk + row.key_head)] = true;
    }
    fill_rows(call.k_scale.view() ? call.k_scale : call.k, keys, junk);
    fill_rows(call.v_scale.view() ? call.v_scale : call.v, keys, junk);
    fill_rows(call.q, rows, junk);
    if (call.sink.view()) return;  // the softmax of such a row has one part, and lse is that part
    fill_rows(call.d_o, rows, junk);
    if (!call.dlse.view()) return;
    const Index Lq = call.inputs.q.shape(1);
    const std::vector<double> before = call.dlse.values();
    for (const bool write : {false, true})
        for (Index i = 0; i < call.dlse.count(); ++i) {  // [B, H, Lq]
            const Index row = i / Lq / H * Lq + i % Lq;
            if (rows[static_cast<std::size_t>(row * H + i / Lq % H)] == write)
                call.dlse.set(i, write ? before[static_cast<std::size_t>(i)] : junk);
        }
}

}  // namespace softdelta::test

#include "diagnose/sampling/select.h"

#include <algorithm>
#include <cmath>

#include "core/parallel.h"

namespace softdelta::diagnose {

namespace {

// Rows of sequence n.
double rows_of(const io::Bounds& bounds, const Tensor& t, std::int64_t n) {
    const auto i = static_cast<std::size_t>(n);
    return static_cast<double>(bounds.empty() ? t.shape(1) : bounds[i + 1] - bounds[i]);
}

// Rows of queries and of keys of sequence n.
std::pair<double, double> sizes_of(const io::Call& call, std::int64_t n) {
    if (!call.is_attention) return {rows_of(call.packing.tokens, call.delta.v, n), 0};
    const AttentionInputs& in = call.attention;
    const double keys = in.block_table ? static_cast<double>(in.block_table.shape(1) * in.k.shape(1))
                                       : rows_of(call.packing.keys, in.k, n);
    return {rows_of(call.packing.queries, in.q, n), keys};
}

// Of one group of a sequence.
double unit_work(const io::Call& call, std::int64_t n) {
    const auto [rows, keys] = sizes_of(call, n);
    const auto size = [](const Tensor& t, std::size_t dim) { return static_cast<double>(t.shape(dim)); };
    if (call.is_attention) {
        const AttentionInputs& in = call.attention;
        const double D = size(in.q, 3), Dv = size(in.v, 3);
        return rows * keys * size(in.q, 2) / size(in.k, 2) * (call.d_o ? 3.5 * D + 3 * Dv : D + Dv);
    }
    const DeltaInputs& in = call.delta;
    const double K = size(in.q, 3), V = size(in.v, 3), C = static_cast<double>(call.chunk_size);
    const bool gradients = call.d_o || call.dfinal_state;
    return rows * size(in.v, 2) / size(in.q, 2) * (K * V + C * (K + V)) * (gradients ? 10 : 3);
}

// How much farther from the fast path than the nearest unit, in the result where that is most.
std::vector<double> rate(const Screen& screen, std::size_t units) {
    std::vector<double> rates(units, 0.0);
    for (const auto& [name, ratios] : screen.ratios) {
        double least = HUGE_VAL;
        for (const double r : ratios)
            if (!std::isnan(r)) least = std::min(least, r);
        constexpr double smallest = 1e-9;
        for (std::size_t i = 0; i < units; ++i)
            if (!std::isnan(ratios[i])) rates[i] = std::max(rates[i], ratios[i] / std::max(least, smallest));
    }
    return rates;
}

// Numbers by falling rate, ties by number.
std::vector<std::int64_t> sorted(const std::vector<std::int64_t>& numbers, const std::vector<double>& rates) {
    std::vector<std::int64_t> order = numbers;
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
        return rates[static_cast<std::size_t>(a)] > rates[static_cast<std::size_t>(b)];
    });
    return order;
}

// Takes the last and the first of an order in turn.
std::vector<std::int64_t> from_both_ends(const std::vector<std::int64_t>& order) {
    std::vector<std::int64_t> turns;
    for (std::size_t first = 0, last = order.size(); first < last;) {
        turns.push_back(order[--last]);
        if (first < last) turns.push_back(order[first++]);
    }
    return turns;
}

void add(std::vector<std::int64_t>& numbers, std::int64_t n) {
    numbers.insert(std::upper_bound(numbers.begin(), numbers.end(), n), n);
}

}  // namespace

double work_of(const io::Call& call, const Selection& selection) {
    double work = 0;
    for (const std::int64_t n : selection.sequences) work += unit_work(call, n);
    return work * static_cast<double>(selection.groups.size());
}

double work_of(const io::Call& call) {
    double work = 0;
    const std::int64_t sequences = sequence_count(call);
    if (!call.packing.queries.empty() || !call.packing.tokens.empty())
        for (std::int64_t n = 0; n < sequences; ++n) work += unit_work(call, n);
    else if (sequences > 0)
        work = unit_work(call, 0) * static_cast<double>(sequences);
    return work * static_cast<double>(group_count(call));
}

double memory_of(const io::Call& call, int threads) {
    const auto count = [](std::span<const std::int64_t> shape) {
        double n = sizeof(double);
        for (const std::int64_t size : shape) n *= static_cast<double>(size);
        return n;
    };
    const auto count_given = [&](const auto& inputs) {
        double bytes = 0;
        for (const auto& field : fields_of<std::decay_t<decltype(inputs)>>)
            if (const Tensor& t = inputs.*field.tensor) bytes += count(t.shape());
        return bytes;
    };
    double results = 0, replay = 0;
    for (const std::string& name : io::output_names(call)) results += count(io::output_shape(call, name));
    const double hands = core::all_threads(threads);
    if (call.is_attention) {
        const AttentionInputs& in = call.attention;
        const auto widths = static_cast<double>(in.q.shape(3) + in.v.shape(3));
        constexpr double of_tile = 400;  // numbers of each key of a tile of rows
        for (std::int64_t n = 0; n < sequence_count(call); ++n)
            replay = std::max(replay, sizes_of(call, n).second * (3 * widths + of_tile));
    } else {
        const DeltaInputs& in = call.delta;
        const auto size = [](const Tensor& t, std::size_t dim) { return static_cast<double>(t.shape(dim)); };
        const double K = size(in.q, 3), V = size(in.v, 3), C = static_cast<double>(call.chunk_size);
        double rows = 0, chunks = 0;
        for (std::int64_t n = 0; n < sequence_count(call); ++n) {
            rows += sizes_of(call, n).first;
            chunks += std::ceil(sizes_of(call, n).first / C) + 1;
        }
        replay = (size(in.v, 2) / hands + 1) * (rows * (14 * K + 7 * V + 2 * C) + chunks * (2 * K * V + C * C));
    }
    return count_given(call.attention) + count_given(call.delta) + (2 + 3 * hands) * results +
           hands * static_cast<double>(sizeof(double)) * replay;
}

Selection select(const io::Call& call, const Screen& screen, double work) {
    Selection all = select_all(call);
    if (work_of(call, all) <= work) return all;
    const std::size_t groups = all.groups.size();
    const std::vector<double> rates = rate(screen, groups * all.sequences.size());
    std::vector<double> of_sequence(all.sequences.size());
    for (std::size_t i = 0; i < rates.size(); ++i)
        of_sequence[i / groups] = std::max(of_sequence[i / groups], rates[i]);
    std::vector<std::int64_t> sequences;  // those that hold anything
    for (const std::int64_t n : all.sequences)
        if (unit_work(call, n) > 0) sequences.push_back(n);
    sequences = sorted(sequences, of_sequence);

    Selection chosen{all.sequences, {0}};
    const bool whole_groups = work_of(call, chosen) <= work;
    if (!whole_groups) chosen.sequences = {sequences.front()};
    std::vector<double> of_group(groups);
    for (const std::int64_t n : chosen.sequences)
        for (std::size_t g = 0; g < groups; ++g)
            of_group[g] = std::max(of_group[g], rates[static_cast<std::size_t>(n) * groups + g]);
    std::vector<std::int64_t> group_order = sorted(all.groups, of_group);
    chosen.groups = {group_order.front()};

    group_order.erase(group_order.begin());
    sequences.erase(sequences.begin());
    if (whole_groups) sequences.clear();
    const std::vector<std::int64_t> more_groups = from_both_ends(group_order),
                                    more_sequences = from_both_ends(sequences);
    for (std::size_t i = 0; i < std::max(more_groups.size(), more_sequences.size()); ++i)
        for (const bool group : {true, false}) {
            const std::vector<std::int64_t>& more = group ? more_groups : more_sequences;
            if (i >= more.size()) continue;
            Selection larger = chosen;
            add(group ? larger.groups : larger.sequences, more[i]);
            if (work_of(call, larger) <= work) chosen = larger;
        }
    return chosen;
}

}  // namespace softdelta::diagnose

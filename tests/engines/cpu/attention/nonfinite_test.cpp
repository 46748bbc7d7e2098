// One NaN or infinity in q, k, v or do of a random call: what does not see it is to the bit what it was without it,
// forward and backward, on every instruction set.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <utility>

#include "support/attention_seen.h"
#include "support/fast_attention.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

enum class Where { q, k, v, d_o };

// A place in the rows of a tensor [.., H, C].
struct Plant {
    Where where;
    Index row, head, channel;
    double value;
};

RandomAttention draw(std::uint64_t seed) {
    static const AttentionRanges kinds[] = {
        {.batch = 2, .queries = 40, .keys = 60, .key_heads = 2, .group = 2, .channels = 40, .shortest = 1},
        {.batch = 1, .queries = 420, .keys = 560, .key_heads = 1, .group = 2, .channels = 24, .shortest = 1},
        {.batch = 2, .queries = 8, .keys = 70, .key_heads = 2, .group = 2, .channels = 70, .shortest = 1},
        {.batch = 2, .queries = 24, .keys = 1200, .key_heads = 2, .group = 2, .channels = 20, .shortest = 1},
    };
    AttentionRanges ranges = kinds[seed % std::size(kinds)];
    ranges.dtypes = {DType::f32, DType::bf16, DType::f16};
    ranges.pages = true;
    return draw_attention(seed, ranges);
}

const Array& planted(const RandomAttention& call, Where where) {
    if (where == Where::q) return call.q;
    if (where == Where::d_o) return call.d_o;
    return where == Where::k || call.v_in_k ? call.k : call.v;
}

Plant draw_plant(const RandomAttention& call, std::uint64_t seed) {
    constexpr double values[] = {NAN, INFINITY, -INFINITY};
    Random random(seed);
    Plant plant{static_cast<Where>(random() % 4), 0, 0, 0, values[random() % 3]};
    const Array& array = planted(call, plant.where);
    const Index element = static_cast<Index>(random()) & 0x7fffffff;
    const Index width = plant.where == Where::v ? call.inputs.v.shape(3) : array.view().shape(3);
    const Index heads = array.view().shape(2), rows = array.count() / array.view().shape(3) / heads;
    return {plant.where, element / 7 % rows, element / 3 % heads, element % width, plant.value};
}

void set_plant(const RandomAttention& call, const Plant& plant) {
    const Array& array = planted(call, plant.where);
    array.set((plant.row * array.view().shape(2) + plant.head) * array.view().shape(3) + plant.channel, plant.value);
}

// Rows of queries and keys, by row and head, elements of the bias and heads that may know of the plant.
struct Touched {
    using Rows = std::set<std::pair<Index, Index>>;
    Rows queries, keys;
    std::set<Index> bias, heads;

    Touched(const RandomAttention& call, const Plant& plant) {
        const bool is_query = plant.where == Where::q || plant.where == Where::d_o;
        for (const SeenRow& row : seen_rows(call)) {
            const bool sees = std::find(row.key_rows.begin(), row.key_rows.end(), plant.row) != row.key_rows.end();
            if (is_query ? row.row != plant.row || row.head != plant.head : !sees || row.key_head != plant.head)
                continue;
            queries.insert({row.row, row.head});
            heads.insert(row.head);
            for (const Index j : row.key_rows) keys.insert({j, row.key_head});
            for (const Index j : row.keys) bias.insert(bias_element(call, row, j));
        }
    }

  private:
    static Index bias_element(const RandomAttention& call, const SeenRow& row, Index key) {
        const Tensor& t = call.bias.view();
        if (!t) return 0;
        const Index head = row.head * t.shape(1) / call.inputs.q.shape(2), n = t.shape(0) == 1 ? 0 : row.sequence;
        return ((n * t.shape(1) + head) * t.shape(2) + (t.shape(2) == 1 ? 0 : row.query)) * t.shape(3) +
               (t.shape(3) == 1 ? 0 : key);
    }
};

bool is_touched(const Touched& touched, const std::string& name, const io::OwnedTensor& result, Index element) {
    if (name == "dsink") return touched.heads.count(element) != 0;
    if (name == "dbias") return touched.bias.count(element) != 0;
    const std::vector<Index>& shape = result.shape();
    if (name == "lse") {  // [B, H, Lq]
        const Index row = element / shape[2];
        return touched.queries.count({row / shape[1] * shape[2] + element % shape[2], row % shape[1]}) != 0;
    }
    const Index row = element / shape[3];
    const std::pair<Index, Index> place{row / shape[2], row % shape[2]};
    return (name == "dk" || name == "dv" ? touched.keys : touched.queries).count(place) != 0;
}

std::string compare(const Touched& touched, const Results& clean, const Results& dirty) {
    for (const auto& [name, result] : clean) {
        const std::vector<double> before = values(result), after = values(dirty.at(name));
        for (std::size_t i = 0; i < before.size(); ++i)
            if (before[i] != after[i] && !is_touched(touched, name, result, static_cast<Index>(i)))
                return name + " changes from " + std::to_string(before[i]) + " to " + std::to_string(after[i]) +
                       " in element " + std::to_string(i);
    }
    return "";
}

// Where a row sees a value that is not finite, neither is its o.
std::string check_seen(const Touched& touched, const Plant& plant, const Results& dirty) {
    const std::vector<Index>& shape = dirty.at("o").shape();
    const std::vector<double> o = values(dirty.at("o"));
    for (const auto& [row, head] : touched.queries)
        if (std::isfinite(o[static_cast<std::size_t>((row * shape[2] + head) * shape[3] + plant.channel)]))
            return "o does not show it in row " + std::to_string(row) + ", head " + std::to_string(head);
    return "";
}

struct Computed {
    Results forward, backward;
    Computed(RandomAttention&& call, std::uint64_t seed) {
        const FastAttention fast(std::move(call));
        Execution execution;
        execution.engine = "fast";
        execution.threads = 1;
        execution.bf16_products =
            std::array{Bf16Products::f32, Bf16Products::bf16, Bf16Products::automatic}.at(seed / 4 % 3);
        forward = fast.forward(fast.forward_names(), execution);
        if (fast.gradient_names().empty()) return;  // of a paged cache
        backward = fast.backward(fast.gradient_names(), seed / 12 % 2 == 0 ? forward : Results{}, execution);
    }
};

TEST(AttentionFast, WhatIsNotFiniteStaysWhereItIsSeen) {
    const auto number = [](std::uint64_t seed) { return seed; };
    check_calls(call_count(150), number, [](std::uint64_t seed, std::uint64_t /*same*/) -> std::string {
        RandomAttention call = draw(seed);
        const std::string description = call.describe();
        const Plant plant = draw_plant(call, seed);
        const Touched touched(call, plant);
        RandomAttention other = draw(seed);
        set_plant(other, plant);
        const Computed clean(std::move(call), seed), dirty(std::move(other), seed);
        std::string fault = compare(touched, clean.forward, dirty.forward);
        if (fault.empty()) fault = compare(touched, clean.backward, dirty.backward);
        if (fault.empty() && plant.where == Where::v) fault = check_seen(touched, plant, dirty.forward);
        if (fault.empty()) return "";
        constexpr const char* names[] = {"q", "k", "v", "do"};
        return description + ": " + std::to_string(plant.value) + " in " + names[static_cast<int>(plant.where)] +
               ", row " + std::to_string(plant.row) + ", head " + std::to_string(plant.head) + ": " + fault;
    });
}

}  // namespace
}  // namespace softdelta::test

// What is said of an input that cannot show a mistake is true of the mistaken pipelines.
#include <gtest/gtest.h>

#include <algorithm>

#include "diagnose/blind.h"
#include "io/call/make_case.h"
#include "judge/floats.h"

namespace softdelta::test {

namespace {

using diagnose::Blindness;
using diagnose::Fact;

bool is_unseen(const Blindness& blindness, diagnose::Mistake mistake) {
    return std::ranges::any_of(blindness.unseen, [&](const diagnose::Entry* e) { return e->mistake == mistake; });
}

// Of every fact: where it holds, its mistake is not seen, and better inputs are named; where none holds, all are seen.
void expect_true_facts(const io::MakeOptions& options, bool holds) {
    const io::CaseFile file = io::make_case(options);
    const io::Call call = io::call_of(file);
    Results results;
    for (const std::string& name : io::output_names(call))
        results.emplace(name, io::OwnedTensor(io::output_dtype(call, name), io::output_shape(call, name)));
    const Blindness blindness = diagnose::blindness_of(call, views(results), 1);
    EXPECT_LT(blindness.unseen.size(), blindness.of);
    std::size_t hidden = 0;
    for (const Fact& fact : diagnose::facts_of(call)) {
        if (fact.holds(call) != holds) continue;
        EXPECT_EQ(is_unseen(blindness, fact.hidden), holds) << options.op << ": " << fact.better;
        ++hidden;
    }
    EXPECT_GE(hidden, diagnose::facts_of(call).size() - 2) << options.op;
    EXPECT_EQ(blindness.better.empty(), !holds);
    EXPECT_EQ(blindness.sentence().find("this input cannot show ") == 0, !blindness.unseen.empty());
}

io::MakeOptions small(const char* op, int tokens) {
    io::MakeOptions o;
    o.op = op, o.dtype = DType::f32, o.tokens = tokens, o.heads = o.value_heads = 1, o.key_size = o.value_size = 8;
    return o;
}

TEST(Blind, FactsOfDeltaRules) {
    for (const char* op : {"gated_delta_rule", "kda"}) {
        io::MakeOptions poor = small(op, 40);
        poor.gate = "uniform", poor.gate_value = 0, poor.l2norm = false, poor.initial_state = false, poor.scale = 1;
        poor.keys_like = "few";  // β is 1
        expect_true_facts(poor, true);
        io::MakeOptions rich = small(op, 0);
        rich.heads = 2, rich.value_heads = 4, rich.value_size = 12, rich.lengths = {97, 70, 1};
        expect_true_facts(rich, false);
    }
}

TEST(Blind, FactsOfAttention) {
    io::MakeOptions poor = small("attention", 0);
    poor.queries = poor.keys = 20, poor.key_heads = 1, poor.scale = 1;
    expect_true_facts(poor, true);
    io::MakeOptions rich = poor;
    rich.batch = 2, rich.heads = 4, rich.key_heads = 2, rich.value_size = 12, rich.keys = 30, rich.window_left = 9;
    rich.scale = std::numeric_limits<double>::quiet_NaN();
    rich.causal = "bottom_right", rich.mask = "random", rich.bias = "head", rich.softcap = 1, rich.sink = true;
    expect_true_facts(rich, false);
}

}  // namespace

}  // namespace softdelta::test

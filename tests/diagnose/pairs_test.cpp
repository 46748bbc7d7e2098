// Two mistakes at once, drawn at random: both are among the first five that are named.
//
// SOFTDELTA_PAIRS: how many (default 12).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "core/parallel.h"
#include "diagnose/diagnosed.h"
#include "diagnose/drawn_inputs.h"
#include "diagnose/replay/mistaken.h"
#include "judge/small_attention.h"
#include "judge/small_delta.h"

namespace softdelta::test {

namespace {

// Options that let most mistakes show, in drawn shapes.
io::MakeOptions draw_inputs(Draw& draw, bool attention) {
    io::MakeOptions o;
    if (attention) {
        o.op = "attention";
        o.mask = draw.of({"none", "random", "padding", "dead_rows"});
        o.bias = draw.of({"none", "row", "key_head"});
        o.sink = draw.one_in(2);
        if (draw.one_in(2)) o.softcap = 2;
        return vary(draw, o);
    }
    o.op = draw.of({"delta_rule", "gated_delta_rule", "kda", "comba", "simple_gla"});
    o.gate = "uniform", o.gate_value = -0.05;
    if (o.op != "delta_rule" && o.op != "simple_gla" && draw.one_in(2)) {
        o.gate = "mild", o.raw_gate = draw.of({"softplus", "lower_bound"});
        o.lower_bound = -0.1;
        o.beta_logits = o.allow_neg_eigval = true;
    }
    return vary(draw, o);
}

const diagnose::Entry* find_entry(const io::Call& call, const std::string& name) {
    for (const diagnose::Entry& entry : diagnose::entries_of(call))
        if (entry.name == name && (entry.applies == nullptr || entry.applies(call))) return &entry;
    return nullptr;
}

struct Outcome {
    bool drawn = false, named = false, two = false;
    std::string text;
};

Outcome try_pair(Draw& draw) {
    const bool attention = draw.one_in(2);
    const std::vector<Mistake> mistakes = attention ? attention_mistakes() : delta_mistakes();
    const io::CaseFile file = io::make_case(draw_inputs(draw, attention));
    const io::Call call = io::call_of(file);
    const auto any = [&] {
        return mistakes[static_cast<std::size_t>(draw.between(0, static_cast<std::int64_t>(mistakes.size()) - 1))];
    };
    const Mistake a = any(), b = any();
    const diagnose::Entry *first = find_entry(call, a.entry), *second = find_entry(call, b.entry);
    if (first == nullptr || second == nullptr || first == second) return {};
    const Results results =
        attention
            ? run_small_attention(call, static_cast<AttentionMistake>(a.kind), static_cast<AttentionMistake>(b.kind))
            : run_small_delta(call, static_cast<DeltaMistake>(a.kind), 64, static_cast<DeltaMistake>(b.kind));
    const diagnose::Observation observation = observe(call, results);
    const diagnose::MistakenCall mistaken(call, 1);
    const diagnose::Results both = mistaken.run({first, second});
    constexpr double seen = 2;  // each of the two shows beside the other
    for (const diagnose::Entry* alone : {first, second})
        if (observation.between(both, diagnose::Scope::both, mistaken.run({alone})).worst_block < seen) return {};
    const diagnose::Ranking ranking = diagnose::rank(call, observation, HUGE_VAL, 1, {});
    std::vector<const diagnose::Entry*> named = ranking.named();
    named.resize(std::min<std::size_t>(named.size(), 5));
    const auto is_named = [&](const auto* e) { return std::find(named.begin(), named.end(), e) != named.end(); };
    std::ostringstream text;
    text << call.op << ", " << first->name << " and " << second->name << ":\n"
         << table(ranking.pairs) << table(ranking.singles);
    return {true, is_named(first) && is_named(second), ranking.explained_by_two(), text.str()};
}

TEST(Pairs, BothAreAmongTheFirstFive) {
    const char* setting = std::getenv("SOFTDELTA_PAIRS");
    const std::int64_t count = setting != nullptr ? std::atoll(setting) : 12;
    std::vector<Outcome> outcomes(static_cast<std::size_t>(count));
    core::parallel_units(0, count, [&] {
        return [&](std::int64_t i) {
            Draw draw(static_cast<std::uint64_t>(i));
            Outcome& outcome = outcomes[static_cast<std::size_t>(i)];
            while (!outcome.drawn) outcome = try_pair(draw);
        };
    });
    std::int64_t named = 0, two = 0;
    for (const Outcome& outcome : outcomes) {
        named += outcome.named;
        two += outcome.two;
        if (!outcome.named) std::printf("not named: %s", outcome.text.c_str());
    }
    std::printf("both of %lld of %lld pairs are among the first five; of %lld it is said that two explain them\n",
                static_cast<long long>(named), static_cast<long long>(count), static_cast<long long>(two));
    EXPECT_GE(10 * named, 8 * count);
}

}  // namespace

}  // namespace softdelta::test

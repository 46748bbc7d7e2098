// Each mistake in calls of drawn shapes, types and options: where it shows, it ranks first and explains the dump,
// alone.
//
// SOFTDELTA_DRAWS: how many calls (default: one for every fourth mistake). SOFTDELTA_SEED: where the drawing starts
// (default 0).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "core/parallel.h"
#include "diagnose/diagnosed.h"
#include "diagnose/drawn_inputs.h"

namespace softdelta::test {

namespace {

std::int64_t setting(const char* name, std::int64_t otherwise) {
    const char* value = std::getenv(name);
    return value != nullptr ? std::atoll(value) : otherwise;
}

struct Outcome {
    bool shows = false, first = false, explained = false, two = false;
    std::string text;
};

bool same(const std::vector<const diagnose::Entry*>& entries, const std::string& name) {
    return std::any_of(entries.begin(), entries.end(), [&](const auto* e) { return e->name == name; });
}

Outcome try_mistake(const Mistake& m, const io::MakeOptions& inputs) {
    const io::CaseFile file = io::make_case(inputs);
    const io::Call call = io::call_of(file);
    Outcome outcome;
    for (const diagnose::Entry& entry : diagnose::entries_of(call))
        if (entry.name == std::string(m.entry) && entry.applies != nullptr && !entry.applies(call)) return outcome;
    const diagnose::Observation observation = observe(call, m.run(call));
    const diagnose::Distance before = observation.to(observation.truth(), diagnose::Scope::both);
    constexpr double wrong = 2;
    if (before.worst_block < wrong) return outcome;
    const diagnose::Ranking ranking = diagnose::rank(call, observation, HUGE_VAL, 1, {});
    if (same(ranking.within_rounding, m.entry)) return outcome;
    outcome.shows = true;
    const diagnose::Candidate& best = ranking.singles.front();
    outcome.first = best.entries.front()->name == std::string(m.entry) || same(best.equal, m.entry);
    outcome.explained = best.explains;
    outcome.two = ranking.explained_by_two();
    for (const diagnose::Candidate& c : ranking.singles)
        if (c.entries.front()->name == std::string(m.entry))
            outcome.text = "left " + std::to_string(c.left.cost) + ", worst block " +
                           std::to_string(c.left.worst_block) + " in " + c.left.worst_result() + "\n";
    outcome.text += table(ranking.singles);
    return outcome;
}

std::string describe(const io::MakeOptions& o) {
    std::string text = o.op + " " +
                       std::string(o.dtype == DType::bf16  ? "bf16"
                                   : o.dtype == DType::f16 ? "f16"
                                                           : "f32") +
                       " B" + std::to_string(o.batch) + " H" + std::to_string(o.heads) + " K" +
                       std::to_string(o.key_size) + " V" + std::to_string(o.value_size) + " seed " +
                       std::to_string(o.seed);
    text += o.op == "attention" ? " Hk" + std::to_string(o.key_heads) + " Lq" + std::to_string(o.queries) + " Lk" +
                                      std::to_string(o.keys) + " " + o.causal + " mask " + o.mask + " bias " + o.bias
                                : " HV" + std::to_string(o.value_heads) + " T" + std::to_string(o.tokens) + " gate " +
                                      o.gate + std::to_string(o.gate_value) + (o.l2norm ? " l2norm" : "");
    return text + (o.lengths.empty() ? "" : " packed");
}

TEST(Drawn, TheMistakeIsNamed) {
    std::vector<Mistake> mistakes = delta_mistakes();
    for (const Mistake& m : attention_mistakes()) mistakes.push_back(m);
    const auto count = static_cast<std::int64_t>(mistakes.size());
    const std::int64_t draws = setting("SOFTDELTA_DRAWS", count / 4), seed = setting("SOFTDELTA_SEED", 0);
    const std::int64_t step = std::max<std::int64_t>(count / draws, 1);
    std::vector<Outcome> outcomes(static_cast<std::size_t>(draws));
    core::parallel_units(0, draws, [&] {
        return [&](std::int64_t i) {
            const Mistake& m = mistakes[static_cast<std::size_t>((seed + i * step) % count)];
            Draw draw(static_cast<std::uint64_t>(seed + i));
            Outcome& outcome = outcomes[static_cast<std::size_t>(i)];
            constexpr int tries = 20;
            for (int t = 0; t < tries && !outcome.shows; ++t) {
                const io::MakeOptions inputs = vary(draw, m.inputs);
                outcome = try_mistake(m, inputs);
                outcome.text = std::string(m.entry) + ", " + describe(inputs) + ": " + outcome.text;
            }
        };
    });
    std::int64_t first = 0, explained = 0, two = 0, shown = 0;
    for (const Outcome& o : outcomes) {
        shown += o.shows, first += o.first, explained += o.explained, two += o.two;
        if (!o.shows)
            std::printf("does not show: %s\n", o.text.c_str());
        else if (!o.first || !o.explained)
            std::printf("%s%s: %s\n", o.first ? "" : "not first ", o.explained ? "" : "not explained", o.text.c_str());
    }
    std::printf(
        "%lld dumps with a mistake: %lld name it first, %lld are explained, of %lld it is said that two explain them\n",
        static_cast<long long>(shown), static_cast<long long>(first), static_cast<long long>(explained),
        static_cast<long long>(two));
    EXPECT_EQ(first, shown);
    EXPECT_GE(20 * explained, 19 * shown);
    EXPECT_LE(20 * two, shown);
}

}  // namespace

}  // namespace softdelta::test

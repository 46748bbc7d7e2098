// A dump made with a mistake by an independent small kernel, at the storage type's rounding noise: the catalogue's
// entry of that name ranks first, and nothing speaks of more than one mistake. Prints what was confused with what.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/parallel.h"
#include "diagnose/diagnosed.h"
#include "judge/mistakes.h"

namespace softdelta::test {

namespace {

std::vector<Mistake> all_mistakes() {
    std::vector<Mistake> all = delta_mistakes();
    for (const Mistake& m : attention_mistakes()) all.push_back(m);
    return all;
}

TEST(Catalogue, NamesEveryMistake) {
    const std::vector<Mistake> mistakes = all_mistakes();
    std::vector<std::string> faults(mistakes.size()), ties(mistakes.size());
    core::parallel_units(0, static_cast<core::Index>(mistakes.size()), [&] {
        return [&](core::Index unit) {
            const auto i = static_cast<std::size_t>(unit);
            const Mistake& m = mistakes[i];
            const io::CaseFile file = io::make_case(m.inputs);
            const io::Call call = io::call_of(file);
            const diagnose::Ranking ranking = rank_results(call, m.run(call));
            if (ranking.singles.empty()) {
                faults[i] = "nothing is ranked";
                return;
            }
            const diagnose::Candidate& best = ranking.singles.front();
            std::vector<const diagnose::Entry*> first = best.equal;
            first.push_back(best.entries.front());
            if (std::none_of(first.begin(), first.end(),
                             [&](const auto* e) { return e->name == std::string(m.entry); }))
                faults[i] = "not first";
            else if (!best.explains)
                faults[i] = "not explained";
            if (ranking.explained_by_two()) faults[i].append(", said to be two");
            if (!faults[i].empty()) faults[i].append("\n").append(table(ranking.singles));
            if (!best.equal.empty()) ties[i] = names(first);
        };
    });
    std::size_t named = 0;
    for (std::size_t i = 0; i < mistakes.size(); ++i) {
        named += faults[i].empty();
        if (!ties[i].empty()) std::printf("%s: tied, %s\n", mistakes[i].entry, ties[i].c_str());
        EXPECT_TRUE(faults[i].empty()) << mistakes[i].name << ", " << mistakes[i].inputs.op << ", expected "
                                       << mistakes[i].entry << ": " << faults[i];
    }
    std::printf("%zu of %zu dumps with a mistake name it first\n", named, mistakes.size());
}

// The gradients may come from another kernel than the outputs.
TEST(Catalogue, NamesAMistakeOfOnePass) {
    std::size_t tried = 0;
    for (const Mistake& m : all_mistakes()) {
        const std::string entry = m.entry;
        if (entry != "w_without_beta" && entry != "state_not_decayed" && entry != "bias_scaled") continue;
        const io::CaseFile file = io::make_case(m.inputs);
        const io::Call call = io::call_of(file);
        const Results mistaken = m.run(call), right = m.right(call);
        for (const bool forward : {true, false}) {
            Results results = forward ? right : mistaken;
            for (const char* name : {"o", "lse", "final_state"})
                if (results.count(name) != 0) results.at(name) = (forward ? mistaken : right).at(name);
            const diagnose::Ranking ranking = rank_results(call, results);
            const diagnose::Candidate& best = ranking.singles.front();
            EXPECT_EQ(best.entries.front()->name, entry) << table(ranking.singles);
            EXPECT_EQ(best.scope, forward ? diagnose::Scope::forward : diagnose::Scope::backward);
            EXPECT_TRUE(best.explains) << table(ranking.singles);
            ++tried;
        }
    }
    EXPECT_EQ(tried, 10u);
}

// Their effect is within rounding on any input of a 16-bit type: they are not ranked, see below.
const std::set<std::string> never_seen = {"delta_after_rounding", "dbias_rounded_by_tile"};

TEST(Catalogue, HasADumpForEveryEntry) {
    std::set<std::string> shown[2];
    for (const Mistake& m : delta_mistakes()) shown[0].insert(m.entry);
    for (const Mistake& m : attention_mistakes()) shown[1].insert(m.entry);
    for (const diagnose::Entry& entry : diagnose::delta_entries())
        EXPECT_EQ(shown[0].count(entry.name), 1u) << entry.name;
    for (const diagnose::Entry& entry : diagnose::attention_entries())
        EXPECT_EQ(shown[1].count(entry.name) + never_seen.count(entry.name), 1u) << entry.name;
}

bool has(const std::vector<const diagnose::Entry*>& entries, const std::string& name) {
    return std::any_of(entries.begin(), entries.end(), [&](const auto* entry) { return entry->name == name; });
}

TEST(Catalogue, DoesNotRankWhatRoundingHides) {
    for (const Mistake& m : attention_mistakes()) {
        if (m.entry != std::string("dbias_scaled")) continue;
        const io::CaseFile file = io::make_case(m.inputs);
        const io::Call call = io::call_of(file);
        const diagnose::Ranking ranking = rank_results(call, m.run(call));
        for (const std::string& name : never_seen) EXPECT_TRUE(has(ranking.within_rounding, name)) << name;
    }
}

}  // namespace

}  // namespace softdelta::test

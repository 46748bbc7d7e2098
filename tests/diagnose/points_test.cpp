// Changes at places of the small kernels, drawn at random from what kernels compute and what may go wrong there, not
// from what the library can name. Prints which are named, by kind of change; a wrong name is a fault.
//
// SOFTDELTA_POINTS: how many (default 4). SOFTDELTA_SEED: where the drawing starts (default 0).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string_view>

#include "core/parallel.h"
#include "diagnose/catalogue/places.h"
#include "diagnose/diagnosed.h"
#include "diagnose/drawn_inputs.h"
#include "diagnose/replay/mistaken.h"
#include "judge/small_attention.h"
#include "judge/small_delta.h"

namespace softdelta::test {

namespace {

using diagnose::Change;

std::int64_t setting(const char* name, std::int64_t otherwise) {
    const char* value = std::getenv(name);
    return value != nullptr ? std::atoll(value) : otherwise;
}

// The catalogue's word for a change of these tests; none: it is outside of what can be named.
const std::map<std::string, Change> known = {
    {"missing", Change::missing},
    {"doubled", Change::doubled},
    {"halved", Change::halved},
    {"negated", Change::negated},
    {"times scale", Change::times_scale},
    {"over scale", Change::over_scale},
    {"times ln 2", Change::times_ln2},
    {"over ln 2", Change::over_ln2},
    {"times group", Change::times_group},
    {"over group", Change::over_group},
    {"times beta", Change::times_beta},
    {"over beta", Change::over_beta},
    {"row before", Change::row_before},
    {"row after", Change::row_after},
    {"two rows before", Change::two_rows_before},
    {"tail lost", Change::tail_lost},
    {"first row lost", Change::first_row_lost},
    {"last row lost", Change::last_row_lost},
    {"rows 48 to 63 lost", Change::last_warp_lost},
    {"every row of 16 lost", Change::last_of_16_lost},
    {"of the chunk before", Change::stale},
    {"transposed", Change::transposed},
    {"without its diagonal", Change::without_diagonal},
    {"not masked", Change::unmasked},
    {"first keys lost", Change::first_tile_lost},
    {"last keys lost", Change::last_tile_lost},
    {"in bf16", Change::bf16},
    {"no decay", Change::undecayed},
    {"decay twice", Change::twice},
    {"base 2", Change::base_2},
    {"over ln 2 in the exponent", Change::base_over_ln2},
    {"without its own gate", Change::decay_of_row_before},
    {"with the next gate", Change::decay_of_row_after},
    {"last only", Change::last_only},
    {"first only", Change::first_only},
    {"not summed", Change::unsummed},
    {"summed by 16 rows", Change::summed_by_tile},
    {"one", Change::one},
    {"sigmoid", Change::squashed},
    {"summed once more", Change::cumulated},
    {"not rescaled", Change::not_rescaled},
    {"swapped with k", Change::swapped},
    {"always", Change::always},
    {"head before", Change::head_before},
    {"head after", Change::head_after},
    {"first head", Change::first_head},
    {"first sequence", Change::first_sequence},
    {"in turn", Change::modulo},
    {"NaN", Change::not_a_number},
};

using Words = std::vector<std::string>;

const Words factors = {"missing",    "doubled",    "halved",    "negated",     "times scale",
                       "over scale", "times ln 2", "over ln 2", "times group", "over group"};
const Words rows = {"row before",           "row after",      "tail lost",
                    "first row lost",       "last row lost",  "rows 48 to 63 lost",
                    "every row of 16 lost", "two rows before"};
const Words decays = {"no decay", "decay twice", "base 2", "over ln 2 in the exponent"};

Words operator+(Words a, const Words& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

const Words by_beta = factors + rows + Words{"times beta", "over beta", "of the chunk before"};
const Words state = factors + Words{"transposed", "of the chunk before", "in bf16"};
const Words square = factors + Words{"times beta", "transposed", "without its diagonal", "not masked"};
const Words lower = factors + Words{"times beta", "transposed", "of the chunk before"};
const Words own_decays = decays + Words{"without its own gate", "with the next gate"};
const Words written = factors + rows + Words{"head before", "head after", "first head"};

struct Drawable {
    const char* place;
    Words changes;
};

const std::vector<Drawable>& delta_places() {
    static const std::vector<Drawable> places = {
        {"scale", factors},
        {"key head", {"head before", "head after", "first head"}},
        {"norm of q", {"missing", "always"}},
        {"norm of k", {"missing", "always"}},
        {"q", by_beta + Words{"swapped with k"}},
        {"k", by_beta},
        {"k in L and w", by_beta},
        {"v", by_beta},
        {"β", factors + rows + Words{"one", "sigmoid"}},
        {"g", factors + rows + Words{"summed once more"}},
        {"G", own_decays + Words{"not summed", "summed by 16 rows"}},
        {"E", own_decays},
        {"do", by_beta},
        {"S", state},
        {"score.decay", decays},
        {"score", square},
        {"L.decay", decays},
        {"L", lower},
        {"A", square},
        {"erase_key.decay", own_decays},
        {"erase_key", by_beta},
        {"beta_v", by_beta},
        {"w", by_beta},
        {"u", by_beta},
        {"S in w S", state},
        {"w S", by_beta},
        {"v_new", by_beta},
        {"v_new in o", by_beta},
        {"score v_new", by_beta},
        {"read_query.decay", own_decays},
        {"S in o", state},
        {"read_query S", by_beta},
        {"o", by_beta},
        {"write_key.decay", own_decays},
        {"write_key", by_beta},
        {"v_new in S'", by_beta},
        {"state_decay", decays},
        {"state_decay∘S", state},
        {"write_keyᵀ v_new", state},
        {"S'", state},
        {"dS'", state},
        {"scoreᵀ do.decay", decays},
        {"scoreᵀ do", by_beta},
        {"write_key dS'.decay", own_decays},
        {"write_key dS'", by_beta},
        {"dU", by_beta},
        {"v_new in dscore", by_beta},
        {"dscore", square},
        {"dS'.decay", decays},
        {"state_decay∘dS'", state},
        {"read_queryᵀ do.decay", own_decays},
        {"read_queryᵀ do", state},
        {"S in dq", state},
        {"dq from S.decay", own_decays},
        {"dq from S", by_beta},
        {"dq from scores.decay", decays},
        {"dq from scores", by_beta},
        {"dq", by_beta},
        {"v_new in kw", by_beta},
        {"kw.decay", own_decays},
        {"kw", by_beta},
        {"dk from scores.decay", decays},
        {"dk from scores", by_beta},
        {"S in dw", state},
        {"dw", by_beta},
        {"du (β v)ᵀ", square},
        {"dw erase_keyᵀ", square},
        {"dA", square},
        {"dL", lower},
        {"Aᵀ du", by_beta},
        {"Aᵀ dw", by_beta},
        {"e from S.decay", own_decays},
        {"e from S", by_beta},
        {"e from L.decay", decays},
        {"e from L", by_beta},
        {"e", by_beta},
        {"dk from L.decay", decays},
        {"dk from L", by_beta},
        {"dp", by_beta},
        {"dv", by_beta},
        {"rowsum(dR∘v)", by_beta},
        {"rowsum(p∘e)", by_beta},
        {"dβ", by_beta},
        {"wᵀ dU", state},
        {"dk", by_beta},
        {"q∘dq", by_beta},
        {"k∘dk", by_beta},
        {"p∘dp", by_beta},
        {"Σ k∘kw", factors},
        {"S∘dS'.decay", decays},
        {"S∘dS'", factors},
        {"dS", state},
        {"sum of dg", {"not summed", "summed by 16 rows"}},
        {"sum over heads of dq", {"last only", "first only", "in turn"}},
        {"sum over heads of dk", {"last only", "first only", "in turn"}},
        {"o, as written", written},
        {"final_state, as written", state + Words{"head before", "head after", "first head", "first sequence"}},
        {"dq, as written", written},
        {"dk, as written", written},
        {"dv, as written", written},
        {"dg, as written", written},
        {"dbeta, as written", written},
        {"dinitial_state, as written", state + Words{"head before", "first sequence"}}};
    return places;
}

const std::vector<Drawable>& attention_places() {
    const Words keys = {"first keys lost", "last keys lost"}, row_words = rows + Words{"of the chunk before"};
    static const std::vector<Drawable> places = {{"scale", factors},
                                                 {"key head", {"head before", "head after", "first head"}},
                                                 {"q", factors + rows},
                                                 {"k", factors + rows},
                                                 {"v", factors + rows},
                                                 {"do", factors + rows},
                                                 {"q kᵀ", factors + keys + Words{"row before", "row after"}},
                                                 {"tile seen", {"of the chunk before"}},
                                                 {"p of rows without a key", {"NaN", "not masked"}},
                                                 {"bias", factors},
                                                 {"slope", factors},
                                                 {"l", factors},
                                                 {"sum of l", {"not rescaled", "last only", "first only"}},
                                                 {"sum of o", {"not rescaled", "last only", "first only"}},
                                                 {"m in lse", factors},
                                                 {"ln l in lse", factors},
                                                 {"p", factors + keys},
                                                 {"o", factors + rows},
                                                 {"dp", factors + keys + Words{"row before", "row after"}},
                                                 {"D", factors + rows},
                                                 {"dlse", factors},
                                                 {"p in ds", factors},
                                                 {"ds", factors + keys + Words{"row before", "row after"}},
                                                 {"ds in dq", factors + keys + Words{"row before", "row after"}},
                                                 {"ds in dk", factors + keys + Words{"row before", "row after"}},
                                                 {"p in dv", factors + keys + Words{"row before", "row after"}},
                                                 {"sum of dq", {"last only", "first only"}},
                                                 {"sum of dk", {"last only", "first only"}},
                                                 {"sum of dv", {"last only", "first only"}},
                                                 {"sum over heads of dk", {"last only", "first only", "in turn"}},
                                                 {"sum over heads of dv", {"last only", "first only", "in turn"}},
                                                 {"o, as written", written},
                                                 {"lse, as written", written},
                                                 {"dq, as written", written},
                                                 {"dk, as written", written},
                                                 {"dv, as written", written},
                                                 {"dbias, as written", factors},
                                                 {"dsink, as written", factors}};
    return places;
}

io::MakeOptions draw_inputs(Draw& draw, bool attention) {
    io::MakeOptions o;
    if (attention) {
        o.op = "attention";
        o.causal = draw.of({"none", "bottom_right", "top_left"});
        o.bias = draw.of({"none", "none", "full", "key_head"});
        o.sink = draw.one_in(3);
        if (draw.one_in(3)) o.softcap = 3;
    } else {
        o.op = draw.of({"gated_delta_rule", "kda", "gated_delta_rule", "kda", "delta_rule", "comba", "simple_gla"});
        o.gate = "uniform", o.gate_value = -0.05;
    }
    o = vary(draw, o);
    if (attention) {
        o.queries = draw.between(100, 200), o.keys = draw.one_in(2) ? o.queries : draw.between(100, 200);
    } else {
        o.tokens = draw.between(100, 200);
        o.value_heads = o.heads * draw.of({1, 2, 2});
    }
    return o;
}

// Null: outside of what can be named. Whether a call has the place at all is said by `there`.
const diagnose::Entry* find_point(const io::Call& call, const Fault& fault, bool& there) {
    there = true;
    const auto change = known.find(fault.change);
    if (change == known.end()) return nullptr;
    for (const diagnose::Entry& entry : diagnose::points_of(call)) {
        if (!(entry.point == diagnose::Point{fault.place, change->second})) continue;
        there = entry.applies == nullptr || entry.applies(call);
        return there ? &entry : nullptr;
    }
    return nullptr;
}

enum class Verdict { hidden, first, tied, among_three, located, empty, wrong_name };
constexpr const char* verdict_words[] = {"hidden", "first", "tied", "in three", "not named", "noise", "wrong name"};

struct Outcome {
    Verdict verdict = Verdict::hidden;
    bool inside = false;
    std::string change, text;
};

Outcome try_fault(const io::Call& call, const Fault& fault, const std::string& shape) {
    Outcome outcome;
    outcome.change = fault.change;
    bool there = true;
    const diagnose::Entry* expected = find_point(call, fault, there);
    outcome.inside = expected != nullptr || !there;
    if (!there) return outcome;
    const Results results =
        call.is_attention ? run_small_attention(call, AttentionMistake::none, AttentionMistake::none, fault)
                          : run_small_delta(call, DeltaMistake::none, 64, DeltaMistake::none, GateSums::f64, fault);
    const diagnose::Observation observation = observe(call, results);
    constexpr double wrong = 2;
    if (!(observation.to(observation.truth(), diagnose::Scope::both).worst_block > wrong)) return outcome;
    const diagnose::Ranking ranking = diagnose::rank(call, observation, HUGE_VAL, 1, {});
    const diagnose::MistakenCall mistaken(call, 1);
    const auto same = [&](const diagnose::Entry* entry) {
        if (entry == expected) return true;
        if (expected == nullptr) return false;
        constexpr double indistinct = 0.2;
        diagnose::Scope scope = diagnose::Scope::both;  // of the pass that is said to make the mistake
        for (const diagnose::Candidate& c : ranking.singles)
            if (c.entries.front() == entry) scope = c.scope;
        return observation
                   .between(observation.limit(mistaken.run({entry}), scope), diagnose::Scope::both,
                            mistaken.run({expected}))
                   .worst_block < indistinct;
    };
    const std::vector<const diagnose::Entry*> named = ranking.named();
    std::size_t rank = 0;
    while (rank < std::min<std::size_t>(named.size(), 3) && !same(named[rank])) ++rank;
    const bool in_three = rank < std::min<std::size_t>(named.size(), 3);
    if (ranking.explained())
        outcome.verdict =
            same(named.front()) ? (named.front() == expected ? Verdict::first : Verdict::tied) : Verdict::wrong_name;
    else
        outcome.verdict = ranking.noise ? Verdict::empty : in_three ? Verdict::among_three : Verdict::located;
    if (outcome.verdict == Verdict::first || outcome.verdict == Verdict::tied) return outcome;
    outcome.text = "  " + shape + "\n";
    if (expected != nullptr) {
        const diagnose::Distance left = observation.to(mistaken.run({expected}), diagnose::Scope::both);
        outcome.text += "  expected: left " + std::to_string(left.cost) + ", worst block " +
                        std::to_string(left.worst_block) + " in " + left.worst_result() + "\n";
    }
    outcome.text += table(ranking.singles);
    return outcome;
}

// steps: tokens of delta rules have several.
void name_points(std::int64_t count, std::int64_t seed, bool steps) {
    const std::string only = std::getenv("SOFTDELTA_FAMILY") != nullptr ? std::getenv("SOFTDELTA_FAMILY") : "";
    std::vector<Outcome> outcomes(static_cast<std::size_t>(count));
    core::parallel_units(0, count, [&] {
        return [&](std::int64_t i) {
            Draw draw(static_cast<std::uint64_t>(seed + i));
            const bool attention = !steps && only.empty() ? draw.one_in(3) : only == "attention";
            const std::vector<Drawable>& places = attention ? attention_places() : delta_places();
            const auto any = [&](const auto& all) {
                return all[static_cast<std::size_t>(draw.between(0, static_cast<std::int64_t>(all.size()) - 1))];
            };
            Drawable place = any(places);
            while (steps && std::string_view(place.place).ends_with("as written"))
                place = any(places);  // rows of tokens
            const Fault fault{place.place, any(place.changes)};
            Outcome& outcome = outcomes[static_cast<std::size_t>(i)];
            constexpr int tries = 8;  // until it shows
            for (int t = 0; t < tries && outcome.verdict == Verdict::hidden; ++t) {
                io::MakeOptions options = draw_inputs(draw, attention);
                if (steps) {
                    options.op = draw.of({"gated_delta_product", "gdn2", "dplr", "kda"});
                    options.steps = draw.between(2, 3);
                    options.tokens = draw.between(40, 90), options.lengths.clear();
                    if (options.raw_gate == "lower_bound") options.raw_gate = "softplus";
                }
                const io::CaseFile file = io::make_case(options);
                const io::Call call = io::call_of(file);
                outcome = try_fault(call, fault, call.op + " " + std::to_string(seed + i));
            }
            std::printf("%lld, %s %s: %s\n%s", static_cast<long long>(seed + i), fault.place.c_str(),
                        fault.change.c_str(), verdict_words[static_cast<std::size_t>(outcome.verdict)],
                        outcome.text.c_str());
            std::fflush(stdout);
        };
    });
    std::map<std::string, std::array<int, std::size(verdict_words)>> table_of;
    for (const Outcome& o : outcomes) {
        const auto verdict = static_cast<std::size_t>(o.verdict);
        ++table_of[o.inside ? "all inside" : "all outside"][verdict];
        ++table_of[o.change][verdict];
        EXPECT_NE(o.verdict, Verdict::wrong_name) << o.text;
    }
    std::printf("%-28s", "");
    for (const char* words : verdict_words) std::printf("%12s", words);
    for (const auto& [change, counts] : table_of) {
        std::printf("\n%-28s", change.c_str());
        for (const int n : counts) std::printf("%12d", n);
    }
    std::printf("\n");
}

TEST(Points, AreNamed) {
    name_points(setting("SOFTDELTA_POINTS", 4), setting("SOFTDELTA_SEED", 0), false);
}

TEST(Points, OfSeveralStepsAreNamed) {
    name_points(setting("SOFTDELTA_POINTS", 3), setting("SOFTDELTA_SEED", 0), true);
}

// An error between one and four times what rounding may cost is no noise when it has the pattern of a mistake.
TEST(Points, SmallOnesAreNotCalledNoise) {
    const std::vector<Fault> faults = {{"erase_key", "times beta"}, {"S∘dS'", "missing"}};
    for (const Fault& fault : faults) {
        int found = 0;
        for (std::uint64_t seed = 0; found < 1 && seed < 60; ++seed) {
            Draw draw(seed);
            io::MakeOptions options = draw_inputs(draw, false);
            options.op = draw.of({"gated_delta_rule", "kda"});
            options.gate = "uniform", options.gate_value = -0.02 * static_cast<double>(draw.between(1, 20));
            options.raw_gate = "none", options.tokens = 70, options.lengths.clear(), options.batch = 1;
            const io::CaseFile file = io::make_case(options);
            const io::Call call = io::call_of(file);
            const Results results =
                run_small_delta(call, DeltaMistake::none, 64, DeltaMistake::none, GateSums::f64, fault);
            const diagnose::Observation observation = observe(call, results);
            const double loud = observation.to(observation.truth(), diagnose::Scope::both).worst_block;
            if (loud < 1.2 || loud > 4) continue;
            ++found;
            const diagnose::Ranking ranking = diagnose::rank(call, observation, HUGE_VAL, 1, {});
            EXPECT_TRUE(!ranking.noise || ranking.doubtful)
                << fault.place << " " << fault.change << ", seed " << seed << ", up to " << loud << " times rounding\n"
                << table(ranking.singles);
        }
        EXPECT_GT(found, 0) << fault.place;
    }
}

}  // namespace

}  // namespace softdelta::test

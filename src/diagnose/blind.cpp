#include "diagnose/blind.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>

#include "diagnose/diagnose.h"
#include "diagnose/evidence/observation.h"
#include "diagnose/replay/mistaken.h"
#include "diagnose/sampling/sample.h"
#include "diagnose/sampling/select.h"
#include "io/call/operands.h"
#include "io/call/quantised.h"

namespace softdelta::diagnose {

namespace {

using M = Mistake;
using io::Call;

bool all_are(const Tensor& t, double value) {
    const Dense dense(t);
    for (Index i = 0; i < dense.count(); ++i)
        if (dense[i] != value) return false;
    return true;
}

bool gateless(const Call& c) {
    return io::rule_of(c).gate != core::Gate::none && !c.delta.g_gamma && (!c.delta.g || all_are(c.delta.g, 0));
}
bool one_chunk(const Call& c) {
    if (io::rule_of(c).gate == core::Gate::none) return false;
    if (c.packing.tokens.empty()) return c.delta.q.shape(1) <= c.chunk_size;
    for (std::size_t n = 1; n < c.packing.tokens.size(); ++n)
        if (c.packing.tokens[n] - c.packing.tokens[n - 1] > c.chunk_size) return false;
    return true;
}
bool ungrouped(const Call& c) {
    return c.delta.q.shape(2) < 2 || c.delta.v.shape(2) == c.delta.q.shape(2);
}
bool one_size(const Call& c) {
    return c.delta.q.shape(3) == c.delta.v.shape(3) || !std::isnan(c.delta_options.scale);
}
bool one_sequence(const Call& c) {
    return sequence_count(c) < 2;
}
bool unpacked(const Call& c) {
    return c.packing.tokens.empty();
}
bool stateless(const Call& c) {
    return !c.delta.initial_state;
}
bool beta_of_1(const Call& c) {
    return io::rule_of(c).erases() && (!c.delta.beta || all_are(c.delta.beta, 1));
}
bool no_norm(const Call& c) {
    return !c.delta_options.use_qk_l2norm_in_kernel;
}
bool scale_of_1(const Call& c) {
    return (c.is_attention ? c.attention_options.scale : c.delta_options.scale) == 1;
}

const Fact delta_facts[] = {
    {gateless, M::state_not_decayed, "--gate spread --gate-value -0.05"},
    {one_chunk, M::dg_through_chunks, "-T 150"},
    {ungrouped, M::value_head_modulo, "-H 2 --value-heads 4"},
    {one_size, M::value_size_in_delta_scale, "-V 24, and no --scale"},
    {one_sequence, M::initial_state_of_first, "-B 2"},
    {unpacked, M::state_leaks, "--lengths 150,70,1"},
    {stateless, M::initial_state_ignored, "no --no-initial-state"},
    {beta_of_1, M::u_without_beta, "beta below 1"},
    {no_norm, M::dk_without_norm, "no --no-l2norm"},
    {scale_of_1, M::o_without_scale, "--scale 0.3"},
};

bool acausal(const Call& c) {
    return c.attention_options.causal == Causal::none;
}
bool square(const Call& c) {
    return c.attention_options.causal != Causal::bottom_right || c.attention.q.shape(1) == c.attention.k.shape(1);
}
bool one_key_head(const Call& c) {
    return c.attention.k.shape(2) < 2 || c.attention.k.shape(2) == c.attention.q.shape(2);
}
bool unmasked(const Call& c) {
    return !c.attention.mask || c.attention.mask.shape(0) < 2;
}
bool unbiased(const Call& c) {
    return !c.attention.bias;
}
bool uncapped(const Call& c) {
    return c.attention_options.softcap == 0;
}
bool no_sink(const Call& c) {
    return !c.attention.sink;
}
bool no_window(const Call& c) {
    return c.attention_options.window_left < 0;
}
bool one_head_size(const Call& c) {
    return c.attention.q.shape(3) == c.attention.v.shape(3) || !std::isnan(c.attention_options.scale);
}

const Fact attention_facts[] = {
    {acausal, M::causal_one_more, "--causal bottom_right"},
    {square, M::top_left_for_bottom_right, "--causal bottom_right --keys 98"},
    {one_key_head, M::query_head_modulo, "--heads 4 --key-heads 2"},
    {unmasked, M::mask_of_first_batch, "--mask random -B 2"},
    {unbiased, M::bias_scaled, "--bias head"},
    {uncapped, M::softcap_ignored, "--softcap 2"},
    {no_sink, M::sink_not_in_sum, "--sink"},
    {no_window, M::window_left_off_by_one, "--window-left 20"},
    {one_head_size, M::value_size_in_scale, "-V 24, and no --scale"},
    {scale_of_1, M::scores_without_scale, "--scale 0.3"},
};

// The first two sequences and groups of heads: one of each would hide what a neighbour does.
Selection select_two(const Call& call) {
    Selection two;
    for (std::int64_t n = 0; n < std::min<std::int64_t>(sequence_count(call), 2); ++n) two.sequences.push_back(n);
    for (std::int64_t n = 0; n < std::min<std::int64_t>(group_count(call), 2); ++n) two.groups.push_back(n);
    return two;
}

void add_better(const Call& call, Blindness& blindness) {
    for (const Fact& fact : facts_of(call))
        if (fact.holds(call) &&
            std::ranges::any_of(blindness.unseen, [&](const Entry* entry) { return entry->mistake == fact.hidden; }))
            blindness.better.emplace_back(fact.better);
}

}  // namespace

std::span<const Fact> facts_of(const io::Call& call) {
    return call.is_attention ? std::span<const Fact>(attention_facts) : std::span<const Fact>(delta_facts);
}

Blindness blindness_of(const io::Call& call, const std::map<std::string, Tensor>& results, int threads) {
    io::check(call, results);
    if (io::has_quantised_numbers(call)) return blindness_of(io::ExpandedCall(call, DType::f32).call, results, threads);
    const std::span<const Entry> entries = entries_of(call);
    const bool whole = work_of(call) * static_cast<double>(entries.size()) <= Options().work;
    const Selection two = select_two(call);
    std::optional<Sample> sample;
    if (!whole) sample.emplace(call, results, std::map<std::string, Tensor>{}, two);
    const io::Call& examined = whole ? call : sample->call;
    const std::map<std::string, Tensor>& given = whole ? results : sample->results;
    judge::Options judging;
    judging.threads = threads;
    const Observation observation(judge::examine(examined, given, judging), given);
    const MistakenCall mistaken(examined, threads);
    Blindness blindness;
    blindness.of = entries.size();
    for (const Entry& entry : entries) {
        const bool shows =
            (entry.applies == nullptr || entry.applies(call)) &&
            observation.between(mistaken.run({&entry}), Scope::both, observation.truth()).worst_block > 1;
        if (!shows) blindness.unseen.push_back(&entry);
    }
    add_better(call, blindness);
    return blindness;
}

Blindness blindness_of(const io::Call& call, const Ranking& ranking) {
    Blindness blindness;
    blindness.of = entries_of(call).size();
    for (const auto* hidden : {&ranking.no_effect, &ranking.within_rounding})
        std::ranges::copy_if(*hidden, std::back_inserter(blindness.unseen),
                             [](const Entry* entry) { return entry->mistake != M::at_a_point; });
    add_better(call, blindness);
    return blindness;
}

Blindness blindness_by_facts(const io::Call& call) {
    Blindness blindness;
    for (const Fact& fact : facts_of(call))
        for (const Entry& entry : entries_of(call))
            if (entry.mistake == fact.hidden && fact.holds(call)) blindness.unseen.push_back(&entry);
    add_better(call, blindness);
    return blindness;
}

std::string Blindness::sentence(std::size_t most) const {
    if (unseen.empty()) return "";
    std::string text = "this input cannot show ";
    if (of > 0) text += std::to_string(unseen.size()) + " of " + std::to_string(of) + " mistakes";
    if (most == 0) return text + " (--json lists them)";
    if (of > 0) text += ", among them ";
    for (std::size_t i = 0; i < std::min(most, unseen.size()); ++i)
        text += (i > 0 ? ", " : "") + std::string(unseen[i]->name);
    for (std::size_t i = 0; i < std::min(most, better.size()); ++i)
        text += (i > 0 ? ", " : "; `softdelta make` with ") + better[i];
    return text + (better.empty() ? "" : " shows more");
}

}  // namespace softdelta::diagnose

#include "diagnose/diagnose.h"

#include <algorithm>

#include "diagnose/evidence/where.h"
#include "diagnose/sampling/select.h"
#include "diagnose/words.h"
#include "io/call/quantised.h"
#include "judge/memory.h"

namespace softdelta::diagnose {

namespace {

std::string describe(const Entry& entry) {
    if (entry.mistake == Mistake::at_a_point) return std::string(entry.sentence) + " (" + entry.formula + ")";
    return std::string(entry.name) + ": " + entry.sentence + " (" + entry.formula + ")";
}

void add_scope(std::vector<std::string>& text, Scope scope) {
    if (scope == Scope::forward) text.push_back("in the forward pass only: the gradients are those of a right one");
    if (scope == Scope::backward) text.push_back("in the backward pass only: the outputs are right");
}

// How much of the error goes away.
std::string effect(const Ranking& ranking, const Candidate& c) {
    const std::string before = ranking.before.worst_result(), after = c.left.worst_result();
    return "the error was " + number(ranking.before.results.at(before)) + " times what rounding may cost (" + before +
           "), " + number(c.left.results.at(after)) + " times (" + after + ") is left";
}

// How loud the noise is, and where.
std::string describe_noise(const Distance& before) {
    const auto loud = std::count_if(before.blocks.begin(), before.blocks.end(), [](double x) { return x > 1; });
    return "the error is up to " + number(before.worst_block) + " times what rounding may cost, beyond it in " +
           std::to_string(loud) + " of " + std::to_string(before.blocks.size()) + " blocks";
}

// By elimination: where a mistake reaches what is wrong, and nothing that is right.
std::string describe_suspects(const Ranking& ranking) {
    constexpr std::size_t most = 6;
    if (ranking.suspects.empty() || ranking.suspects.size() > most) return "";
    std::string places;
    for (const Entry* entry : ranking.suspects) places.append(places.empty() ? "" : ", ").append(entry->point.place);
    return "if it is at one place, then, by the results that are right, at " + places;
}

// The wrong results that the nearest mistake does not explain, if they are few: as where a gradient goes back through
// it.
std::string results_left(const Ranking& ranking) {
    if (!ranking.near()) return "";
    constexpr double small = 2, part = 0.01;
    std::size_t explained = 0, left = 0;
    std::string names;
    for (const auto& [name, before] : ranking.before.worst_blocks) {
        if (!(before > small)) continue;
        if (ranking.singles.front().left.worst_blocks.at(name) < std::max(small, part * before)) {
            ++explained;
        } else {
            ++left;
            names.append(names.empty() ? "" : ", ").append(name);
        }
    }
    return left > 0 && 2 * left < explained ? names : "";
}

std::vector<std::string> conclude(const Ranking& ranking) {
    std::vector<std::string> text;
    if (ranking.noise) {
        const std::string noise = describe_noise(ranking.before);
        if (ranking.doubtful) {
            text.push_back("more noise than allowed, or a mistake: too few errors show to tell");
            text.push_back("it may be " + describe(*ranking.singles.front().entries.front()));
            text.push_back(noise);
        } else {
            text.push_back("no mistake, only more noise than allowed");
            text.push_back(noise + ", and no mistake has its pattern");
        }
    } else if (ranking.explained()) {
        const Candidate& best = ranking.singles.front();
        text.push_back("one mistake explains it, " + describe(*best.entries.front()));
        add_scope(text, best.scope);
        text.push_back(effect(ranking, best));
        constexpr std::size_t most = 3;
        for (std::size_t i = 0; i < std::min(most, best.equal.size()); ++i)
            text.push_back("this input cannot tell it from " + describe(*best.equal[i]));
        if (best.equal.size() > most)
            text.push_back("nor from " + std::to_string(best.equal.size() - most) + " other mistakes");
    } else if (ranking.explained_by_two()) {
        const Candidate& best = ranking.pairs.front();
        text.push_back("more than one mistake: no single one explains it, these two do");
        for (const Entry* entry : best.entries) text.push_back(describe(*entry));
        add_scope(text, best.scope);
        text.push_back(effect(ranking, best));
    } else {
        text.push_back("no mistake of the catalogue explains it, nor do two");
        if (ranking.near())
            text.push_back("nearest is " + describe(*ranking.singles.front().entries.front()) + "; " +
                           effect(ranking, ranking.singles.front()));
        if (const std::string rest = results_left(ranking); !rest.empty())
            text.push_back("the nearest explains all wrong results but " + rest);
        if (const std::string suspects = describe_suspects(ranking); !suspects.empty()) text.push_back(suspects);
    }
    return text;
}

Diagnosis diagnose_part(const io::Call& call, const std::map<std::string, Tensor>& results,
                        const std::map<std::string, Tensor>& intermediates, const Options& options,
                        const std::function<void(ErrorMap&)>& name_rows) {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : results) names.push_back(name);
    Diagnosis diagnosis;
    diagnosis.memory = judge::memory_to_judge(call, names, "", options.threads) + memory_of(call, options.threads);
    judge::expect_memory("", diagnosis.memory, options.memory);
    judge::Options judging;
    judging.threads = options.threads;
    judging.progress = options.progress;
    const std::vector<judge::Evidence> evidence = judge::examine(call, results, judging);
    for (const judge::Evidence& e : evidence) diagnosis.findings.push_back(e.finding);
    if (!diagnosis.wrong()) return diagnosis;
    for (const judge::Evidence& e : evidence) {
        diagnosis.maps.push_back(map_errors(e, results.at(e.finding.name)));
        name_rows(diagnosis.maps.back());
    }
    diagnosis.where = describe_where(call, evidence, results, diagnosis.maps);
    diagnosis.stages = check_stages(call, intermediates, options.threads);
    diagnosis.ranking = rank(call, Observation(evidence, results), options.work, options.threads, options.progress);
    diagnosis.conclusion = conclude(diagnosis.ranking);
    return diagnosis;
}

// The row of a result that is farthest off, by its numbers in the whole call.
std::string worst_row(const ErrorMap& map) {
    const auto worst = std::max_element(map.rows.begin(), map.rows.end(),
                                        [](const ErrorRow& a, const ErrorRow& b) { return a.ratio < b.ratio; });
    if (worst == map.rows.end()) return "";
    const std::string sequence = worst->sequence >= 0
                                     ? "sequence " + std::to_string(number_of(map.sequence_numbers, worst->sequence))
                                     : "batch row " + std::to_string(number_of(map.batch_numbers, worst->batch));
    return "worst in " + sequence + ", head " + std::to_string(number_of(map.head_numbers, worst->head)) + ", row " +
           std::to_string(worst->row) + " of its " + map.row_name;
}

Diagnosis diagnose_sample(const io::Call& call, const std::map<std::string, Tensor>& results,
                          const std::map<std::string, Tensor>& intermediates, const Options& options) {
    if (options.progress) options.progress(0, "comparison with the fast path");
    judge::expect_memory("", judge::memory_to_compute(call, "fast", options.threads), options.memory);
    const Screen screen = compare_with_fast(call, results, options.threads);
    const Selection selection = select(call, screen, options.work / static_cast<double>(entries_of(call).size()));
    const Sample sample(call, results, intermediates, selection);
    const auto name_rows = [&](ErrorMap& map) {
        const Tensor& whole = results.at(map.result);
        const TensorPart part = part_of_result(call, selection, map.result, whole);
        map.batch_numbers.assign(part.sequences.begin(), part.sequences.end());
        map.head_numbers.assign(part.heads.begin(), part.heads.end());
        map.sequence_numbers.assign(selection.sequences.begin(), selection.sequences.end());
        map.whole_heads = map.heads * group_count(call) / static_cast<Index>(selection.groups.size());
    };
    Diagnosis diagnosis = diagnose_part(sample.call, sample.results, sample.intermediates, options, name_rows);
    std::map<std::string, double> limits;
    for (judge::Finding& f : diagnosis.findings) {
        limits[f.name] = f.limit;
        const auto map = std::find_if(diagnosis.maps.begin(), diagnosis.maps.end(),
                                      [&](const ErrorMap& m) { return m.result == f.name; });
        const bool wrong = f.verdict == judge::Verdict::wrong;
        if (wrong && map != diagnosis.maps.end()) f.note = worst_row(*map);
    }
    diagnosis.examined = describe_selection(call, selection, screen, limits, sample.left_out);
    return diagnosis;
}

}  // namespace

bool Diagnosis::wrong() const {
    return judge::summarise(findings) == judge::Verdict::wrong;
}

Diagnosis diagnose(const io::Call& call, const std::map<std::string, Tensor>& results,
                   const std::map<std::string, Tensor>& intermediates, const Options& options) {
    io::check(call, results);
    if (io::has_quantised_numbers(call))
        return diagnose(io::ExpandedCall(call, DType::f32).call, results, intermediates, options);
    std::map<std::string, Tensor> stages = intermediates;
    if (!call.is_attention && call.delta_options.steps > 1) stages.clear();  // engines have none of steps
    const std::vector<StageFinding> misshapen = take_out_misshapen(call, stages);
    const bool whole = work_of(call) * static_cast<double>(entries_of(call).size()) <= options.work;
    Diagnosis diagnosis = whole ? diagnose_part(call, results, stages, options, [](ErrorMap&) {})
                                : diagnose_sample(call, results, stages, options);
    if (diagnosis.wrong()) diagnosis.stages.insert(diagnosis.stages.end(), misshapen.begin(), misshapen.end());
    return diagnosis;
}

}  // namespace softdelta::diagnose

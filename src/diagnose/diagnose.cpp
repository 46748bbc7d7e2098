#include "diagnose/diagnose.h"

#include <algorithm>
#include <cstdio>

#include "diagnose/where.h"

namespace softdelta::diagnose {

namespace {

std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2g", x);
    return text;
}

std::string describe(const Entry& entry) {
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

std::vector<std::string> conclude(const Ranking& ranking) {
    std::vector<std::string> text;
    if (ranking.explained()) {
        const Candidate& best = ranking.singles.front();
        text.push_back("one mistake explains it, " + describe(*best.entries.front()));
        add_scope(text, best.scope);
        text.push_back(effect(ranking, best));
        for (const Entry* equal : best.equal) text.push_back("this input cannot tell it from " + describe(*equal));
    } else if (ranking.explained_by_two()) {
        const Candidate& best = ranking.pairs.front();
        text.push_back("more than one mistake: no single one explains it, these two do");
        for (const Entry* entry : best.entries) text.push_back(describe(*entry));
        add_scope(text, best.scope);
        text.push_back(effect(ranking, best));
    } else {
        text.push_back("no mistake of the catalogue explains it, nor do two");
        if (!ranking.singles.empty() && ranking.singles.front().left.cost < ranking.before.cost)
            text.push_back("nearest is " + describe(*ranking.singles.front().entries.front()) + "; " +
                           effect(ranking, ranking.singles.front()));
    }
    return text;
}

}  // namespace

bool Diagnosis::wrong() const {
    return std::any_of(findings.begin(), findings.end(),
                       [](const judge::Finding& f) { return f.verdict == judge::Verdict::wrong; });
}

Diagnosis diagnose(const io::Call& call, const std::map<std::string, Tensor>& results,
                   const std::map<std::string, Tensor>& intermediates, const Options& options) {
    judge::Options judging;
    judging.threads = options.threads;
    judging.progress = options.progress;
    const std::vector<judge::Evidence> evidence = judge::examine(call, results, judging);
    Diagnosis diagnosis;
    for (const judge::Evidence& e : evidence) diagnosis.findings.push_back(e.finding);
    if (!diagnosis.wrong()) return diagnosis;
    for (const judge::Evidence& e : evidence) diagnosis.maps.push_back(map_errors(e, results.at(e.finding.name)));
    diagnosis.where = describe_where(call, evidence, results, diagnosis.maps);
    diagnosis.stages = check_stages(call, intermediates, options.threads);
    diagnosis.ranking = rank(call, Observation(evidence, results), options.threads, options.progress);
    diagnosis.conclusion = conclude(diagnosis.ranking);
    return diagnosis;
}

}  // namespace softdelta::diagnose

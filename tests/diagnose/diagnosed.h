// What the catalogue says of a set of results, on one thread.
#pragma once

#include <string>

#include "diagnose/evidence/rank.h"
#include "judge/floats.h"

namespace softdelta::test {

inline diagnose::Observation observe(const io::Call& call, const Results& results) {
    judge::Options options;
    options.threads = 1;
    const std::map<std::string, Tensor> actual = views(results);
    return diagnose::Observation(judge::examine(call, actual, options), actual);
}

inline diagnose::Ranking rank_results(const io::Call& call, const Results& results) {
    return diagnose::rank(call, observe(call, results), HUGE_VAL, 1, {});
}

inline std::string names(const std::vector<const diagnose::Entry*>& entries) {
    std::string text;
    for (const diagnose::Entry* entry : entries) text += (text.empty() ? "" : " + ") + std::string(entry->name);
    return text;
}

// The best candidates, for messages.
inline std::string table(const std::vector<diagnose::Candidate>& candidates) {
    std::string text;
    for (std::size_t i = 0; i < std::min<std::size_t>(candidates.size(), 5); ++i) {
        const diagnose::Candidate& c = candidates[i];
        text += "  " + names(c.entries) + ": cost " + std::to_string(c.left.cost) + ", worst block " +
                std::to_string(c.left.worst_block) + " in " + c.left.worst_result() + ", effect " +
                std::to_string(c.effect) + (c.explains ? ", explains\n" : "\n");
    }
    return text;
}

}  // namespace softdelta::test

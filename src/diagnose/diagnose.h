// What is wrong with a dump: where, and which mistake of the catalogue explains it.
#pragma once

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "diagnose/evidence/error_map.h"
#include "diagnose/evidence/rank.h"
#include "diagnose/evidence/stage_check.h"

namespace softdelta::diagnose {

struct Options {
    int threads = 0;
    // Multiply-adds that all mistakes together may take; of a call that takes more, a part is examined.
    double work = 2e11;
    double memory = HUGE_VAL;  // bytes that may be needed; estimated before anything is computed
    std::function<void(double fraction, const char* step)> progress;
};

struct Diagnosis {
    std::vector<std::string> examined;  // sentences: which part of the call; empty: all of it
    std::vector<judge::Finding> findings;
    std::vector<ErrorMap> maps;           // of every result
    std::vector<std::string> where;       // sentences
    std::vector<StageFinding> stages;     // intermediates, in data flow
    std::vector<std::string> conclusion;  // likewise: which mistake
    Ranking ranking;                      // empty when every result is right
    double memory = 0;                    // bytes, as estimated

    bool wrong() const;
};

// Of the results and the intermediates (dense views, by name) of a call.
Diagnosis diagnose(const io::Call& call, const std::map<std::string, Tensor>& results,
                   const std::map<std::string, Tensor>& intermediates, const Options& options);

}  // namespace softdelta::diagnose

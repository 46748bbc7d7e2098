// Which mistakes of the catalogue explain what a dump holds.
#pragma once

#include <functional>
#include <vector>

#include "diagnose/catalogue/catalogue.h"
#include "diagnose/evidence/observation.h"

namespace softdelta::diagnose {

struct Candidate {
    std::vector<const Entry*> entries;  // one mistake, or two at once
    Scope scope = Scope::both;
    Distance left;                          // between the dump and the mistaken truth
    std::map<std::string, double> reaches;  // the effect on each result, relative to noise
    double effect = 0;                      // of the mistake, relative to noise, in the block where it shows most
    std::vector<const Entry*> equal;        // entries that give the same results on this input, to within rounding
    Fit fit;                                // the dump's error as a multiple of the effect
    double evidence = 0;                    // log of how much likelier the dump is with it than with noise alone
    bool improves = false;                  // is far likelier, and takes most of the error away
    bool explains = false;                  // and what is left is rounding
};

struct Ranking {
    Distance before;                            // between the dump and the truth
    std::vector<Candidate> singles;             // best first
    std::vector<Candidate> pairs;               // best first; only looked for when no single mistake explains the dump
    std::size_t pairs_left_out = 0;             // for want of time: the least likely
    bool noise = false;                         // no mistake, only more noise than allowed
    bool doubtful = false;                      // or the first of singles: too few errors tell
    std::vector<const Entry*> suspects;         // losses that reach every wrong result and no right one
    std::vector<const Entry*> within_rounding;  // shows less on this input than rounding may
    std::vector<const Entry*> no_effect;        // mistakes that this call cannot have, or its results cannot show

    // Mistakes in the order in which they are likely: those of pairs, where one alone explains nothing, then the
    // others.
    std::vector<const Entry*> named() const;
    bool explained() const { return !singles.empty() && singles.front().explains; }
    // The likeliest takes away enough of the error to be worth a word.
    bool near() const { return !singles.empty() && singles.front().left.cost < 0.7 * before.cost; }
    bool explained_by_two() const { return !explained() && !pairs.empty() && pairs.front().explains; }
};

using Progress = std::function<void(double fraction, const char* step)>;

// `work` multiply-adds bound how many pairs are tried.
Ranking rank(const io::Call& call, const Observation& observation, double work, int threads, const Progress& progress);

}  // namespace softdelta::diagnose

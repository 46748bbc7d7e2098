// What an input cannot show: mistakes of the catalogue whose results on it are within the limits of the right ones.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "diagnose/catalogue/catalogue.h"
#include "judge/verify.h"

namespace softdelta::diagnose {

// Something about an input that hides a mistake, and what a better one has.
struct Fact {
    bool (*holds)(const io::Call&);
    Mistake hidden;
    const char* better;  // an option of `softdelta make`
};
std::span<const Fact> facts_of(const io::Call& call);

struct Ranking;

struct Blindness {
    std::vector<const Entry*> unseen;  // mistakes, also those of options that the call has not
    std::size_t of = 0;                // how many there are; 0: only those that facts tell of were looked at
    std::vector<std::string> better;   // options of `softdelta make` that show some of them

    // "this input cannot show 12 of 71 mistakes, among them …", so many by name; empty: it shows all.
    std::string sentence(std::size_t most = 4) const;
};

// Runs every mistake; of a large call on two groups of heads of two sequences. `results` gives names and types.
Blindness blindness_of(const io::Call& call, const std::map<std::string, Tensor>& results, int threads);
// As a diagnosis found it.
Blindness blindness_of(const io::Call& call, const Ranking& ranking);
// Without running any.
Blindness blindness_by_facts(const io::Call& call);

}  // namespace softdelta::diagnose

// Known mistakes of kernels, each a small change of the chunk form or of attention: a name, a sentence, a formula.
#pragma once

#include <span>
#include <string>

#include "diagnose/catalogue/mistake.h"
#include "io/call/call.h"

namespace softdelta::diagnose {

struct Entry {
    Mistake mistake;
    const char* name;
    const char* sentence;  // what the kernel does
    const char* formula;   // right → mistaken, in the names of docs/math.md
    const char* source;    // of the right formula, or of the mistake
    Phase from = Phase::forward;
    bool (*applies)(const io::Call&) = nullptr;  // whether a call can have it; null: every call
    Point point{};                               // of Mistake::at_a_point
};

std::span<const Entry> delta_entries();
std::span<const Entry> attention_entries();

inline std::span<const Entry> entries_of(const io::Call& call) {
    return call.is_attention ? attention_entries() : delta_entries();
}

// The catalogue as a page of Markdown.
std::string catalogue_page();

}  // namespace softdelta::diagnose

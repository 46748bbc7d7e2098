// Mistakes that kernels have had or nearly had, each with inputs that let it show.
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "io/call/make_case.h"
#include "judge/floats.h"

namespace softdelta::test {

struct Mistake {
    std::string name;
    const char* entry;   // its name in the catalogue of `softdelta diagnose`
    const char* result;  // one that it spoils
    io::MakeOptions inputs;
    std::function<Results(const io::Call&)> run;    // the kernel with the mistake
    std::function<Results(const io::Call&)> right;  // and without
    int kind;                                       // DeltaMistake or AttentionMistake
};

inline void PrintTo(const Mistake& mistake, std::ostream* out) {
    *out << mistake.name;
}

std::vector<Mistake> delta_mistakes();
std::vector<Mistake> attention_mistakes();

}  // namespace softdelta::test

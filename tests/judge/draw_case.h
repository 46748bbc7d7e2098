// Calls drawn at random: every operation, its options and its hard cases, in sizes that take milliseconds.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>

#include "io/call/make_case.h"

namespace softdelta::test {

// The same numbers on every machine: the standard library's distributions differ.
class Draw {
  public:
    explicit Draw(std::uint64_t seed) : engine_(seed) {}
    std::int64_t between(std::int64_t low, std::int64_t high) {  // both included
        return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
    }
    bool one_in(std::int64_t n) { return between(1, n) == 1; }
    template <class T>
    T of(std::initializer_list<T> choices) {
        return choices.begin()[between(0, static_cast<std::int64_t>(choices.size()) - 1)];
    }

  private:
    std::mt19937_64 engine_;
};

io::MakeOptions draw_case(Draw& draw);

}  // namespace softdelta::test

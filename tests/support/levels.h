// Drawn calls on every instruction set that the CPU has.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/parallel.h"
#include "support/array.h"
#include "support/call_count.h"

namespace softdelta::test {

// Each level is selected while visit(name) runs.
template <class Visit>
void for_each_level(const Visit& visit) {
    for (const IsaLevel& level : isa_levels()) {
        if (!level.available) continue;
        select_isa_level(level.name);
        visit(level.name);
    }
    select_isa_level("");
}

// `count` calls on each level, several at a time, with seeds from first_seed() on. check(draw(seed), seed) is what is
// wrong with a call, or nothing.
template <class Draw, class Check>
void check_calls(Index count, const Draw& draw, const Check& check) {
    std::uint64_t first = first_seed();
    for_each_level([&](const std::string& level) {
        std::vector<std::string> faults(static_cast<std::size_t>(count));
        core::parallel_units(0, count, [&] {
            return [&](Index i) {
                const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
                try {
                    faults[static_cast<std::size_t>(i)] = check(draw(seed), seed);
                } catch (const std::exception& e) {
                    faults[static_cast<std::size_t>(i)] = "SOFTDELTA_SEED=" + std::to_string(seed) + ": " + e.what();
                }
            };
        });
        for (const std::string& fault : faults)
            if (!fault.empty()) ADD_FAILURE() << level << ": " << fault;
        first += static_cast<std::uint64_t>(count);
    });
}

}  // namespace softdelta::test

// Prints a hash of every result of drawn calls of the delta rules, on each level that the CPU has. SOFTDELTA_CALLS: how
// many.
#include "engines/cpu/bits/result_bits.h"
#include "support/fast_delta.h"
#include "support/levels.h"

int main() {
    using namespace softdelta;
    test::for_each_level([&](const std::string& level) {
        for (std::uint64_t seed = 1; seed <= static_cast<std::uint64_t>(test::call_count(500)); ++seed) {
            const test::FastDelta call = test::draw_fast_delta(seed);
            test::FastDelta::Results results = call.forward(call.forward_names(), test::fast(seed));
            results.merge(call.backward(call.gradient_names(), test::fast(seed)));
            test::print_hashes(level, "delta", seed, results);
        }
    });
    return 0;
}

// Prints a hash of every result of drawn attention calls, on each level that the CPU has. SOFTDELTA_CALLS: how many.
#include "engines/cpu/bits/result_bits.h"
#include "support/fast_attention.h"
#include "support/levels.h"

int main() {
    using namespace softdelta;
    Execution execution;
    execution.engine = "fast";
    execution.threads = 2;
    test::for_each_level([&](const std::string& level) {
        for (std::uint64_t seed = 1; seed <= static_cast<std::uint64_t>(test::call_count(500)); ++seed) {
            const test::FastAttention call = test::draw_fast_attention(seed);
            test::Results results = call.forward(call.forward_names(), execution);
            const test::Names gradients = call.gradient_names();
            if (!gradients.empty()) results.merge(call.backward(gradients, results, execution));
            test::print_hashes(level, "attention", seed, results);
        }
    });
    return 0;
}

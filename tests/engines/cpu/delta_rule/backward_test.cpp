// Gradients of the fast delta rules against the f64 recurrence: random calls with every option of the contract, on
// every instruction set, in every storage type, judged by the limits that a right kernel of that precision sets
// (docs/math.md). Memory that is not written holds NaN; buffers end at unreadable pages.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include "support/fast_delta.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

std::string check_backward(const FastDelta& call, std::uint64_t seed) {
    FastDelta::Names names = call.gradient_names();
    if (call.has("first gate surges")) std::erase(names, "dinitial_state");
    return judge_results(call, call.backward(call.some(names), fast(seed), Memory::own, call.drawn_keep()));
}

TEST(DeltaFast, BackwardIsRight) {
    check_calls(call_count(200), draw_delta_for_gradients, check_backward);
}

TEST(DeltaFast, BackwardOfKeptStatesThatShrink) {
    check_calls(call_count(16), draw_shrinking_states, [](const FastDelta& call, std::uint64_t seed) {
        return judge_results(call, call.backward(call.gradient_names(), fast(seed), Memory::own, {384, DType::f32}));
    });
}

}  // namespace
}  // namespace softdelta::test

// Gradients of the fast delta rules against the f64 recurrence: random calls with every option of the contract, on
// every instruction set, in every storage type, judged by the limits that an honest kernel of that precision sets
// (docs/math.md). Memory that is not written holds NaN; buffers end at unreadable pages.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>

#include "support/fast_delta.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

bool has(const FastDelta& call, const char* feature) {
    const std::vector<std::string>& features = call.drawn().features;
    return std::find(features.begin(), features.end(), feature) != features.end();
}

// Gradients may grow beyond f16 where states do.
FastDelta draw(std::uint64_t seed) {
    FastDelta call = draw_fast_delta(seed);
    const bool f16 = has(call, "positive gate") || has(call, "comba") || has(call, "large initial_state") ||
                     has(call, "extreme raw gate");
    return f16 ? draw_fast_delta(seed, {DType::f32, DType::bf16}) : std::move(call);
}

std::string check_backward(const FastDelta& call, std::uint64_t seed) {
    FastDelta::Names names = call.gradient_names();
    if (has(call, "first gate surges")) std::erase(names, "dinitial_state");
    return judge_results(call, call.backward(call.some(names), fast(seed)));
}

TEST(DeltaFast, BackwardIsRight) {
    check_calls(call_count(200), draw, check_backward);
}

}  // namespace
}  // namespace softdelta::test

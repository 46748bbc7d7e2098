// The fast delta rules against the f64 recurrence: random calls with every option of the contract, on every instruction
// set, in every storage type, judged by the limits that an honest kernel of that precision sets (docs/math.md). Memory
// that is not written holds NaN; buffers end at unreadable pages.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/fast_delta.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

// Some rules make states grow; f16 ends at 65504.
bool exceeds_f16(const FastDelta& call) {
    if (call.drawn().v.view().dtype() != DType::f16) return false;
    Execution reference;
    reference.engine = Engine::reference;
    const std::vector<double> o = forward_results(call.drawn(), reference).at("o").values();
    return std::any_of(o.begin(), o.end(), [](double x) { return std::abs(x) > 60000; });
}

std::string check_forward(const FastDelta& call, std::uint64_t seed) {
    if (exceeds_f16(call)) return "";
    return judge_results(call, call.forward(call.some(call.forward_names()), fast(seed)));
}

TEST(DeltaFast, ForwardIsRight) {
    check_calls(
        call_count(200), [](std::uint64_t seed) { return draw_fast_delta(seed); }, check_forward);
}

}  // namespace
}  // namespace softdelta::test

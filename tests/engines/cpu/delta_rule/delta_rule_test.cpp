// The fast delta rules against the f64 recurrence: random calls with every option of the contract, on every instruction
// set, in every storage type, judged by the limits that an honest kernel of that precision sets (docs/math.md). Memory
// that is not written holds NaN; buffers end at unreadable pages.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "io/file/core_view.h"
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

// The CPU's conversion to bf16 makes a number below 2^-126 zero; nothing that is computed from it in f32 shows.
constexpr double smallest_normal = 0x1p-126;

double error_ratio(const Tensor& actual, const Array& expected) {
    const core::Tensor t = io::core_view(actual);
    double error = 0, size = 0;
    for (Index i = 0; i < expected.count(); ++i) {
        Index at = 0, rest = i;
        for (auto dim = static_cast<std::size_t>(t.rank); dim-- > 0; rest /= t.shape[dim])
            at += rest % t.shape[dim] * t.stride[dim];
        const double e = expected.get(i), a = core::load(t, at);
        size += e * e;
        if (!(std::abs(a - e) < smallest_normal)) error += (a - e) * (a - e);
    }
    return error == 0 ? 0 : std::sqrt(error / size);
}

// What the backward pass need not compute again: u and the states, against the f64 recurrence.
std::string check_kept(const FastDelta& call, std::uint64_t seed) {
    for (const char* grows : {"positive gate", "surging gate", "comba", "large initial_state", "extreme raw gate"})
        if (call.has(grows)) return "";
    const Keep keep{.interval = 64};
    const Array states(DType::f64, call.drawn().states_shape(keep.interval)), u(DType::f64, call.drawn().o_shape());
    DeltaOptions options = call.drawn().options;
    options.state_interval = keep.interval;
    Execution reference;
    reference.engine = Engine::reference;
    delta_forward(call.drawn().inputs(), {.states = states.view(), .u = u.view()}, options, reference);
    const FastDelta::Kept kept = call.kept(keep, fast(seed));
    const double limit =
        call.drawn().v.view().dtype() == DType::f32 && call.drawn().k.view().dtype() == DType::f32 ? 1e-4 : 0.03;
    std::string wrong;
    if (!(error_ratio(kept.u.view(), u) <= limit))
        wrong += call.describe() + ": u " + std::to_string(error_ratio(kept.u.view(), u)) + "\n";
    if (!(error_ratio(kept.states.view(), states) <= limit)) wrong += call.describe() + ": states\n";
    return wrong;
}

TEST(DeltaFast, KeepsStatesAndWhatTokensWrite) {
    check_calls(
        call_count(100), [](std::uint64_t seed) { return draw_fast_delta(seed); }, check_kept);
}

}  // namespace
}  // namespace softdelta::test

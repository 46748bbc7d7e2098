// The bound of the workspace of delta rules: as bound_test.cpp has it of attention.
#include "engines/cpu/bound.h"
#include "support/levels.h"
#include "support/random_delta.h"

namespace softdelta::test {
namespace {

TEST(WorkspaceBound, OfDeltaRulesIsEnough) {
    const std::uint64_t first = first_seed();
    for_each_level([&](const std::string& level) {
        for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(20)); ++seed) {
            DeltaRanges ranges{
                .batch = 5, .tokens = 1200, .heads = 4, .group = 2, .key_channels = 8, .value_channels = 20};
            ranges.dtypes = {DType::f32};
            ranges.tiled = true;
            ranges.lengths = {0, 1, 1, 2, 8, 64, 500, 2000};
            const RandomDelta call = draw_delta(seed, ranges);
            Random random(seed);
            const Execution execution = draw_execution(random);
            DeltaInputs in = call.inputs(), kinds = in;
            const Array o(DType::f32, call.o_shape());
            for (Tensor DeltaInputs::*t : {&DeltaInputs::q, &DeltaInputs::k, &DeltaInputs::v, &DeltaInputs::p,
                                           &DeltaInputs::g, &DeltaInputs::beta})
                kinds.*t = empty(kinds.*t);
            kinds.cu_seqlens = kinds.initial_state = {};
            check_bound(
                {call.sequences, in.q.shape(0) * in.q.shape(1), 0},
                delta_forward_workspace(in, {.o = o.view()}, call.options, execution),
                [&](const Limits& l) { return delta_forward_workspace_bound(kinds, l, call.options, execution); },
                random, level + ", " + call.describe());
        }
    });
}

}  // namespace
}  // namespace softdelta::test

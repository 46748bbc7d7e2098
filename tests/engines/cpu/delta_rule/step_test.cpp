// Decode: a few tokens at a time on states that stay where they are, on every instruction set.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/fast_delta.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

Execution with(const std::string& engine) {
    Execution e;
    e.engine = engine;
    return e;
}

// RMS(x − truth)/RMS(truth), numbers of order 1 at least.
double error_ratio(const std::vector<double>& x, const std::vector<double>& truth) {
    double error = 0, size = 1e-6 * static_cast<double>(truth.size());
    for (std::size_t i = 0; i < truth.size(); ++i) {
        if (!std::isfinite(x[i])) return INFINITY;
        error += (x[i] - truth[i]) * (x[i] - truth[i]);
        size += truth[i] * truth[i];
    }
    return truth.empty() ? 0 : std::sqrt(error / size);
}

std::vector<double> values(const Tensor& t) {
    std::vector<double> all;
    const auto* data = static_cast<const float*>(t.data());
    for (Index i = 0; i < t.count(); ++i) all.push_back(static_cast<double>(data[i]));
    return all;
}

RandomDelta draw(std::uint64_t seed) {
    DeltaRanges ranges{.batch = 3, .tokens = 10, .heads = 2, .group = 3, .key_channels = 80, .value_channels = 80};
    ranges.channel_step = seed % 2 == 0 ? 16 : 1;
    ranges.shortest = 1;
    ranges.dtypes = {DType::f32};
    return draw_delta(seed, ranges);
}

// Two calls, one after the other, on a pool of states with an entry for each sequence, in any order, and others
// between. States are dense, [K, V] or [V, K].
void check(const RandomDelta& call, const std::string& what) {
    const Index N = call.sequences, pool = 2 * N + 1;
    Random random(call.seed);
    std::vector<Index> entries(static_cast<std::size_t>(pool));
    for (Index i = 0; i < pool; ++i) entries[static_cast<std::size_t>(i)] = i;
    std::shuffle(entries.begin(), entries.end(), random);
    Array indices(DType::i64, {N});
    // Some have no sequence; their entries stay as they are.
    std::vector<bool> used(static_cast<std::size_t>(pool), false), padding(static_cast<std::size_t>(N));
    for (Index n = 0; n < N; ++n) {
        const Index entry = entries[static_cast<std::size_t>(n)];
        const bool none = padding[static_cast<std::size_t>(n)] = random() % 4 == 0;
        used[static_cast<std::size_t>(entry)] = !none;
        indices.set(n, none ? -1 : static_cast<double>(entry));
    }
    Shape shape = call.state_shape();
    shape[0] = pool;
    Array states(DType::f32, shape), truth(DType::f64, shape), o(DType::f32, call.o_shape()),
        o_truth(DType::f64, call.o_shape());
    fill_normal(states, random);
    for (Index i = 0; i < states.count(); ++i) truth.set(i, states.get(i));
    const std::vector<double> before = states.values();

    DeltaInputs in = call.inputs();
    in.state_indices = indices.view();
    for (int pass = 0; pass < 2; ++pass) {
        in.initial_state = truth.view();
        delta_forward(in, {.o = o_truth.view(), .final_state = truth.view()}, call.options, with("reference"));
        in.initial_state = states.view();
        delta_forward(in, {.o = o.view(), .final_state = states.view()}, call.options, with("fast"));
        EXPECT_LE(error_ratio(values(o.view()), o_truth.values()), 3e-6) << what;
        for (Index n = 0; n < N; ++n)
            for (Index t = call.begin(n); padding[static_cast<std::size_t>(n)] && t < call.begin(n) + call.length(n);
                 ++t)
                for (Index i = 0; i < o.view().shape(2) * o.view().shape(3); ++i) {
                    const Index row = call.batch(n) * o.view().shape(1) + t;
                    ASSERT_EQ(o.get(row * o.view().shape(2) * o.view().shape(3) + i), 0) << "no sequence, " << what;
                }
    }
    EXPECT_LE(error_ratio(values(states.view()), truth.values()), 3e-6) << what;
    const Index size = states.count() / pool;
    for (Index i = 0; i < pool; ++i)
        for (Index j = i * size; !used[static_cast<std::size_t>(i)] && j < (i + 1) * size; ++j)
            ASSERT_EQ(states.get(j), before[static_cast<std::size_t>(j)]) << "another entry of the pool, " << what;
}

TEST(DeltaStep, InPlaceOnAPoolOfStates) {
    std::uint64_t seed = first_seed();
    for_each_level([&](const std::string& level) {
        for (const std::uint64_t end = seed + static_cast<std::uint64_t>(call_count(40)); seed < end; ++seed) {
            RandomDelta call = draw(seed);
            call.options.use_qk_l2norm_in_kernel = true;  // no rule amplifies what is lost
            check(call, level + ", " + call.describe());
            if (testing::Test::HasFailure()) return;
        }
    });
}

// 16-bit states are rounded once a call, whatever the number of tokens.
TEST(DeltaStep, RoundsStatesOnce) {
    for_each_level([&](const std::string& level) {
        for (std::uint64_t seed = 1; seed <= 20; ++seed) {
            RandomDelta call = draw(seed);
            call.options.use_qk_l2norm_in_kernel = true;
            for (const DType dtype : {DType::bf16, DType::f16}) {
                const Array initial(dtype, call.state_shape()), final(dtype, call.state_shape());
                Random random(seed);
                fill_normal(initial, random);
                Array truth(DType::f64, call.state_shape());
                DeltaInputs in = call.inputs();
                in.initial_state = initial.view();
                delta_forward(in, {.final_state = truth.view()}, call.options, with("reference"));
                delta_forward(in, {.final_state = final.view()}, call.options, with("fast"));
                const double ulp = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
                EXPECT_LE(error_ratio(final.values(), truth.values()), 0.7 * ulp) << level << ", " << call.describe();
            }
        }
    });
}

}  // namespace
}  // namespace softdelta::test

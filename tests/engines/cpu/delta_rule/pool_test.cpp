// Pools of states as servers have them: a sequence begins from an entry that others may begin from too, or from 0, ends
// in another one, and leaves states on its way in further ones. Its results have the bits that it has alone on one
// thread.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each engine and instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "support/levels.h"
#include "support/parts.h"
#include "support/random_delta.h"

namespace softdelta::test {
namespace {

constexpr Index interval = 64;

struct Pools {
    Array states, read, written, has_initial, snapshots;

    Pools(const RandomDelta& call, Random& random) {
        const Index N = call.sequences;
        const Shape of_states = call.states_shape(interval);
        const Index kept = of_states[0] * of_states[1], entries = 3 * N + kept + 1;
        Shape shape = call.state_shape();
        shape[0] = entries;
        states = Array(DType::f32, shape);
        fill_normal(states, random);
        std::vector<Index> order(static_cast<std::size_t>(entries));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        read = Array(DType::i32, {N});
        written = Array(random() % 2 == 0 ? DType::i32 : DType::i64, {N});
        has_initial = Array(DType::boolean, {N});
        snapshots = Array(random() % 2 == 0 ? DType::i32 : DType::i64, {of_states[0], of_states[1]});
        const auto next = [&] {
            const Index entry = order.back();
            order.pop_back();
            return static_cast<double>(entry);
        };
        const double shared = next();
        for (Index n = 0; n < N; ++n) {
            const std::uint64_t kind = random() % 6;  // shared, its own, its own in place, …, none
            read.set(n, kind == 5 ? -1 : kind < 2 ? shared : next());
            written.set(n, kind == 2 ? read.get(n) : kind == 3 ? -1 : next());
            has_initial.set(n, random() % 3 == 0 ? 0 : 1);
        }
        for (Index i = 0; i < kept; ++i) snapshots.set(i, random() % 3 == 0 ? -1 : next());
    }
};

void check(const RandomDelta& call, const Execution& execution, bool keeps, const std::string& what) {
    Random random(call.seed);
    const Pools pools(call, random);
    const Array o(DType::f32, call.o_shape()), alone_o(DType::f32, call.o_shape());
    const std::vector<double> before = pools.states.values();
    Array expected(DType::f32, {pools.states.view().shape().begin(), pools.states.view().shape().end()});
    for (Index i = 0; i < expected.count(); ++i) expected.set(i, before[static_cast<std::size_t>(i)]);
    DeltaOptions options = call.options;
    options.state_interval = interval;
    Execution one = execution;
    one.threads = 1;

    DeltaInputs in = call.inputs();
    in.initial_state = pools.states.view();
    in.state_indices = pools.read.view();
    in.final_state_indices = pools.written.view();
    in.has_initial_state = pools.has_initial.view();
    if (keeps) in.snapshot_indices = pools.snapshots.view();

    const auto intervals = [](Index tokens) { return (tokens + interval - 1) / interval; };
    Index kept_before = 0;
    for (Index n = 0; n < call.sequences; ++n) {
        const Index count = call.length(n);
        const auto rows = [&](const Tensor& t) { return tokens_of(t, call.batch(n), call.begin(n), count); };
        const Index first = call.cu_seqlens.view() ? kept_before : 0;
        kept_before += intervals(count);
        if (pools.read.get(n) < 0) continue;  // o is 0
        DeltaInputs alone = call.inputs();
        for (Tensor* t : {&alone.q, &alone.k, &alone.p, &alone.v, &alone.g, &alone.beta}) *t = rows(*t);
        alone.cu_seqlens = {};
        Shape shape = call.state_shape();
        shape[0] = 1;
        const Array initial(DType::f32, shape), final_state(DType::f32, shape);
        const Index size = initial.count();
        for (Index i = 0; i < size; ++i)
            initial.set(i, before[static_cast<std::size_t>(static_cast<Index>(pools.read.get(n)) * size + i)]);
        alone.initial_state = pools.has_initial.get(n) != 0 ? initial.view() : Tensor();
        shape.insert(shape.begin() + 1, intervals(count));
        const Array states(DType::f32, shape);
        delta_forward(alone,
                      {.o = rows(alone_o.view()),
                       .final_state = pools.written.get(n) >= 0 ? final_state.view() : Tensor(),
                       .states = keeps ? states.view() : Tensor()},
                      options, one);
        const auto put = [&](double entry, const auto& value) {
            for (Index i = 0; entry >= 0 && i < size; ++i) expected.set(static_cast<Index>(entry) * size + i, value(i));
        };
        put(pools.written.get(n), [&](Index i) { return final_state.get(i); });
        for (Index s = 0; keeps && s < intervals(count); ++s)
            put(pools.snapshots.get({call.batch(n), first + s}), [&](Index i) { return states.get(s * size + i); });
    }
    delta_forward(in, {.o = o.view(), .final_state = pools.states.view()}, options, execution);
    ASSERT_EQ(first_difference(o, alone_o), -1) << what;
    ASSERT_EQ(first_difference(pools.states, expected), -1) << what;
}

void check_calls(const Execution& execution, bool keeps, int calls, const std::string& where) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(calls); ++seed) {
        DeltaRanges ranges{.batch = 6, .tokens = 300, .heads = 2, .group = 2, .key_channels = 20, .value_channels = 20};
        ranges.dtypes = {seed % 2 == 0 ? DType::f32 : DType::bf16};
        ranges.lengths = {0, 1, 1, 2, 5, 63, 64, 65, 130, 200};
        if (seed % 3 == 0) ranges.batch = 2, ranges.tokens = 700, ranges.lengths = {};  // heads are split
        RandomDelta call = draw_delta(seed, ranges);
        call.initial_state = {};
        check(call, execution, keeps, where + ", " + call.describe());
        if (testing::Test::HasFatalFailure()) return;
    }
}

TEST(StatePools, GiveASequenceTheBitsThatItHasAlone) {
    for_each_level([&](const std::string& level) {
        for (const bool keeps : {false, true})
            for (const int threads : {1, 5}) {
                Execution execution;
                execution.engine = "fast";
                execution.threads = threads;
                check_calls(execution, keeps, call_count(10), level);
            }
    });
}

TEST(StatePools, OfTheReferenceAndTheStages) {
    for (const char* engine : {"reference", "stages_f64", "stages_f32"})
        check_calls({.engine = engine}, true, call_count(4), engine);
}

TEST(StatePools, RefuseWhatSequencesWouldTakeFromEachOther) {
    std::vector<float> data(4096, 0.5F);
    std::vector<std::int32_t> index(64);
    const auto floats = [&](std::initializer_list<std::int64_t> shape) {
        return Tensor(data.data(), DType::f32, shape);
    };
    std::vector<float> pool(6 * 2 * 2), o(4096);
    const auto error = [&](std::vector<int> read, std::vector<int> written, std::vector<int> kept,
                           bool has_second = true) -> std::string {
        const auto place = [&](const std::vector<int>& values, std::size_t at) {
            std::copy(values.begin(), values.end(), index.begin() + static_cast<std::ptrdiff_t>(at));
            return index.data() + at;
        };
        DeltaInputs in{.q = floats({2, 65, 1, 2}), .k = floats({2, 65, 1, 2}), .v = floats({2, 65, 1, 2})};
        in.initial_state = Tensor(pool.data(), DType::f32, {6, 1, 2, 2});
        std::uint8_t begins[] = {1, has_second ? std::uint8_t{1} : std::uint8_t{0}};
        if (!has_second) in.has_initial_state = Tensor(begins, DType::boolean, {2});
        if (!read.empty()) in.state_indices = Tensor(place(read, 0), DType::i32, {2});
        if (!written.empty()) in.final_state_indices = Tensor(place(written, 8), DType::i32, {2});
        if (!kept.empty()) in.snapshot_indices = Tensor(place(kept, 16), DType::i32, {2, 2});
        try {
            delta_forward(in, {.o = Tensor(o.data(), DType::f32, {2, 65, 1, 2}), .final_state = in.initial_state},
                          {.rule = Rule::delta_rule});
        } catch (const std::exception& e) {
            return e.what();
        }
        return "";
    };
    EXPECT_EQ(error({0, 0}, {1, 2}, {}), "") << "both begin from entry 0";
    EXPECT_EQ(error({0, 1}, {0, -1}, {-1, 4, 5, -1}), "");
    EXPECT_EQ(error({0, 0}, {}, {}), "state_indices[1] is 0, expected an entry that no other sequence uses");
    EXPECT_EQ(error({}, {0, 1}, {}), "initial_state: dimension 0 is 6, expected 2 (batch)");
    EXPECT_EQ(error({0, 1}, {1, 2}, {}, false), "") << "the second begins from 0: nobody reads entry 1";
    EXPECT_EQ(error({0, -1}, {1, 1}, {}), "") << "the second is padding";
    EXPECT_EQ(error({0, 1}, {2, 2}, {}), "final_state_indices[1] is 2, expected an entry that no other sequence uses");
    EXPECT_EQ(error({0, 1}, {1, 2}, {}),
              "state_indices[1] is 1, expected an entry that is not written for another sequence");
    EXPECT_EQ(error({0, 1}, {0, 6}, {}), "final_state_indices[1] is 6, expected 0 to 5, or -1 where none is written");
    EXPECT_EQ(error({0, 6}, {1, 2}, {}), "state_indices[1] is 6, expected 0 to 5, or -1 where there is no sequence");
    EXPECT_EQ(error({0, 1}, {0, 1}, {2, 3, 2, 4}),
              "snapshot_indices[1, 0] is 2, expected an entry that no other sequence uses");
    EXPECT_EQ(error({0, 1}, {0, 1}, {2, 3, 4, -2}),
              "snapshot_indices[1, 1] is -2, expected 0 to 5, or -1 where none is kept");
    EXPECT_EQ(error({0, 1}, {2, 3}, {1, -1, -1, -1}),
              "state_indices[1] is 1, expected an entry that is not written for another sequence");
}

}  // namespace
}  // namespace softdelta::test

// The delta rules on the GPU against the truth: drawn calls of every option, results poisoned and between guard bytes.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "engines/cuda/gpu_test.h"
#include "engines/cuda/on_gpu.h"
#include "support/array.h"
#include "support/fast_delta.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

class CudaDelta : public OnGpuTest {};

// A drawn call's inputs on the GPU.
struct OnGpu {
    std::map<std::string, GpuTensor> given;
    DeltaInputs inputs;

    OnGpu(const FastDelta& call, bool dense) : is_dense(dense) {
        for (const DeltaOperand& operand : delta_operands())
            inputs.*operand.input = own(operand.name, call.call().delta.*operand.input);
        inputs.cu_seqlens = own("cu_seqlens", call.call().delta.cu_seqlens);
    }
    Tensor own(const std::string& name, const Tensor& t) {
        return given.emplace(name, is_dense ? GpuTensor::dense(t) : GpuTensor::input(t)).first->second.view();
    }

    bool is_dense;
};

bool is_refused(const FastDelta& call) {
    return call.call().delta.q.shape(3) > 256;
}

FastDelta::Results forward(const FastDelta& call, bool lengths_on_host, bool dense = false,
                           const Execution& execution = cuda()) {
    OnGpu gpu(call, dense);
    if (lengths_on_host) gpu.inputs.cu_seqlens = call.call().delta.cu_seqlens;
    FastDelta::Results results;
    std::map<std::string, GpuTensor> memory;
    for (const std::string& name : call.forward_names()) {
        io::OwnedTensor host(io::output_dtype(call.call(), name), io::output_shape(call.call(), name));
        memory.emplace(name, GpuTensor::result(host.view()));
        results.emplace(name, host);
    }
    delta_forward(gpu.inputs, {.o = memory.at("o").view(), .final_state = memory.at("final_state").view()},
                  call.call().delta_options, execution);
    for (const auto& [name, host] : results) memory.at(name).copy_to(host.view());
    return results;
}

// Some rules make states grow; f16 ends at 65504.
bool exceeds_f16(const FastDelta& call) {
    if (call.drawn().v.view().dtype() != DType::f16) return false;
    Execution reference;
    reference.engine = "reference";
    const std::vector<double> o = forward_results(call.drawn(), reference).at("o").values();
    return std::any_of(o.begin(), o.end(), [](double x) { return std::abs(x) > 60000; });
}

FastDelta::Results backward(const FastDelta& call, const FastDelta::Names& names, bool own_workspace,
                            bool dense = false, Execution execution = cuda()) {
    OnGpu gpu(call, dense);
    const GpuTensor d_o = dense ? GpuTensor::dense(call.call().d_o) : GpuTensor::input(call.call().d_o),
                    dfinal_state = GpuTensor::input(call.call().dfinal_state);
    FastDelta::Results results;
    std::map<std::string, GpuTensor> memory;
    for (const std::string& name : names) {
        io::OwnedTensor host(io::output_dtype(call.call(), name), io::output_shape(call.call(), name));
        memory.emplace(name, GpuTensor::result(host.view()));
        results.emplace(name, host);
    }
    DeltaGradients gradients;
    gradients.d_o = d_o.view();
    gradients.dfinal_state = dfinal_state.view();
    for (const DeltaOperand& operand : delta_operands())
        if (const auto found = memory.find(std::string("d") + operand.name); found != memory.end())
            gradients.*operand.gradient = found->second.view();
    GpuTensor workspace;
    if (own_workspace) {
        const auto bytes = static_cast<std::int64_t>(
            delta_backward_workspace(gpu.inputs, gradients, call.call().delta_options, execution));
        workspace = GpuTensor::result(Tensor(nullptr, DType::boolean, {bytes}));
        execution.workspace = {static_cast<std::byte*>(workspace.view().data()), static_cast<std::size_t>(bytes)};
    }
    delta_backward(gpu.inputs, gradients, call.call().delta_options, execution);
    for (const auto& [name, host] : results) memory.at(name).copy_to(host.view());
    if (own_workspace) workspace.check_guards();
    return results;
}

FastDelta::Names drawn_gradients(const FastDelta& call) {
    FastDelta::Names names = call.gradient_names();
    if (call.has("first gate surges")) std::erase(names, "dinitial_state");
    return call.some(names);
}

TEST_F(CudaDelta, BackwardIsRight) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(200)); ++seed) {
        const FastDelta call = draw_delta_for_gradients(seed);
        const FastDelta::Names names = drawn_gradients(call);
        if (is_refused(call)) {
            EXPECT_THROW(backward(call, names, false), Unsupported);
            continue;
        }
        const FastDelta::Results results = backward(call, names, seed % 2 == 0);
        EXPECT_EQ(judge_results(call, results), "") << "SOFTDELTA_SEED=" << seed;
        expect_same_bits(results, backward(call, names, seed % 2 != 0), seed);
    }
}

TEST_F(CudaDelta, TwentyRunsHaveTheSameBits) {
    constexpr int runs = 20;
    for (const std::uint64_t seed : {2u, 9u, 22u, 28u, 34u, 40u}) {
        const FastDelta call = draw_fast_delta(seed, {DType::bf16});
        if (is_refused(call)) continue;
        const FastDelta::Results results = backward(call, call.gradient_names(), false);
        const FastDelta::Results outputs = forward(call, true, true);
        for (int i = 1; i < runs; ++i) {
            expect_same_bits(results, backward(call, call.gradient_names(), i % 2 != 0), seed);
            expect_same_bits(outputs, forward(call, true, true), seed);
        }
    }
}

TEST_F(CudaDelta, ForwardIsRight) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(300)); ++seed) {
        const FastDelta call = draw_fast_delta(seed);
        if (is_refused(call)) {
            EXPECT_THROW(forward(call, true), Unsupported);
            continue;
        }
        if (exceeds_f16(call)) continue;
        EXPECT_EQ(judge_results(call, forward(call, seed % 2 == 0)), "") << "SOFTDELTA_SEED=" << seed;
    }
}

// Any gate with any way to erase, one step a token or several: what the chunk kernels do not know goes token by token.
TEST_F(CudaDelta, RulesOfFactsAreRight) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(100)); ++seed) {
        const FastDelta call = draw_rule_of_facts(seed);
        EXPECT_EQ(judge_results(call, forward(call, seed % 2 == 0)), "") << "SOFTDELTA_SEED=" << seed;
        const FastDelta::Names names = drawn_gradients(call);
        EXPECT_EQ(judge_results(call, backward(call, names, seed % 2 == 0)), "") << "SOFTDELTA_SEED=" << seed;
    }
}

// What the token kernel takes: decode, and a few speculative tokens.
TEST_F(CudaDelta, FewTokensAreRight) {
    const std::uint64_t first = first_seed();
    const std::vector<DType> types[] = {{DType::f32}, {DType::bf16}, {DType::f32, DType::bf16}};
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(300)); ++seed) {
        const FastDelta call(draw_delta(seed, {.batch = 3,
                                               .tokens = 8,
                                               .heads = 2,
                                               .group = 2,
                                               .key_channels = 256,
                                               .value_channels = 140,
                                               .channel_step = seed % 2 == 0 ? 4 : 1,
                                               .dtypes = types[seed % 3],
                                               .repeats = true,
                                               .far = true,
                                               .hard = seed % 4 != 0}));
        if (is_refused(call)) continue;
        EXPECT_EQ(judge_results(call, forward(call, true, seed % 2 == 0)), "") << "SOFTDELTA_SEED=" << seed;
    }
}

// Rows of 16-byte units: what the chunk kernels take.
TEST_F(CudaDelta, ChunksAreRight) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(300)); ++seed) {
        const FastDelta call(draw_delta(seed, {.batch = 2,
                                               .tokens = 400,
                                               .heads = 2,
                                               .group = 3,
                                               .key_channels = 128,
                                               .value_channels = 256,
                                               .channel_step = 8,
                                               .lengths = {31, 32, 63, 64, 65, 128, 129, 257},
                                               .dtypes = {std::array{DType::bf16, DType::f32, DType::f16}[seed % 3]},
                                               .repeats = true,
                                               .far = true}));
        if (is_refused(call)) continue;
        if (exceeds_f16(call)) continue;
        const FastDelta::Results results = forward(call, seed % 4 < 2, true);
        EXPECT_EQ(judge_results(call, results), "") << "SOFTDELTA_SEED=" << seed;
        expect_same_bits(results, forward(call, seed % 4 < 2, true), seed);
    }
}

// States of more than 128 channels, as Mamba-2 has them.
TEST_F(CudaDelta, WideKeysAreRight) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(60)); ++seed) {
        const FastDelta call(draw_delta(seed, {.batch = 2,
                                               .tokens = 130,
                                               .heads = 1,
                                               .group = 2,
                                               .key_channels = 256,
                                               .value_channels = 96,
                                               .channel_step = seed % 3 == 0 ? 64 : 8,
                                               .lengths = {17, 63, 64, 65, 129},
                                               .dtypes = {std::array{DType::bf16, DType::f32, DType::f16}[seed % 3]}}));
        if (is_refused(call) || exceeds_f16(call)) continue;
        EXPECT_EQ(judge_results(call, forward(call, seed % 4 < 2, true)), "") << "SOFTDELTA_SEED=" << seed;
    }
}

// More tokens than one kernel takes, of so few heads that chunks are folded beside the scan.
TEST_F(CudaDelta, ChunksOfFewHeadsAreRight) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(100)); ++seed) {
        const FastDelta call(draw_delta(seed, {.batch = 1,
                                               .tokens = 450,
                                               .heads = 1,
                                               .group = 2,
                                               .key_channels = 128,
                                               .value_channels = 64,
                                               .channel_step = seed % 3 == 0 ? 64 : 8,
                                               .shortest = 257,
                                               .dtypes = {seed % 2 == 0 ? DType::bf16 : DType::f16},
                                               .repeats = true,
                                               .far = true,
                                               .hard = seed % 4 == 2}));
        if (is_refused(call)) continue;
        if (exceeds_f16(call)) continue;
        const FastDelta::Results results = forward(call, seed % 4 < 2, true);
        EXPECT_EQ(judge_results(call, results), "") << "SOFTDELTA_SEED=" << seed;
        expect_same_bits(results, forward(call, seed % 4 < 2, true), seed);
    }
}

TEST_F(CudaDelta, ChunkGradientsAreRight) {
    const std::uint64_t first = first_seed();
    const GpuEvent ready, done;
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(300)); ++seed) {
        const FastDelta call(draw_delta(seed, {.batch = 2,
                                               .tokens = 300,
                                               .heads = 2,
                                               .group = seed % 2 == 0 ? 2 : 1,
                                               .key_channels = 128,
                                               .value_channels = 128,
                                               .channel_step = seed % 3 == 0 ? 64 : 8,
                                               .lengths = {31, 32, 63, 64, 65, 128, 129, 257},
                                               .dtypes = {seed % 3 == 1 ? DType::f32 : DType::bf16},
                                               .tiled = true,
                                               .repeats = true,
                                               .far = true,
                                               .hard = seed % 4 == 3}));
        if (is_refused(call)) continue;
        FastDelta::Names names = call.gradient_names();
        if (call.has("first gate surges")) std::erase(names, "dinitial_state");
        names = call.some(names);
        const FastDelta::Results results = backward(call, names, seed % 2 == 0, true);
        EXPECT_EQ(judge_results(call, results), "") << "SOFTDELTA_SEED=" << seed;
        Execution handed_on = cuda();  // events change the order of the scans
        if (seed % 4 < 2) handed_on.gpu.state_ready = ready.get();
        if (seed % 4 > 0) handed_on.gpu.state_done = done.get();
        expect_same_bits(results, backward(call, names, seed % 2 != 0, true, handed_on), seed);
    }
}

// Up to 300 sequences in one call, of up to 500 tokens each, or of none.
TEST_F(CudaDelta, ManyPackedSequencesAreRight) {
    const std::uint64_t first = first_seed();
    const int calls = (call_count(60) + 5) / 6;
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(calls); ++seed) {
        const FastDelta call(draw_delta(seed, {.batch = 298,
                                               .tokens = 1500,
                                               .heads = 1,
                                               .group = seed % 2 == 0 ? 2 : 1,
                                               .key_channels = 64,
                                               .value_channels = 64,
                                               .channel_step = 8,
                                               .lengths = {9, 63, 64, 65, 257, 500},
                                               .dtypes = {seed % 2 == 0 ? DType::f32 : DType::bf16},
                                               .packed = true}));
        if (is_refused(call)) continue;
        const FastDelta::Results results = forward(call, true, true);
        EXPECT_EQ(judge_results(call, results), "") << "SOFTDELTA_SEED=" << seed;
        expect_same_bits(results, forward(call, false, true), seed);
        FastDelta::Names names = call.gradient_names();
        if (call.has("first gate surges")) std::erase(names, "dinitial_state");
        const FastDelta::Results gradients = backward(call, names, true, true);
        EXPECT_EQ(judge_results(call, gradients), "") << "SOFTDELTA_SEED=" << seed;
        expect_same_bits(gradients, backward(call, names, false, true), seed);
    }
}

// What a forward pass kept serves backward passes as often as wanted. Of calls that nothing is kept of, none is taken.
TEST_F(CudaDelta, KeptChunksAreRight) {
    const std::uint64_t first = first_seed();
    int kept_calls = 0;
    std::uint64_t seed = first;
    for (; kept_calls < call_count(100); ++seed) {
        const bool by_groups = seed % 16 == 0;  // of sequences: those of 120 heads go one by one
        const FastDelta call(draw_delta(seed, {.batch = 3,
                                               .tokens = by_groups ? 40 : 200,
                                               .heads = by_groups ? 132 : 2,
                                               .group = 1,
                                               .key_channels = 128,
                                               .value_channels = 128,
                                               .channel_step = seed % 3 == 0 ? 64 : 8,
                                               .lengths = {31, 32, 63, 64, 65, 128, 129},
                                               .dtypes = {seed % 3 == 1 ? DType::f32 : DType::bf16},
                                               .repeats = true,
                                               .far = true,
                                               .hard = seed % 4 == 3}));
        if (is_refused(call)) continue;
        OnGpu gpu(call, true);
        const DeltaOptions& options = call.call().delta_options;
        const std::size_t bytes = delta_kept_size(gpu.inputs, options, cuda());
        const auto size = static_cast<std::int64_t>(std::max<std::size_t>(bytes, 256));
        const GpuTensor memory = GpuTensor::result(Tensor(nullptr, DType::boolean, {size}));
        Execution execution = cuda();
        execution.gpu.kept = {static_cast<std::byte*>(memory.view().data()), static_cast<std::size_t>(size)};
        if (bytes == 0) {
            EXPECT_THROW(forward(call, true, true, execution), Unsupported);
            EXPECT_THROW(backward(call, call.gradient_names(), false, true, execution), Unsupported);
            continue;
        }
        ++kept_calls;
        expect_same_bits(forward(call, true, true, execution), forward(call, true, true), seed);
        FastDelta::Names names = call.gradient_names();
        if (call.has("first gate surges")) std::erase(names, "dinitial_state");
        const FastDelta::Results results = backward(call, names, true, true, execution);
        EXPECT_EQ(judge_results(call, results), "") << "SOFTDELTA_SEED=" << seed;
        expect_same_bits(results, backward(call, names, false, true, execution), seed);
        memory.check_guards();

        execution.gpu.kept = execution.gpu.kept.first(bytes - 1);
        EXPECT_THROW(forward(call, true, true, execution), std::invalid_argument);
        if (call.call().d_o.stride()[3] != 0) {  // else this pass does not go by chunks
            EXPECT_THROW(backward(call, names, false, true, execution), std::invalid_argument);
        }
        execution.gpu.kept = {execution.gpu.kept.data() + 128, bytes};
        EXPECT_THROW(forward(call, true, true, execution), std::invalid_argument);
    }
}

// A caller who names the engine may leave the tensors on the host: results in any layout, nothing else is written.
TEST_F(CudaDelta, TensorsOfTheHostAreCopied) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(40)); ++seed) {
        const FastDelta call = draw_fast_delta(seed, {DType::f32, DType::bf16});
        if (is_refused(call)) continue;
        EXPECT_EQ(judge_results(call, call.forward(call.forward_names(), cuda())), "") << "SOFTDELTA_SEED=" << seed;
        if (call.has("positive gate") || call.has("first gate surges")) continue;
        const FastDelta::Names names = call.some(call.gradient_names());
        EXPECT_EQ(judge_results(call, call.backward(names, cuda())), "") << "SOFTDELTA_SEED=" << seed;
    }
}

TEST_F(CudaDelta, MoreHeadsThanAGridHasAreRefused) {
    constexpr std::int64_t H = 65536, K = 8;
    std::vector<float> x(H * K), o(H * K, -1);
    const auto rows = [&](std::vector<float>& data) { return Tensor(data.data(), DType::f32, {1, 1, H, K}); };
    DeltaOptions options;
    options.rule = Rule::delta_rule;
    EXPECT_THROW(delta_forward({.q = rows(x), .k = rows(x), .v = rows(x)}, {.o = rows(o)}, options, cuda()),
                 Unsupported);
    EXPECT_EQ(o[0], -1);
}

// A pool of states on the host, updated in place: entry 2 is nobody's.
TEST_F(CudaDelta, StatesOfTheHostAreUpdatedInPlace) {
    constexpr std::int64_t N = 2, pool = 3, T = 5, H = 2, D = 16, state = H * D * D;
    std::vector<float> x(N * T * H * D), o(x.size()), separate(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
    std::vector<float> states(pool * state, 0.25F), after(states.size(), -1);
    const std::vector<std::int32_t> indices = {1, 0};
    const auto rows = [&](std::vector<float>& data) { return Tensor(data.data(), DType::f32, {N, T, H, D}); };
    const auto of_pool = [&](std::vector<float>& data) { return Tensor(data.data(), DType::f32, {pool, H, D, D}); };
    DeltaInputs in{.q = rows(x), .k = rows(x), .v = rows(x)};
    in.initial_state = of_pool(states);
    in.state_indices = Tensor(const_cast<std::int32_t*>(indices.data()), DType::i32, {N});
    DeltaOptions options;
    options.rule = Rule::delta_rule;
    delta_forward(in, {.o = rows(separate), .final_state = of_pool(after)}, options, cuda());
    delta_forward(in, {.o = rows(o), .final_state = of_pool(states)}, options, cuda());
    EXPECT_EQ(o, separate);
    EXPECT_TRUE(std::equal(states.begin(), states.begin() + 2 * state, after.begin()));
    EXPECT_NE(states[0], 0.25F);
    EXPECT_EQ(std::count(states.begin() + 2 * state, states.end(), 0.25F), state);

    std::uint8_t flags[N] = {1, 0};
    std::int32_t kept[N] = {2, -1};
    const std::vector<float> before = states;
    const auto expect_refused = [&](const std::string& name, Tensor DeltaInputs::*operand, const Tensor& value) {
        DeltaInputs beyond = in;  // what the kernels do not know is refused before they run
        beyond.*operand = value;
        try {
            delta_forward(beyond, {.o = rows(o), .final_state = of_pool(states)}, options, cuda());
            FAIL() << name;
        } catch (const Unsupported& e) {
            EXPECT_EQ(e.what(), name + ": the CUDA engine knows state_indices alone");
        }
        EXPECT_EQ(states, before);
    };
    expect_refused("final_state_indices", &DeltaInputs::final_state_indices, in.state_indices);
    expect_refused("has_initial_state", &DeltaInputs::has_initial_state, Tensor(flags, DType::boolean, {N}));
    expect_refused("snapshot_indices", &DeltaInputs::snapshot_indices, Tensor(kept, DType::i32, {N, 1}));
}

// Lengths and entries of a pool on the GPU, which nobody checks: nothing else is read or written, which guard bytes
// show, and AddressSanitizer where the GPU is the host.
TEST_F(CudaDelta, LengthsOnTheGpuMayBeWild) {
    constexpr Index T = 150, H = 1, D = 64, N = 3;
    struct Case {
        DType type;
        bool with_pool;
    };
    for (const auto& [type, with_pool] : {Case{DType::bf16, false}, Case{DType::f32, false}, Case{DType::bf16, true}})
        for (const auto& ends : {std::array<double, 4>{-5, 70, 1e15, 1e15}, {300, 400, 500, -1}, {0, 150, 100, 50}}) {
            Random random(5);
            std::map<std::string, GpuTensor> memory;
            const auto input = [&](const char* name, DType dtype, const Shape& shape) {
                Array t(dtype, shape);
                fill_normal(t, random);
                for (Index i = 0; name[0] == 'g' && i < t.count(); ++i) t.set(i, -std::abs(t.get(i)));
                return memory.emplace(name, GpuTensor::input(t.view())).first->second.view();
            };
            const auto result = [&](const char* name, DType dtype, const Shape& shape) {
                return memory.emplace(name, GpuTensor::result(Array(dtype, shape).view())).first->second.view();
            };
            const auto integers = [&](const char* name, const std::vector<double>& values) {
                Array t(DType::i64, {static_cast<Index>(values.size())});
                for (Index i = 0; i < t.count(); ++i) t.set(i, values[static_cast<std::size_t>(i)]);
                return memory.emplace(name, GpuTensor::input(t.view())).first->second.view();
            };
            const Shape rows = {1, T, H, D}, heads = {1, T, H}, state = {N, H, D, D};
            DeltaInputs in{.q = input("q", type, rows), .k = input("k", type, rows), .v = input("v", type, rows)};
            in.g = input("g", DType::f32, heads), in.beta = input("beta", DType::f32, heads);
            in.initial_state = input("initial_state", DType::f32, state);
            in.cu_seqlens = integers("cu_seqlens", {ends.begin(), ends.end()});
            if (with_pool) in.state_indices = integers("state_indices", {-1, 1e15, 2});
            DeltaOptions options;
            options.rule = Rule::gated_delta_rule;
            delta_forward(in, {.o = result("o", type, rows), .final_state = result("final_state", DType::f32, state)},
                          options, cuda());
            if (!with_pool) {
                DeltaGradients grad;
                grad.d_o = input("d_o", type, rows);
                grad.dq = result("dq", type, rows), grad.dk = result("dk", type, rows);
                grad.dv = result("dv", type, rows), grad.dg = result("dg", DType::f32, heads);
                grad.dbeta = result("dbeta", DType::f32, heads);
                grad.dinitial_state = result("dinitial_state", DType::f32, state);
                delta_backward(in, grad, options, cuda());
            }
            for (const auto& [name, tensor] : memory) EXPECT_NO_THROW(tensor.check_guards()) << name;
        }
}

// A batch of sequences of any lengths, as one packed call or as a call for each.
class MixedBatch {
  public:
    enum class Form { packed, packed_on_gpu, packed_alone, alone };

    MixedBatch(Rule rule, DType type, Index K, Index V, std::vector<Index> lengths) : lengths_(std::move(lengths)) {
        options_.rule = rule;
        options_.use_qk_l2norm_in_kernel = true;
        Index T = 0;
        for (const Index n : lengths_) T += n;
        const auto N = static_cast<Index>(lengths_.size());
        const Shape keys{1, T, H, K}, values{1, T, HV, V}, gates{1, T, HV}, states{N, HV, K, V};
        const Shape gate = rule == Rule::kda ? Shape{1, T, HV, K} : gates;
        add("q", type, keys), add("k", type, keys), add("v", type, values), add("d_o", type, values);
        if (rule == Rule::comba) add("p", type, keys);
        if (rule != Rule::delta_rule) add("g", DType::f32, gate);
        if (rule != Rule::simple_gla) add("beta", DType::f32, gates);
        add("initial_state", DType::f32, states), add("dfinal_state", DType::f32, states);
    }

    // Elements of results.
    std::map<std::string, std::vector<double>> run(Form form) {
        std::map<std::string, Array> hosts;
        results_.clear();
        const auto add_result = [&](const std::string& name, const GpuTensor& like) {
            const Tensor& t = like.view();
            hosts[name] = Array(t.dtype(), {t.shape().begin(), t.shape().end()});
            results_.emplace(name, GpuTensor::result(hosts[name].view()));
        };
        add_result("o", given_.at("d_o")), add_result("final_state", given_.at("initial_state"));
        for (const char* name : {"q", "k", "p", "v", "g", "beta", "initial_state"})
            if (given_.count(name) > 0) add_result(std::string("d") + name, given_.at(name));
        const auto N = static_cast<Index>(lengths_.size());
        Index begin = 0;
        if (form == Form::packed || form == Form::packed_on_gpu)
            compute(0, N, 0, form);
        else
            for (Index n = 0; n < N; begin += lengths_[static_cast<std::size_t>(n++)]) compute(n, 1, begin, form);
        std::map<std::string, std::vector<double>> values;
        for (const auto& [name, host] : hosts) {
            results_.at(name).copy_to(host.view());
            values[name] = host.values();
        }
        return values;
    }

  private:
    static constexpr Index H = 2, HV = 2;

    void add(const std::string& name, DType type, const Shape& shape) {
        Array t(type, shape);
        fill_normal(t, random_);
        for (Index i = 0; i < t.count(); ++i) {
            const double x = t.get(i);
            t.set(i, name == "g" ? -0.3 * std::abs(x) : name == "beta" ? 1 / (1 + std::exp(-x)) : x);
        }
        given_.emplace(name, GpuTensor::input(t.view()));
    }
    void compute(Index first, Index count, Index begin, Form form) {
        Array ends(DType::i32, {count + 1});
        Index tokens = 0;
        for (Index n = 0; n < count; ++n)
            ends.set(n + 1, static_cast<double>(tokens += lengths_[static_cast<std::size_t>(first + n)]));
        const GpuTensor on_gpu = GpuTensor::input(ends.view());
        const auto part = [&](const std::map<std::string, GpuTensor>& of, const std::string& name) {
            const auto found = of.find(name);
            if (found == of.end()) return Tensor();
            const bool state = name.ends_with("state");
            return found->second.part(state ? 0 : 1, state ? first : begin, state ? count : tokens);
        };
        DeltaInputs in;
        DeltaGradients grad;
        for (const DeltaOperand& operand : delta_operands()) {
            in.*operand.input = part(given_, operand.name);
            grad.*operand.gradient = part(results_, std::string("d") + operand.name);
        }
        if (form != Form::alone) in.cu_seqlens = form == Form::packed_on_gpu ? on_gpu.view() : ends.view();
        grad.d_o = part(given_, "d_o"), grad.dfinal_state = part(given_, "dfinal_state");
        delta_forward(in, {.o = part(results_, "o"), .final_state = part(results_, "final_state")}, options_, cuda());
        delta_backward(in, grad, options_, cuda());
    }

    std::vector<Index> lengths_;
    DeltaOptions options_;
    Random random_{17};
    std::map<std::string, GpuTensor> given_, results_;
};

// Few tokens and many side by side: each sequence has the bits that it has alone.
TEST_F(CudaDelta, SequencesDoNotSeeTheirNeighbours) {
    struct Sizes {
        DType type;
        Index K, V;
        std::vector<Rule> rules;
    };
    using Form = MixedBatch::Form;
    const std::vector<Rule> all = {Rule::delta_rule, Rule::gated_delta_rule, Rule::kda, Rule::comba, Rule::simple_gla};
    const std::vector<Rule> two = {Rule::gated_delta_rule, Rule::kda};
    const std::vector<std::vector<Index>> batches = {
        {1, 40, 8, 9, 130, 0, 3, 64, 1}, {1, 1, 16, 1, 1}, {2, 300}, {150, 130}};
    std::uint64_t n = 0;
    for (const Sizes& s : {Sizes{DType::bf16, 64, 64, all}, Sizes{DType::bf16, 128, 72, two},
                           Sizes{DType::f16, 36, 20, two}, Sizes{DType::f32, 32, 32, two}})
        for (const Rule rule : s.rules)
            for (std::size_t i = 0; i < batches.size(); ++i, ++n) {
                if (n * 7 % 44 >= static_cast<std::uint64_t>(call_count(44)))
                    continue;  // any of them where few are run
                const std::vector<Index>& lengths = batches[(i + n / batches.size()) % batches.size()];
                MixedBatch batch(rule, s.type, s.K, s.V, lengths);
                const auto alone = batch.run(Form::alone);
                for (const Form form : {Form::packed, Form::packed_on_gpu, Form::packed_alone})
                    for (const auto& [name, values] : batch.run(form))
                        EXPECT_TRUE(values == alone.at(name))
                            << name << ", rule " << static_cast<int>(rule) << ", K " << s.K << ", " << lengths.size()
                            << " sequences, form " << static_cast<int>(form);
            }
}

// Rows of q, k and p whose squares f32 does not hold, beside ordinary ones.
TEST_F(CudaDelta, FarRowsAreNormed) {
    constexpr DType type = DType::bf16;
    constexpr Index H = 2, D = 64;
    std::uint64_t n = 0;
    for (const Rule rule : {Rule::delta_rule, Rule::gated_delta_rule, Rule::kda, Rule::comba, Rule::simple_gla})
        for (const Index T : {3, 100, 300}) {
            if (n++ * 4 % 15 >= static_cast<std::uint64_t>(call_count(15))) continue;  // any of them where few are run
            Random random(3);
            const Shape rows{1, T, H, D}, heads{1, T, H};
            Array q(type, rows), k(type, rows), p(type, rows), v(type, rows), d_o(type, rows), beta(DType::f32, heads),
                g(DType::f32, rule == Rule::kda ? rows : heads);
            for (Array* t : {&q, &k, &p, &v, &d_o}) fill_normal(*t, random);
            for (Index i = 0; i < g.count(); ++i) g.set(i, -draw_unit(random));
            for (Index i = 0; i < beta.count(); ++i) beta.set(i, draw_unit(random));
            for (Array* t : {&q, &k, &p})
                for (Index row = 0; row < T * H; ++row)
                    if (const double size = random() % 3 == 0 ? 1e20 : 1; size != 1)
                        for (Index i = row * D; i < (row + 1) * D; ++i) t->set(i, size * t->get(i));
            DeltaInputs in{.q = q.view(), .k = k.view(), .v = v.view()};
            if (rule == Rule::comba) in.p = p.view();
            if (rule != Rule::delta_rule) in.g = g.view();
            if (rule != Rule::simple_gla) in.beta = beta.view();
            DeltaOptions options;
            options.rule = rule, options.use_qk_l2norm_in_kernel = true;
            const auto run = [&](const char* engine) {
                Execution execution;
                execution.engine = engine;
                std::map<std::string, Array> results;
                for (const char* name : {"o", "dv", "dq"}) results.emplace(name, Array(type, rows));
                delta_forward(in, {.o = results.at("o").view()}, options, execution);
                DeltaGradients grad;
                grad.d_o = d_o.view(), grad.dq = results.at("dq").view(), grad.dv = results.at("dv").view();
                delta_backward(in, grad, options, execution);
                return results;
            };
            const auto expected = run("reference"), actual = run("cuda");
            for (const auto& [name, values] : expected)
                for (Index row = 0; row < T * H; ++row) {
                    double off = 0, all = 0;
                    for (Index i = row * D; i < (row + 1) * D; ++i) {
                        off += std::pow(actual.at(name).get(i) - values.get(i), 2);
                        all += std::pow(values.get(i), 2);
                    }
                    ASSERT_LE(std::sqrt(off), 0.05 * std::sqrt(all) + (name == "dq" ? 0.0 : 1e-2))
                        << name << ", rule " << static_cast<int>(rule) << ", token " << row / H << " of " << T;
                }
        }
}

// Gates that rise by so little that a whole chunk is still near 1.
TEST_F(CudaDelta, GatesThatRiseSlowlyAreRight) {
    constexpr std::int64_t T = 70, D = 64;
    const Shape shape = {1, T, 1, D};
    const auto filled = [&](DType type, double low, double high, int seed) {
        Array t(type, shape);
        for (std::int64_t i = 0; i < T * D; ++i)
            t.set(i, low + (high - low) * (0.5 + 0.5 * std::sin(static_cast<double>(seed * T * D + i))));
        return t;
    };
    const Array q = filled(DType::bf16, -1, 1, 0), k = filled(DType::bf16, -0.2, 0.2, 1),
                v = filled(DType::bf16, -1, 1, 2), g = filled(DType::f32, 0, 0.02, 3);
    const DeltaInputs in{.q = q.view(), .k = k.view(), .v = v.view(), .g = g.view()};
    DeltaOptions options;
    options.rule = Rule::kda;
    const auto run = [&](const Execution& execution, DType type) {
        Array o(type, shape);
        delta_forward(in, {.o = o.view()}, options, execution);
        return o.values();
    };
    Execution reference;
    reference.engine = "reference";
    const std::vector<double> truth = run(reference, DType::f32), o = run(cuda(), DType::bf16);
    double error = 0, sum = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) {
        error += (o[i] - truth[i]) * (o[i] - truth[i]);
        sum += truth[i] * truth[i];
    }
    EXPECT_LT(std::sqrt(error / sum), 0.01);
}

// Something is kept of a call where both passes go by chunks.
TEST_F(CudaDelta, EveryCardGoesByChunks) {
    const Shape rows = {1, 128, 2, 128}, heads = {1, 128, 2};
    const GpuTensor x = GpuTensor::input(Array(DType::bf16, rows).view()),
                    of_heads = GpuTensor::input(Array(DType::f32, heads).view()),
                    of_channels = GpuTensor::input(Array(DType::f32, rows).view());
    for (const Rule rule : {Rule::delta_rule, Rule::gated_delta_rule, Rule::kda, Rule::comba, Rule::simple_gla}) {
        DeltaInputs in{.q = x.view(), .k = x.view(), .v = x.view()};
        if (rule == Rule::comba) in.p = x.view();
        if (rule != Rule::delta_rule) in.g = (rule == Rule::kda ? of_channels : of_heads).view();
        if (rule != Rule::simple_gla) in.beta = of_heads.view();
        DeltaOptions options;
        options.rule = rule;
        EXPECT_GT(delta_kept_size(in, options, cuda()), 0U) << static_cast<int>(rule);
    }
}

// Without a GPU the environment says which one there is (host/device.cpp).
TEST_F(CudaDelta, OlderGpusAreRefused) {
    if (std::getenv("SOFTDELTA_CUDA_CAPABILITY") == nullptr) GTEST_SKIP() << "this GPU is new enough";
    const Array x(DType::f32, {1, 2, 1, 8}), heads(DType::f32, {1, 2, 1});
    Array o(DType::f32, {1, 2, 1, 8});
    try {
        DeltaOptions options;
        options.rule = Rule::delta_rule;
        delta_forward({.q = x.view(), .k = x.view(), .v = x.view(), .beta = heads.view()}, {.o = o.view()}, options,
                      cuda());
        FAIL() << "a GPU that is too old took a call";
    } catch (const Unsupported& error) {
        EXPECT_NE(std::string(error.what()).find("compute capability 7.5, expected 8.0"), std::string::npos)
            << error.what();
    }
}

}  // namespace
}  // namespace softdelta::test

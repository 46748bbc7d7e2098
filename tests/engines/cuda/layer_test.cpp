// The convolution and the norm on the GPU against the truth: drawn calls, results poisoned and between guard bytes.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many.
#include <gtest/gtest.h>

#include <cstring>

#include "engines/cuda/gpu_test.h"
#include "support/levels.h"
#include "support/random_layer.h"

namespace softdelta::test {
namespace {

class CudaLayer : public OnGpuTest {};

// Results in types and layouts drawn by the seed. With own_workspace the call gets its memory, between guard bytes.
template <class Family>
StoredByName on_gpu(const LayerCall<Family>& call, bool backward, const std::vector<DType>& dtypes,
                    bool lengths_on_host, bool own_workspace) {
    std::map<std::string, GpuTensor> given, results;
    std::map<std::string, Array> hosts;
    for (const auto& [name, array] : call.given) given.emplace(name, GpuTensor::input(array.view()));
    Random layout(call.seed);
    for (const std::string& name : backward ? call.wanted : call.outputs) {
        const DType dtype = dtypes[layout() % dtypes.size()];
        const Shape shape = call.shape_of(name);
        hosts[name] = layout() % 2 == 0 ? Array(dtype, shape, layout) : Array(dtype, shape);
        results.emplace(name, GpuTensor::result(hosts[name].view()));
    }
    auto inputs = assign<typename Family::Inputs>(given);
    if constexpr (requires { inputs.cu_seqlens; })
        if (lengths_on_host) {
            if (call.has("cu_seqlens")) inputs.cu_seqlens = call["cu_seqlens"].view();
            if (call.has("state_indices")) inputs.state_indices = call["state_indices"].view();
        }
    Execution execution = cuda();
    GpuTensor workspace;
    const auto with_workspace = [&](std::size_t bytes, const auto& run) {
        if (own_workspace) {
            workspace = GpuTensor::result(Tensor(nullptr, DType::boolean, {static_cast<Index>(bytes)}));
            execution.workspace = {static_cast<std::byte*>(workspace.view().data()), bytes};
        }
        run();
        if (own_workspace) workspace.check_guards();
    };
    if (backward) {
        auto gradients = assign<typename Family::Gradients>(results);
        for (const auto& field : fields_of<typename Family::Gradients>)
            if (field.given != nullptr && call.has(field.name)) gradients.*field.tensor = given.at(field.name).view();
        with_workspace(Family::backward_workspace(inputs, gradients, call.options, execution),
                       [&] { Family::backward(inputs, gradients, call.options, execution); });
    } else {
        const auto outputs = assign<typename Family::Outputs>(results);
        with_workspace(Family::forward_workspace(inputs, outputs, call.options, execution),
                       [&] { Family::forward(inputs, outputs, call.options, execution); });
    }
    StoredByName stored;
    for (const auto& [name, result] : results) {
        result.copy_to(hosts[name].view());
        stored[name] = {hosts[name].view().dtype(), numbers_of(hosts[name].view())};
    }
    return stored;
}

template <class Family, class Draw>
void check(Index count, const Draw& draw, bool backward) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(count)); ++seed) {
        LayerRanges ranges = fast_layer_ranges(seed);
        if (backward) ranges.pools = false;
        const LayerCall<Family> call = draw(seed, ranges);
        const std::vector<std::string>& names = backward ? call.wanted : call.outputs;
        const StoredByName results = on_gpu(call, backward, ranges.dtypes, seed % 3 == 0, seed % 2 == 0);
        ASSERT_EQ(compare(results, truth(call, names, backward), bounds(call, names, backward), call.describe()), "");
        const StoredByName again = on_gpu(call, backward, ranges.dtypes, seed % 3 != 0, seed % 2 != 0);
        for (const auto& [name, stored] : results) {
            const Numbers &one = stored.numbers, &other = again.at(name).numbers;
            ASSERT_TRUE(one.empty() || std::memcmp(one.data(), other.data(), one.size() * sizeof(double)) == 0)
                << name << " differs in a second run, " << call.describe();
        }
    }
}

TEST_F(CudaLayer, ConvolutionForwardIsRight) {
    check<Convolution>(500, draw_convolution, false);
}
TEST_F(CudaLayer, ConvolutionBackwardIsRight) {
    check<Convolution>(350, draw_convolution, true);
}
TEST_F(CudaLayer, NormForwardIsRight) {
    check<Norm>(150, draw_norm, false);
}
TEST_F(CudaLayer, NormBackwardIsRight) {
    check<Norm>(150, draw_norm, true);
}

// A sequence in parts, on a state that is updated in place, is the sequence as a whole.
TEST_F(CudaLayer, StepsAreTheWhole) {
    constexpr Index B = 3, T = 9, C = 72, W = 4;
    Random random(7);
    const Array x(DType::bf16, {B, T, C}), weight(DType::bf16, {C, W}), state(DType::bf16, {B, C, W});
    for (const Array* a : {&x, &weight, &state}) fill_normal(*a, random);
    const GpuTensor on_x = GpuTensor::input(x.view()), on_weight = GpuTensor::input(weight.view()),
                    initial = GpuTensor::input(state.view()), updated = GpuTensor::input(state.view());
    const Array whole(DType::bf16, {B, T, C}), parts(DType::bf16, {B, T, C}), last(DType::bf16, {B, C, W}),
        last_of_parts(DType::bf16, {B, C, W});
    const GpuTensor y = GpuTensor::result(whole.view()), final = GpuTensor::result(last.view()),
                    y_parts = GpuTensor::result(parts.view());
    causal_convolution_forward({.x = on_x.view(), .weight = on_weight.view(), .initial_state = initial.view()},
                               {.y = y.view(), .final_state = final.view()}, {Activation::silu}, cuda());
    for (Index t = 0; t < T;) {
        const Index count = std::min<Index>(1 + t % 3, T - t);
        const auto tokens = [&](const Tensor& v) {
            return Tensor(static_cast<std::byte*>(v.data()) + t * v.stride()[1] * 2, v.dtype(), Shape{B, count, C},
                          v.stride())
                .on({kDLCUDA, 0});
        };
        causal_convolution_step({.x = tokens(on_x.view()), .weight = on_weight.view()},
                                {.y = tokens(y_parts.view()), .final_state = updated.view()}, {Activation::silu},
                                cuda());
        t += count;
    }
    y.copy_to(whole.view()), y_parts.copy_to(parts.view()), final.copy_to(last.view());
    updated.copy_to(last_of_parts.view());
    EXPECT_EQ(parts.values(), whole.values());
    EXPECT_EQ(last_of_parts.values(), last.values());
}

// Few tokens and many side by side: each sequence has the bits that it has alone.
TEST_F(CudaLayer, SequencesDoNotSeeTheirNeighbours) {
    constexpr Index C = 72, W = 4;
    const Index lengths[] = {1, 40, 3, 0, 130, 1, 2};
    constexpr Index N = std::size(lengths), T = 177;
    Random random(7);
    std::map<std::string, GpuTensor> given;
    const auto add = [&](const char* name, const Shape& shape) {
        const Array a(DType::bf16, shape);
        fill_normal(a, random);
        given.emplace(name, GpuTensor::input(a.view()));
    };
    add("x", {1, T, C}), add("dy", {1, T, C}), add("weight", {C, W});
    add("initial_state", {N, C, W}), add("dfinal_state", {N, C, W});
    const auto run = [&](bool packed) {
        std::map<std::string, GpuTensor> results;
        std::map<std::string, Array> hosts;
        for (const char* name : {"y", "final_state", "dx", "dinitial_state"}) {
            const bool state = std::string(name).ends_with("state");
            hosts[name] = Array(DType::bf16, state ? Shape{N, C, W} : Shape{1, T, C});
            results.emplace(name, GpuTensor::result(hosts[name].view()));
        }
        for (Index n = 0, begin = 0; n < N; begin += lengths[n++]) {
            Array ends(DType::i32, {N + 1});
            for (Index i = 0; i < N; ++i) ends.set(i + 1, ends.get(i) + static_cast<double>(lengths[i]));
            const auto tokens = [&](const GpuTensor& t) { return packed ? t.view() : t.part(1, begin, lengths[n]); };
            const auto states = [&](const GpuTensor& t) { return packed ? t.view() : t.part(0, n, 1); };
            ConvolutionInputs in{.x = tokens(given.at("x")), .weight = given.at("weight").view()};
            in.initial_state = states(given.at("initial_state"));
            if (packed) in.cu_seqlens = ends.view();
            causal_convolution_forward(in,
                                       {.y = tokens(results.at("y")), .final_state = states(results.at("final_state"))},
                                       {Activation::silu}, cuda());
            ConvolutionGradients grad;
            grad.dy = tokens(given.at("dy")), grad.dfinal_state = states(given.at("dfinal_state"));
            grad.dx = tokens(results.at("dx")), grad.dinitial_state = states(results.at("dinitial_state"));
            causal_convolution_backward(in, grad, {Activation::silu}, cuda());
            if (packed) break;
        }
        std::map<std::string, Numbers> numbers;
        for (const auto& [name, host] : hosts) {
            results.at(name).copy_to(host.view());
            numbers[name] = host.values();
        }
        return numbers;
    };
    EXPECT_EQ(run(true), run(false));
}

TEST_F(CudaLayer, WideWeightsAreRefused) {
    const Array x(DType::f32, {1, 2, 3}), weight(DType::f32, {3, 17}), y(DType::f32, {1, 2, 3});
    EXPECT_THROW(causal_convolution_forward({.x = x.view(), .weight = weight.view()}, {.y = y.view()}, {}, cuda()),
                 Unsupported);
}

TEST_F(CudaLayer, OfPoolsOfStatesItKnowsStateIndicesAlone) {
    const Array x(DType::f32, {1, 2, 3}), weight(DType::f32, {3, 4}), y(DType::f32, {1, 2, 3}),
        states(DType::f32, {1, 3, 3}), entry(DType::i32, {1}), flag(DType::boolean, {1});
    const auto expect_refused = [&](const std::string& name, const ConvolutionInputs& in) {
        try {
            causal_convolution_forward(in, {.y = y.view(), .final_state = states.view()}, {}, cuda());
            FAIL() << name;
        } catch (const Unsupported& e) {
            EXPECT_EQ(e.what(), name + ": the CUDA engine knows state_indices alone");
        }
    };
    expect_refused("final_state_indices",
                   {.x = x.view(), .weight = weight.view(), .final_state_indices = entry.view()});
    expect_refused("has_initial_state", {.x = x.view(), .weight = weight.view(), .has_initial_state = flag.view()});
}

}  // namespace
}  // namespace softdelta::test

// Wrong arguments of the causal convolution and the gated norm: one error that names argument, actual and expected,
// before anything is touched.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "softdelta/softdelta.hpp"

namespace softdelta {
namespace {

struct Memory {
    std::vector<float> data = std::vector<float>(256, 0.5f), result = std::vector<float>(256, -7.0f);
    std::vector<std::int32_t> index{0, 2, 4};

    Tensor floats(std::initializer_list<std::int64_t> shape) { return {data.data(), DType::f32, shape}; }
    Tensor results(std::initializer_list<std::int64_t> shape) { return {result.data(), DType::f32, shape}; }
    Tensor integers(std::initializer_list<std::int64_t> shape) { return {index.data(), DType::i32, shape}; }

    // The error of a call, "" when there is none.
    template <class Run>
    std::string error(const Run& run) const {
        try {
            run();
        } catch (const std::exception& e) {
            for (const float x : result) EXPECT_EQ(x, -7.0f) << "written before the error: " << e.what();
            return e.what();
        }
        return "";
    }
};

struct Convolution : Memory {
    ConvolutionInputs in{.x = floats({1, 4, 3}), .weight = floats({3, 4})};
    ConvolutionOutputs out{.y = results({1, 4, 3})};
    ConvolutionGradients grad{.dy = floats({1, 4, 3}), .dx = results({1, 4, 3})};
    ConvolutionOptions options{};
    Execution execution{};

    std::string forward() {
        return error([&] { causal_convolution_forward(in, out, options, execution); });
    }
    std::string step() {
        return error([&] { causal_convolution_step(in, out, options, execution); });
    }
    std::string backward() {
        return error([&] { causal_convolution_backward(in, grad, options, execution); });
    }
};

TEST(ConvolutionArguments, AreNamedWithActualAndExpected) {
    using Call = std::function<std::string(Convolution&)>;
    const std::vector<std::pair<Call, std::string>> cases{
        {[](auto& c) { return c.forward(); }, ""},
        {[](auto& c) { return c.in.x = {}, c.forward(); }, "x is missing, expected a tensor: [B, T, C]"},
        {[](auto& c) { return c.in.weight = {}, c.forward(); }, "weight is missing, expected a tensor: [C, W]"},
        {[](auto& c) {
             return c.in.x = c.floats({4, 3}), c.forward();
         },
         "x: shape is [4, 3], expected 3 dimensions [B, T, C]"},
        {[](auto& c) {
             return c.in.weight = c.floats({4, 4}), c.forward();
         },
         "weight: dimension 0 is 4, expected 3 (channels)"},
        {[](auto& c) {
             return c.in.weight = c.floats({3, 0}), c.forward();
         },
         "weight: dimension 1 is 0, expected 1 or more"},
        {[](auto& c) {
             return c.in.x = c.floats({1, 4, 0}), c.forward();
         },
         "x: dimension 2 is 0, expected 1 or more channels"},
        {[](auto& c) { return c.in.bias = c.floats({4}), c.forward(); },
         "bias: dimension 0 is 4, expected 3 (channels)"},
        {[](auto& c) { return c.in.bias = c.integers({3}), c.forward(); },
         "bias: type is i32, expected f64, f32, bf16 or f16"},
        {[](auto& c) {
             return c.in.initial_state = c.floats({1, 3, 2}), c.forward();
         },
         "initial_state: dimension 2 is 2, expected 3 or more (the width of weight, less one)"},
        {[](auto& c) {
             return c.in.initial_state = c.floats({2, 3, 3}), c.forward();
         },
         "initial_state: dimension 0 is 2, expected 1 (batch)"},
        {[](auto& c) {
             c.in.initial_state = c.floats({1, 3, 3}), c.out.final_state = c.results({1, 3, 4});
             return c.forward();
         },
         "final_state: dimension 2 is 4, expected 3 (tokens of a state)"},
        {[](auto& c) { return c.in.cu_seqlens = c.integers({2}), c.forward(); },
         "cu_seqlens[1] is 2, expected 4 (tokens)"},
        {[](auto& c) {
             c.in.state_indices = c.integers({1}), c.in.initial_state = c.floats({2, 3, 3}), c.index[0] = 2;
             return c.forward();
         },
         "state_indices[0] is 2, expected 0 to 1, or -1 where there is no sequence"},
        {[](auto& c) { return c.options.activation = Activation::sigmoid, c.forward(); },
         "activation is 2, expected 0 (none) or 1 (silu)"},
        {[](auto& c) {
             c.out.y = Tensor(static_cast<float*>(c.in.x.data()) + 1, DType::f32, c.in.x.shape());
             return c.forward();
         },
         "y: memory is shared with x, expected the same elements, or none of them"},
        {[](auto& c) { return c.execution.engine = "stages_f64", c.forward(); },
         "engine stages_f64 has no causal convolution"},
        {[](auto& c) {
             c.execution.engine = "fast", c.in.weight = c.floats({3, 9});
             return c.forward();
         },
         "weight: dimension 1 is 9, expected at most 8: name the engine reference for wider ones"},
        {[](auto& c) {
             return c.in.weight = c.floats({3, 9}), c.forward();
         },
         "weight: dimension 1 is 9, expected at most 8: name the engine reference for wider ones"},
        {[](auto& c) {
             c.execution.engine = "reference", c.in.weight = c.floats({3, 9});
             return c.forward();
         },
         ""},
        {[](auto& c) { return c.out = {}, c.forward(); }, "outputs is empty, expected one or more of y, final_state"},
        {[](auto& c) { return c.grad = {.dy = c.grad.dy}, c.backward(); },
         "gradients is empty, expected one or more of dx, dweight, dbias, dinitial_state"},
        {[](auto& c) {
             c.in.state_indices = c.integers({1}), c.in.initial_state = c.floats({2, 3, 3}), c.index[0] = 1;
             return c.out.final_state = c.results({1, 3, 3}), c.forward();
         },
         "final_state: dimension 0 is 1, expected 2, a pool as initial_state: state_indices[0] is 1"},
        {[](auto& c) {
             return c.in.weight = c.in.weight.on({kDLCUDA, 1}), c.forward();
         },
         "weight: device is cuda:1, expected cpu, where x is"},
        {[](auto& c) { return c.step(); }, "final_state is missing, expected a tensor: [N, C, S], the state of a step"},
        {[](auto& c) {
             c.in.initial_state = c.floats({1, 3, 3}), c.out.final_state = c.results({1, 3, 3});
             return c.step();
         },
         "initial_state is given, expected none: a step has its state in final_state"},
        {[](auto& c) { return c.backward(); }, ""},
        {[](auto& c) { return c.grad.dy = {}, c.backward(); },
         "dy is missing, and so is dfinal_state, expected one of them: gradients start there"},
        {[](auto& c) { return c.grad.dbias = c.results({3}), c.backward(); },
         "bias is missing, expected a tensor: its gradient is asked for"},
        {[](auto& c) {
             return c.grad.dweight = c.results({3, 3}), c.backward();
         },
         "dweight: dimension 1 is 3, expected 4 (as its input)"},
        {[](auto& c) { return c.in.state_indices = c.integers({1}), c.backward(); },
         "state_indices: there are no gradients through a pool of states"},
    };
    for (const auto& [run, expected] : cases) {
        Convolution call;
        EXPECT_EQ(run(call), expected);
    }
}

struct Norm : Memory {
    NormInputs in{.x = floats({1, 4, 2, 3}), .z = floats({1, 4, 2, 3})};
    NormOutputs out{.y = results({1, 4, 2, 3})};
    NormGradients grad{.dy = floats({1, 4, 2, 3}), .dx = results({1, 4, 2, 3})};
    NormOptions options{};
    Execution execution{};

    std::string forward() {
        return error([&] { gated_norm_forward(in, out, options, execution); });
    }
    std::string backward() {
        return error([&] { gated_norm_backward(in, grad, options, execution); });
    }
};

TEST(NormArguments, AreNamedWithActualAndExpected) {
    using Call = std::function<std::string(Norm&)>;
    const std::vector<std::pair<Call, std::string>> cases{
        {[](auto& c) { return c.forward(); }, ""},
        {[](auto& c) { return c.in.x = {}, c.forward(); }, "x is missing, expected a tensor: [B, T, H, D]"},
        {[](auto& c) { return c.in.z = {}, c.forward(); }, "z is missing, expected a tensor: the gate is made from it"},
        {[](auto& c) { return c.options.gate = Activation::none, c.forward(); },
         "z is given, expected none: there is no gate"},
        {[](auto& c) {
             return c.in.z = c.floats({1, 4, 3, 3}), c.forward();
         },
         "z: dimension 2 is 3, expected 2 (as x)"},
        {[](auto& c) { return c.in.weight = c.floats({2}), c.forward(); },
         "weight: dimension 0 is 2, expected 3 (channels)"},
        {[](auto& c) { return c.options.gate = static_cast<Activation>(3), c.forward(); },
         "gate is 3, expected 0 (none), 1 (silu) or 2 (sigmoid)"},
        {[](auto& c) { return c.options.epsilon = -1, c.forward(); },
         "epsilon is -1, expected 0 or a positive number that f32 can hold"},
        {[](auto& c) { return c.options.epsilon = 1e300, c.forward(); },
         "epsilon is 1e+300, expected 0 or a positive number that f32 can hold"},
        {[](auto& c) { return c.grad = {.dy = c.grad.dy}, c.backward(); },
         "gradients is empty, expected one or more of dx, dz, dweight"},
        {[](auto& c) { return c.out.y = {}, c.forward(); }, "y is missing, expected a tensor: [B, T, H, D]"},
        {[](auto& c) { return c.execution.engine = "stages_f32", c.forward(); }, "engine stages_f32 has no gated norm"},
        {[](auto& c) { return c.backward(); }, ""},
        {[](auto& c) { return c.grad.dy = {}, c.backward(); }, "dy is missing, expected a tensor: [B, T, H, D]"},
        {[](auto& c) { return c.grad.dweight = c.results({3}), c.backward(); },
         "weight is missing, expected a tensor: its gradient is asked for"},
    };
    for (const auto& [run, expected] : cases) {
        Norm call;
        EXPECT_EQ(run(call), expected);
    }
}

}  // namespace
}  // namespace softdelta

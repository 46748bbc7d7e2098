// The layers around the delta rules to be timed. They wait for memory: work counted is the bytes of the tensors that a
// call reads and writes, each once.
#include "cli/bench/problem.h"

namespace softdelta::cli {

namespace {

using io::OwnedTensor;
using std::int64_t;

// Of a token: channels of the convolution; heads of the norm and their size.
constexpr int64_t channels = 8192, width = 4, heads = 32, head_size = 128;
constexpr int64_t tokens = 4096, step_batch = 32, step_layers = 40;

struct ConvolutionOperands {
    OwnedTensor x, weight, y, dy, dx, dweight;

    explicit ConvolutionOperands(DType dtype, Pass pass, int64_t batch = 1, int64_t length = tokens)
        : x(random_tensor(dtype, {batch, length, channels}, 1)), weight(random_tensor(dtype, {channels, width}, 2)) {
        const std::vector<int64_t> shape{batch, length, channels};
        if (pass == Pass::forward) {
            y = OwnedTensor(dtype, shape);
        } else {
            dy = random_tensor(dtype, shape, 3);
            dx = OwnedTensor(dtype, shape);
            dweight = OwnedTensor(dtype, {channels, width});
        }
    }
    ConvolutionInputs inputs() const { return {.x = x.view(), .weight = weight.view()}; }
};

const ConvolutionOptions silu = {.activation = Activation::silu};

Problem make_convolution(DType dtype, Pass pass) {
    const auto operands = std::make_shared<ConvolutionOperands>(dtype, pass);
    Problem problem;
    problem.limit = Limit::copy;
    problem.work = static_cast<double>(operands->x.bytes()) * (pass == Pass::forward ? 2 : 3);
    problem.call = [operands, pass](const Execution& execution) {
        const ConvolutionOperands& o = *operands;
        if (pass == Pass::forward)
            causal_convolution_forward(o.inputs(), {.y = o.y.view()}, silu, execution);
        else
            causal_convolution_backward(o.inputs(), {.dy = o.dy.view(), .dx = o.dx.view(), .dweight = o.dweight.view()},
                                        silu, execution);
    };
    return problem;
}

// One token of some sequences in every layer, whose states [B, C, W − 1] are moved by a token.
Problem make_convolution_step() {
    struct Layers {
        ConvolutionOperands operands{DType::f32, Pass::forward, step_batch, 1};
        std::vector<OwnedTensor> states;
    };
    const auto layers = std::make_shared<Layers>();
    for (int64_t i = 0; i < step_layers; ++i)
        layers->states.push_back(
            random_tensor(DType::f32, {step_batch, channels, width - 1}, 4 + static_cast<std::uint64_t>(i)));
    Problem problem;
    problem.limit = Limit::copy;
    problem.work = 2.0 * static_cast<double>(step_layers) *
                   static_cast<double>(layers->states.front().bytes() + layers->operands.x.bytes());
    problem.call = [layers](const Execution& execution) {
        for (const OwnedTensor& state : layers->states)
            causal_convolution_step(layers->operands.inputs(),
                                    {.y = layers->operands.y.view(), .final_state = state.view()}, silu, execution);
    };
    return problem;
}

Problem make_norm(DType dtype, Pass pass) {
    struct Operands {
        OwnedTensor x, z, weight, y, dy, dx, dz, dweight;
    };
    const std::vector<int64_t> shape{1, tokens, heads, head_size};
    const auto operands = std::make_shared<Operands>();
    Operands& o = *operands;
    o.x = random_tensor(dtype, shape, 1), o.z = random_tensor(dtype, shape, 2);
    o.weight = random_tensor(dtype, {head_size}, 3);
    if (pass == Pass::forward) {
        o.y = OwnedTensor(dtype, shape);
    } else {
        o.dy = random_tensor(dtype, shape, 4);
        o.dx = OwnedTensor(dtype, shape), o.dz = OwnedTensor(dtype, shape), o.dweight = OwnedTensor(dtype, {head_size});
    }
    Problem problem;
    problem.limit = Limit::copy;
    problem.work = static_cast<double>(o.x.bytes()) * (pass == Pass::forward ? 3 : 5);
    problem.call = [operands, pass](const Execution& execution) {
        const NormInputs in{.x = operands->x.view(), .z = operands->z.view(), .weight = operands->weight.view()};
        if (pass == Pass::forward)
            gated_norm_forward(in, {.y = operands->y.view()}, {}, execution);
        else
            gated_norm_backward(in,
                                {.dy = operands->dy.view(),
                                 .dx = operands->dx.view(),
                                 .dz = operands->dz.view(),
                                 .dweight = operands->dweight.view()},
                                {}, execution);
    };
    return problem;
}

}  // namespace

std::vector<Entry> layer_entries() {
    std::vector<Entry> entries;
    const auto add = [&entries](const std::string& name, const std::string& shape, auto make) {
        for (const Pass pass : {Pass::forward, Pass::backward})
            for (const DType dtype : {DType::f32, DType::bf16})
                entries.push_back(
                    {name + (pass == Pass::forward ? " forward " : " backward ") + type_name(dtype) + shape,
                     [=] { return make(dtype, pass); }});
    };
    add("causal_convolution", " W4", make_convolution);
    entries.push_back({"causal_convolution step f32 W4, 40 layers", make_convolution_step});
    add("gated_norm", " D128", make_norm);
    return entries;
}

}  // namespace softdelta::cli

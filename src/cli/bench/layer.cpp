// The layers around the delta rules to be timed. They wait for memory: work counted is the bytes of the tensors that a
// call reads and writes, each once.
#include "cli/bench/problem.h"

namespace softdelta::cli {

namespace {

using io::OwnedTensor;
using std::int64_t;

struct ConvolutionOperands {
    OwnedTensor x, weight, y, dy, dx, dweight;
    std::vector<OwnedTensor> states;  // one for each layer, [B, C, W − 1]

    explicit ConvolutionOperands(const ConvolutionShape& s)
        : x(random_tensor(s.dtype, {s.batch, s.layers > 0 ? 1 : s.tokens, s.channels}, 1)),
          weight(random_tensor(s.dtype, {s.channels, s.width}, 2)) {
        if (s.pass != Pass::backward) y = OwnedTensor(s.dtype, x.shape());
        if (s.pass != Pass::forward) {
            dy = random_tensor(s.dtype, x.shape(), 3);
            dx = OwnedTensor(s.dtype, x.shape());
            dweight = OwnedTensor(s.dtype, weight.shape());
        }
        for (int64_t i = 0; i < s.layers; ++i)
            states.push_back(
                random_tensor(DType::f32, {s.batch, s.channels, s.width - 1}, 4 + static_cast<std::uint64_t>(i)));
    }
    ConvolutionInputs inputs() const { return {.x = x.view(), .weight = weight.view()}; }
};

const ConvolutionOptions silu = {.activation = Activation::silu};

// How many tensors as large as x a pass reads and writes.
double tensors_of(Pass pass, double forward, double backward) {
    return (pass == Pass::backward ? 0 : forward) + (pass == Pass::forward ? 0 : backward);
}

}  // namespace

// Of a step: one token of some sequences in every layer.
Problem make_convolution(const ConvolutionShape& shape) {
    const auto operands = std::make_shared<ConvolutionOperands>(shape);
    Problem problem;
    problem.limit = Limit::copy;
    if (shape.layers > 0) {
        problem.work = 2.0 * static_cast<double>(shape.layers) *
                       static_cast<double>(operands->states.front().bytes() + operands->x.bytes());
        problem.call = [operands](const Execution& execution) {
            for (const OwnedTensor& state : operands->states)
                causal_convolution_step(operands->inputs(), {.y = operands->y.view(), .final_state = state.view()},
                                        silu, execution);
        };
        return problem;
    }
    problem.work = static_cast<double>(operands->x.bytes()) * tensors_of(shape.pass, 2, 3);
    problem.call = [operands, pass = shape.pass](const Execution& execution) {
        const ConvolutionOperands& o = *operands;
        if (pass != Pass::backward) causal_convolution_forward(o.inputs(), {.y = o.y.view()}, silu, execution);
        if (pass != Pass::forward)
            causal_convolution_backward(o.inputs(), {.dy = o.dy.view(), .dx = o.dx.view(), .dweight = o.dweight.view()},
                                        silu, execution);
    };
    return problem;
}

Problem make_norm(const NormShape& shape) {
    struct Operands {
        OwnedTensor x, z, weight, y, dy, dx, dz, dweight;
    };
    const std::vector<int64_t> rows{shape.batch, shape.tokens, shape.heads, shape.head_size};
    const auto operands = std::make_shared<Operands>();
    Operands& o = *operands;
    o.x = random_tensor(shape.dtype, rows, 1), o.z = random_tensor(shape.dtype, rows, 2);
    o.weight = random_tensor(shape.dtype, {shape.head_size}, 3);
    if (shape.pass != Pass::backward) o.y = OwnedTensor(shape.dtype, rows);
    if (shape.pass != Pass::forward) {
        o.dy = random_tensor(shape.dtype, rows, 4);
        o.dx = OwnedTensor(shape.dtype, rows), o.dz = OwnedTensor(shape.dtype, rows);
        o.dweight = OwnedTensor(shape.dtype, {shape.head_size});
    }
    Problem problem;
    problem.limit = Limit::copy;
    problem.work = static_cast<double>(o.x.bytes()) * tensors_of(shape.pass, 3, 5);
    const NormOptions options{.gate = shape.gate};
    problem.call = [operands, options, pass = shape.pass](const Execution& execution) {
        const NormInputs in{.x = operands->x.view(), .z = operands->z.view(), .weight = operands->weight.view()};
        if (pass != Pass::backward) gated_norm_forward(in, {.y = operands->y.view()}, options, execution);
        if (pass != Pass::forward)
            gated_norm_backward(in,
                                {.dy = operands->dy.view(),
                                 .dx = operands->dx.view(),
                                 .dz = operands->dz.view(),
                                 .dweight = operands->dweight.view()},
                                options, execution);
    };
    return problem;
}

std::vector<Entry> layer_entries() {
    std::vector<Entry> entries;
    const auto add = [&entries](const std::string& name, const std::string& shape, auto make) {
        for (const Pass pass : {Pass::forward, Pass::backward})
            for (const DType dtype : {DType::f32, DType::bf16})
                entries.push_back(
                    {name + (pass == Pass::forward ? " forward " : " backward ") + type_name(dtype) + shape,
                     [=] { return make(dtype, pass); }});
    };
    add("causal_convolution", " W4",
        [](DType dtype, Pass pass) { return make_convolution({.dtype = dtype, .pass = pass}); });
    entries.push_back(
        {"causal_convolution step f32 W4, 40 layers", [] { return make_convolution({.batch = 32, .layers = 40}); }});
    add("gated_norm", " D128", [](DType dtype, Pass pass) { return make_norm({.dtype = dtype, .pass = pass}); });
    return entries;
}

}  // namespace softdelta::cli

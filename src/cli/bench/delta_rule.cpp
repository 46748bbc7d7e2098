// Delta rules to be timed. Work counted is that of the chunk form with 64 rows and triangles (math.md, "Costs"),
// whatever a kernel does.
#include <bit>

#include "cli/bench/problem.h"
#include "io/call/operands.h"

namespace softdelta::cli {

namespace {

using io::OwnedTensor;
using std::int64_t;

const core::Rule& rule_of(const DeltaShape& s) {
    return core::rules.at(static_cast<std::size_t>(s.rule));
}

struct DeltaOperands {
    OwnedTensor q, k, v, p, g, beta, o, d_o, dq, dk, dv, dp, dg, dbeta, final_state;
    std::vector<OwnedTensor> states;  // one for each layer

    explicit DeltaOperands(const DeltaShape& s) {
        const int64_t T = s.layers > 0 ? 1 : s.tokens;
        const int64_t B = s.batch, K = s.head_size, V = s.value_size > 0 ? s.value_size : K;
        const std::vector<int64_t> key{B, T, s.heads, K}, value{B, T, s.value_heads, V}, state{B, s.value_heads, K, V},
            scalar{B, T, s.value_heads}, channels{B, T, s.value_heads, K};
        q = random_tensor(s.dtype, key, 1);
        k = random_tensor(s.dtype, key, 2);
        v = random_tensor(s.dtype, value, 3);
        if (io::takes({rule_of(s).name, &rule_of(s)}, "p")) p = random_tensor(s.dtype, key, 4);
        if (rule_of(s).gate != core::Gate::none)
            g = random_tensor(DType::f32, rule_of(s).has_channel_gate() ? channels : scalar, 5, -0.1, 0);
        if (rule_of(s).erases()) beta = random_tensor(s.dtype, scalar, 6, 0, 1);
        o = OwnedTensor(s.dtype, value);
        final_state = OwnedTensor(DType::f32, state);
        for (int64_t i = 0; i < s.layers; ++i)
            states.push_back(random_tensor(DType::f32, state, 7 + static_cast<std::uint64_t>(i)));
        if (s.pass == Pass::forward) return;
        d_o = random_tensor(s.dtype, value, 8);
        const auto like = [](const OwnedTensor& x) {
            return x.shape().empty() ? OwnedTensor() : OwnedTensor(x.dtype(), x.shape());
        };
        dq = like(q), dk = like(k), dv = like(v), dp = like(p), dg = like(g), dbeta = like(beta);
    }

    static Tensor view(const OwnedTensor& tensor) { return tensor.shape().empty() ? Tensor() : tensor.view(); }
    DeltaInputs inputs() const {
        return {.q = view(q), .k = view(k), .v = view(v), .g = view(g), .beta = view(beta), .p = view(p)};
    }
    DeltaGradients gradients() const {
        return {.d_o = view(d_o),
                .dq = view(dq),
                .dk = view(dk),
                .dv = view(dv),
                .dg = view(dg),
                .dbeta = view(dbeta),
                .dp = view(dp)};
    }
};

double flops(const DeltaShape& s) {
    const auto K = static_cast<double>(s.head_size), V = s.value_size > 0 ? static_cast<double>(s.value_size) : K;
    const double products = rule_of(s).erases() ? 6 * K * V + 2 * 64 * (K + V) : 4 * K * V + 64 * (K + V);
    const double passes = s.pass == Pass::forward ? 1 : s.pass == Pass::training ? 3 : 2;
    return passes * products * static_cast<double>(s.batch * s.tokens * s.value_heads);
}

}  // namespace

io::OwnedTensor random_tensor(DType dtype, std::vector<int64_t> shape, std::uint64_t seed, double low, double high) {
    OwnedTensor tensor(dtype, std::move(shape));
    for (int64_t i = 0; i < tensor.count(); ++i) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const auto x = static_cast<float>(low + (high - low) * static_cast<double>(seed >> 11) * 0x1p-53);
        if (dtype == DType::f32)
            static_cast<float*>(tensor.data())[i] = x;
        else  // bf16, cut off
            static_cast<std::uint16_t*>(tensor.data())[i] =
                static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
    }
    return tensor;
}

Problem make_delta(const DeltaShape& shape) {
    const auto operands = std::make_shared<DeltaOperands>(shape);
    DeltaOptions options;
    options.rule = shape.rule;
    options.use_qk_l2norm_in_kernel = shape.normalises;
    Problem problem;
    if (shape.layers > 0) {
        problem.limit = Limit::copy;
        problem.work = 2.0 * static_cast<double>(shape.layers) * static_cast<double>(operands->final_state.bytes());
        problem.call = [operands, options](const Execution& execution) {
            for (const OwnedTensor& state : operands->states) {
                DeltaInputs in = operands->inputs();
                in.initial_state = state.view();
                delta_forward(in, {.o = operands->o.view(), .final_state = state.view()}, options, execution);
            }
        };
        return problem;
    }
    problem.limit = shape.dtype == DType::bf16 ? Limit::bf16 : Limit::f32;
    problem.work = flops(shape);
    problem.call = [operands, options, pass = shape.pass](const Execution& execution) {
        if (pass != Pass::backward)
            delta_forward(operands->inputs(), {.o = operands->o.view(), .final_state = operands->final_state.view()},
                          options, execution);
        if (pass != Pass::forward) delta_backward(operands->inputs(), operands->gradients(), options, execution);
    };
    return problem;
}

std::vector<Entry> delta_entries() {
    std::vector<Entry> entries;
    for (std::size_t number = 0; number < core::rules.size(); ++number) {
        const auto rule = static_cast<Rule>(number);
        const std::string rule_name(core::rules.at(number).name);
        DeltaShape shape;
        shape.rule = rule;
        for (const Pass pass : {Pass::forward, Pass::backward})
            for (const DType dtype : {DType::f32, DType::bf16}) {
                shape.pass = pass, shape.dtype = dtype;
                entries.push_back(
                    {rule_name + (pass == Pass::forward ? " forward " : " backward ") + type_name(dtype) + " D128",
                     [shape] { return make_delta(shape); }});
            }
        shape = {.rule = rule, .heads = 32, .value_heads = 32, .layers = 40};
        entries.push_back({rule_name + " step f32 D128, 40 layers", [shape] { return make_delta(shape); }});
    }
    return entries;
}

}  // namespace softdelta::cli

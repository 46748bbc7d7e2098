// One step of training through a gated delta rule: forward, loss, backward, and a step along the gradient. The slope of
// the loss along that step is compared with a finite difference, which the f64 reference computes.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <softdelta/softdelta.hpp>
#include <vector>

using softdelta::DType, softdelta::Tensor;

constexpr std::int64_t T = 128, H = 2, K = 32, V = 32;  // tokens, heads, head dimensions
const softdelta::DeltaOptions options{.rule = softdelta::Rule::gated_delta_rule, .use_qk_l2norm_in_kernel = true};

// The parameters of this small problem, or their gradients: of type float or double.
template <class Number>
struct Operands {
    std::vector<Number> q = std::vector<Number>(T * H * K), k = q, v = std::vector<Number>(T * H * V);
    std::vector<Number> g = std::vector<Number>(T * H), beta = g;

    static constexpr DType type = sizeof(Number) == 4 ? DType::f32 : DType::f64;
    static constexpr std::vector<Number> Operands::*all[] = {&Operands::q, &Operands::k, &Operands::v, &Operands::g,
                                                             &Operands::beta};
    static Tensor keys(auto& x) { return {x.data(), type, {1, T, H, K}}; }
    static Tensor values(auto& x) { return {x.data(), type, {1, T, H, V}}; }
    static Tensor gates(auto& x) { return {x.data(), type, {1, T, H}}; }
    softdelta::DeltaInputs inputs() const {
        return {.q = keys(q), .k = keys(k), .v = values(v), .g = gates(g), .beta = gates(beta)};
    }
};

// loss = ½ Σ (o − target)²; f64 tensors are computed by the reference.
template <class Number>
double loss(const Operands<Number>& x, const std::vector<float>& target, std::vector<Number>& o) {
    o.resize(target.size());
    softdelta::delta_forward(x.inputs(), {.o = x.values(o)}, options);
    double sum = 0;
    for (std::size_t i = 0; i < o.size(); ++i) sum += 0.5 * (o[i] - target[i]) * (o[i] - target[i]);
    return sum;
}

// The loss at x − step·gradient, in f64.
double loss_after(const Operands<float>& x, const Operands<float>& gradient, double step,
                  const std::vector<float>& target) {
    Operands<double> moved;
    for (std::size_t n = 0; n < 5; ++n)
        for (std::size_t i = 0; i < (x.*x.all[n]).size(); ++i)
            (moved.*moved.all[n])[i] = (x.*x.all[n])[i] - step * (gradient.*x.all[n])[i];
    std::vector<double> o;
    return loss(moved, target, o);
}

int main() {
    std::mt19937 engine(1);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    Operands<float> x, gradient;
    for (auto* values : {&x.q, &x.k, &x.v})
        std::generate(values->begin(), values->end(), [&] { return normal(engine); });
    std::generate(x.g.begin(), x.g.end(), [&] { return -0.2F * uniform(engine); });
    std::generate(x.beta.begin(), x.beta.end(), [&] { return uniform(engine); });
    std::vector<float> target(T * H * V), o, d_o(target.size());
    std::generate(target.begin(), target.end(), [&] { return 0.1F * normal(engine); });

    const double before = loss(x, target, o);
    for (std::size_t i = 0; i < o.size(); ++i) d_o[i] = o[i] - target[i];  // dloss / do
    softdelta::delta_backward(x.inputs(),
                              {.d_o = x.values(d_o),
                               .dq = x.keys(gradient.q),
                               .dk = x.keys(gradient.k),
                               .dv = x.values(gradient.v),
                               .dg = x.gates(gradient.g),
                               .dbeta = x.gates(gradient.beta)},
                              options);

    double slope = 0;  // of the loss along −gradient: −|gradient|²
    for (const auto field : x.all)
        for (const float d : gradient.*field) slope -= static_cast<double>(d) * d;
    const double h = 1e-5;
    const double difference = (loss_after(x, gradient, h, target) - loss_after(x, gradient, -h, target)) / (2 * h);
    const double error = std::abs(difference / slope - 1);
    const double after = loss_after(x, gradient, 0.02, target);
    std::printf("loss before the step             %12.6f\n", before);
    std::printf("slope by the backward pass       %12.6f\n", slope);
    std::printf("slope by a finite difference     %12.6f   relative error %.1e\n", difference, error);
    std::printf("loss after a step of 0.02        %12.6f\n", after);
    const bool right = error < 1e-4 && after < before;
    std::printf("%s\n", right ? "right" : "WRONG");
    return right ? 0 : 1;
}

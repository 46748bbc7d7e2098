// A rule that nobody has is a row of core::Rule: gate, erasure and p in combinations outside the table of rules, given
// to reference and kernels as they are. Neither the chunk scan nor its adjoint knows which rule it computes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/execution.h"
#include "cpu/delta_rule.h"
#include "cpu/isa.h"
#include "reference/reference.h"

namespace softdelta {
namespace {

using core::DType;
using core::Erase;
using core::Gate;
using core::Index;
using core::Rule;
using core::Tensor;

const Rule new_rules[] = {
    {"a gate per channel, erasing from the previous state", Gate::channel, Erase::from_previous_state, false, false},
    {"the same along its own p", Gate::channel, Erase::from_previous_state, true, false},
    {"a gate per channel, erasing along its own p", Gate::channel, Erase::from_decayed_state, true, false},
    {"a gate per channel, erasing nothing", Gate::channel, Erase::nothing, false, false},
    {"one gate, erasing along its own p", Gate::scalar, Erase::from_decayed_state, true, false},
    {"one gate, erasing from the previous state", Gate::scalar, Erase::from_previous_state, false, false},
    {"no gate, erasing along its own p", Gate::none, Erase::from_decayed_state, true, true},
};

using Numbers = std::vector<double>;

// A dense tensor with its own memory.
class Dense {
  public:
    Dense(DType dtype, const std::vector<Index>& shape) {
        view_.dtype = dtype;
        view_.rank = static_cast<int>(shape.size());
        Index count = 1;
        for (std::size_t d = shape.size(); d-- > 0; count *= shape[d])
            view_.shape[d] = shape[d], view_.stride[d] = count;
        memory_.assign(static_cast<std::size_t>(count), std::nan(""));
        view_.data = memory_.data();
    }
    Tensor view() const { return view_; }
    Numbers values() const {
        Numbers all(memory_.size());
        for (std::size_t i = 0; i < all.size(); ++i) all[i] = core::load(view_, static_cast<Index>(i));
        return all;
    }
    void set(const Numbers& x) const {
        for (std::size_t i = 0; i < x.size(); ++i) core::store(view_, static_cast<Index>(i), x[i]);
    }

  private:
    Numbers memory_;
    Tensor view_;
};
using Tensors = std::map<std::string, Dense>;

constexpr Index T = 150, H = 2, HV = 4, K = 36, V = 20;

std::vector<Index> shape_of(const Rule& rule, const std::string& name) {
    if (name == "q" || name == "k" || name == "p") return {1, T, H, K};
    if (name == "v" || name == "o") return {1, T, HV, V};
    if (name == "beta" || (name == "g" && rule.gate == Gate::scalar)) return {1, T, HV};
    if (name == "g") return {1, T, HV, K};
    return {1, HV, K, V};  // states
}

std::vector<std::string> operands(const Rule& rule) {
    std::vector<std::string> names{"q", "k", "v", "initial_state"};
    if (rule.erase != Erase::nothing) names.emplace_back("beta");
    if (rule.own_p) names.emplace_back("p");
    if (rule.gate != Gate::none) names.emplace_back("g");
    return names;
}

// Normal numbers; rows of keys of length one, β in (0, 1), gates mild but for some of −1000.
Tensors draw(const Rule& rule, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> unit;
    Tensors x;
    std::vector<std::string> names = operands(rule);
    names.insert(names.end(), {"do", "dfinal_state"});
    for (const std::string& name : names) {
        const Dense& t = x.try_emplace(name, DType::f32, shape_of(rule, name == "do" ? "o" : name)).first->second;
        Numbers numbers(static_cast<std::size_t>(t.view().count()));
        for (double& n : numbers)
            n = name == "beta" ? unit(random)
                : name == "g"  ? (unit(random) < 0.02 ? -1000 : -unit(random))
                               : normal(random);
        if (name == "q" || name == "k" || name == "p")
            for (std::size_t row = 0; row < numbers.size(); row += K) {
                double squares = 0;
                for (std::size_t m = row; m < row + K; ++m) squares += numbers[m] * numbers[m];
                for (std::size_t m = row; m < row + K; ++m) numbers[m] /= std::sqrt(squares);
            }
        t.set(numbers);
    }
    return x;
}

Tensor view(const Tensors& x, const std::string& name) {
    const auto found = x.find(name);
    return found == x.end() ? Tensor{} : found->second.view();
}

core::DeltaInputs inputs(const Tensors& x) {
    core::DeltaInputs in;
    in.q = view(x, "q"), in.k = view(x, "k"), in.p = view(x, "p"), in.v = view(x, "v"), in.g = view(x, "g");
    in.beta = view(x, "beta"), in.initial_state = view(x, "initial_state");
    return in;
}

core::DeltaOptions options(const Rule& rule) {
    core::DeltaOptions o;
    o.rule = rule;
    o.scale = 0.7;
    return o;
}

using Results = std::map<std::string, Numbers>;

template <class Forward>
Results forward(const Rule& rule, DType dtype, const Forward& run) {
    const Dense o(dtype, shape_of(rule, "o")), state(dtype, shape_of(rule, "state"));
    core::DeltaOutputs out;
    out.o = o.view(), out.final_state = state.view();
    run(out);
    return {{"o", o.values()}, {"final_state", state.values()}};
}

template <class Backward>
Results backward(const Rule& rule, const Tensors& x, DType dtype, const Backward& run) {
    Tensors d;
    for (const std::string& name : operands(rule)) d.try_emplace("d" + name, dtype, shape_of(rule, name));
    core::DeltaGradients grad;
    grad.d_o = view(x, "do"), grad.dfinal_state = view(x, "dfinal_state");
    grad.dq = view(d, "dq"), grad.dk = view(d, "dk"), grad.dp = view(d, "dp"), grad.dv = view(d, "dv");
    grad.dg = view(d, "dg"), grad.dbeta = view(d, "dbeta"), grad.dinitial_state = view(d, "dinitial_state");
    run(grad);
    Results all;
    for (const auto& [name, tensor] : d) all[name] = tensor.values();
    return all;
}

Results true_outputs(const Rule& rule, const Tensors& x) {
    return forward(rule, DType::f64,
                   [&](const auto& out) { reference::delta_forward(inputs(x), options(rule), 1, out); });
}
Results true_gradients(const Rule& rule, const Tensors& x) {
    return backward(rule, x, DType::f64,
                    [&](const auto& grad) { reference::delta_backward(inputs(x), options(rule), 1, grad); });
}

double error_ratio(const Numbers& actual, const Numbers& truth) {
    double errors = 0, squares = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) {
        errors += (actual[i] - truth[i]) * (actual[i] - truth[i]);
        squares += truth[i] * truth[i];
    }
    return std::sqrt(errors / squares);
}

TEST(DeltaNewRule, KernelsComputeItFromItsRowAlone) {
    for (const cpu::Level& level : cpu::isa_levels()) {
        if (!level.available()) continue;
        setenv("SOFTDELTA_ISA", level.name, 1);
        for (const Rule& rule : new_rules) {
            SCOPED_TRACE(std::string(rule.name) + ", " + level.name);
            const Tensors x = draw(rule, 1);
            core::Execution execution;
            execution.threads = 2;
            const Results outputs = forward(rule, DType::f32, [&](const auto& out) {
                cpu::delta_forward(inputs(x), options(rule), execution, out);
            });
            for (const auto& [name, truth] : true_outputs(rule, x))
                EXPECT_LE(error_ratio(outputs.at(name), truth), 3e-6) << name;
            const Results gradients = backward(rule, x, DType::f32, [&](const auto& grad) {
                cpu::delta_backward(inputs(x), options(rule), execution, grad);
            });
            for (const auto& [name, truth] : true_gradients(rule, x))
                EXPECT_LE(error_ratio(gradients.at(name), truth), 3e-6) << name;
        }
    }
    unsetenv("SOFTDELTA_ISA");
}

// The recurrence's own gradients: the derivative of ⟨o, do⟩ + ⟨final_state, dfinal_state⟩ along a random direction.
TEST(DeltaNewRule, ReferenceHasItsGradients) {
    for (const Rule& rule : new_rules) {
        SCOPED_TRACE(std::string(rule.name));
        const Tensors drawn = draw(rule, 2);
        std::mt19937_64 random(3);
        std::normal_distribution<double> normal;
        Tensors x;  // in f64
        Results direction;
        for (const auto& [name, tensor] : drawn) {
            const Dense& t = x.try_emplace(name, DType::f64, shape_of(rule, name == "do" ? "o" : name)).first->second;
            t.set(tensor.values());
            Numbers& along = direction[name];
            for (const double value : tensor.values()) along.push_back(std::abs(value) > 500 ? 0 : normal(random));
        }
        const auto loss_at = [&](double step) {
            for (const std::string& name : operands(rule)) {
                Numbers moved = drawn.at(name).values();
                for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += step * direction[name][i];
                x.at(name).set(moved);
            }
            double loss = 0;
            for (const auto& [name, result] : true_outputs(rule, x)) {
                const Numbers weight = x.at("d" + name).values();
                for (std::size_t i = 0; i < result.size(); ++i) loss += weight[i] * result[i];
            }
            return loss;
        };
        const double step = 1e-5, numeric = (loss_at(step) - loss_at(-step)) / (2 * step);
        loss_at(0);
        double analytic = 0;
        for (const auto& [name, gradient] : true_gradients(rule, x))
            for (std::size_t i = 0; i < gradient.size(); ++i) analytic += gradient[i] * direction[name.substr(1)][i];
        EXPECT_NEAR(numeric, analytic, 1e-6 * std::abs(analytic));
    }
}

}  // namespace
}  // namespace softdelta

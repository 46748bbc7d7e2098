// A call of a delta rule behind the interface, where a rule is whatever its row says: operands by name, results as
// numbers, from the reference and from the kernels of the level that is selected.
#pragma once

#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/execution.h"
#include "engines/cpu/delta_rule/delta_rule.h"
#include "engines/cpu/machine/isa.h"
#include "engines/reference/reference.h"
#include "support/random.h"
#include "support/takes.h"

namespace softdelta::test {

using core::DType;
using core::Erase;
using core::Gate;
using core::Index;
using core::Rule;
using core::Tensor;

using Numbers = std::vector<double>;
using NumbersByName = std::map<std::string, Numbers>;

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

struct RuleSizes {
    Index tokens, key_heads, heads, keys, values;
    Index steps = 1;
};

class RuleCall {
  public:
    using GateOf = std::function<double(Index element, Random& random)>;

    // Normal numbers in storage of `dtype`, rows of keys of length one, β in (0, 1).
    RuleCall(const Rule& rule, const RuleSizes& sizes, DType dtype, std::uint64_t seed, const GateOf& gate)
        : rule_(rule), sizes_(sizes) {
        Random random(seed);
        Normal normal;
        std::vector<std::string> names = operands();
        names.insert(names.end(), {"do", "dfinal_state"});
        for (const std::string& name : names) {
            const Dense& t = tensors_.try_emplace(name, dtype, shape(name == "do" ? "o" : name)).first->second;
            Numbers numbers(static_cast<std::size_t>(t.view().count()));
            for (std::size_t i = 0; i < numbers.size(); ++i)
                numbers[i] = name == "beta" ? draw_unit(random)
                             : name == "g"  ? gate(static_cast<Index>(i), random)
                                            : normal(random);
            if (name == "q" || name == "k" || name == "p") normalise(numbers);
            t.set(numbers);
        }
    }

    const Rule& rule() const { return rule_; }
    Numbers values(const std::string& name) const { return tensors_.at(name).values(); }
    void set(const std::string& name, const Numbers& x) const { tensors_.at(name).set(x); }

    // What is differentiated by.
    std::vector<std::string> operands() const {
        std::vector<std::string> names{"q", "k", "v", "initial_state"};
        for (const char* name : {"beta", "p", "g"})
            if (takes(rule_, name)) names.emplace_back(name);
        return names;
    }

    // o, final_state; d + the name of each operand.
    NumbersByName true_outputs() const {
        return outputs(DType::f64, [&](const auto& out) { reference::delta_forward(inputs(), options(), 1, out); });
    }
    NumbersByName true_gradients() const {
        return gradients(DType::f64,
                         [&](const auto& grad) { reference::delta_backward(inputs(), options(), 1, grad); });
    }
    NumbersByName fast_outputs() const {
        return outputs(DType::f32,
                       [&](const auto& out) { cpu::delta_forward(inputs(), options(), two_threads(), out); });
    }
    NumbersByName fast_gradients() const {
        return gradients(DType::f32,
                         [&](const auto& grad) { cpu::delta_backward(inputs(), options(), two_threads(), grad); });
    }

  private:
    void normalise(Numbers& rows) const {
        const auto K = static_cast<std::size_t>(sizes_.keys);
        for (std::size_t row = 0; row < rows.size(); row += K) {
            double squares = 0;
            for (std::size_t m = row; m < row + K; ++m) squares += rows[m] * rows[m];
            for (std::size_t m = row; m < row + K; ++m) rows[m] /= std::sqrt(squares);
        }
    }

    std::vector<Index> shape(const std::string& name) const {
        const auto [T, H, HV, K, V, n] = sizes_;
        if (name == "q") return {1, T, H, K};
        if (name == "k" || name == "p") return {1, n * T, H, K};
        if (name == "v") return {1, n * T, HV, V};
        if (name == "o") return {1, T, HV, V};
        if (name == "beta") return {1, n * T, HV};
        if (name == "g" && rule_.gate == Gate::scalar) return {1, T, HV};
        if (name == "g") return {1, T, HV, K};
        return {1, HV, K, V};  // states
    }

    Tensor view(const std::string& name) const {
        const auto found = tensors_.find(name);
        return found == tensors_.end() ? Tensor{} : found->second.view();
    }
    core::DeltaInputs inputs() const {
        core::DeltaInputs in;
        in.q = view("q"), in.k = view("k"), in.p = view("p"), in.v = view("v"), in.g = view("g");
        in.beta = view("beta"), in.initial_state = view("initial_state");
        return in;
    }
    core::DeltaOptions options() const {
        core::DeltaOptions o;
        o.rule = rule_;
        o.scale = 0.7;
        o.steps = sizes_.steps;
        return o;
    }
    static core::Execution two_threads() {
        core::Execution execution;
        execution.threads = 2;
        return execution;
    }

    template <class Run>
    NumbersByName outputs(DType dtype, const Run& run) const {
        const Dense o(dtype, shape("o")), state(dtype, shape("final_state"));
        core::DeltaOutputs out;
        out.o = o.view(), out.final_state = state.view();
        run(out);
        return {{"o", o.values()}, {"final_state", state.values()}};
    }

    template <class Run>
    NumbersByName gradients(DType dtype, const Run& run) const {
        std::map<std::string, Dense> d;
        for (const std::string& name : operands()) d.try_emplace("d" + name, dtype, shape(name));
        const auto result = [&](const char* name) {
            const auto found = d.find(name);
            return found == d.end() ? Tensor{} : found->second.view();
        };
        core::DeltaGradients grad;
        grad.d_o = view("do"), grad.dfinal_state = view("dfinal_state");
        grad.dq = result("dq"), grad.dk = result("dk"), grad.dp = result("dp"), grad.dv = result("dv");
        grad.dg = result("dg"), grad.dbeta = result("dbeta"), grad.dinitial_state = result("dinitial_state");
        run(grad);
        NumbersByName all;
        for (const auto& [name, tensor] : d) all[name] = tensor.values();
        return all;
    }

    Rule rule_;
    RuleSizes sizes_;
    std::map<std::string, Dense> tensors_;
};

// RMS(x − truth) / RMS(truth)
inline double error_ratio(const Numbers& x, const Numbers& truth) {
    double errors = 0, squares = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) {
        errors += (x[i] - truth[i]) * (x[i] - truth[i]);
        squares += truth[i] * truth[i];
    }
    return std::sqrt(errors / squares);
}

}  // namespace softdelta::test

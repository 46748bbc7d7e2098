#include "cpu/delta_rule.h"

#include <initializer_list>
#include <utility>

namespace softdelta::cpu {

namespace {

using Named = std::pair<const char*, const core::Tensor&>;

std::string refuse_f64(std::initializer_list<Named> tensors) {
    for (const auto& [name, t] : tensors)
        if (t && t.dtype == core::DType::f64)
            return std::string(name) + " is f64, expected f32, bf16 or f16; f64 is for the reference engine";
    return "";
}

std::string refuse_inputs(const core::DeltaInputs& in) {
    return refuse_f64({{"q", in.q},
                       {"k", in.k},
                       {"p", in.p},
                       {"v", in.v},
                       {"g", in.g},
                       {"g_gamma", in.g_gamma},
                       {"beta", in.beta},
                       {"initial_state", in.initial_state},
                       {"A_log", in.A_log},
                       {"dt_bias", in.dt_bias}});
}

}  // namespace

std::string refusal(const core::DeltaInputs& in, const core::DeltaOutputs& out) {
    std::string inputs = refuse_inputs(in);
    if (!inputs.empty()) return inputs;
    return refuse_f64({{"o", out.o}, {"final_state", out.final_state}, {"states", out.states}});
}

std::string refusal(const core::DeltaInputs& in, const core::DeltaGradients& grad) {
    std::string inputs = refuse_inputs(in);
    if (!inputs.empty()) return inputs;
    return refuse_f64({{"d_o", grad.d_o},
                       {"dfinal_state", grad.dfinal_state},
                       {"dq", grad.dq},
                       {"dk", grad.dk},
                       {"dp", grad.dp},
                       {"dv", grad.dv},
                       {"dg", grad.dg},
                       {"dg_gamma", grad.dg_gamma},
                       {"dbeta", grad.dbeta},
                       {"dinitial_state", grad.dinitial_state},
                       {"dA_log", grad.dA_log},
                       {"ddt_bias", grad.ddt_bias}});
}

}  // namespace softdelta::cpu

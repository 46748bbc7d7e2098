// softdelta._native: the delta rules. Arguments stand in the order of softdelta.h; the package gives them defaults.
#include "python/native/call.h"

namespace softdelta::python {

using namespace nb::literals;

namespace {

softdelta_delta_inputs inputs(Views& views, nb::handle q, nb::handle k, nb::handle v, nb::handle g, nb::handle g_gamma,
                              nb::handle beta, nb::handle p, nb::handle initial_state, nb::handle A_log,
                              nb::handle dt_bias, nb::handle cu_seqlens, nb::handle state_indices) {
    return {sizeof(softdelta_delta_inputs),
            views.input("q", q),
            views.input("k", k),
            views.input("v", v),
            views.input("g", g),
            views.input("g_gamma", g_gamma),
            views.input("beta", beta),
            views.input("p", p),
            views.input("initial_state", initial_state),
            views.input("A_log", A_log),
            views.input("dt_bias", dt_bias),
            views.input("cu_seqlens", cu_seqlens),
            views.input("state_indices", state_indices)};
}

softdelta_delta_options options_of(int rule, double scale, bool l2norm, bool gate, double lower_bound, bool sigmoid,
                                   bool neg_eigval, bool v_first, std::int64_t state_interval) {
    return {sizeof(softdelta_delta_options),
            rule,
            scale,
            l2norm,
            gate,
            lower_bound,
            sigmoid,
            neg_eigval,
            v_first,
            state_interval};
}

void forward(int rule, nb::handle q, nb::handle k, nb::handle v, nb::handle g, nb::handle g_gamma, nb::handle beta,
             nb::handle p, nb::handle initial_state, nb::handle A_log, nb::handle dt_bias, nb::handle cu_seqlens,
             nb::handle state_indices, double scale, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel,
             double lower_bound, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first,
             std::int64_t state_interval, nb::handle o, nb::handle final_state, nb::handle states, const char* engine,
             int threads, bool bf16) {
    Views views(bf16);
    const auto in =
        inputs(views, q, k, v, g, g_gamma, beta, p, initial_state, A_log, dt_bias, cu_seqlens, state_indices);
    const auto options = options_of(rule, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound,
                                    use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, state_interval);
    const softdelta_delta_outputs out{sizeof out, views.result("o", o), views.result("final_state", final_state),
                                      views.result("states", states)};
    const softdelta_execution execution = How{engine, threads, bf16}.execution();
    run([&] { return softdelta_delta_forward(&in, &options, &execution, &out); });
}

void backward(int rule, nb::handle q, nb::handle k, nb::handle v, nb::handle g, nb::handle g_gamma, nb::handle beta,
              nb::handle p, nb::handle initial_state, nb::handle A_log, nb::handle dt_bias, nb::handle cu_seqlens,
              double scale, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, double lower_bound,
              bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first, nb::handle d_o,
              nb::handle dfinal_state, nb::handle dq, nb::handle dk, nb::handle dv, nb::handle dg, nb::handle dg_gamma,
              nb::handle dbeta, nb::handle dp, nb::handle dinitial_state, nb::handle dA_log, nb::handle ddt_bias,
              const char* engine, int threads, bool bf16) {
    Views views(bf16);
    const auto in = inputs(views, q, k, v, g, g_gamma, beta, p, initial_state, A_log, dt_bias, cu_seqlens, nb::none());
    const auto options = options_of(rule, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound,
                                    use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, 64);
    const softdelta_delta_gradients gradients{sizeof gradients,
                                              views.input("d_o", d_o),
                                              views.input("dfinal_state", dfinal_state),
                                              views.result("dq", dq),
                                              views.result("dk", dk),
                                              views.result("dv", dv),
                                              views.result("dg", dg),
                                              views.result("dg_gamma", dg_gamma),
                                              views.result("dbeta", dbeta),
                                              views.result("dp", dp),
                                              views.result("dinitial_state", dinitial_state),
                                              views.result("dA_log", dA_log),
                                              views.result("ddt_bias", ddt_bias)};
    const softdelta_execution execution = How{engine, threads, bf16}.execution();
    run([&] { return softdelta_delta_backward(&in, &options, &execution, &gradients); });
}

}  // namespace

void bind_delta_rule(nb::module_& m) {
    m.def("delta_forward", &forward, "rule"_a, "q"_a.none(), "k"_a.none(), "v"_a.none(), "g"_a.none(),
          "g_gamma"_a.none(), "beta"_a.none(), "p"_a.none(), "initial_state"_a.none(), "A_log"_a.none(),
          "dt_bias"_a.none(), "cu_seqlens"_a.none(), "state_indices"_a.none(), "scale"_a, "use_qk_l2norm_in_kernel"_a,
          "use_gate_in_kernel"_a, "lower_bound"_a, "use_beta_sigmoid_in_kernel"_a, "allow_neg_eigval"_a,
          "state_v_first"_a, "state_interval"_a, "o"_a.none(), "final_state"_a.none(), "states"_a.none(), "engine"_a,
          "threads"_a, "bf16"_a);
    m.def("delta_backward", &backward, "rule"_a, "q"_a.none(), "k"_a.none(), "v"_a.none(), "g"_a.none(),
          "g_gamma"_a.none(), "beta"_a.none(), "p"_a.none(), "initial_state"_a.none(), "A_log"_a.none(),
          "dt_bias"_a.none(), "cu_seqlens"_a.none(), "scale"_a, "use_qk_l2norm_in_kernel"_a, "use_gate_in_kernel"_a,
          "lower_bound"_a, "use_beta_sigmoid_in_kernel"_a, "allow_neg_eigval"_a, "state_v_first"_a, "d_o"_a.none(),
          "dfinal_state"_a.none(), "dq"_a.none(), "dk"_a.none(), "dv"_a.none(), "dg"_a.none(), "dg_gamma"_a.none(),
          "dbeta"_a.none(), "dp"_a.none(), "dinitial_state"_a.none(), "dA_log"_a.none(), "ddt_bias"_a.none(),
          "engine"_a, "threads"_a, "bf16"_a);
}

}  // namespace softdelta::python

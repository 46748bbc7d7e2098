#include "distributed/summary.h"

namespace softdelta::distributed {

namespace {

// A tensor of this shape whose elements are all the one at `element`.
Tensor repeated(void* element, core::DType dtype, std::initializer_list<Index> shape) {
    Tensor t;
    t.data = element;
    t.dtype = dtype;
    for (const Index size : shape) t.shape[static_cast<std::size_t>(t.rank++)] = size;
    return t;
}

}  // namespace

core::DeltaOutputs offset_results(const core::DeltaSummary& summary) {
    core::DeltaOutputs out;
    out.final_state = summary.E;
    return out;
}

MapCall::MapCall(const core::DeltaInputs& inputs, const core::DeltaOptions& given, const core::DeltaSummary& summary)
    : in(inputs), options(given) {
    const bool number = given.rule.maps_by_number();
    const Index B = in.q.shape[0], T = in.q.shape[1], rows = in.v.shape[1], HV = in.v.shape[2],
                N = core::sequence_count(in);
    const Index K = number ? 1 : in.q.shape[3];
    if (number) {  // the state decays alone
        in.k = repeated(&zero_, in.k.dtype, {B, rows, in.q.shape[2], 1});
        in.q = repeated(&zero_, in.k.dtype, {B, T, in.q.shape[2], 1});
    }
    in.v = repeated(&zero_, in.v.dtype, {B, rows, HV, K});
    identity_.assign(static_cast<std::size_t>(K * K), 0.0F);
    for (Index i = 0; i < K; ++i) identity_[static_cast<std::size_t>(i * (K + 1))] = 1;
    in.initial_state = repeated(identity_.data(), core::DType::f32, {N, HV, K, K});
    in.initial_state.stride[2] = K;
    in.initial_state.stride[3] = 1;
    options.state_v_first = false;
    out.final_state = summary.M;
    if (number) {
        out.final_state.rank = 4;
        out.final_state.shape[2] = out.final_state.shape[3] = 1;
        out.final_state.stride[2] = out.final_state.stride[3] = 0;
    }
}

GradientCall::GradientCall(const core::DeltaInputs& inputs, const core::DeltaSummaryGradient& gradient) : in(inputs) {
    const auto& v = inputs.v.shape;
    in.v = repeated(&zero_, inputs.v.dtype, {v[0], v[1], v[2], v[3]});
    out.d_o = gradient.d_o;
    out.dinitial_state = gradient.R;
}

}  // namespace softdelta::distributed

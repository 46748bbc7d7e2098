#include "cpu/attention.h"

#include <initializer_list>

namespace softdelta::cpu {

namespace {

constexpr const char* wide = "f64 tensors: the fast kernels take f32, bf16 and f16; use the reference engine";

bool any_f64(std::initializer_list<const core::Tensor*> tensors) {
    for (const core::Tensor* t : tensors)
        if (*t && t->dtype == core::DType::f64) return true;
    return false;
}

}  // namespace

const char* refusal(const core::AttentionInputs& in, const core::AttentionOutputs& out) {
    return any_f64({&in.q, &in.k, &in.v, &in.bias, &in.sink, &out.o, &out.lse}) ? wide : nullptr;
}

const char* refusal(const core::AttentionInputs& in, const core::AttentionGradients& grad) {
    return any_f64({&in.q, &in.k, &in.v, &in.bias, &in.sink, &grad.o, &grad.lse, &grad.d_o, &grad.dlse, &grad.dq,
                    &grad.dk, &grad.dv, &grad.dbias, &grad.dsink})
               ? wide
               : nullptr;
}

}  // namespace softdelta::cpu

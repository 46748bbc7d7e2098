// GGML_OP_L2_NORM: y = x / max(√Σx², ε), row by row. ggml's CPU backend is as fast; with SOFTDELTA_GGML_TAKE=all the
// backend takes it because graphs of ggml's own tests normalise q and k of the delta rule on the same backend.
#include <algorithm>
#include <cmath>

#include "operations/operations.h"
#include "operations/view.h"

namespace softdelta_ggml {

Support l2_norm_support(const ggml_tensor* op) {
    const ggml_tensor* x = op->src[0];
    return {x->type == GGML_TYPE_F32 && op->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) &&
                op->nb[0] == sizeof(float),
            false};
}

std::string compute_l2_norm(const ggml_tensor* op, Resources&) {
    const ggml_tensor* x = op->src[0];
    const float smallest = ggml_get_op_params_f32(op, 0);
    for (std::int64_t i3 = 0; i3 < x->ne[3]; ++i3)
        for (std::int64_t i2 = 0; i2 < x->ne[2]; ++i2)
            for (std::int64_t i1 = 0; i1 < x->ne[1]; ++i1) {
                const auto* from = reinterpret_cast<const float*>(row(x, i1, i2, i3));
                auto* to = reinterpret_cast<float*>(row(op, i1, i2, i3));
                double sum = 0;
                for (std::int64_t i = 0; i < x->ne[0]; ++i) sum += static_cast<double>(from[i]) * from[i];
                const float factor = 1 / std::max(static_cast<float>(std::sqrt(sum)), smallest);
                for (std::int64_t i = 0; i < x->ne[0]; ++i) to[i] = from[i] * factor;
            }
    return "";
}

}  // namespace softdelta_ggml

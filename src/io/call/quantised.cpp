#include "io/call/quantised.h"

#include <vector>

#include "core/quantised.h"
#include "io/file/core_view.h"

namespace softdelta::io {

namespace {

OwnedTensor expand(const Tensor& numbers, const Tensor& scales, DType dtype) {
    core::Tensor from = core_view(numbers);
    const core::Tensor scale = core_view(scales);
    const bool blocks = from.rank == 5;
    const core::Index size = numbers.shape(3) * (blocks ? core::quantised_block : 1);
    if (blocks) {
        from.block = core::quantised_block;
        from.block_stride = from.stride[3];
        from.stride[3] = from.stride[4];
    }
    core::Tensor repeated = scale;
    for (std::size_t i = 0; i < 4; ++i)
        if (scale.shape[i] == 1) repeated.stride[i] = 0;
    OwnedTensor to(dtype, {numbers.shape(0), numbers.shape(1), numbers.shape(2), size});
    const core::Tensor out = core_view(to.view());
    std::vector<double> row(static_cast<std::size_t>(size));
    for (core::Index a = 0; a < out.shape[0]; ++a)
        for (core::Index b = 0; b < out.shape[1]; ++b)
            for (core::Index c = 0; c < out.shape[2]; ++c) {
                const core::Index at = a * from.stride[0] + b * from.stride[1] + c * from.stride[2];
                const core::Index scale_at = a * repeated.stride[0] + b * repeated.stride[1] + c * repeated.stride[2];
                core::load_quantised_row(from, at, repeated, scale_at, size, row.data());
                core::store_row(out, out.offset({a, b, c, 0}), 3, size, row.data());
            }
    return to;
}

}  // namespace

ExpandedCall::ExpandedCall(const Call& given, DType dtype) : call(given) {
    AttentionInputs& in = call.attention;
    if (in.k_scale) memory[0] = expand(in.k, in.k_scale, dtype), in.k = memory[0].view();
    if (in.v_scale) memory[1] = expand(in.v, in.v_scale, dtype), in.v = memory[1].view();
    in.k_scale = in.v_scale = {};
}

}  // namespace softdelta::io

#include "engines/cpu/attention/bias_gradient.h"

#include <algorithm>

#include "core/parallel.h"

namespace softdelta::cpu {

namespace {

// Calls work(offset of a row, in elements) for every row along the last dimension.
template <class Work>
void for_rows(const Tensor& t, int threads, const Work& work) {
    const Index rows = t.shape[0] * t.shape[1] * t.shape[2];
    const Index step = std::max<Index>(1, 4096 / std::max<Index>(1, t.shape[3]));
    core::parallel_units(threads, (rows + step - 1) / step, [&] {
        return [&](Index unit) {
            for (Index r = unit * step; r < std::min((unit + 1) * step, rows); ++r)
                work(r / t.shape[2] / t.shape[1], r / t.shape[2] % t.shape[1], r % t.shape[2]);
        };
    });
}

}  // namespace

AttentionBiasGradient::AttentionBiasGradient(const core::AttentionInputs& in, const core::AttentionGradients& grad,
                                             const AttentionHeads& heads)
    : in_(in), grad_(grad), heads_(heads) {
    const Tensor& t = grad.dbias;
    if (!t) return;
    writes_ = by_tiles() && t.shape[0] == heads.sequences() && t.shape[1] == in.q.shape[2] &&
              (t.shape[2] > 1 || heads.most_rows() == heads.group());
    sums_ = t;
}

void AttentionBiasGradient::take(kernels::Scratch& memory) {
    if (!grad_.dbias || writes_ || grad_.dbias.dtype == core::DType::f32) return;
    sums_.dtype = core::DType::f32;
    sums_.data = memory.take<float>(sums_.count());
    Index stride = 1;
    for (std::size_t dim = 4; dim-- > 0; stride *= sums_.shape[dim]) sums_.stride[dim] = stride;
}

// Sums begin at 0; so do elements beyond the length of a sequence, which no tile writes.
void AttentionBiasGradient::clear(int threads) const {
    if (!grad_.dbias) return;
    if (writes_ && !in_.cu_seqlens_q && !in_.cache_seqlens && in_.q.shape[1] > 0) return;
    for_rows(sums_, threads, [&](Index b, Index h, Index i) {
        const Index at = sums_.offset({b, h, i, 0});
        for (Index j = 0; j < sums_.shape[3]; ++j) core::store(sums_, at + j * sums_.stride[3], 0);
    });
}

kernels::Plane AttentionBiasGradient::plane(Index sequence, Index key_head) const {
    return by_tiles() ? heads_.plane(sums_, heads_.sequence(sequence), key_head) : kernels::Plane{};
}

void AttentionBiasGradient::add_row(Index sequence, Index head, Index query, float value) {
    const Index batch = core::sequence(in_, sequence).mask_batch;
    const Index at = sums_.offset({batch, core::shared_head(sums_, head, in_.q.shape[2]), query, 0});
    static_cast<float*>(sums_.data)[at] += value;
}

void AttentionBiasGradient::finish(const kernels::AttentionBackward& kernel, int threads) const {
    if (!grad_.dbias || sums_.data == grad_.dbias.data) return;
    for_rows(sums_, threads, [&](Index b, Index h, Index i) {
        const Tensor& t = grad_.dbias;
        const auto* row = static_cast<const float*>(sums_.data) + sums_.offset({b, h, i, 0});
        auto* out =
            static_cast<std::byte*>(t.data) + t.offset({b, h, i, 0}) * static_cast<Index>(core::size_of(t.dtype));
        kernel.store(row, t.shape[3], out, t.dtype, t.stride[3]);
    });
}

}  // namespace softdelta::cpu

#include "engines/cpu/attention/head.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "engines/cpu/machine/isa.h"

namespace softdelta::cpu {

namespace {

// Farther than any key; small enough to be added to positions.
constexpr Index unbounded = Index{1} << 60;

void* at(const Tensor& t, Index offset) {
    return static_cast<std::byte*>(t.data) + offset * static_cast<Index>(core::size_of(t.dtype));
}

float empty_lse(core::EmptyRow value) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    if (value == core::EmptyRow::zero) return 0;
    return value == core::EmptyRow::plus_infinity ? infinity : -infinity;
}

}  // namespace

AttentionHeads::AttentionHeads(const core::AttentionInputs& in, const core::AttentionOptions& options,
                               const core::Execution& execution, const kernels::Table& table, const Tensor* d_o)
    : in_(in), options_(options) {
    const auto bf16 = [](const Tensor& t) { return t.dtype == core::DType::bf16; };
    const bool all_bf16 = bf16(in.q) && bf16(in.k) && bf16(in.v) && (d_o == nullptr || bf16(*d_o));
    bf16_products_ = all_bf16 && use_bf16_products(execution, table);
    decode_bf16_products_ =
        all_bf16 && execution.bf16_products != core::Bf16Products::f32 && table.multiply_add_bf16.run != nullptr;
    for (Index n = 0; n < sequences(); ++n) {
        const core::AttentionSequence s = core::sequence(in, n);
        longest_queries_ = std::max(longest_queries_, s.q_count);
        longest_keys_ = std::max(longest_keys_, s.k_count);
    }
}

kernels::QueryRows AttentionHeads::query_rows(const Tensor& t, const core::AttentionSequence& s, Index key_head) const {
    if (!t) return {};
    return {at(t, t.offset({s.batch, 0, 0, 0}) + s.q_begin * t.stride[1] + key_head * group() * t.stride[2]), t.dtype,
            t.stride[2], t.stride[1], t.stride[3]};
}

kernels::KeyRows AttentionHeads::key_rows(const Tensor& t, const core::AttentionSequence& s, Index key_head,
                                          const Tensor& scale) const {
    if (!t) return {};
    kernels::KeyRows rows{.dtype = t.dtype, .row = t.stride[1], .column = t.stride[3]};
    if (in_.block_table) {
        const Tensor& table = in_.block_table;
        rows.data = at(t, key_head * t.stride[2]);
        rows.table = at(table, s.key_batch * table.stride[0]);
        rows.wide_table = table.dtype == core::DType::i64;
        rows.table_stride = table.stride[1];
        rows.block_rows = t.shape[1];
        rows.block = t.stride[0];
    } else {
        rows.data = at(t, t.offset({s.key_batch, 0, 0, 0}) + s.k_begin * t.stride[1] + key_head * t.stride[2]);
    }
    if (scale) {
        const Index first = in_.block_table ? 0 : scale.offset({s.key_batch, 0, 0, 0}) + s.k_begin * scale.stride[1];
        rows.scale = at(scale, first + key_head * scale.stride[2]);
        rows.scale_row = scale.stride[1];
        rows.scale_block = scale.stride[0];
        rows.scales = {scale.dtype, scale.stride[3],
                       t.block > 0 ? t.block_stride : core::quantised_block * t.stride[3]};
    }
    return rows;
}

kernels::Plane AttentionHeads::row_values(const Tensor& t, Index sequence, Index key_head) const {
    if (!t) return {};
    const core::AttentionSequence s = core::sequence(in_, sequence);
    return {.data = at(t, t.offset({s.batch, 0, 0}) + key_head * group() * t.stride[1] + s.q_begin * t.stride[2]),
            .dtype = t.dtype,
            .head = t.stride[1],
            .row = t.stride[2]};
}

kernels::Plane AttentionHeads::plane(const Tensor& t, const core::AttentionSequence& s, Index key_head) const {
    if (!t) return {};
    const Index first_head = core::shared_head(t, key_head * group(), in_.q.shape[2]);
    const bool own_head = t.shape[1] == in_.q.shape[2];
    const auto stride = [&](std::size_t dim) { return t.shape[dim] == 1 ? 0 : t.stride[dim]; };
    return {.data = at(t, t.offset({s.mask_batch, first_head, 0, 0})),
            .dtype = t.dtype,
            .head = own_head ? t.stride[1] : 0,
            .row = stride(2),
            .column = stride(3)};
}

kernels::Plane AttentionHeads::head_values(const Tensor& t, Index key_head) const {
    if (!t) return {};
    return {.data = at(t, key_head * group() * t.stride[0]), .dtype = t.dtype, .head = t.stride[0]};
}

kernels::AttentionHead AttentionHeads::outline(const core::AttentionSequence& s) const {
    kernels::AttentionHead head;
    head.queries = s.q_count;
    head.keys = s.k_count;
    head.group = group();
    head.size = in_.q.shape[3];
    head.value_size = in_.v.shape[3];
    const Index diagonal = options_.shift + (options_.causal == core::Causal::top_left ? 0 : s.k_count - s.q_count);
    head.left = options_.window_left < 0 ? -unbounded : diagonal - std::min(options_.window_left, unbounded);
    head.right = options_.causal == core::Causal::none ? unbounded : diagonal;
    if (options_.window_right >= 0)
        head.right = std::min(head.right, diagonal + std::min(options_.window_right, unbounded));
    head.top_w = options_.top_w;
    return head;
}

kernels::AttentionHead AttentionHeads::head(Index sequence, Index key_head) const {
    const core::AttentionSequence s = core::sequence(in_, sequence);
    kernels::AttentionHead head = outline(s);
    head.q = query_rows(in_.q, s, key_head);
    head.k = key_rows(in_.k, s, key_head, in_.k_scale);
    head.v = key_rows(in_.v, s, key_head, in_.v_scale);
    head.mask = plane(in_.mask, s, key_head);
    head.bias = plane(in_.bias, s, key_head);
    head.sink = head_values(in_.sink, key_head);
    head.bias_slope = head_values(in_.bias_slopes, key_head);
    head.alibi_slope = head_values(in_.alibi_slopes, key_head);
    head.scale = static_cast<float>(options_.scale);
    head.softcap = static_cast<float>(options_.softcap);
    head.empty_lse = empty_lse(options_.empty_row);
    head.bf16_products = bf16_products_;
    return head;
}

kernels::AttentionHead AttentionHeads::decode_head(Index sequence, Index key_head) const {
    kernels::AttentionHead decoded = head(sequence, key_head);
    decoded.bf16_products = decode_bf16_products_;
    decoded.fetches_to_second_cache = decode_fetches_to_second_cache();
    return decoded;
}

kernels::AttentionHead AttentionHeads::largest() const {
    kernels::AttentionHead head;
    head.queries = longest_queries_;
    head.keys = longest_keys_;
    head.group = group();
    head.size = in_.q.shape[3];
    head.value_size = in_.v.shape[3];
    head.top_w = options_.top_w;
    static std::byte somewhere;  // a size needs to know that there are scales, which may have no memory yet
    if (in_.k_scale) head.k.scale = &somewhere;
    if (in_.v_scale) head.v.scale = &somewhere;
    head.bf16_products = bf16_products_;
    return head;
}

}  // namespace softdelta::cpu

#include "engines/cpu/attention/head.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "engines/cpu/machine/isa.h"

namespace softdelta::cpu {

namespace {

void* at(const Tensor& t, Index offset) {
    return static_cast<std::byte*>(t.data) + offset * static_cast<Index>(core::size_of(t.dtype));
}

// Element (batch, row, head, 0) of a tensor [batch, rows, heads, ·].
void* row_of(const Tensor& t, Index batch, Index row, Index head) {
    return at(t, batch * t.stride[0] + row * t.stride[1] + head * t.stride[2]);
}

// Bytes from a head of such a tensor to the one `heads` after it.
Index head_step(const Tensor& t, Index heads = 1) {
    return heads * t.stride[2] * static_cast<Index>(core::size_of(t.dtype));
}

void* behind(void* data, Index bytes) {
    return static_cast<std::byte*>(data) + bytes;
}

// How rows of k or v lie, but not where.
kernels::KeyRows rows_like(const Tensor& t, const Tensor& scale, const Tensor& table) {
    kernels::KeyRows rows{.dtype = t.dtype, .row = t.stride[1], .column = t.stride[3]};
    if (table) {
        rows.wide_table = table.dtype == core::DType::i64;
        rows.table_stride = table.stride[1];
        rows.block_rows = t.shape[1];
        rows.block = t.stride[0];
    }
    if (scale) {
        rows.scale_row = scale.stride[1];
        rows.scale_block = scale.stride[0];
        rows.scales = {scale.dtype, scale.stride[3],
                       t.block > 0 ? t.block_stride : core::quantised_block * t.stride[3]};
    }
    return rows;
}

// Whether quantised numbers are sums of two bf16, each of 8 bits: integers have 7 bits, halves and f8 4, f16 has 11.
bool is_two_bf16(const Tensor& t, const Tensor& scale) {
    if (!scale) return false;
    return scale.dtype == core::DType::bf16 || (scale.dtype == core::DType::f16 && t.dtype != core::DType::i8);
}

float empty_lse(core::EmptyRow value) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    if (value == core::EmptyRow::zero) return 0;
    return value == core::EmptyRow::plus_infinity ? infinity : -infinity;
}

}  // namespace

AttentionHeads::AttentionHeads(const core::AttentionInputs& in, const core::AttentionOptions& options,
                               const core::Execution& execution, const kernels::Table& table, const Tensor* d_o)
    : in_(in), options_(options), ends_meet_(options.causal != core::Causal::top_left) {
    const auto reach = [](Index window) { return window < 0 ? 2 * unbounded : std::min(window, unbounded); };
    left_ = -reach(options.window_left);
    right_ = std::min(reach(options.window_right), options.causal == core::Causal::none ? 2 * unbounded : 0);
    const auto bf16 = [](const Tensor& t) { return t.dtype == core::DType::bf16; };
    const bool all_bf16 = bf16(in.q) && bf16(in.k) && bf16(in.v) && (d_o == nullptr || bf16(*d_o));
    decode_bf16_products_ =
        all_bf16 && execution.bf16_products != core::Bf16Products::f32 && table.multiply_add_bf16.run != nullptr;
    for (Index n = 0; n < sequences(); ++n) {
        const core::AttentionSequence s = sequence(n);
        longest_queries_ = std::max(longest_queries_, s.q_count);
        longest_keys_ = std::max(longest_keys_, s.k_count);
    }
    common_.group = group();
    common_.size = in.q.shape[3];
    common_.value_size = in.v.shape[3];
    common_.q = query_rows(in.q, {}, 0);
    common_.k = rows_like(in.k, in.k_scale, in.block_table);
    common_.v = rows_like(in.v, in.v_scale, in.block_table);
    common_.top_w = options.top_w;
    common_.scale = static_cast<float>(options.scale);
    common_.softcap = static_cast<float>(options.softcap);
    common_.empty_lse = empty_lse(options.empty_row);
    const auto fits = [&](const Tensor& t, const Tensor& scale) {
        return bf16(t) || (table.matrix_tiles && is_two_bf16(t, scale));
    };
    common_.bf16_products = bf16(in.q) && fits(in.k, in.k_scale) && fits(in.v, in.v_scale) &&
                            (d_o == nullptr || bf16(*d_o)) && use_bf16_products(execution, table);
    common_.fetches_to_second_cache = decode_fetches_to_second_cache();
    q_step_ = head_step(in.q, group());
    k_step_ = head_step(in.k);
    v_step_ = head_step(in.v);
    has_addends_ = in.mask || in.bias || in.sink || in.bias_slopes || in.alibi_slopes;
}

kernels::QueryRows AttentionHeads::query_rows(const Tensor& t, const core::AttentionSequence& s, Index key_head) const {
    if (!t) return {};
    return {row_of(t, s.batch, s.q_begin, key_head * group()), t.dtype, t.stride[2], t.stride[1], t.stride[3]};
}

kernels::KeyRows AttentionHeads::key_rows(const Tensor& t, const core::AttentionSequence& s, Index key_head) const {
    if (!t) return {};
    kernels::KeyRows rows = rows_like(t, {}, in_.block_table);
    place(rows, t, {}, s, key_head);
    return rows;
}

void AttentionHeads::place(kernels::KeyRows& rows, const Tensor& t, const Tensor& scale,
                           const core::AttentionSequence& s, Index key_head) const {
    const Tensor& table = in_.block_table;
    const Index batch = table ? 0 : s.key_batch;
    if (table) rows.table = at(table, s.key_batch * table.stride[0]);
    rows.data = row_of(t, batch, s.k_begin, key_head);
    if (scale) rows.scale = row_of(scale, batch, s.k_begin, key_head);
}

kernels::Plane AttentionHeads::row_values(const Tensor& t, const core::AttentionSequence& s, Index key_head) const {
    if (!t) return {};
    return {.data = row_of(t, s.batch, key_head * group(), s.q_begin),
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

void AttentionHeads::place(kernels::AttentionHead& head, const core::AttentionSequence& s,
                           const AttentionOutline& sizes, Index key_head) const {
    head.queries = sizes.queries;
    head.keys = sizes.keys;
    head.left = sizes.left;
    head.right = sizes.right;
    head.q.data = row_of(in_.q, s.batch, s.q_begin, key_head * head.group);
    place(head.k, in_.k, in_.k_scale, s, key_head);
    place(head.v, in_.v, in_.v_scale, s, key_head);
    if (has_addends_) place_addends(head, s, key_head);
}

void AttentionHeads::place_next(kernels::AttentionHead& head, const kernels::AttentionHead& before,
                                const core::AttentionSequence& s, Index key_head) const {
    head.queries = before.queries;
    head.keys = before.keys;
    head.left = before.left;
    head.right = before.right;
    head.q.data = behind(before.q.data, q_step_);
    head.k.table = before.k.table;
    head.k.data = behind(before.k.data, k_step_);
    head.v.table = before.v.table;
    head.v.data = behind(before.v.data, v_step_);
    if (in_.k_scale) head.k.scale = behind(before.k.scale, head_step(in_.k_scale));
    if (in_.v_scale) head.v.scale = behind(before.v.scale, head_step(in_.v_scale));
    if (has_addends_) place_addends(head, s, key_head);
}

void AttentionHeads::place_addends(kernels::AttentionHead& head, const core::AttentionSequence& s,
                                   Index key_head) const {
    if (in_.mask) head.mask = plane(in_.mask, s, key_head);
    if (in_.bias) head.bias = plane(in_.bias, s, key_head);
    if (in_.sink) head.sink = head_values(in_.sink, key_head);
    if (in_.bias_slopes) head.bias_slope = head_values(in_.bias_slopes, key_head);
    if (in_.alibi_slopes) head.alibi_slope = head_values(in_.alibi_slopes, key_head);
}

kernels::AttentionHead AttentionHeads::decode_head() const {
    kernels::AttentionHead decoded = common_;
    decoded.bf16_products = decode_bf16_products_;
    return decoded;
}

kernels::AttentionHead AttentionHeads::largest() const {
    kernels::AttentionHead head;
    head.queries = longest_queries_;
    head.keys = longest_keys_;
    head.group = common_.group;
    head.size = common_.size;
    head.value_size = common_.value_size;
    head.top_w = common_.top_w;
    head.bf16_products = common_.bf16_products;
    static std::byte somewhere;  // a size needs to know that there are scales, which may have no memory yet
    if (in_.k_scale) head.k.scale = &somewhere;
    if (in_.v_scale) head.v.scale = &somewhere;
    return head;
}

}  // namespace softdelta::cpu

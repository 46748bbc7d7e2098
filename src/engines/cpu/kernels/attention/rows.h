// Rows and values of an attention head by their index.
#pragma once

#include <cmath>

#include "engines/cpu/kernels/attention/head.h"
#include "engines/cpu/kernels/gemm/pack.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline void* element(void* data, DType dtype, Index at) {
    return static_cast<std::byte*>(data) + at * static_cast<Index>(core::size_of(dtype));
}

template <class T>
SOFTDELTA_INLINE F load_part(const T* p, Index n) {
    return n >= W ? load(p) : load_partial(p, n);
}

// Elements at … at + W − 1, zeros beyond the first n.
SOFTDELTA_INLINE F load_floats(DType dtype, const void* data, Index at, Index n) {
    if (dtype == DType::f32) return load_part(static_cast<const float*>(data) + at, n);
    if (dtype == DType::bf16) return load_part(static_cast<const core::bf16*>(data) + at, n);
    return load_part(static_cast<const core::f16*>(data) + at, n);
}

inline float load_float(DType dtype, const void* data, Index at) {
    if (dtype == DType::f32) return static_cast<const float*>(data)[at];
    if (dtype == DType::bf16) return core::to_float(static_cast<const core::bf16*>(data)[at]);
    return core::to_float(static_cast<const core::f16*>(data)[at]);
}

// Which query head of the group row r belongs to.
inline Index head_of(const AttentionHead& head, Index r) {
    return head.group == 1 ? 0 : r / head.queries;
}

// Row r of q, o, do or dq.
inline Row query_row(const AttentionHead& head, const QueryRows& t, Index r) {
    const Index h = head_of(head, r);
    const Index at = h * t.head + (r - h * head.queries) * t.row;
    return {element(t.data, t.dtype, at), t.dtype, t.column};
}

// Row j of k, v, dk or dv.
inline Row key_row(const KeyRows& t, Index j) {
    Index block = 0, row = j;
    if (t.table != nullptr) {
        const Index i = j / t.block_rows * t.table_stride;
        block =
            t.wide_table ? static_cast<const std::int64_t*>(t.table)[i] : static_cast<const std::int32_t*>(t.table)[i];
        row = j % t.block_rows;
    }
    Row r{element(t.data, t.dtype, block * t.block + row * t.row), t.dtype, t.column};
    if (t.scale != nullptr) {
        r.scale = element(t.scale, t.scales.dtype, block * t.scale_block + row * t.scale_row);
        r.scales = &t.scales;
    }
    return r;
}

inline Index plane_row(const AttentionHead& head, const Plane& t, Index r) {
    const Index h = head_of(head, r);
    return h * t.head + (r - h * head.queries) * t.row;
}

// The value of row r: of a sink, lse and the like.
inline float head_value(const AttentionHead& head, const Plane& t, Index r) {
    return load_float(t.dtype, t.data, plane_row(head, t, r));
}

// Whether a row holds no Inf and no NaN.
inline bool is_finite(Row row, Index n) {
    if (row.scales != nullptr) {
        F total = splat(0.0F);
        for (Index i = 0; i < n; i += W)
            total = fma(load_quantised(row.dtype, row.data, row.step, row.scale, *row.scales, i, n - i), splat(0.0F),
                        total);
        return all(total == total);
    }
    if (row.step == 1) {
        F total = splat(0.0F);  // 0·x is NaN of Inf and NaN
        for (Index i = 0; i < n; i += W) total = fma(load_floats(row.dtype, row.data, i, n - i), splat(0.0F), total);
        return all(total == total);
    }
    for (Index i = 0; i < n; ++i)
        if (!std::isfinite(load_float(row.dtype, row.data, i * row.step))) return false;
    return true;
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

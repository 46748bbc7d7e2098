// New keys and values of a cache: operands of one call.
#pragma once

#include "core/operands.h"
#include "core/quantised.h"

namespace softdelta::core {

struct CacheAppendInputs {
    Tensor k;              // [B, L, Hk, D]; packed [1, ΣL, Hk, D]
    Tensor v;              // as k, with Dv
    Tensor cu_seqlens;     // [N+1] i32|i64; then B = 1
    Tensor cache_seqlens;  // [N] keys in use of each sequence, the new ones included
    Tensor block_table;    // [N, max blocks] i32|i64
};

// As attention reads them.
struct CacheAppendOutputs {
    Tensor k_cache;  // [N, Lk, Hk, D]; paged [blocks, block rows, Hk, D]; may be quantised numbers (core/quantised.h)
    Tensor v_cache;  // as k_cache, with Dv
    Tensor k_scale;  // of quantised numbers: written where each row has its own, else read
    Tensor v_scale;
};

template <>
inline constexpr auto operands_of<CacheAppendInputs> = std::to_array<Operand<CacheAppendInputs>>({
    {.name = "k", .tensor = &CacheAppendInputs::k, .shape = "B T Hk D", .need = needs::required},
    {.name = "v", .tensor = &CacheAppendInputs::v, .shape = "B T Hk Dv", .need = needs::required},
    {.name = "cu_seqlens", .tensor = &CacheAppendInputs::cu_seqlens, .shape = "N+1", .kind = Kind::integer},
    {.name = "cache_seqlens",
     .tensor = &CacheAppendInputs::cache_seqlens,
     .shape = "N",
     .need = needs::required,
     .kind = Kind::integer},
    {.name = "block_table", .tensor = &CacheAppendInputs::block_table, .shape = "N max_blocks", .kind = Kind::integer},
});
template <>
inline constexpr auto operands_of<CacheAppendOutputs> = std::to_array<Operand<CacheAppendOutputs>>({
    {.name = "k_cache",
     .tensor = &CacheAppendOutputs::k_cache,
     .shape = "B Lk Hk D",
     .need = needs::required,
     .written = true},
    {.name = "v_cache",
     .tensor = &CacheAppendOutputs::v_cache,
     .shape = "B Lk Hk Dv",
     .need = needs::required,
     .written = true},
    {.name = "k_scale", .tensor = &CacheAppendOutputs::k_scale, .shape = "B|1 Lk|1 Hk|1 D/32|1", .written = true},
    {.name = "v_scale", .tensor = &CacheAppendOutputs::v_scale, .shape = "B|1 Lk|1 Hk|1 Dv/32|1", .written = true},
});

inline Index sequence_count(const CacheAppendInputs& in) {
    return in.cache_seqlens.shape[0];
}

// New tokens of a sequence: `count` from row `begin` of batch row `batch`, which become keys `first` and on.
struct NewTokens {
    Index batch, begin, count, first;
};
inline NewTokens new_tokens(const CacheAppendInputs& in, Index n) {
    const Index used = load_index(in.cache_seqlens, n * in.cache_seqlens.stride[0]);
    if (!in.cu_seqlens) return {n, 0, in.k.shape[1], used - in.k.shape[1]};
    const Index begin = load_index(in.cu_seqlens, n * in.cu_seqlens.stride[0]);
    const Index count = load_index(in.cu_seqlens, (n + 1) * in.cu_seqlens.stride[0]) - begin;
    return {0, begin, count, used - count};
}

}  // namespace softdelta::core

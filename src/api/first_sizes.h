// The size that each public structure had in the first release, in bytes of a 64-bit machine. A number here never
// changes: it is what callers say who know that release alone. A structure that grows is larger, no other differs.
#pragma once

#include <cstddef>

#include "softdelta/judge.h"
#include "softdelta/softdelta.h"

namespace softdelta::api {

template <class T>
inline constexpr std::size_t first_size = 0;

template <>
inline constexpr std::size_t first_size<softdelta_engine_info> = 40;
template <>
inline constexpr std::size_t first_size<softdelta_stage> = 24;
template <>
inline constexpr std::size_t first_size<softdelta_stages> = 32;
template <>
inline constexpr std::size_t first_size<softdelta_gpu> = 40;
template <>
inline constexpr std::size_t first_size<softdelta_execution> = 88;
template <>
inline constexpr std::size_t first_size<softdelta_limits> = 32;
template <>
inline constexpr std::size_t first_size<softdelta_attention_inputs> = 120;
template <>
inline constexpr std::size_t first_size<softdelta_attention_options> = 80;
template <>
inline constexpr std::size_t first_size<softdelta_attention_outputs> = 24;
template <>
inline constexpr std::size_t first_size<softdelta_attention_gradients> = 80;
template <>
inline constexpr std::size_t first_size<softdelta_cache_append_inputs> = 48;
template <>
inline constexpr std::size_t first_size<softdelta_cache_append_outputs> = 40;
template <>
inline constexpr std::size_t first_size<softdelta_delta_inputs> = 128;
template <>
inline constexpr std::size_t first_size<softdelta_delta_options> = 72;
template <>
inline constexpr std::size_t first_size<softdelta_delta_outputs> = 40;
template <>
inline constexpr std::size_t first_size<softdelta_delta_gradients> = 120;
template <>
inline constexpr std::size_t first_size<softdelta_delta_summary_outputs> = 24;
template <>
inline constexpr std::size_t first_size<softdelta_delta_summary_gradients> = 24;
template <>
inline constexpr std::size_t first_size<softdelta_delta_fold_inputs> = 32;
template <>
inline constexpr std::size_t first_size<softdelta_delta_fold_outputs> = 24;
template <>
inline constexpr std::size_t first_size<softdelta_attention_merge_inputs> = 32;
template <>
inline constexpr std::size_t first_size<softdelta_causal_convolution_inputs> = 72;
template <>
inline constexpr std::size_t first_size<softdelta_causal_convolution_options> = 16;
template <>
inline constexpr std::size_t first_size<softdelta_causal_convolution_outputs> = 24;
template <>
inline constexpr std::size_t first_size<softdelta_causal_convolution_gradients> = 56;
template <>
inline constexpr std::size_t first_size<softdelta_gated_norm_inputs> = 32;
template <>
inline constexpr std::size_t first_size<softdelta_gated_norm_options> = 24;
template <>
inline constexpr std::size_t first_size<softdelta_gated_norm_outputs> = 16;
template <>
inline constexpr std::size_t first_size<softdelta_gated_norm_gradients> = 40;
template <>
inline constexpr std::size_t first_size<softdelta_isa_level> = 32;
template <>
inline constexpr std::size_t first_size<softdelta_rounding> = 24;

// None has padding at its end, where a later field would read what a caller never wrote: `reserved` fills it.
template <class... T>
constexpr bool whole = ((sizeof(T) >= first_size<T>)&&...);
static_assert(
    sizeof(void*) != 8 ||
    whole<softdelta_engine_info, softdelta_stage, softdelta_stages, softdelta_gpu, softdelta_execution,
          softdelta_limits, softdelta_cache_append_inputs, softdelta_cache_append_outputs, softdelta_attention_inputs,
          softdelta_attention_options, softdelta_attention_outputs, softdelta_attention_gradients,
          softdelta_delta_inputs, softdelta_delta_options, softdelta_delta_outputs, softdelta_delta_gradients,
          softdelta_delta_summary_outputs, softdelta_delta_summary_gradients, softdelta_delta_fold_inputs,
          softdelta_delta_fold_outputs, softdelta_attention_merge_inputs, softdelta_causal_convolution_inputs,
          softdelta_causal_convolution_options, softdelta_causal_convolution_outputs,
          softdelta_causal_convolution_gradients, softdelta_gated_norm_inputs, softdelta_gated_norm_options,
          softdelta_gated_norm_outputs, softdelta_gated_norm_gradients, softdelta_isa_level, softdelta_rounding>);

}  // namespace softdelta::api

// softdelta in C++20: views, options with defaults, exceptions. Header-only over the C interface, softdelta.h, which
// documents the shape, default and source of every operand. Structures here have the same fields, in one file as there.
//
//     using softdelta::DType, softdelta::Tensor;
//     Tensor q(q_data, DType::f32, {B, T, H, K}), …;
//     softdelta::delta_forward({.q = q, .k = k, .v = v, .g = g}, {.o = o}, {.rule = softdelta::Rule::kda});
//
// Wrong arguments throw std::invalid_argument, and calls that cannot be done throw softdelta::Unsupported, before
// anything is written. std::bad_alloc may come later. Examples: docs/c-and-cpp.md. One file: all that a C++ program
// includes.
#pragma once

#if __cplusplus < 202002L
#error "softdelta.hpp needs C++20; softdelta/softdelta.h is for C and earlier C++"
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "softdelta/judge.h"
#include "softdelta/softdelta.h"

namespace softdelta {

// The type of a tensor's elements.
enum class DType : std::uint8_t { f64, f32, bf16, f16, boolean, i32, i64, i8, u8, f8 };  // f8 is e4m3

// Where a tensor's elements are, and whether they may be written.
struct Address {
    void* data = nullptr;    // the first element
    bool read_only = false;  // whether it was given as const

    Address(void* memory) : data(memory) {}                                            // may be written
    Address(const void* memory) : data(const_cast<void*>(memory)), read_only(true) {}  // is only read
    Address(std::nullptr_t) {}                                                         // no elements
};

// A view of memory that the caller owns. Strides are in elements; without them the view is row-major. Operands may
// be const memory; a view of that is refused as a result. A default view means "not given".
class Tensor {
  public:
    static constexpr std::size_t max_rank = 6;  // most dimensions

    // Not given.
    Tensor() = default;
    // Row-major.
    Tensor(Address memory, DType dtype, std::span<const std::int64_t> shape)
        : data_(memory.data), dtype_(dtype), read_only_(memory.read_only) {
        set_shape(shape);
        std::int64_t step = 1;
        for (std::size_t i = rank_; i-- > 0;) {
            stride_[i] = step;
            step = static_cast<std::int64_t>(static_cast<std::uint64_t>(step) * static_cast<std::uint64_t>(shape_[i]));
        }
    }
    // With strides.
    Tensor(Address memory, DType dtype, std::span<const std::int64_t> shape, std::span<const std::int64_t> stride)
        : data_(memory.data), dtype_(dtype), read_only_(memory.read_only) {
        set_shape(shape);
        if (stride.size() != rank_)
            throw std::invalid_argument("softdelta::Tensor: as many strides as dimensions are expected");
        std::copy(stride.begin(), stride.end(), stride_.begin());
    }
    // Row-major; the shape in braces.
    Tensor(Address memory, DType dtype, std::initializer_list<std::int64_t> shape)
        : Tensor(memory, dtype, std::span<const std::int64_t>(shape.begin(), shape.size())) {}
    // With strides; both in braces.
    Tensor(Address memory, DType dtype, std::initializer_list<std::int64_t> shape,
           std::initializer_list<std::int64_t> stride)
        : Tensor(memory, dtype, std::span<const std::int64_t>(shape.begin(), shape.size()),
                 std::span<const std::int64_t>(stride.begin(), stride.size())) {}
    explicit operator bool() const { return rank_ > 0; }                              // whether it is given
    void* data() const { return data_; }                                              // the first element
    DType dtype() const { return dtype_; }                                            // of an element
    bool read_only() const { return read_only_; }                                     // a view of const memory
    std::size_t rank() const { return rank_; }                                        // the number of dimensions
    std::span<const std::int64_t> shape() const { return {shape_.data(), rank_}; }    // [rank]
    std::span<const std::int64_t> stride() const { return {stride_.data(), rank_}; }  // [rank] in elements
    std::int64_t shape(std::size_t i) const { return shape_[i]; }                     // the size of dimension i
    // The number of elements.
    std::int64_t count() const {
        std::int64_t n = 1;
        for (const std::int64_t size : shape()) n *= size;
        return n;
    }

    // The same view of memory on another device; {kDLCPU, 0} unless said.
    Tensor on(DLDevice device) const {
        Tensor t = *this;
        t.device_ = device;
        return t;
    }

    // The DLPack view; valid as long as this object.
    DLTensor dlpack() const {
        static constexpr DLDataType types[] = {
            {kDLFloat, 64, 1}, {kDLFloat, 32, 1}, {kDLBfloat, 16, 1}, {kDLFloat, 16, 1}, {6, 8, 1},
            {kDLInt, 32, 1},   {kDLInt, 64, 1},   {kDLInt, 8, 1},     {kDLUInt, 8, 1},   {10, 8, 1}};
        DLTensor t{};
        t.data = data_;
        t.device = device_;
        t.ndim = static_cast<int>(rank_);
        t.dtype = types[static_cast<std::size_t>(dtype_)];
        t.shape = const_cast<std::int64_t*>(shape_.data());
        t.strides = const_cast<std::int64_t*>(stride_.data());
        return t;
    }

  private:
    void set_shape(std::span<const std::int64_t> shape) {
        if (shape.empty() || shape.size() > max_rank)
            throw std::invalid_argument("softdelta::Tensor: 1 to 6 dimensions are expected");
        rank_ = shape.size();
        std::copy(shape.begin(), shape.end(), shape_.begin());
    }

    void* data_ = nullptr;
    DType dtype_ = DType::f64;
    bool read_only_ = false;
    DLDevice device_{kDLCPU, 0};
    std::size_t rank_ = 0;
    std::array<std::int64_t, max_rank> shape_{};
    std::array<std::int64_t, max_rank> stride_{};
};

// The call is legal, but this engine, build or machine cannot do it.
struct Unsupported : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// How products of bf16 operands are computed (softdelta_bf16_products).
enum class Bf16Products { automatic, f32, bf16 };

// An intermediate of the stages engines (softdelta_stage).
struct Stage {
    std::string name;
    Tensor tensor;
};

// What the stages engines are told besides (softdelta_stages).
struct Stages {
    std::int64_t chunk_size = 64;
    std::vector<Stage> wanted{};
};

// For tests of kernels: where engines round (softdelta_rounding).
struct Rounding {
    std::uint64_t seed = 0;
    bool shortcuts = false;
    bool float_scores = false;
};

// What engines on a GPU are told besides, for delta rules (softdelta_gpu).
struct Gpu {
    void* state_ready = nullptr;  // events: waited for before an entering state is read,
    void* state_done = nullptr;   // and recorded when the leaving one is filled
    std::span<std::byte> kept{};  // what delta_forward leaves for delta_backward (delta_kept_size)
};

// How to compute a call (softdelta_execution).
struct Execution {
    std::string engine{};  // an engine's name (list_engines()), "fast" or, the same as "", "automatic"
    int threads = 0;
    Bf16Products bf16_products = Bf16Products::automatic;
    std::span<std::byte> workspace{};  // memory for the call, which then allocates nothing
    softdelta_parallel_for parallel_for = nullptr;
    void* parallel_context = nullptr;
    void* stream = nullptr;  // engines on a GPU: the stream that the call works on
    Stages stages{};
    Rounding rounding{};
    Gpu gpu{};
};

// The largest calls that a workspace is for (softdelta_limits).
struct Limits {
    std::int64_t sequences = 1;
    std::int64_t tokens = 1;
    std::int64_t keys = 1;
};

// Which keys a query sees by its position (softdelta_causal).
enum class Causal { none, top_left, bottom_right };
// The lse of a row that sees no key and has no sink (softdelta_empty_row).
enum class EmptyRow { minus_infinity, plus_infinity, zero };

// The tensors that attention reads (softdelta_attention_inputs).
struct AttentionInputs {
    Tensor q{}, k{}, v{}, mask{}, bias{}, sink{}, cu_seqlens_q{}, cu_seqlens_k{}, cache_seqlens{}, block_table{},
        alibi_slopes{}, bias_slopes{}, k_scale{}, v_scale{};
};

// Options of attention (softdelta_attention_options).
struct AttentionOptions {
    double scale = NAN;
    Causal causal = Causal::none;
    std::int64_t window_left = -1;
    std::int64_t window_right = -1;
    double softcap = 0;
    EmptyRow empty_row = EmptyRow::minus_infinity;
    std::int64_t top_w = -1;
    std::int64_t query_offset = 0;
    std::int64_t key_offset = 0;
};

// Results of the forward pass (softdelta_attention_outputs).
struct AttentionOutputs {
    Tensor o{}, lse{};
};

// What the backward pass starts from, and the gradients wanted (softdelta_attention_gradients).
struct AttentionGradients {
    Tensor o{}, lse{}, d_o{}, dlse{};           // given
    Tensor dq{}, dk{}, dv{}, dbias{}, dsink{};  // wanted
};

// Keys and values of new tokens (softdelta_cache_append_inputs).
struct CacheAppendInputs {
    Tensor k{}, v{}, cu_seqlens{}, cache_seqlens{}, block_table{};
};

// The cache that they go to (softdelta_cache_append_outputs).
struct CacheAppendOutputs {
    Tensor k_cache{}, v_cache{}, k_scale{}, v_scale{};
};

// The delta rules (softdelta_rule).
enum class Rule { delta_rule, gated_delta_rule, kda, comba, simple_gla, gla, gdn2, gated_delta_product, dplr };

// The gate of a rule (softdelta_rule_gate).
enum class RuleGate { none, head, channel };

// What a rule erases from (softdelta_rule_erases).
enum class RuleErases { from_decayed_state, from_previous_state, nothing };

// Facts of a rule, as softdelta_rule_of_facts takes them.
struct RuleFacts {
    RuleGate gate = RuleGate::none;                      // what decays the state
    RuleErases erases = RuleErases::from_decayed_state;  // what it erases from
    bool own_p = false;                                  // erases along p instead of k
};

// The rule of these facts: options.rule = softdelta::rule_of({.gate = softdelta::RuleGate::channel}).
inline Rule rule_of(const RuleFacts& facts) {
    return static_cast<Rule>(softdelta_rule_of_facts(static_cast<std::int32_t>(facts.gate),
                                                     static_cast<std::int32_t>(facts.erases), facts.own_p));
}

// The tensors that a delta rule reads (softdelta_delta_inputs).
struct DeltaInputs {
    Tensor q{}, k{}, v{}, g{}, g_gamma{}, beta{}, p{}, initial_state{}, A_log{}, dt_bias{}, cu_seqlens{},
        state_indices{}, final_state_indices{}, has_initial_state{}, snapshot_indices{};
};

// Which key head a value head reads (softdelta_head_order).
enum class HeadOrder { grouped, tiled };

// Options of a delta rule (softdelta_delta_options).
struct DeltaOptions {
    Rule rule = Rule::gated_delta_rule;
    double scale = NAN;
    bool use_qk_l2norm_in_kernel = false;
    bool use_gate_in_kernel = false;
    double lower_bound = NAN;
    bool use_beta_sigmoid_in_kernel = false;
    bool allow_neg_eigval = false;
    bool state_v_first = false;
    std::int64_t state_interval = 64;
    HeadOrder head_order = HeadOrder::grouped;
    std::int32_t steps = 1;
};

// Results of the forward pass (softdelta_delta_outputs).
struct DeltaOutputs {
    Tensor o{}, final_state{}, states{}, u{};
};

// What the backward pass starts from, and the gradients wanted (softdelta_delta_gradients).
struct DeltaGradients {
    Tensor d_o{}, dfinal_state{};                                                                      // given
    Tensor dq{}, dk{}, dv{}, dg{}, dg_gamma{}, dbeta{}, dp{}, dinitial_state{}, dA_log{}, ddt_bias{};  // wanted
    Tensor states{}, u{};  // given, both or none: of the forward pass
};

// What a range of tokens does to the state that enters it (softdelta_delta_summary_outputs).
struct DeltaSummary {
    Tensor M{}, E{};
};

// What it does to the gradient of the state that leaves it (softdelta_delta_summary_gradients).
struct DeltaSummaryGradient {
    Tensor d_o{}, R{};
};

// Summaries of ranges in a row (softdelta_delta_fold_inputs).
struct DeltaFoldInputs {
    Tensor M{}, E{}, initial_state{};
};

// The states between them (softdelta_delta_fold_outputs).
struct DeltaFoldOutputs {
    Tensor states{}, final_state{};
};

// What is applied to a result, or to a gate (softdelta_activation).
enum class Activation { none, silu, sigmoid };

// The tensors that the causal convolution reads (softdelta_causal_convolution_inputs).
struct ConvolutionInputs {
    Tensor x{}, weight{}, bias{}, initial_state{}, cu_seqlens{}, state_indices{}, final_state_indices{},
        has_initial_state{};
};

// Options of the causal convolution (softdelta_causal_convolution_options).
struct ConvolutionOptions {
    Activation activation = Activation::none;
};

// Results of the forward pass (softdelta_causal_convolution_outputs).
struct ConvolutionOutputs {
    Tensor y{}, final_state{};
};

// What the backward pass starts from, and the gradients wanted (softdelta_causal_convolution_gradients).
struct ConvolutionGradients {
    Tensor dy{}, dfinal_state{};                        // given
    Tensor dx{}, dweight{}, dbias{}, dinitial_state{};  // wanted
};

// The tensors that the gated norm reads (softdelta_gated_norm_inputs).
struct NormInputs {
    Tensor x{}, z{}, weight{};
};

// Options of the gated norm (softdelta_gated_norm_options).
struct NormOptions {
    Activation gate = Activation::silu;
    double epsilon = 1e-6;
};

// The result of the forward pass (softdelta_gated_norm_outputs).
struct NormOutputs {
    Tensor y{};
};

// What the backward pass starts from, and the gradients wanted (softdelta_gated_norm_gradients).
struct NormGradients {
    Tensor dy{};                   // given
    Tensor dx{}, dz{}, dweight{};  // wanted
};

// The tensors of a call's structures by name, in the order of softdelta.h: for code that makes a call from names, a
// file or another language.
template <class Struct, class C>
struct Field {
    using CStruct = C;

    const char* name;
    Tensor Struct::*tensor;
    const DLTensor* C::*given = nullptr;  // in the C structure: what is read, …
    DLTensor* C::*wanted = nullptr;       // … or what is written

    constexpr Field(const char* n, Tensor Struct::*t, const DLTensor* C::*g) : name(n), tensor(t), given(g) {}
    constexpr Field(const char* n, Tensor Struct::*t, DLTensor* C::*w) : name(n), tensor(t), wanted(w) {}
    void set(C& c, DLTensor* view) const {
        if (given != nullptr)
            c.*given = view;
        else
            c.*wanted = view;
    }
};

// fields_of<AttentionInputs> and so on: an array of Field.
template <class Struct>
inline constexpr auto fields_of = nullptr;

template <>
inline constexpr auto fields_of<AttentionInputs> = std::to_array<Field<AttentionInputs, softdelta_attention_inputs>>({
    {"q", &AttentionInputs::q, &softdelta_attention_inputs::q},
    {"k", &AttentionInputs::k, &softdelta_attention_inputs::k},
    {"v", &AttentionInputs::v, &softdelta_attention_inputs::v},
    {"mask", &AttentionInputs::mask, &softdelta_attention_inputs::mask},
    {"bias", &AttentionInputs::bias, &softdelta_attention_inputs::bias},
    {"sink", &AttentionInputs::sink, &softdelta_attention_inputs::sink},
    {"cu_seqlens_q", &AttentionInputs::cu_seqlens_q, &softdelta_attention_inputs::cu_seqlens_q},
    {"cu_seqlens_k", &AttentionInputs::cu_seqlens_k, &softdelta_attention_inputs::cu_seqlens_k},
    {"cache_seqlens", &AttentionInputs::cache_seqlens, &softdelta_attention_inputs::cache_seqlens},
    {"block_table", &AttentionInputs::block_table, &softdelta_attention_inputs::block_table},
    {"alibi_slopes", &AttentionInputs::alibi_slopes, &softdelta_attention_inputs::alibi_slopes},
    {"bias_slopes", &AttentionInputs::bias_slopes, &softdelta_attention_inputs::bias_slopes},
    {"k_scale", &AttentionInputs::k_scale, &softdelta_attention_inputs::k_scale},
    {"v_scale", &AttentionInputs::v_scale, &softdelta_attention_inputs::v_scale},
});
template <>
inline constexpr auto fields_of<AttentionOutputs> =
    std::to_array<Field<AttentionOutputs, softdelta_attention_outputs>>({
        {"o", &AttentionOutputs::o, &softdelta_attention_outputs::o},
        {"lse", &AttentionOutputs::lse, &softdelta_attention_outputs::lse},
    });
template <>
inline constexpr auto fields_of<AttentionGradients> =
    std::to_array<Field<AttentionGradients, softdelta_attention_gradients>>({
        {"o", &AttentionGradients::o, &softdelta_attention_gradients::o},
        {"lse", &AttentionGradients::lse, &softdelta_attention_gradients::lse},
        {"d_o", &AttentionGradients::d_o, &softdelta_attention_gradients::d_o},
        {"dlse", &AttentionGradients::dlse, &softdelta_attention_gradients::dlse},
        {"dq", &AttentionGradients::dq, &softdelta_attention_gradients::dq},
        {"dk", &AttentionGradients::dk, &softdelta_attention_gradients::dk},
        {"dv", &AttentionGradients::dv, &softdelta_attention_gradients::dv},
        {"dbias", &AttentionGradients::dbias, &softdelta_attention_gradients::dbias},
        {"dsink", &AttentionGradients::dsink, &softdelta_attention_gradients::dsink},
    });
template <>
inline constexpr auto fields_of<CacheAppendInputs> =
    std::to_array<Field<CacheAppendInputs, softdelta_cache_append_inputs>>({
        {"k", &CacheAppendInputs::k, &softdelta_cache_append_inputs::k},
        {"v", &CacheAppendInputs::v, &softdelta_cache_append_inputs::v},
        {"cu_seqlens", &CacheAppendInputs::cu_seqlens, &softdelta_cache_append_inputs::cu_seqlens},
        {"cache_seqlens", &CacheAppendInputs::cache_seqlens, &softdelta_cache_append_inputs::cache_seqlens},
        {"block_table", &CacheAppendInputs::block_table, &softdelta_cache_append_inputs::block_table},
    });
template <>
inline constexpr auto fields_of<CacheAppendOutputs> =
    std::to_array<Field<CacheAppendOutputs, softdelta_cache_append_outputs>>({
        {"k_cache", &CacheAppendOutputs::k_cache, &softdelta_cache_append_outputs::k_cache},
        {"v_cache", &CacheAppendOutputs::v_cache, &softdelta_cache_append_outputs::v_cache},
        {"k_scale", &CacheAppendOutputs::k_scale, &softdelta_cache_append_outputs::k_scale},
        {"v_scale", &CacheAppendOutputs::v_scale, &softdelta_cache_append_outputs::v_scale},
    });
template <>
inline constexpr auto fields_of<DeltaInputs> = std::to_array<Field<DeltaInputs, softdelta_delta_inputs>>({
    {"q", &DeltaInputs::q, &softdelta_delta_inputs::q},
    {"k", &DeltaInputs::k, &softdelta_delta_inputs::k},
    {"v", &DeltaInputs::v, &softdelta_delta_inputs::v},
    {"g", &DeltaInputs::g, &softdelta_delta_inputs::g},
    {"g_gamma", &DeltaInputs::g_gamma, &softdelta_delta_inputs::g_gamma},
    {"beta", &DeltaInputs::beta, &softdelta_delta_inputs::beta},
    {"p", &DeltaInputs::p, &softdelta_delta_inputs::p},
    {"initial_state", &DeltaInputs::initial_state, &softdelta_delta_inputs::initial_state},
    {"A_log", &DeltaInputs::A_log, &softdelta_delta_inputs::A_log},
    {"dt_bias", &DeltaInputs::dt_bias, &softdelta_delta_inputs::dt_bias},
    {"cu_seqlens", &DeltaInputs::cu_seqlens, &softdelta_delta_inputs::cu_seqlens},
    {"state_indices", &DeltaInputs::state_indices, &softdelta_delta_inputs::state_indices},
    {"final_state_indices", &DeltaInputs::final_state_indices, &softdelta_delta_inputs::final_state_indices},
    {"has_initial_state", &DeltaInputs::has_initial_state, &softdelta_delta_inputs::has_initial_state},
    {"snapshot_indices", &DeltaInputs::snapshot_indices, &softdelta_delta_inputs::snapshot_indices},
});
template <>
inline constexpr auto fields_of<DeltaOutputs> = std::to_array<Field<DeltaOutputs, softdelta_delta_outputs>>({
    {"o", &DeltaOutputs::o, &softdelta_delta_outputs::o},
    {"final_state", &DeltaOutputs::final_state, &softdelta_delta_outputs::final_state},
    {"states", &DeltaOutputs::states, &softdelta_delta_outputs::states},
    {"u", &DeltaOutputs::u, &softdelta_delta_outputs::u},
});
template <>
inline constexpr auto fields_of<DeltaGradients> = std::to_array<Field<DeltaGradients, softdelta_delta_gradients>>({
    {"d_o", &DeltaGradients::d_o, &softdelta_delta_gradients::d_o},
    {"dfinal_state", &DeltaGradients::dfinal_state, &softdelta_delta_gradients::dfinal_state},
    {"dq", &DeltaGradients::dq, &softdelta_delta_gradients::dq},
    {"dk", &DeltaGradients::dk, &softdelta_delta_gradients::dk},
    {"dv", &DeltaGradients::dv, &softdelta_delta_gradients::dv},
    {"dg", &DeltaGradients::dg, &softdelta_delta_gradients::dg},
    {"dg_gamma", &DeltaGradients::dg_gamma, &softdelta_delta_gradients::dg_gamma},
    {"dbeta", &DeltaGradients::dbeta, &softdelta_delta_gradients::dbeta},
    {"dp", &DeltaGradients::dp, &softdelta_delta_gradients::dp},
    {"dinitial_state", &DeltaGradients::dinitial_state, &softdelta_delta_gradients::dinitial_state},
    {"dA_log", &DeltaGradients::dA_log, &softdelta_delta_gradients::dA_log},
    {"ddt_bias", &DeltaGradients::ddt_bias, &softdelta_delta_gradients::ddt_bias},
    {"states", &DeltaGradients::states, &softdelta_delta_gradients::states},
    {"u", &DeltaGradients::u, &softdelta_delta_gradients::u},
});

template <>
inline constexpr auto fields_of<DeltaSummary> = std::to_array<Field<DeltaSummary, softdelta_delta_summary_outputs>>({
    {"M", &DeltaSummary::M, &softdelta_delta_summary_outputs::M},
    {"E", &DeltaSummary::E, &softdelta_delta_summary_outputs::E},
});
template <>
inline constexpr auto fields_of<DeltaSummaryGradient> =
    std::to_array<Field<DeltaSummaryGradient, softdelta_delta_summary_gradients>>({
        {"d_o", &DeltaSummaryGradient::d_o, &softdelta_delta_summary_gradients::d_o},
        {"R", &DeltaSummaryGradient::R, &softdelta_delta_summary_gradients::R},
    });
template <>
inline constexpr auto fields_of<DeltaFoldInputs> = std::to_array<Field<DeltaFoldInputs, softdelta_delta_fold_inputs>>({
    {"M", &DeltaFoldInputs::M, &softdelta_delta_fold_inputs::M},
    {"E", &DeltaFoldInputs::E, &softdelta_delta_fold_inputs::E},
    {"initial_state", &DeltaFoldInputs::initial_state, &softdelta_delta_fold_inputs::initial_state},
});
template <>
inline constexpr auto fields_of<DeltaFoldOutputs> =
    std::to_array<Field<DeltaFoldOutputs, softdelta_delta_fold_outputs>>({
        {"states", &DeltaFoldOutputs::states, &softdelta_delta_fold_outputs::states},
        {"final_state", &DeltaFoldOutputs::final_state, &softdelta_delta_fold_outputs::final_state},
    });
template <>
inline constexpr auto fields_of<ConvolutionInputs> =
    std::to_array<Field<ConvolutionInputs, softdelta_causal_convolution_inputs>>({
        {"x", &ConvolutionInputs::x, &softdelta_causal_convolution_inputs::x},
        {"weight", &ConvolutionInputs::weight, &softdelta_causal_convolution_inputs::weight},
        {"bias", &ConvolutionInputs::bias, &softdelta_causal_convolution_inputs::bias},
        {"initial_state", &ConvolutionInputs::initial_state, &softdelta_causal_convolution_inputs::initial_state},
        {"cu_seqlens", &ConvolutionInputs::cu_seqlens, &softdelta_causal_convolution_inputs::cu_seqlens},
        {"state_indices", &ConvolutionInputs::state_indices, &softdelta_causal_convolution_inputs::state_indices},
        {"final_state_indices", &ConvolutionInputs::final_state_indices,
         &softdelta_causal_convolution_inputs::final_state_indices},
        {"has_initial_state", &ConvolutionInputs::has_initial_state,
         &softdelta_causal_convolution_inputs::has_initial_state},
    });
template <>
inline constexpr auto fields_of<ConvolutionOutputs> =
    std::to_array<Field<ConvolutionOutputs, softdelta_causal_convolution_outputs>>({
        {"y", &ConvolutionOutputs::y, &softdelta_causal_convolution_outputs::y},
        {"final_state", &ConvolutionOutputs::final_state, &softdelta_causal_convolution_outputs::final_state},
    });
template <>
inline constexpr auto fields_of<ConvolutionGradients> =
    std::to_array<Field<ConvolutionGradients, softdelta_causal_convolution_gradients>>({
        {"dy", &ConvolutionGradients::dy, &softdelta_causal_convolution_gradients::dy},
        {"dfinal_state", &ConvolutionGradients::dfinal_state, &softdelta_causal_convolution_gradients::dfinal_state},
        {"dx", &ConvolutionGradients::dx, &softdelta_causal_convolution_gradients::dx},
        {"dweight", &ConvolutionGradients::dweight, &softdelta_causal_convolution_gradients::dweight},
        {"dbias", &ConvolutionGradients::dbias, &softdelta_causal_convolution_gradients::dbias},
        {"dinitial_state", &ConvolutionGradients::dinitial_state,
         &softdelta_causal_convolution_gradients::dinitial_state},
    });
template <>
inline constexpr auto fields_of<NormInputs> = std::to_array<Field<NormInputs, softdelta_gated_norm_inputs>>({
    {"x", &NormInputs::x, &softdelta_gated_norm_inputs::x},
    {"z", &NormInputs::z, &softdelta_gated_norm_inputs::z},
    {"weight", &NormInputs::weight, &softdelta_gated_norm_inputs::weight},
});
template <>
inline constexpr auto fields_of<NormOutputs> = std::to_array<Field<NormOutputs, softdelta_gated_norm_outputs>>({
    {"y", &NormOutputs::y, &softdelta_gated_norm_outputs::y},
});
template <>
inline constexpr auto fields_of<NormGradients> = std::to_array<Field<NormGradients, softdelta_gated_norm_gradients>>({
    {"dy", &NormGradients::dy, &softdelta_gated_norm_gradients::dy},
    {"dx", &NormGradients::dx, &softdelta_gated_norm_gradients::dx},
    {"dz", &NormGradients::dz, &softdelta_gated_norm_gradients::dz},
    {"dweight", &NormGradients::dweight, &softdelta_gated_norm_gradients::dweight},
});

// The C structure that Struct becomes.
template <class Struct>
using CStruct = typename decltype(fields_of<Struct>)::value_type::CStruct;

namespace detail {

// DLPack views that live as long as one call.
class Views {
  public:
    DLTensor* operator()(const Tensor& t) {
        if (!t) return nullptr;
        views_[used_] = t.dlpack();
        return &views_[used_++];
    }

  private:
    std::array<DLTensor, 32> views_{};
    std::size_t used_ = 0;
};

inline void check(softdelta_status status) {
    switch (status) {
        case SOFTDELTA_OK:
            return;
        case SOFTDELTA_INVALID_ARGUMENT:
            throw std::invalid_argument(softdelta_last_error());
        case SOFTDELTA_UNSUPPORTED:
            throw Unsupported(softdelta_last_error());
        case SOFTDELTA_OUT_OF_MEMORY:
            throw std::bad_alloc();
        default:
            throw std::runtime_error(softdelta_last_error());
    }
}

// The execution structure with those that it points to; refers to `e`.
class ExecutionView {
  public:
    explicit ExecutionView(const Execution& e) : tensors_(e.stages.wanted.size()), wanted_(e.stages.wanted.size()) {
        for (std::size_t i = 0; i < wanted_.size(); ++i) {
            tensors_[i] = e.stages.wanted[i].tensor.dlpack();
            wanted_[i] = {sizeof(softdelta_stage), e.stages.wanted[i].name.c_str(), &tensors_[i]};
        }
        stages_ = {sizeof stages_, e.stages.chunk_size, wanted_.data(), wanted_.size()};
        rounding_ = {sizeof rounding_, e.rounding.seed, e.rounding.shortcuts, e.rounding.float_scores};
        gpu_ = {sizeof gpu_, e.gpu.state_ready, e.gpu.state_done, e.gpu.kept.data(), e.gpu.kept.size()};
        c_.engine = e.engine.empty() ? nullptr : e.engine.c_str();
        c_.threads = e.threads;
        c_.bf16_products = static_cast<std::int32_t>(e.bf16_products);
        c_.workspace = e.workspace.data();
        c_.workspace_size = e.workspace.size();
        c_.parallel_for = e.parallel_for;
        c_.parallel_context = e.parallel_context;
        c_.stream = e.stream;
        c_.stages = &stages_;
        c_.rounding = &rounding_;
        c_.gpu = &gpu_;
    }
    ExecutionView(const ExecutionView&) = delete;
    ExecutionView& operator=(const ExecutionView&) = delete;
    const softdelta_execution* get() const { return &c_; }

  private:
    std::vector<DLTensor> tensors_;
    std::vector<softdelta_stage> wanted_;
    softdelta_stages stages_{};
    softdelta_rounding rounding_{};
    softdelta_gpu gpu_{};
    softdelta_execution c_ = softdelta_execution_default();
};

// The C structure of a call's tensors.
template <class Struct>
auto to_c(const Struct& tensors, Views& view) {
    static_assert(sizeof(Struct) == fields_of<Struct>.size() * sizeof(Tensor), "a tensor is missing from fields_of");
    CStruct<Struct> c{};
    c.size = sizeof c;
    for (const auto& field : fields_of<Struct>) {
        const Tensor& t = tensors.*field.tensor;
        if (field.wanted != nullptr && t.read_only())
            throw std::invalid_argument(std::string(field.name) + " is const memory, expected memory to write");
        field.set(c, view(t));
    }
    return c;
}

inline softdelta_attention_options to_c(const AttentionOptions& o) {
    return {sizeof(softdelta_attention_options),
            o.scale,
            static_cast<std::int32_t>(o.causal),
            o.window_left,
            o.window_right,
            o.softcap,
            static_cast<std::int32_t>(o.empty_row),
            o.top_w,
            o.query_offset,
            o.key_offset};
}

inline softdelta_delta_options to_c(const DeltaOptions& o) {
    return {sizeof(softdelta_delta_options),
            static_cast<std::int32_t>(o.rule),
            o.scale,
            o.use_qk_l2norm_in_kernel,
            o.use_gate_in_kernel,
            o.lower_bound,
            o.use_beta_sigmoid_in_kernel,
            o.allow_neg_eigval,
            o.state_v_first,
            o.state_interval,
            static_cast<std::int32_t>(o.head_order),
            o.steps};
}

inline softdelta_causal_convolution_options to_c(const ConvolutionOptions& o) {
    return {sizeof(softdelta_causal_convolution_options), static_cast<std::int32_t>(o.activation), 0};
}

inline softdelta_limits to_c(const Limits& l) {
    return {sizeof(softdelta_limits), l.sequences, l.tokens, l.keys};
}

inline softdelta_gated_norm_options to_c(const NormOptions& o) {
    return {sizeof(softdelta_gated_norm_options), static_cast<std::int32_t>(o.gate), o.epsilon};
}

}  // namespace detail

// Writes outputs.o and outputs.lse, those that are given.
inline void attention_forward(const AttentionInputs& inputs, const AttentionOutputs& outputs,
                              const AttentionOptions& options = {}, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto out = detail::to_c(outputs, view);
    detail::check(softdelta_attention_forward(&in, &out, &opt, detail::ExecutionView(execution).get()));
}

// Returns how many bytes of execution.workspace the same call needs.
inline std::size_t attention_forward_workspace(const AttentionInputs& inputs, const AttentionOutputs& outputs,
                                               const AttentionOptions& options = {}, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto out = detail::to_c(outputs, view);
    std::size_t bytes = 0;
    detail::check(
        softdelta_attention_forward_workspace(&in, &out, &opt, detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// Returns how many bytes of execution.workspace are enough for every call within these limits.
inline std::size_t attention_forward_workspace_bound(const AttentionInputs& inputs, const Limits& limits,
                                                     const AttentionOptions& options = {},
                                                     const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto most = detail::to_c(limits);
    std::size_t bytes = 0;
    detail::check(
        softdelta_attention_forward_workspace_bound(&in, &most, &opt, detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// Attention of many layers that differ in the memory of their tensors alone (softdelta_attention_plan).
class AttentionPlan {
  public:
    // Of one layer's call, which is not computed.
    AttentionPlan(const AttentionInputs& inputs, const AttentionOutputs& outputs, const AttentionOptions& options = {},
                  const Execution& execution = {}) {
        detail::Views view;
        const auto in = detail::to_c(inputs, view);
        const auto opt = detail::to_c(options);
        const auto out = detail::to_c(outputs, view);
        softdelta_attention_plan* plan = nullptr;
        detail::check(softdelta_attention_plan_create(&in, &out, &opt, detail::ExecutionView(execution).get(), &plan));
        plan_.reset(plan);
    }
    // Of a layer: tensors as the plan's, without lengths and block table.
    void forward(const AttentionInputs& inputs, const AttentionOutputs& outputs) {
        detail::Views view;
        const auto in = detail::to_c(inputs, view);
        const auto out = detail::to_c(outputs, view);
        detail::check(softdelta_attention_plan_forward(plan_.get(), &in, &out));
    }

  private:
    struct Destroy {
        void operator()(softdelta_attention_plan* plan) const { softdelta_attention_plan_destroy(plan); }
    };
    std::unique_ptr<softdelta_attention_plan, Destroy> plan_{};
};

// Writes the gradients that are given, from d_o and optionally dlse.
inline void attention_backward(const AttentionInputs& inputs, const AttentionGradients& gradients,
                               const AttentionOptions& options = {}, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto grad = detail::to_c(gradients, view);
    detail::check(softdelta_attention_backward(&in, &grad, &opt, detail::ExecutionView(execution).get()));
}

// Returns how many bytes of execution.workspace the same call needs.
inline std::size_t attention_backward_workspace(const AttentionInputs& inputs, const AttentionGradients& gradients,
                                                const AttentionOptions& options = {}, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto grad = detail::to_c(gradients, view);
    std::size_t bytes = 0;
    detail::check(
        softdelta_attention_backward_workspace(&in, &grad, &opt, detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// Writes new keys and values behind those in use, in the numbers that the cache has.
inline void cache_append(const CacheAppendInputs& inputs, const CacheAppendOutputs& outputs,
                         const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto out = detail::to_c(outputs, view);
    detail::check(softdelta_cache_append(&in, &out, detail::ExecutionView(execution).get()));
}

// Writes outputs.o, final_state and states, those that are given.
inline void delta_forward(const DeltaInputs& inputs, const DeltaOutputs& outputs, const DeltaOptions& options,
                          const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto out = detail::to_c(outputs, view);
    detail::check(softdelta_delta_forward(&in, &out, &opt, detail::ExecutionView(execution).get()));
}

// Returns how many bytes of execution.workspace the same call needs.
inline std::size_t delta_forward_workspace(const DeltaInputs& inputs, const DeltaOutputs& outputs,
                                           const DeltaOptions& options, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto out = detail::to_c(outputs, view);
    std::size_t bytes = 0;
    detail::check(softdelta_delta_forward_workspace(&in, &out, &opt, detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// Returns how many bytes of execution.workspace are enough for every call within these limits.
inline std::size_t delta_forward_workspace_bound(const DeltaInputs& inputs, const Limits& limits,
                                                 const DeltaOptions& options, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto most = detail::to_c(limits);
    std::size_t bytes = 0;
    detail::check(
        softdelta_delta_forward_workspace_bound(&in, &most, &opt, detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// Returns how many bytes of execution.gpu.kept such a call fills; 0: nothing can be kept of it.
inline std::size_t delta_kept_size(const DeltaInputs& inputs, const DeltaOptions& options,
                                   const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    std::size_t bytes = 0;
    detail::check(softdelta_delta_kept_size(&in, &opt, detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// Writes the gradients that are given, from d_o, dfinal_state or both.
inline void delta_backward(const DeltaInputs& inputs, const DeltaGradients& gradients, const DeltaOptions& options,
                           const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto grad = detail::to_c(gradients, view);
    detail::check(softdelta_delta_backward(&in, &grad, &opt, detail::ExecutionView(execution).get()));
}

// Returns how many bytes of execution.workspace the same call needs.
inline std::size_t delta_backward_workspace(const DeltaInputs& inputs, const DeltaGradients& gradients,
                                            const DeltaOptions& options, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto grad = detail::to_c(gradients, view);
    std::size_t bytes = 0;
    detail::check(softdelta_delta_backward_workspace(&in, &grad, &opt, detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// Writes what a range of tokens does to a state: S_out = M S_in + E. inputs has no initial state.
inline void delta_summary(const DeltaInputs& inputs, const DeltaSummary& outputs, const DeltaOptions& options,
                          const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto out = detail::to_c(outputs, view);
    detail::check(softdelta_delta_summary(&in, &out, &opt, detail::ExecutionView(execution).get()));
}

// Writes R of dS_in = Mᵀ dS_out + R, from d_o.
inline void delta_summary_backward(const DeltaInputs& inputs, const DeltaSummaryGradient& gradients,
                                   const DeltaOptions& options, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto grad = detail::to_c(gradients, view);
    detail::check(softdelta_delta_summary_backward(&in, &grad, &opt, detail::ExecutionView(execution).get()));
}

// Writes the states between ranges, from their summaries.
inline void delta_fold(const DeltaFoldInputs& inputs, const DeltaFoldOutputs& outputs, const DeltaOptions& options,
                       const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto out = detail::to_c(outputs, view);
    detail::check(softdelta_delta_fold(&in, &out, &opt, detail::ExecutionView(execution).get()));
}

// The same for gradients, from the last range to the first: inputs.E holds R.
inline void delta_fold_backward(const DeltaFoldInputs& inputs, const DeltaFoldOutputs& outputs,
                                const DeltaOptions& options, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto out = detail::to_c(outputs, view);
    detail::check(softdelta_delta_fold_backward(&in, &out, &opt, detail::ExecutionView(execution).get()));
}

// Puts attention over disjoint sets of keys together, in this order; outputs may not be among the parts.
inline void attention_merge(std::span<const AttentionOutputs> parts, const AttentionOutputs& outputs,
                            const Execution& execution = {}) {
    std::vector<DLTensor> views;
    std::vector<const DLTensor*> o, lse;
    views.reserve(2 * parts.size());
    const auto view = [&views](const Tensor& t) -> const DLTensor* {
        return t ? &views.emplace_back(t.dlpack()) : nullptr;
    };
    for (const AttentionOutputs& part : parts) o.push_back(view(part.o)), lse.push_back(view(part.lse));
    detail::Views results;
    const auto out = detail::to_c(outputs, results);
    const softdelta_attention_merge_inputs in{sizeof in, o.data(), lse.data(), static_cast<std::int64_t>(parts.size())};
    detail::check(softdelta_attention_merge(&in, &out, detail::ExecutionView(execution).get()));
}

// Writes outputs.y and outputs.final_state, those that are given.
inline void causal_convolution_forward(const ConvolutionInputs& inputs, const ConvolutionOutputs& outputs,
                                       const ConvolutionOptions& options = {}, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto out = detail::to_c(outputs, view);
    detail::check(softdelta_causal_convolution_forward(&in, &out, &opt, detail::ExecutionView(execution).get()));
}

// Returns how many bytes of execution.workspace are enough for every call within these limits.
inline std::size_t causal_convolution_forward_workspace_bound(const ConvolutionInputs& inputs, const Limits& limits,
                                                              const ConvolutionOptions& options = {},
                                                              const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto most = detail::to_c(limits);
    std::size_t bytes = 0;
    detail::check(softdelta_causal_convolution_forward_workspace_bound(&in, &most, &opt,
                                                                       detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// A token or a few: outputs.final_state is read and written in place, inputs.initial_state is not given.
inline void causal_convolution_step(const ConvolutionInputs& inputs, const ConvolutionOutputs& outputs,
                                    const ConvolutionOptions& options = {}, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto out = detail::to_c(outputs, view);
    detail::check(softdelta_causal_convolution_step(&in, &out, &opt, detail::ExecutionView(execution).get()));
}

// Writes the gradients that are given, from dy, dfinal_state or both.
inline void causal_convolution_backward(const ConvolutionInputs& inputs, const ConvolutionGradients& gradients,
                                        const ConvolutionOptions& options = {}, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto grad = detail::to_c(gradients, view);
    detail::check(softdelta_causal_convolution_backward(&in, &grad, &opt, detail::ExecutionView(execution).get()));
}

// Returns how many bytes of execution.workspace the same call needs.
inline std::size_t causal_convolution_forward_workspace(const ConvolutionInputs& inputs,
                                                        const ConvolutionOutputs& outputs,
                                                        const ConvolutionOptions& options = {},
                                                        const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto out = detail::to_c(outputs, view);
    std::size_t bytes = 0;
    detail::check(softdelta_causal_convolution_forward_workspace(&in, &out, &opt,
                                                                 detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// Returns how many bytes of execution.workspace the same call needs.
inline std::size_t causal_convolution_backward_workspace(const ConvolutionInputs& inputs,
                                                         const ConvolutionGradients& gradients,
                                                         const ConvolutionOptions& options = {},
                                                         const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto grad = detail::to_c(gradients, view);
    std::size_t bytes = 0;
    detail::check(softdelta_causal_convolution_backward_workspace(&in, &grad, &opt,
                                                                  detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// Writes outputs.y.
inline void gated_norm_forward(const NormInputs& inputs, const NormOutputs& outputs, const NormOptions& options = {},
                               const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto out = detail::to_c(outputs, view);
    detail::check(softdelta_gated_norm_forward(&in, &out, &opt, detail::ExecutionView(execution).get()));
}

// Returns how many bytes of execution.workspace are enough for every call within these limits.
inline std::size_t gated_norm_forward_workspace_bound(const NormInputs& inputs, const Limits& limits,
                                                      const NormOptions& options = {},
                                                      const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto most = detail::to_c(limits);
    std::size_t bytes = 0;
    detail::check(
        softdelta_gated_norm_forward_workspace_bound(&in, &most, &opt, detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// Writes the gradients that are given, from dy.
inline void gated_norm_backward(const NormInputs& inputs, const NormGradients& gradients,
                                const NormOptions& options = {}, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto grad = detail::to_c(gradients, view);
    detail::check(softdelta_gated_norm_backward(&in, &grad, &opt, detail::ExecutionView(execution).get()));
}

// Returns how many bytes of execution.workspace the same call needs.
inline std::size_t gated_norm_forward_workspace(const NormInputs& inputs, const NormOutputs& outputs,
                                                const NormOptions& options = {}, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto out = detail::to_c(outputs, view);
    std::size_t bytes = 0;
    detail::check(
        softdelta_gated_norm_forward_workspace(&in, &out, &opt, detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// Returns how many bytes of execution.workspace the same call needs.
inline std::size_t gated_norm_backward_workspace(const NormInputs& inputs, const NormGradients& gradients,
                                                 const NormOptions& options = {}, const Execution& execution = {}) {
    detail::Views view;
    const auto in = detail::to_c(inputs, view);
    const auto opt = detail::to_c(options);
    const auto grad = detail::to_c(gradients, view);
    std::size_t bytes = 0;
    detail::check(
        softdelta_gated_norm_backward_workspace(&in, &grad, &opt, detail::ExecutionView(execution).get(), &bytes));
    return bytes;
}

// Gives scratch memory that is kept between calls, at most 128 MiB, back to the system.
inline void release_memory() {
    detail::check(softdelta_release_memory());
}

// An engine of this library (softdelta_engine_info).
struct EngineInfo {
    std::string name, description;
    DLDeviceType device_type = kDLCPU;
    bool fast = false, available = false;
};

// All engines; the fastest comes first.
inline std::vector<EngineInfo> list_engines() {
    std::vector<EngineInfo> all;
    for (std::int32_t i = 0; i < softdelta_engine_count(); ++i) {
        softdelta_engine_info info = softdelta_engine_info_default();
        detail::check(softdelta_get_engine(i, &info));
        all.push_back({info.name, info.description, static_cast<DLDeviceType>(info.device_type), info.fast != 0,
                       info.available != 0});
    }
    return all;
}

// An instruction set that kernels exist for (softdelta_isa_level).
struct IsaLevel {
    std::string name;
    bool compiled = false, available = false, selected = false;
    bool bf16_products = false;  // has dot products of bf16, and they are faster here than products of f32
};

// All instruction sets; each extends the one before. Throws Unsupported when SOFTDELTA_ISA names none that is
// available.
inline std::vector<IsaLevel> isa_levels() {
    std::vector<IsaLevel> levels;
    for (std::int32_t i = 0; i < softdelta_isa_level_count(); ++i) {
        softdelta_isa_level level = softdelta_isa_level_default();
        detail::check(softdelta_get_isa_level(i, &level));
        levels.push_back(
            {level.name, level.compiled != 0, level.available != 0, level.selected != 0, level.bf16_products != 0});
    }
    return levels;
}

// Selects the level of all calls that begin after it, while no call runs; "": what the environment selects. Throws
// Unsupported.
inline void select_isa_level(const std::string& name) {
    detail::check(softdelta_select_isa_level(name.c_str()));
}

}  // namespace softdelta

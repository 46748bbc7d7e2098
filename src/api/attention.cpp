// Attention: the checks of one call, then the engine.
#include "api/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "api/engines/table.h"
#include "api/error.h"
#include "api/operands.h"
#include "api/quantised.h"

namespace softdelta::api {

namespace {

Index queries(const core::AttentionInputs& in, Index sequence) {
    if (!in.cu_seqlens_q) return in.q.shape[1];
    if (!in.cu_seqlens_q.device.is_cpu()) return 0;  // not known
    const auto end = [&](Index n) { return core::load_index(in.cu_seqlens_q, n * in.cu_seqlens_q.stride[0]); };
    return end(sequence + 1) - end(sequence);
}

// A query that sees no key has o = 0. That is right of a shard of the keys; else the caller counted the
// keys in use before the new ones were there.
Index least_keys(const core::AttentionInputs& in, const core::AttentionOptions& o, Index sequence) {
    const Index count = queries(in, sequence);
    return o.shift != 0 ? 0 : o.causal == core::Causal::bottom_right ? count : std::min<Index>(count, 1);
}

// Whether `count` indices are neither negative nor beyond the last. The sign of x, or of last − x, shows one that is.
template <class T>
bool are_within(const T* indices, Index stride, Index count, Index last) {
    using Bits = std::make_unsigned_t<T>;
    const auto most = static_cast<Bits>(std::min<Index>(last, std::numeric_limits<T>::max()));
    Bits signs = 0;
    if (stride == 1) {
#pragma omp simd reduction(| : signs)
        for (Index i = 0; i < count; ++i)
            signs |= static_cast<Bits>(indices[i]) | (most - static_cast<Bits>(indices[i]));
    } else {
        for (Index i = 0; i < count; ++i)
            signs |= static_cast<Bits>(indices[i * stride]) | (most - static_cast<Bits>(indices[i * stride]));
    }
    return static_cast<T>(signs) >= 0;
}

// Blocks of a sequence's keys. A server has thousands of them in a call: they are looked at one by one when one is
// wrong.
void check_blocks(const core::AttentionInputs& in, Index sequence, Index count) {
    const Tensor& table = in.block_table;
    const Index last = in.k.shape[0] - 1, first = sequence * table.stride[0], stride = table.stride[1];
    const bool right = table.dtype == core::DType::i32
                           ? are_within(static_cast<const std::int32_t*>(table.data) + first, stride, count, last)
                           : are_within(static_cast<const std::int64_t*>(table.data) + first, stride, count, last);
    for (Index i = 0; !right && i < count; ++i)
        if (const Index block = core::load_index(table, first + i * stride); block < 0 || block > last)
            refuse("block_table[" + std::to_string(sequence) + ", " + std::to_string(i) + "]", std::to_string(block),
                   "0 to " + std::to_string(last) + " (blocks of k)");
}

// A cache for each sequence: how many keys are in it, and in which blocks they lie.
void check_caches(const core::AttentionInputs& in, const core::AttentionOptions& o, Index sequences, Index capacity) {
    if (!in.cache_seqlens || !in.cache_seqlens.device.is_cpu()) return;
    const bool paged = in.block_table && in.block_table.device.is_cpu();
    const Index rows = paged ? in.k.shape[1] : 1;
    for (Index b = 0; b < sequences; ++b) {
        const Index used = core::load_index(in.cache_seqlens, b * in.cache_seqlens.stride[0]);
        const auto refuse_length = [&](const std::string& expected) {
            refuse("cache_seqlens[" + std::to_string(b) + "]", std::to_string(used), expected);
        };
        if (used < 0 || used > capacity) refuse_length("0 to " + std::to_string(capacity));
        if (const Index least = least_keys(in, o, b); used < least)
            refuse_length(std::to_string(least) + " or more: it counts the keys of the " +
                          std::to_string(queries(in, b)) + " queries too");
        if (paged) check_blocks(in, b, (used + rows - 1) / rows);
    }
}

// The heads of q, k and v, and their features.
void check_heads(const core::AttentionInputs& in) {
    const Index heads = in.q.shape[2], key_heads = in.k.shape[2];
    if (in.q.shape[3] < 1) refuse("q: dimension 3", "0", "1 or more");
    if (in.v.shape[3] < 1) refuse("v: dimension 3", "0", "1 or more");
    if (key_heads < 1) refuse("k: dimension 2", "0", "1 or more (key heads)");
    if (heads < 1 || heads % key_heads != 0)
        refuse("q: dimension 2", std::to_string(heads), "a multiple of " + std::to_string(key_heads) + " (key heads)");
    expect_size("k", in.k, 3, {in.q.shape[3], "as q"});
    for (const int dim : {0, 1, 2}) expect_size("v", in.v, dim, {in.k.shape[static_cast<std::size_t>(dim)], "as k"});
    expect_memory("q, v: the result [B, Lq, H, Dv]", {in.q.shape[0], in.q.shape[1], heads, in.v.shape[3]});
}

Sizes sizes_of(const core::AttentionInputs& in) {
    using enum core::Symbol;
    Sizes sizes;
    sizes[B] = sizes[N] = {in.q.shape[0], "batch"};
    sizes[Lq] = {in.q.shape[1], "queries"};
    sizes[Lk] = {in.k.shape[1], "keys"};
    sizes[H] = {in.q.shape[2], "query heads"};
    sizes[Hk] = {in.k.shape[2], "key heads"};
    sizes[D] = {in.q.shape[3], "as q"};
    sizes[Dv] = {in.v.shape[3], "as v"};
    return sizes;
}

// Sizes of one sequence's scores, for mask and bias: of N sequences the longest, as many keys as a cache has room for.
Sizes score_sizes(const core::AttentionInputs& in, Sizes sizes) {
    using enum core::Symbol;
    if (in.block_table) expect_present("cache_seqlens", in.cache_seqlens, "block_table needs it");
    if (in.cache_seqlens) expect_absent("cu_seqlens_k", in.cu_seqlens_k, "cache_seqlens is given");
    if (in.cu_seqlens_k) expect_present("cu_seqlens_q", in.cu_seqlens_q, "cu_seqlens_k is given");
    if (in.cu_seqlens_q) {
        if (!in.cache_seqlens)
            expect_present("cu_seqlens_k", in.cu_seqlens_k, "cu_seqlens_q is given without cache_seqlens");
        expect_size("q", in.q, 0, {1, "packed sequences"});
        sizes[Lq] = {expect_cumulative("cu_seqlens_q", in.cu_seqlens_q, in.q.shape[1], "rows of q"), "longest queries"};
        sizes[bounds] = {in.cu_seqlens_q.shape[0], "as cu_seqlens_q"};
        sizes[B] = sizes[N] = {in.cu_seqlens_q.shape[0] - 1, "sequences"};
    }
    if (in.block_table) {
        expect_rank("block_table", in.block_table, "N max_blocks");
        if (in.k.shape[1] < 1) refuse("k: dimension 1", "0", "1 or more rows of a block");
        const Index count = in.block_table.shape[1];
        if (count > most_elements / in.k.shape[1])
            refuse("block_table: dimension 1", std::to_string(count), "a size that memory can hold");
        sizes[Lk].value *= count;
    } else if (in.cu_seqlens_k) {
        expect_size("k", in.k, 0, {1, "packed sequences"});
        sizes[Lk] = {expect_cumulative("cu_seqlens_k", in.cu_seqlens_k, in.k.shape[1], "rows of k"), "longest keys"};
    } else {
        expect_size("k", in.k, 0, sizes[N]);
    }
    return sizes;
}

using Input = core::TensorOf<core::AttentionInputs>;

bool may_be_quantised(Input input) {
    return input == &core::AttentionInputs::k || input == &core::AttentionInputs::v;
}
bool is_scale(Input input) {
    return input == &core::AttentionInputs::k_scale || input == &core::AttentionInputs::v_scale;
}

std::pair<Sizes, Sizes> check_inputs(core::AttentionInputs& in) {
    take_blocks(in);
    expect_required(in);
    expect_one_device(in, in.q.device);
    for (const auto& operand : core::operands_of<core::AttentionInputs>) {
        const Tensor& t = in.*operand.tensor;
        if (!may_be_quantised(operand.tensor) || !core::is_quantised(t.dtype))
            expect_kind(operand.name, t, operand.kind);
    }
    check_heads(in);
    take_scales(in);
    const Sizes sizes = sizes_of(in), scores = score_sizes(in, sizes);
    for (const auto& operand : core::operands_of<core::AttentionInputs>)
        if (operand.need != core::needs::required && !is_scale(operand.tensor))
            expect_shape(operand.name, in.*operand.tensor, operand.shape, scores);
    if (in.bias_slopes) expect_present("bias", in.bias, "bias_slopes multiplies it");
    return {sizes, scores};
}

void expect_position(const char* name, std::int64_t offset) {
    if (offset < -most_elements || offset > most_elements)
        refuse(name, std::to_string(offset), "a position that memory can hold");
}

core::AttentionOptions check_options(const softdelta_attention_options* given, const core::AttentionInputs& in) {
    const auto c = given != nullptr ? read_struct("options", given) : softdelta_attention_options_default();
    core::AttentionOptions o;
    o.scale = std::isnan(c.scale) ? 1 / std::sqrt(static_cast<double>(in.q.shape[3])) : c.scale;
    expect_f32("scale", o.scale);
    if (c.causal < SOFTDELTA_CAUSAL_NONE || c.causal > SOFTDELTA_CAUSAL_BOTTOM_RIGHT)
        refuse("causal", std::to_string(c.causal), "0 to 2");
    o.causal = static_cast<core::Causal>(c.causal);
    if (c.window_left < -1) refuse("window_left", std::to_string(c.window_left), "-1 (unbounded) or more");
    if (c.window_right < -1) refuse("window_right", std::to_string(c.window_right), "-1 (unbounded) or more");
    o.window_left = c.window_left;
    o.window_right = c.window_right;
    const bool caps = c.softcap > 0 && fits_f32(c.softcap) && fits_f32(1 / c.softcap) && fits_f32(o.scale / c.softcap);
    if (c.softcap != 0 && !caps)
        refuse("softcap", number_text(c.softcap),
               "0 (off), or a positive number of which f32 can hold scale / softcap");
    o.softcap = c.softcap;
    if (c.empty_row < SOFTDELTA_EMPTY_ROW_MINUS_INFINITY || c.empty_row > SOFTDELTA_EMPTY_ROW_ZERO)
        refuse("empty_row", std::to_string(c.empty_row), "0 to 2");
    o.empty_row = static_cast<core::EmptyRow>(c.empty_row);
    if (c.top_w == 0 || c.top_w < -1) refuse("top_w", std::to_string(c.top_w), "-1 (off), or 1 or more");
    if (c.top_w > 0) expect_present("bias", in.bias, "top_w selects by it");
    o.top_w = c.top_w;
    expect_position("query_offset", c.query_offset);
    expect_position("key_offset", c.key_offset);
    o.shift = c.query_offset - c.key_offset;
    if (o.shift != 0) expect_absent("alibi_slopes", in.alibi_slopes, "query_offset or key_offset is given");
    return o;
}

}  // namespace

AttentionCall check_attention_call(const softdelta_attention_inputs* inputs, const softdelta_attention_options* options,
                                   const softdelta_execution* execution) {
    AttentionCall call{.in = import_all<core::AttentionInputs>(read_struct("inputs", inputs))};
    const auto [sizes, scores] = check_inputs(call.in);
    call.sizes = sizes;
    call.options = check_options(options, call.in);
    check_caches(call.in, call.options, scores[core::Symbol::N].value, scores[core::Symbol::Lk].value);
    call.how = check_execution(execution);
    if (call.how.engine.named != nullptr && call.how.engine.named->check_attention_stages != nullptr)
        call.how.engine.named->check_attention_stages(call.in, call.how.execution);
    return call;
}

core::AttentionOutputs check_attention_outputs(const AttentionCall& c, const softdelta_attention_outputs* outputs) {
    const auto out = import_all<core::AttentionOutputs>(read_struct("outputs", outputs));
    expect_result("outputs", out, c.how.execution);
    expect_one_device(out, c.in.q.device);
    for (const auto& operand : core::operands_of<core::AttentionOutputs>)
        expect_operand(operand, out.*operand.tensor, operand.shape, c.sizes);
    return out;
}

namespace {

core::AttentionGradients check_gradients(const AttentionCall& c, const softdelta_attention_gradients& given) {
    const auto g = import_all<core::AttentionGradients>(given);
    for (const auto& [name, t] : {std::pair{"k", &c.in.k}, std::pair{"v", &c.in.v}})
        if (core::is_quantised(t->dtype))
            throw core::Unsupported(std::string(name) + " is " + core::name_of(t->dtype) +
                                    ", expected f64, f32, bf16 or f16: there are no gradients of numbers with scales");
    expect_required(g);
    expect_result("gradients", g, c.how.execution);
    expect_one_device(g, c.in.q.device);
    for (const auto& operand : core::operands_of<core::AttentionGradients>) {
        if (operand.input != nullptr)
            expect_gradient(operand.name, g.*operand.tensor, c.in.*operand.input);
        else
            expect_operand(operand, g.*operand.tensor, operand.shape, c.sizes);
    }
    if (c.in.block_table) throw core::Unsupported("block_table: there are no gradients through a paged cache");
    return g;
}

// Checked calls, for use(engine, call, pass).
template <class Use>
auto forward(const softdelta_attention_inputs* inputs, const softdelta_attention_outputs* outputs,
             const softdelta_attention_options* options, const softdelta_execution* execution, const Use& use) {
    const AttentionCall call = check_attention_call(inputs, options, execution);
    const auto out = check_attention_outputs(call, outputs);
    return use(call.how.engine, engines::AttentionForward{call.in, call.options, call.how.execution, out},
               &engines::Engine::attention_forward);
}

template <class Use>
auto backward(const softdelta_attention_inputs* inputs, const softdelta_attention_gradients* gradients,
              const softdelta_attention_options* options, const softdelta_execution* execution, const Use& use) {
    const AttentionCall call = check_attention_call(inputs, options, execution);
    const auto grad = check_gradients(call, read_struct("gradients", gradients));
    return use(call.how.engine, engines::AttentionBackward{call.in, call.options, call.how.execution, grad},
               &engines::Engine::attention_backward);
}

}  // namespace

}  // namespace softdelta::api

softdelta_status softdelta_attention_forward(const softdelta_attention_inputs* inputs,
                                             const softdelta_attention_outputs* outputs,
                                             const softdelta_attention_options* options,
                                             const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] { api::forward(inputs, outputs, options, execution, api::compute); });
}

softdelta_status softdelta_attention_backward(const softdelta_attention_inputs* inputs,
                                              const softdelta_attention_gradients* gradients,
                                              const softdelta_attention_options* options,
                                              const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] { api::backward(inputs, gradients, options, execution, api::compute); });
}

softdelta_status softdelta_attention_forward_workspace(const softdelta_attention_inputs* inputs,
                                                       const softdelta_attention_outputs* outputs,
                                                       const softdelta_attention_options* options,
                                                       const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard(
        [&] { api::result("bytes", bytes) = api::forward(inputs, outputs, options, execution, api::measure); });
}

softdelta_status softdelta_attention_backward_workspace(const softdelta_attention_inputs* inputs,
                                                        const softdelta_attention_gradients* gradients,
                                                        const softdelta_attention_options* options,
                                                        const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard(
        [&] { api::result("bytes", bytes) = api::backward(inputs, gradients, options, execution, api::measure); });
}

softdelta_status softdelta_attention_forward_workspace_bound(const softdelta_attention_inputs* inputs,
                                                             const softdelta_limits* limits,
                                                             const softdelta_attention_options* options,
                                                             const softdelta_execution* execution, size_t* bytes) {
    using namespace softdelta;
    return api::guard([&] {
        const auto call = api::check_attention_call(inputs, options, execution);
        const core::AttentionOutputs none;
        api::result("bytes", bytes) = api::workspace_bound_of(
            call.how.engine, engines::AttentionForward{call.in, call.options, call.how.execution, none},
            &engines::Engine::attention_forward, api::check_limits(limits));
    });
}

// Attention: the checks of one call, then the engine.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "api/check.h"
#include "api/engines.h"
#include "api/error.h"
#include "core/attention.h"

namespace softdelta::api {

namespace {

struct Call {
    core::AttentionInputs in;
    core::AttentionOptions options;
    core::Execution execution;
    WantedEngine engine;
    Index batch, queries, heads, value_size;  // B, Lq, H, Dv of the results
};

// A mask or bias: every dimension full or 1; the head dimension may also be Hk.
void check_broadcast(const char* name, const Tensor& t, Size batch, Index heads, Index key_heads, Size queries,
                     Size keys) {
    expect_rank(name, t, 4, "[B|1, H|Hk|1, Lq|1, Lk|1]");
    expect_size(name, t, 0, {{1}, batch});
    expect_size(name, t, 1, {{1}, {key_heads, "key heads"}, {heads, "query heads"}});
    expect_size(name, t, 2, {{1}, queries});
    expect_size(name, t, 3, {{1}, keys});
}

// A cache for each sequence: how many keys are in it, and in which blocks they lie.
void check_caches(const core::AttentionInputs& in, Size sequences, Index capacity) {
    expect_integer("cache_seqlens", in.cache_seqlens);
    expect_integer("block_table", in.block_table);
    expect_shape("cache_seqlens", in.cache_seqlens, "[B]", {sequences});
    if (!in.cache_seqlens || !in.cache_seqlens.device.is_cpu()) return;
    const Index rows = in.block_table ? in.k.shape[1] : 1;
    for (Index b = 0; b < sequences.value; ++b) {
        const Index used = core::load_index(in.cache_seqlens, b * in.cache_seqlens.stride[0]);
        if (used < 0 || used > capacity)
            refuse("cache_seqlens[" + std::to_string(b) + "]", std::to_string(used),
                   "0 to " + std::to_string(capacity));
        for (Index i = 0; in.block_table && in.block_table.device.is_cpu() && i < (used + rows - 1) / rows; ++i) {
            const Index block = core::load_index(in.block_table, in.block_table.offset({b, i}));
            if (block < 0 || block >= in.k.shape[0])
                refuse("block_table[" + std::to_string(b) + ", " + std::to_string(i) + "]", std::to_string(block),
                       "0 to " + std::to_string(in.k.shape[0] - 1) + " (blocks of k)");
        }
    }
}

core::AttentionInputs import_inputs(const softdelta_attention_inputs& c) {
    return {import("q", c.q),
            import("k", c.k),
            import("v", c.v),
            import("mask", c.mask),
            import("bias", c.bias),
            import("sink", c.sink),
            import("cu_seqlens_q", c.cu_seqlens_q),
            import("cu_seqlens_k", c.cu_seqlens_k),
            import("cache_seqlens", c.cache_seqlens),
            import("block_table", c.block_table)};
}

void check_inputs(const core::AttentionInputs& in) {
    expect_present("q", in.q, "[B, Lq, H, D]");
    expect_present("k", in.k, "[B, Lk, Hk, D]");
    expect_present("v", in.v, "[B, Lk, Hk, Dv]");
    expect_rank("q", in.q, 4, "[B, Lq, H, D]");
    expect_rank("k", in.k, 4, "[B, Lk, Hk, D]");
    expect_rank("v", in.v, 4, "[B, Lk, Hk, Dv]");
    expect_one_device(in, in.q.device);
    for (const auto& [name, t] :
         {std::pair{"q", &in.q}, {"k", &in.k}, {"v", &in.v}, {"bias", &in.bias}, {"sink", &in.sink}})
        expect_float(name, *t);
    expect_bool("mask", in.mask);

    const Index heads = in.q.shape[2], key_heads = in.k.shape[2];
    if (in.q.shape[3] < 1) refuse("q: dimension 3", "0", "1 or more");
    if (in.v.shape[3] < 1) refuse("v: dimension 3", "0", "1 or more");
    if (key_heads < 1) refuse("k: dimension 2", "0", "1 or more (key heads)");
    if (heads < 1 || heads % key_heads != 0)
        refuse("q: dimension 2", std::to_string(heads), "a multiple of " + std::to_string(key_heads) + " (key heads)");
    expect_size("k", in.k, 3, {{in.q.shape[3], "as q"}});
    for (const int dim : {0, 1, 2}) expect_size("v", in.v, dim, {{in.k.shape[static_cast<std::size_t>(dim)], "as k"}});
    expect_shape("sink", in.sink, "[H]", {{heads, "query heads"}});
    expect_memory("q, v: the result [B, Lq, H, Dv]", {in.q.shape[0], in.q.shape[1], heads, in.v.shape[3]});

    Size queries{in.q.shape[1], "queries"}, keys{in.k.shape[1], "keys"}, sequences{in.q.shape[0], "batch"};
    if (in.block_table) expect_present("cache_seqlens", in.cache_seqlens, "block_table needs it");
    if (in.cache_seqlens) expect_absent("cu_seqlens_k", in.cu_seqlens_k, "cache_seqlens is given");
    if (in.cu_seqlens_k) expect_present("cu_seqlens_q", in.cu_seqlens_q, "cu_seqlens_k is given");
    if (in.cu_seqlens_q) {
        if (!in.cache_seqlens)
            expect_present("cu_seqlens_k", in.cu_seqlens_k, "cu_seqlens_q is given without cache_seqlens");
        expect_size("q", in.q, 0, {{1, "packed sequences"}});
        queries = {expect_cumulative("cu_seqlens_q", in.cu_seqlens_q, in.q.shape[1], "rows of q"), "longest queries"};
        sequences = {in.cu_seqlens_q.shape[0] - 1, "sequences"};
    }
    expect_rank("block_table", in.block_table, 2, "[B, max blocks]");
    if (in.block_table) {
        expect_size("block_table", in.block_table, 0, {sequences});
        if (in.k.shape[1] < 1) refuse("k: dimension 1", "0", "1 or more rows of a block");
        const Index blocks = in.block_table.shape[1];
        if (blocks > most_elements / keys.value)
            refuse("block_table: dimension 1", std::to_string(blocks), "a size that memory can hold");
        keys.value *= blocks;
    } else if (in.cu_seqlens_k) {
        expect_size("k", in.k, 0, {{1, "packed sequences"}});
        keys = {expect_cumulative("cu_seqlens_k", in.cu_seqlens_k, in.k.shape[1], "rows of k"), "longest keys"};
        expect_size("cu_seqlens_k", in.cu_seqlens_k, 0, {{in.cu_seqlens_q.shape[0], "as cu_seqlens_q"}});
    } else {
        expect_size("k", in.k, 0, {sequences});
    }
    check_caches(in, sequences, keys.value);
    check_broadcast("mask", in.mask, sequences, heads, key_heads, queries, keys);
    check_broadcast("bias", in.bias, sequences, heads, key_heads, queries, keys);
}

core::AttentionOptions check_options(const softdelta_attention_options* given, const core::AttentionInputs& in) {
    const auto c = given != nullptr ? read_struct("options", given) : softdelta_attention_options_default();
    core::AttentionOptions o;
    o.scale = std::isnan(c.scale) ? 1 / std::sqrt(static_cast<double>(in.q.shape[3])) : c.scale;
    expect_finite("scale", o.scale);
    if (c.causal < SOFTDELTA_CAUSAL_NONE || c.causal > SOFTDELTA_CAUSAL_BOTTOM_RIGHT)
        refuse("causal", std::to_string(c.causal), "0 to 2");
    o.causal = static_cast<core::Causal>(c.causal);
    if (c.window_left < -1) refuse("window_left", std::to_string(c.window_left), "-1 (unbounded) or more");
    if (c.window_right < -1) refuse("window_right", std::to_string(c.window_right), "-1 (unbounded) or more");
    o.window_left = c.window_left;
    o.window_right = c.window_right;
    if (!std::isfinite(c.softcap) || c.softcap < 0)
        refuse("softcap", std::to_string(c.softcap), "0 (off) or a positive number");
    o.softcap = c.softcap;
    if (c.empty_row < SOFTDELTA_EMPTY_ROW_MINUS_INFINITY || c.empty_row > SOFTDELTA_EMPTY_ROW_ZERO)
        refuse("empty_row", std::to_string(c.empty_row), "0 to 2");
    o.empty_row = static_cast<core::EmptyRow>(c.empty_row);
    if (c.top_w == 0 || c.top_w < -1) refuse("top_w", std::to_string(c.top_w), "-1 (off), or 1 or more");
    if (c.top_w > 0) expect_present("bias", in.bias, "top_w selects by it");
    o.top_w = c.top_w;
    return o;
}

Call check_call(const softdelta_attention_inputs* inputs, const softdelta_attention_options* options,
                const softdelta_execution* execution) {
    Call call{};
    call.in = import_inputs(read_struct("inputs", inputs));
    check_inputs(call.in);
    call.options = check_options(options, call.in);
    std::tie(call.execution, call.engine) = check_execution(execution);
    if (call.engine.named != nullptr && call.engine.named->check_attention_stages != nullptr)
        call.engine.named->check_attention_stages(call.in, call.execution);
    call.batch = call.in.q.shape[0];
    call.queries = call.in.q.shape[1];
    call.heads = call.in.q.shape[2];
    call.value_size = call.in.v.shape[3];
    return call;
}

core::AttentionOutputs check_outputs(const Call& c, const softdelta_attention_outputs& given) {
    const core::AttentionOutputs out{import("o", given.o), import("lse", given.lse)};
    const Size batch{c.batch, "batch"}, queries{c.queries, "queries"}, heads{c.heads, "query heads"};
    expect_one_device(out, c.in.q.device);
    expect_result("o", out.o, "[B, Lq, H, Dv]", {batch, queries, heads, {c.value_size, "as v"}});
    expect_result("lse", out.lse, "[B, H, Lq]", {batch, heads, queries});
    return out;
}

core::AttentionGradients check_gradients(const Call& c, const softdelta_attention_gradients& given) {
    const core::AttentionGradients g{
        import("o", given.o),       import("lse", given.lse),     import("d_o", given.d_o),
        import("dlse", given.dlse), import("dq", given.dq),       import("dk", given.dk),
        import("dv", given.dv),     import("dbias", given.dbias), import("dsink", given.dsink)};
    expect_present("d_o", g.d_o, "[B, Lq, H, Dv]");
    expect_one_device(g, c.in.q.device);
    const Size batch{c.batch, "batch"}, queries{c.queries, "queries"}, heads{c.heads, "query heads"};
    for (const auto& [name, t] : {std::pair{"d_o", &g.d_o}, {"o", &g.o}}) {
        expect_float(name, *t);
        expect_shape(name, *t, "[B, Lq, H, Dv]", {batch, queries, heads, {c.value_size, "as v"}});
    }
    for (const auto& [name, t] : {std::pair{"dlse", &g.dlse}, {"lse", &g.lse}}) {
        expect_float(name, *t);
        expect_shape(name, *t, "[B, H, Lq]", {batch, heads, queries});
    }
    expect_gradient("dq", g.dq, c.in.q);
    expect_gradient("dk", g.dk, c.in.k);
    expect_gradient("dv", g.dv, c.in.v);
    expect_gradient("dbias", g.dbias, c.in.bias);
    expect_gradient("dsink", g.dsink, c.in.sink);
    if (c.in.block_table) throw core::Unsupported("block_table: there are no gradients through a paged cache");
    return g;
}

}  // namespace

}  // namespace softdelta::api

softdelta_status softdelta_attention_forward(const softdelta_attention_inputs* inputs,
                                             const softdelta_attention_options* options,
                                             const softdelta_execution* execution,
                                             const softdelta_attention_outputs* outputs) {
    using namespace softdelta;
    return api::guard([&] {
        const api::Call call = api::check_call(inputs, options, execution);
        const auto out = api::check_outputs(call, api::read_struct("outputs", outputs));
        api::run_pass(call.engine, engines::AttentionForward{call.in, call.options, call.execution, out},
                      &engines::Engine::attention_forward);
    });
}

softdelta_status softdelta_attention_backward(const softdelta_attention_inputs* inputs,
                                              const softdelta_attention_options* options,
                                              const softdelta_execution* execution,
                                              const softdelta_attention_gradients* gradients) {
    using namespace softdelta;
    return api::guard([&] {
        const api::Call call = api::check_call(inputs, options, execution);
        const auto grad = api::check_gradients(call, api::read_struct("gradients", gradients));
        api::run_pass(call.engine, engines::AttentionBackward{call.in, call.options, call.execution, grad},
                      &engines::Engine::attention_backward);
    });
}

softdelta_status softdelta_attention_forward_workspace(const softdelta_attention_inputs* inputs,
                                                       const softdelta_attention_options* options,
                                                       const softdelta_execution* execution,
                                                       const softdelta_attention_outputs* outputs, size_t* bytes) {
    using namespace softdelta;
    return api::guard([&] {
        const api::Call call = api::check_call(inputs, options, execution);
        const auto out = api::check_outputs(call, api::read_struct("outputs", outputs));
        api::result("bytes", bytes) =
            api::workspace_of(call.engine, engines::AttentionForward{call.in, call.options, call.execution, out},
                              &engines::Engine::attention_forward);
    });
}

softdelta_status softdelta_attention_backward_workspace(const softdelta_attention_inputs* inputs,
                                                        const softdelta_attention_options* options,
                                                        const softdelta_execution* execution,
                                                        const softdelta_attention_gradients* gradients, size_t* bytes) {
    using namespace softdelta;
    return api::guard([&] {
        const api::Call call = api::check_call(inputs, options, execution);
        const auto grad = api::check_gradients(call, api::read_struct("gradients", gradients));
        api::result("bytes", bytes) =
            api::workspace_of(call.engine, engines::AttentionBackward{call.in, call.options, call.execution, grad},
                              &engines::Engine::attention_backward);
    });
}

// New keys and values of a cache: the checks of one call. Tensors lie on the CPU.
#include <algorithm>
#include <string>
#include <vector>

#include "api/check.h"
#include "api/error.h"
#include "api/operands.h"
#include "api/overlap.h"
#include "api/quantised.h"
#include "cache/append.h"

namespace softdelta::api {

namespace {

struct Append {
    core::CacheAppendInputs in;
    core::CacheAppendOutputs out;
    cache::OwnScales own;
    core::Execution execution;
};

void check_rows(Append& call, Sizes& sizes) {
    using enum core::Symbol;
    const core::CacheAppendInputs& in = call.in;
    expect_required(in);
    if (!in.k.device.is_cpu()) throw core::Unsupported("k lies on " + device_text(in.k.device) + ", expected cpu");
    expect_one_device(in, in.k.device, "k");
    sizes[B] = sizes[N] = {in.k.shape[0], "batch"};
    sizes[T] = {in.k.shape[1], "new tokens, as k"};
    sizes[Hk] = {in.k.shape[2], "key heads"};
    sizes[D] = {in.k.shape[3], "as k"};
    sizes[Dv] = {in.v.shape[3], "as v"};
    if (in.cu_seqlens) {
        expect_size("k", in.k, 0, {1, "packed sequences"});
        expect_cumulative("cu_seqlens", in.cu_seqlens, in.k.shape[1], "rows of k");
        sizes[N] = {in.cu_seqlens.shape[0] - 1, "sequences"};
        sizes[bounds] = {in.cu_seqlens.shape[0], "as cu_seqlens"};
    }
    if (in.block_table) expect_rank("block_table", in.block_table, "N max_blocks");
    for (const auto& operand : core::operands_of<core::CacheAppendInputs>)
        expect_operand(operand, in.*operand.tensor, operand.shape, sizes);
}

// Returns whether each row has scales of its own.
bool check_cache(const char* name, Tensor& cache, const char* scale_name, Tensor& scale, const core::Shape& shape,
                 const Sizes& sizes) {
    expect_writable(name, cache);
    take_blocks(name, cache);
    if (!core::is_quantised(cache.dtype)) expect_kind(name, cache, core::Kind::floating);
    if (cache.dtype == core::DType::f64)
        refuse(std::string(name) + ": type", "f64", "f32, bf16, f16, i8, u8 or f8_e4m3");
    expect_shape(name, cache, shape, sizes);
    const bool own = scale.rank == 4 && scale.shape[0] == cache.shape[0] && scale.shape[1] == cache.shape[1];
    if (own) expect_writable(scale_name, scale);
    take_scale(scale_name, scale, name, cache);
    expect_kind(scale_name, scale, core::Kind::floating);
    if (own && scale.shape[2] > 1 && scale.stride[2] == 0)
        refuse(std::string(scale_name) + ": dimension 2", "1",
               "one of each key head, for rows have scales of their own");
    return own;
}

// Where new keys go: within their caches, and none where another one goes.
void check_places(const Append& call) {
    const core::CacheAppendInputs& in = call.in;
    const Index rows = call.out.k_cache.shape[1];
    const Index capacity = in.block_table ? in.block_table.shape[1] * rows : rows;
    std::vector<Index> written;
    for (Index n = 0; n < core::sequence_count(in); ++n) {
        const core::NewTokens s = core::new_tokens(in, n);
        const Index used = s.first + s.count;
        if (s.first < 0 || used > capacity)
            refuse("cache_seqlens[" + std::to_string(n) + "]", std::to_string(used),
                   std::to_string(s.count) + " to " + std::to_string(capacity) + ": it counts the new keys too");
        for (Index i = s.first / std::max<Index>(rows, 1); in.block_table && s.count > 0 && i * rows < used; ++i) {
            const Index block = core::load_index(in.block_table, in.block_table.offset({n, i}));
            const std::string label = "block_table[" + std::to_string(n) + ", " + std::to_string(i) + "]";
            if (block < 0 || block >= call.out.k_cache.shape[0])
                refuse(label, std::to_string(block),
                       "0 to " + std::to_string(call.out.k_cache.shape[0] - 1) + " (blocks of k_cache)");
            written.push_back(block);
        }
    }
    std::sort(written.begin(), written.end());
    if (const auto twice = std::adjacent_find(written.begin(), written.end()); twice != written.end())
        refuse("block_table: block " + std::to_string(*twice), "written for two sequences", "one: others may read it");
}

Append check_append(const softdelta_cache_append_inputs* inputs, const softdelta_cache_append_outputs* outputs,
                    const softdelta_execution* execution) {
    Append call{};
    call.in = import_all<core::CacheAppendInputs>(read_struct("inputs", inputs));
    Sizes sizes;
    check_rows(call, sizes);
    call.out = import_all<core::CacheAppendOutputs>(read_struct("outputs", outputs));
    core::CacheAppendOutputs& out = call.out;
    Operands operands;
    operands.add(call.in);
    for (const auto& [name, t] : {std::pair{"k_cache", &out.k_cache}, std::pair{"v_cache", &out.v_cache}})
        expect_present(name, *t, "the cache");
    if (out.k_cache.rank < 4) expect_rank("k_cache", out.k_cache, "B Lk Hk D");
    expect_one_device(out, call.in.k.device, "k");
    Sizes of_cache = sizes;
    of_cache[core::Symbol::B] =
        call.in.block_table ? Size{out.k_cache.shape[0], "blocks, as k_cache"} : sizes[core::Symbol::N];
    of_cache[core::Symbol::Lk] = {out.k_cache.shape[1], "as k_cache"};
    if (call.in.block_table && out.k_cache.shape[1] < 1)
        refuse("k_cache: dimension 1", "0", "1 or more rows of a block");
    call.own.k = check_cache("k_cache", out.k_cache, "k_scale", out.k_scale, "B Lk Hk D", of_cache);
    call.own.v = check_cache("v_cache", out.v_cache, "v_scale", out.v_scale, "B Lk Hk Dv", of_cache);
    for (const auto& [name, t] : {std::pair{"k_cache", &out.k_cache}, std::pair{"v_cache", &out.v_cache}})
        operands.writes(name, *t);
    call.own.k ? operands.writes("k_scale", out.k_scale) : operands.reads("k_scale", out.k_scale);
    call.own.v ? operands.writes("v_scale", out.v_scale) : operands.reads("v_scale", out.v_scale);
    call.execution = check_execution(execution).execution;
    check_places(call);
    operands.expect_apart();
    return call;
}

}  // namespace

}  // namespace softdelta::api

softdelta_status softdelta_cache_append(const softdelta_cache_append_inputs* inputs,
                                        const softdelta_cache_append_outputs* outputs,
                                        const softdelta_execution* execution) {
    using namespace softdelta;
    return api::guard([&] {
        const api::Append call = api::check_append(inputs, outputs, execution);
        const core::UseThreads threads(call.execution.parallel_for);
        cache::append(call.in, call.own, call.execution.threads, call.out);
    });
}

// The backward pass: sums and terms of rows (far_rows.cu, row_terms.cu), and then each gradient in a kernel of its own.
#include "engines/cuda/attention/far_rows.h"
#include "engines/cuda/attention/passes.h"
#include "engines/cuda/attention/rows.h"
#include "engines/cuda/attention/sink_gradient.h"
#include "engines/cuda/device/workspace.h"

namespace softdelta::cuda {

namespace {

struct Memory {
    RowTerms rows;
    float* o = nullptr;        // where the caller has not saved it
    Redo queries, keys;        // of warpgroups
    int* far_heads = nullptr;  // whether a row of a sequence's key head is far; behind the flags of queries
    KeptKeys* kept = nullptr;
    Places places;
    ScorePlan plan;
    BiasPlan bias;
    SplitOperands split;          // none: not by kernels of these
    std::uint16_t* ds = nullptr;  // of either plan
    float *bias_sums = nullptr, *key_sums = nullptr;
};

bool takes_warpgroup_gradients(const AttentionCall& call, const core::AttentionInputs& in,
                               const core::AttentionGradients& grad) {
    return takes_warpgroups(call, in.q.device, warpgroup_backward_channels) && call.keys <= most_warpgroup_rows &&
           (call.softcap == 0 || !(call.bias || call.alibi_slopes)) && call.softcap <= most_warpgroup_cap &&
           has_units(view_of(grad.d_o), call.value_channels, call.q.dtype);
}

// Each element of dbias is a score's own: kernels of warps and of split operands store ds.
bool has_scores(const core::AttentionInputs& in, const core::Tensor& dbias) {
    return dbias && is_whole(in) && dbias.shape[0] == in.q.shape[0] && dbias.shape[1] == in.q.shape[2] &&
           dbias.shape[2] == in.q.shape[1] && dbias.shape[3] == in.k.shape[1];
}

bool takes_warp_gradients(const AttentionCall& call, const core::AttentionInputs& in,
                          const core::AttentionGradients& grad, const BiasPlan& bias) {
    return takes_warps(call, in.q.device) && call.keys <= most_warpgroup_rows && call.softcap == 0 &&
           (!grad.dbias || has_scores(in, grad.dbias) || bias.elements > 0) &&
           has_units(view_of(grad.d_o), call.value_channels, call.q.dtype);
}

Memory memory_of(const engines::AttentionBackward& of, const AttentionCall& call, MemoryParts& parts) {
    const core::AttentionInputs& in = of.in;
    const core::AttentionGradients& grad = of.out;
    const Index rows = in.q.shape[0] * in.q.shape[1] * in.q.shape[2];
    Memory m;
    m.rows.sums.top = parts.take<float>(rows);
    m.rows.sums.log_sum = parts.take<float>(rows);
    m.rows.D = parts.take<float>(rows);
    m.rows.sink = grad.dsink ? parts.take<float>(rows) : nullptr;
    m.o = grad.o ? nullptr : parts.take<float>(rows * in.v.shape[3]);
    m.queries = redo_of_queries(in, parts);
    m.far_heads = parts.take<int>(core::sequence_count(in) * in.k.shape[2]);
    m.keys = redo_of_keys(in, parts);
    m.keys.any = m.far_heads;
    m.places = take_places(in, parts);
    if (call.top_w >= 0) m.kept = parts.take<KeptKeys>(rows);
    m.plan = plan_scores(of);
    m.bias = plan_bias(of);
    m.ds = parts.take<std::uint16_t>(std::max(m.plan.elements, m.bias.elements));
    m.bias_sums = parts.take<float>(m.bias.kept);
    m.key_sums = parts.take<float>(m.bias.of_keys);
    if (!takes_warpgroup_gradients(call, in, grad) && takes_split(in, call, grad.d_o))
        m.split = take_split_operands(in, call, true, parts);
    return m;
}

View dense_rows(float* data, const AttentionCall& call) {
    const Index row = call.heads * Index(call.value_channels);
    return {data, DType::f32, {call.queries * row, row, call.value_channels, 1}};
}

SavedRows saved_rows(const core::AttentionInputs& in, const AttentionCall& call, const core::AttentionGradients& grad,
                     const View& o) {
    SavedRows s{grad.o ? view_of(grad.o) : o, grad.lse.dtype == DType::f32 ? view_of(grad.lse) : View(),
                view_of(grad.d_o), view_of(grad.dlse)};
    if (const core::Tensor& t = in.cu_seqlens_q; t && !t.device.is_cpu()) s.ends = view_of(t), s.last = t.shape[0] - 1;
    const DType type = s.d_o.dtype;
    s.in_units = (type == DType::bf16 || type == DType::f16) && has_units(s.o, call.value_channels, type) &&
                 has_units(s.d_o, call.value_channels, type);
    return s;
}

int planes_with(const core::Tensor& d_o, const core::AttentionInputs& in) {
    return d_o.dtype == DType::bf16 ? planes_of(in) : 3;
}

Gradients gradients_of(const core::AttentionGradients& grad) {
    Gradients g{view_of(grad.d_o), view_of(grad.dq), view_of(grad.dk), view_of(grad.dv), view_of(grad.dbias)};
    if (grad.dbias) {
        g.bias_batches = grad.dbias.shape[0], g.bias_heads = grad.dbias.shape[1];
        g.bias_queries = grad.dbias.shape[2], g.bias_keys = grad.dbias.shape[3];
    }
    return g;
}

// dbias where nothing shares it, as what dq is made from.
StoredScores scores_of_dbias(const Gradients& grad) {
    StoredScores ds;
    ds.view = grad.dbias;
    ds.sequences = grad.bias_batches, ds.heads = grad.bias_heads;
    ds.queries = grad.bias_queries, ds.keys = grad.bias_keys;
    ds.is_dbias = true;
    return ds;
}
// In the workspace, of some sequences and heads.
StoredScores scores_in(const Memory& memory, Index row, const AttentionPass& pass, int first_head, int heads) {
    const auto& [call, s] = pass;
    StoredScores ds;
    const Index of_head = call.queries * row;
    ds.view = {memory.ds, call.q.dtype, {heads * of_head, of_head, row, 1}};
    ds.first_sequence = s.first, ds.first_head = first_head;
    ds.sequences = s.count, ds.heads = heads, ds.queries = call.queries, ds.keys = call.keys;
    return ds;
}
// Sums over queries, of each sequence and head.
StoredScores sums_of_keys(const Memory& memory, const AttentionCall& call, int sequences) {
    StoredScores ds;
    ds.view = {memory.key_sums, DType::f32, {call.heads * memory.bias.row, memory.bias.row, 0, 1}};
    ds.sequences = sequences, ds.heads = call.heads, ds.queries = 1, ds.keys = call.keys;
    return ds;
}

}  // namespace

std::size_t attention_backward_workspace(const engines::AttentionBackward& of) {
    const AttentionCall call = attention_call(of.in, of.options);
    return Workspace::with_alignment(bytes_of([&](MemoryParts& parts) { memory_of(of, call, parts); }));
}

void attention_backward(const engines::AttentionBackward& of_call) {
    const core::AttentionInputs& in = of_call.in;
    const core::AttentionGradients& grad = of_call.out;
    const OnDevice device(in.q.device);
    const cudaStream_t stream = stream_of(of_call.execution);
    AttentionCall call = attention_call(in, of_call.options);
    const auto memory_in = [&](MemoryParts& parts) { return memory_of(of_call, call, parts); };
    const Workspace workspace(of_call.execution, bytes_of(memory_in));
    MemoryParts parts(workspace.data());
    Memory memory = memory_in(parts);
    const int planes = planes_with(grad.d_o, in);
    Gradients wanted = gradients_of(grad);
    wanted.heads = call.heads;
    wanted.rows = memory.rows;
    const bool warpgroups = takes_warpgroup_gradients(call, in, grad),
               warps = takes_warp_gradients(call, in, grad, memory.bias), split = static_cast<bool>(memory.split.q);

    ForwardOutputs sums{{}, {}, memory.rows.sums, {}};
    if (memory.o != nullptr) sums.o = dense_rows(memory.o, call);
    const AttentionSequences packed = place_packed(in, call, memory.places, stream);
    const auto for_each = [&](const auto& use) { for_each_sequences(in, call, packed, use); };
    if (memory.kept != nullptr) for_each([&](const AttentionPass& s) { launch_selection(s, memory.kept, stream); });
    call.kept = memory.kept;
    if (split) for_each([&](const AttentionPass& s) { launch_split(s, memory.split, wanted.d_o, stream); });
    if (warpgroups || warps || split) {
        memory.queries.early = memory.keys.early = !warps;
        wanted.redo_queries = memory.queries, wanted.redo_keys = memory.keys;
    }
    sums.redo = memory.queries;
    sum_rows(in, call, packed, {warpgroups, warps, split ? &memory.split : nullptr, planes},
             saved_rows(in, call, grad, sums.o), sums, memory.rows, memory.far_heads, stream);

    const bool bias_by_key = warpgroups && takes_bias_gradient(call, wanted, core::sequence_count(in));
    const BiasPlan bias = (warpgroups && !bias_by_key) || warps ? memory.bias : BiasPlan();
    Gradients by_key = wanted;
    if (!bias_by_key) by_key.dbias = View();
    const StoredScores key_sums = sums_of_keys(memory, call, static_cast<int>(core::sequence_count(in)));
    if (bias.of_keys > 0) by_key.dbias = key_sums.view;
    if ((by_key.dbias && wanted.bias_queries != 1) || (warps && wanted.dbias && !bias))
        by_key.ds = scores_of_dbias(wanted);
    if (bias_by_key && packed.of_keys) launch_clear_bias({call, packed}, by_key, stream);
    const ScorePlan plan = warpgroups ? memory.plan : ScorePlan();
    const bool from_stored = wanted.dq && call.q.dtype == DType::bf16;
    const auto take_part = [&](const AttentionPass& s, const ScorePlan& of, int head, bool all_scores) {
        Gradients part = by_key;
        part.first_head = head;
        part.heads = std::min(static_cast<int>(of.key_heads) * call.group, call.heads - head);
        part.ds = scores_in(memory, of.row, s, head, part.heads);
        part.ds.is_dbias = all_scores;
        if (warps) {
            launch_warp_gradients(false, s, part, stream);
        } else {
            launch_warpgroup_by_key(s, part, stream);
            if (from_stored) launch_warpgroup_by_stored(s, part, stream);
        }
        return part.ds;
    };
    const auto each_part = [&](const ScorePlan& of, const auto& use) {
        for (int head = 0; head < call.heads; head += static_cast<int>(of.key_heads) * call.group) use(head);
    };
    const auto on_warpgroups = [&](const AttentionPass& s) {
        if (plan.elements > 0) return each_part(plan, [&](int head) { take_part(s, plan, head, false); });
        if (wanted.dk || wanted.dv || by_key.dbias) launch_warpgroup_by_key(s, by_key, stream);
        if (!wanted.dq) return;
        if (by_key.ds && call.q.dtype == DType::bf16 &&
            !s.sequences.of_queries)  // of f16, dbias may have lost the last bits of ds
            launch_warpgroup_by_stored(s, by_key, stream);
        else
            launch_warpgroup_by_query(s, wanted, stream);
    };
    // dbias as a sum: the first and the last turn of each sum are those that its heads and sequences have.
    const auto add_bias = [&](const AttentionPass& s, int head) {
        const StoredScores ds = take_part(s, bias, head, true);
        const bool shares_heads = wanted.bias_heads == 1;
        const Index next_head = head + ds.heads, next_sequence = s.sequences.first + Index(s.sequences.count);
        const bool first_head = !shares_heads || head == 0, last_head = !shares_heads || next_head == call.heads;
        const bool first_sequence = !bias.heads_first || s.sequences.first == 0;
        const bool last_sequence = !bias.heads_first || next_sequence == core::sequence_count(in);
        launch_bias_sums(call, ds, wanted, memory.bias_sums, first_head && first_sequence, last_head && last_sequence,
                         stream);
    };
    if (bias.elements > 0) {
        const auto each_sequences = [&](const auto& use) { for_each_sequences(in, call, packed, use, bias.sequences); };
        if (bias.heads_first)
            each_part(bias, [&](int head) { each_sequences([&](const AttentionPass& s) { add_bias(s, head); }); });
        else
            each_sequences([&](const AttentionPass& s) { each_part(bias, [&](int head) { add_bias(s, head); }); });
        if (warpgroups && wanted.dq && !from_stored)
            for_each([&](const AttentionPass& s) { launch_warpgroup_by_query(s, wanted, stream); });
    } else if (warpgroups) {
        for_each_sequences(in, call, packed, on_warpgroups,
                           plan.elements > 0 ? plan.sequences : AttentionSequences::most);
    }
    if (warps) {
        for_each([&](const AttentionPass& s) {
            if (wanted.dk || wanted.dv || wanted.dbias) launch_warp_gradients(true, s, wanted, stream);
            if (!bias && (wanted.dq || wanted.dbias)) launch_warp_gradients(false, s, by_key, stream);
        });
    }
    const bool split_bias = split && has_scores(in, grad.dbias);
    if (split) {
        Gradients of = wanted;
        if (!split_bias) of.dbias = View();
        for_each([&](const AttentionPass& s) { launch_split_gradients(s, memory.split, of, stream); });
    }
    if (bias.of_keys > 0) launch_bias_sums(call, key_sums, wanted, nullptr, true, true, stream);
    for_each([&](const AttentionPass& s) {
        launch_gradients(s, planes, wanted, stream);
        if (wanted.dbias) {
            Gradients of_bias = wanted;
            if (!bias_by_key && !bias && !split_bias && !warps) of_bias.redo_keys = {};
            launch_bias_gradient(s, planes, of_bias, stream);
        }
    });
    if (grad.dsink) launch_sink_gradient(call, memory.rows, view_of(grad.dsink), stream);
}

}  // namespace softdelta::cuda

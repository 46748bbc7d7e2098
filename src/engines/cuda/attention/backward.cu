// The backward pass: sums of every row once more, D, and then each gradient in a kernel of its own.
#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/passes.h"
#include "engines/cuda/attention/rows.h"
#include "engines/cuda/attention/split/split.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/device/workspace.h"
#include "engines/cuda/tile/lanes.h"
#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {

namespace {

struct SavedRows {
    View o, lse, d_o, dlse;
    bool in_units = false;  // rows of o and do are whole units of 16 bytes of d_o's type
    bool summed = false;    // the call has computed sums of rows
    View ends{};            // packed lengths on the device: rows from the last on belong to no sequence
    Index last = 0;
};

// Kernels of warpgroups take lse as one number: tiles with rows where it is far from 0 are summed once more, and what
// the sink needs of them is taken again.
enum class RowPass { only, warpgroups, again };

// A warp has four queries of a head, so that four loads are under way.
constexpr int term_warps = 4, term_rows = 4;
class TermWarp {
  public:
    __device__ TermWarp(const AttentionCall& call, const AttentionSequences& packed, const SavedRows& saved,
                        const RowTerms& out, RowPass pass, const Redo& far, int* far_heads)
        : call_(call), packed_(packed), saved_(saved), out_(out), pass_(pass), far_(far), far_heads_(far_heads) {}

    // term_rows rows from `first` on.
    __device__ void run(Index first) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        Row rows[term_rows];
        rows[0] = {first, first / call_.queries, first % call_.queries};
#pragma unroll
        for (int r = 1; r < term_rows; ++r) {
            rows[r] = {first + r, rows[r - 1].batch, rows[r - 1].query + 1};
            if (rows[r].query == call_.queries) ++rows[r].batch, rows[r].query = 0;
        }
        float D[term_rows];
        if (saved_.in_units && saved_.d_o.dtype == DType::bf16) {
            add_units(Plane(), rows, lane, D);
        } else if (saved_.in_units) {
            add_units(__half(), rows, lane, D);
        } else {
            for (int r = 0; r < term_rows; ++r) {
                D[r] = 0;
                for (int c = lane; counts(rows[r].number) && c < call_.value_channels; c += 32)
                    D[r] = fmaf(load(saved_.d_o, at(saved_.d_o, rows[r]) + c * saved_.d_o.stride[3]),
                                load(saved_.o, at(saved_.o, rows[r]) + c * saved_.o.stride[3]), D[r]);
            }
        }
        float own = 0;  // of lane r: row r
        Row row = rows[0];
        unrolled<term_rows>([&](int r) {
            const float sum = sum_of_warp(D[r]);
            if (lane == r) own = sum, row = rows[r];
        });
        if (lane < term_rows && row.number < call_.total_queries) store(row, own);
    }

  private:
    struct Row {
        Index number, batch, query;
    };
    __device__ Index at(const View& v, const Row& row) const {
        return row.batch * v.stride[0] + row.query * v.stride[1] + head_ * v.stride[2];
    }
    __device__ Index of_lse(const View& v, const Row& row) const {
        return row.batch * v.stride[0] + head_ * v.stride[1] + row.query * v.stride[2];
    }
    __device__ bool counts(Index row) const {
        return row < call_.total_queries &&
               (!saved_.ends || row < load_index(saved_.ends, saved_.last * saved_.ends.stride[0]));
    }

    template <class T>
    __device__ void add_units(T type, const Row (&rows)[term_rows], int lane, float (&D)[term_rows]) const {
        const T *o[term_rows], *d_o[term_rows];
        bool is[term_rows];
        unrolled<term_rows>([&](int r) {
            D[r] = 0, is[r] = counts(rows[r].number);
            o[r] = static_cast<const T*>(saved_.o.data) + at(saved_.o, rows[r]);
            d_o[r] = static_cast<const T*>(saved_.d_o.data) + at(saved_.d_o, rows[r]);
        });
        for (int c = 4 * lane; c < call_.value_channels; c += 128) {
            uint2 x[term_rows] = {}, y[term_rows] = {};
            unrolled<term_rows>([&](int r) {
                if (is[r])
                    x[r] = *reinterpret_cast<const uint2*>(d_o[r] + c),
                    y[r] = *reinterpret_cast<const uint2*>(o[r] + c);
            });
            unrolled<term_rows>([&](int r) {
                const float2 x0 = ptx::unpack(x[r].x, type), x1 = ptx::unpack(x[r].y, type);
                const float2 y0 = ptx::unpack(y[r].x, type), y1 = ptx::unpack(y[r].y, type);
                D[r] = fmaf(x1.y, y1.y, fmaf(x1.x, y1.x, fmaf(x0.y, y0.y, fmaf(x0.x, y0.x, D[r]))));
            });
        }
    }

    // By one thread.
    __device__ void store(const Row& row, float D) const {
        const Index at = head_ * call_.total_queries + row.number;
        if (!counts(row.number)) {
            if (out_.sink != nullptr) out_.sink[at] = 0;
            return;
        }
        if (saved_.dlse) D -= load(saved_.dlse, of_lse(saved_.dlse, row));
        out_.D[at] = D;

        // A saved lse may be that of more keys than these; one that is far from 0 has lost its logarithm.
        const float lse = saved_.lse ? load(saved_.lse, of_lse(saved_.lse, row)) : INFINITY;
        const bool far = is_far(lse), near = isfinite(lse) && !far;
        if (near || (saved_.lse && pass_ == RowPass::warpgroups && !(far && saved_.summed))) {
            out_.sums.top[at] = lse;
            out_.sums.log_sum[at] = 0;
        }
        if (pass_ == RowPass::warpgroups && is_far(out_.sums.top[at] + out_.sums.log_sum[at])) mark_far(row);
        if (out_.sink == nullptr) return;
        const float sink = load(call_.sink, head_ * call_.sink.stride[0]);
        float probability = sink == INFINITY ? 1.0F : 0.0F;
        if (isfinite(sink)) probability = expf((sink - out_.sums.top[at]) - out_.sums.log_sum[at]);
        out_.sink[at] = probability != 0 ? probability * D : 0.0F;
    }

    // By any thread that finds such a row.
    __device__ void mark_far(const Row& row) const {
        const int batch = static_cast<int>(row.batch), tile = static_cast<int>(row.query / tile_rows);
        const RowTile of = packed_.of_queries ? packed_.tile_of_query(row.query) : RowTile{batch, batch, tile, 0};
        if (!of) return;
        far_heads_[of.i * (call_.heads / call_.group) + head_ / call_.group] = 1;
        if (saved_.summed) return;
        *far_.at(of, call_.heads, head_) = 1;
        *far_.any = 1;
    }

    const AttentionCall& call_;
    const AttentionSequences& packed_;
    const SavedRows& saved_;
    const RowTerms& out_;
    RowPass pass_;
    const Redo& far_;
    int *far_heads_, head_ = static_cast<int>(blockIdx.y);
};
__global__ void __launch_bounds__(32 * term_warps)
    row_term_kernel(const __grid_constant__ AttentionCall call, const __grid_constant__ AttentionSequences packed,
                    const __grid_constant__ SavedRows saved, const __grid_constant__ RowTerms out, RowPass pass,
                    const __grid_constant__ Redo far, int* far_heads) {
    ptx::follow_launch_before();
    if (pass == RowPass::again && *far.any == 0) return;
    const TermWarp warp(call, packed, saved, out, pass, far, far_heads);
    const Index step = Index(gridDim.x) * term_warps * term_rows;
    for (Index first = (Index(blockIdx.x) * term_warps + threadIdx.x / 32) * term_rows; first < call.total_queries;
         first += step)
        warp.run(first);
}

constexpr int sum_threads = 256;
__global__ void __launch_bounds__(sum_threads)
    sink_gradient_kernel(const __grid_constant__ RowTerms rows, Index count, View dsink) {
    auto* parts = reinterpret_cast<double*>(ptx::shared_memory());
    const int thread = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.x);
    double sum = 0;
    for (Index i = thread; i < count; i += sum_threads) sum += static_cast<double>(rows.sink[head * count + i]);
    parts[thread] = sum;
    for (int step = sum_threads / 2; step > 0; step /= 2) {
        __syncthreads();
        if (thread < step) parts[thread] += parts[thread + step];
    }
    if (thread == 0) store(dsink, head * dsink.stride[0], -static_cast<float>(parts[0]));
}

// dbias of packed sequences where no tile of keys is. By blocks for each head and sequence.
__global__ void __launch_bounds__(sum_threads)
    clear_bias_kernel(const __grid_constant__ AttentionSequences sequences, const __grid_constant__ Gradients grad) {
    const AttentionSequence s = sequences[static_cast<int>(blockIdx.y)];
    const Index from = (s.k_count + tile_rows - 1) / tile_rows * tile_rows, width = grad.bias_keys - from;
    const Index* stride = grad.dbias.stride;
    const Index base = s.mask_batch * stride[0] + Index(blockIdx.x) * stride[1] + from * stride[3];
    for (Index e = threadIdx.x; width > 0 && e < grad.bias_queries * width; e += sum_threads)
        store(grad.dbias, base + e / width * stride[2] + e % width * stride[3], 0);
}

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

bool takes_warp_gradients(const AttentionCall& call, const core::AttentionInputs& in,
                          const core::AttentionGradients& grad) {
    return takes_warps(call, in.q.device) && call.keys <= most_warpgroup_rows && call.softcap == 0 && !grad.dbias &&
           has_units(view_of(grad.d_o), call.value_channels, call.q.dtype);
}

// Where nothing shares an element of dbias, kernels of split operands store ds.
bool takes_split_bias(const core::AttentionInputs& in, const core::Tensor& dbias) {
    return dbias && is_whole(in) && dbias.shape[0] == in.q.shape[0] && dbias.shape[1] == in.q.shape[2] &&
           dbias.shape[2] == in.q.shape[1] && dbias.shape[3] == in.k.shape[1];
}

Memory memory_of(const core::AttentionInputs& in, const core::AttentionOptions& options,
                 const core::AttentionGradients& grad, MemoryParts& parts) {
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
    if (options.top_w >= 0) m.kept = parts.take<KeptKeys>(rows);
    m.plan = plan_scores(in, options, grad);
    m.bias = plan_bias(in, options, grad);
    m.ds = parts.take<std::uint16_t>(std::max(m.plan.elements, m.bias.elements));
    m.bias_sums = parts.take<float>(m.bias.kept);
    m.key_sums = parts.take<float>(m.bias.of_keys);
    const AttentionCall call = attention_call(in, options);
    if (!takes_warpgroup_gradients(call, in, grad) && takes_split(in, call, grad.d_o))
        m.split = take_split_operands(in, call, true, parts);
    return m;
}

View dense_rows(float* data, const AttentionCall& call) {
    View v;
    v.data = data;
    v.dtype = core::DType::f32;
    v.stride[3] = 1;
    v.stride[2] = call.value_channels;
    v.stride[1] = call.heads * v.stride[2];
    v.stride[0] = call.queries * v.stride[1];
    return v;
}

int planes_with(const core::Tensor& d_o, const core::AttentionInputs& in) {
    return d_o.dtype == core::DType::bf16 ? planes_of(in) : 3;
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
StoredScores scores_in(const Memory& memory, Index row, const AttentionCall& call, const AttentionSequences& s,
                       int first_head, int heads) {
    StoredScores ds;
    ds.view.data = memory.ds;
    ds.view.dtype = call.q.dtype;
    ds.view.stride[3] = 1;
    ds.view.stride[2] = row;
    ds.view.stride[1] = call.queries * row;
    ds.view.stride[0] = heads * ds.view.stride[1];
    ds.first_sequence = s.first, ds.first_head = first_head;
    ds.sequences = s.count, ds.heads = heads, ds.queries = call.queries, ds.keys = call.keys;
    return ds;
}
// Sums over queries, of each sequence and head.
StoredScores sums_of_keys(const Memory& memory, const AttentionCall& call, int sequences) {
    StoredScores ds;
    ds.view.data = memory.key_sums;
    ds.view.stride[3] = 1;
    ds.view.stride[1] = memory.bias.row;
    ds.view.stride[0] = call.heads * ds.view.stride[1];
    ds.sequences = sequences, ds.heads = call.heads, ds.queries = 1, ds.keys = call.keys;
    return ds;
}

}  // namespace

std::size_t attention_backward_workspace(const core::AttentionInputs& in, const core::AttentionOptions& options,
                                         const core::AttentionGradients& grad) {
    MemoryParts parts(nullptr);
    memory_of(in, options, grad, parts);
    return Workspace::with_alignment(parts.used());
}

void attention_backward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                        const core::Execution& execution, const core::AttentionGradients& grad) {
    const OnDevice device(in.q.device);
    const cudaStream_t stream = stream_of(execution);
    AttentionCall call = attention_call(in, options);
    MemoryParts counted(nullptr);
    memory_of(in, options, grad, counted);
    const Workspace workspace(execution, counted.used());
    MemoryParts parts(workspace.data());
    Memory memory = memory_of(in, options, grad, parts);
    const int planes = planes_with(grad.d_o, in);
    Gradients wanted = gradients_of(grad);
    wanted.heads = call.heads;
    wanted.rows = memory.rows;
    const bool warpgroups = takes_warpgroup_gradients(call, in, grad), warps = takes_warp_gradients(call, in, grad),
               split = static_cast<bool>(memory.split.q);

    ForwardOutputs sums{{}, {}, memory.rows.sums, {}};
    if (memory.o != nullptr) sums.o = dense_rows(memory.o, call);
    const AttentionSequences packed = place_packed(in, call, memory.places, stream);
    const auto for_each = [&](const auto& use) { for_each_sequences(in, call, packed, use); };
    if (memory.kept != nullptr)
        for_each([&](const AttentionSequences& s) { launch_selection(call, s, memory.kept, stream); });
    call.kept = memory.kept;
    SavedRows saved{grad.o ? view_of(grad.o) : sums.o, grad.lse.dtype == core::DType::f32 ? view_of(grad.lse) : View(),
                    wanted.d_o, view_of(grad.dlse)};
    if (const core::Tensor& t = in.cu_seqlens_q; t && !t.device.is_cpu())
        saved.ends = view_of(t), saved.last = t.shape[0] - 1;
    const DType of_do = saved.d_o.dtype;
    saved.in_units = (of_do == DType::bf16 || of_do == DType::f16) && has_units(saved.o, call.value_channels, of_do) &&
                     has_units(saved.d_o, call.value_channels, of_do);
    const auto add_up = [&](bool in_tiles, const Redo& redo) {
        sums.redo = redo;
        // Far rows where nothing is added to scores are seldom: kernels of planes take them without another launch.
        const bool left = sums.far_lse && !call.mask && !call.bias && !call.alibi_slopes;
        for_each([&](const AttentionSequences& s) {
            if (in_tiles && split && !left) launch_split_forward(call, s, memory.split, sums, stream);
            if (in_tiles && warpgroups && !left) launch_warpgroup_forward(call, s, sums, stream);
            if (in_tiles && warps && !left) launch_warp_forward(call, s, sums, stream);
            launch_attention_forward(call, s, planes, sums, stream);
        });
    };
    const auto take_terms = [&](RowPass pass) {
        const Index all = (call.total_queries + term_warps * term_rows - 1) / (term_warps * term_rows);
        const bool few = pass == RowPass::again;
        launch(row_term_kernel,
               {dim3(few ? few_blocks(all, call.heads) : static_cast<unsigned>(all), static_cast<unsigned>(call.heads)),
                32 * term_warps, 0, few && !warps},
               stream, "attention's row terms", call, packed, saved, memory.rows, pass, memory.queries,
               memory.far_heads);
    };
    if (split) for_each([&](const AttentionSequences& s) { launch_split(call, s, memory.split, wanted.d_o, stream); });
    if (warpgroups || warps || split) {
        memory.queries.early = memory.keys.early = !warps;
        saved.summed = memory.o != nullptr || !saved.lse;
        if (saved.summed) add_up(true, memory.queries);
        const int* const end = memory.far_heads + core::sequence_count(in) * (call.heads / call.group);
        check(cudaMemsetAsync(memory.queries.blocks, 0,
                              static_cast<std::size_t>(end - memory.queries.blocks) * sizeof(int), stream),
              "memory for the call");
        take_terms(RowPass::warpgroups);
        if (!saved.summed) {
            sums.far_lse = saved.lse;
            add_up(true, memory.queries);
            if (grad.dsink) take_terms(RowPass::again);
        }
        wanted.redo_queries = memory.queries, wanted.redo_keys = memory.keys;
    } else {
        add_up(false, {});
        take_terms(RowPass::only);
    }

    const bool bias_by_key = warpgroups && takes_bias_gradient(call, wanted, core::sequence_count(in));
    const BiasPlan bias = warpgroups && !bias_by_key ? memory.bias : BiasPlan();
    Gradients by_key = wanted;
    if (!bias_by_key) by_key.dbias = View();
    const StoredScores key_sums = sums_of_keys(memory, call, static_cast<int>(core::sequence_count(in)));
    if (bias.of_keys > 0) by_key.dbias = key_sums.view;
    if (by_key.dbias && wanted.bias_queries != 1) by_key.ds = scores_of_dbias(wanted);
    if (bias_by_key && packed.of_keys)
        launch(clear_bias_kernel,
               {dim3(static_cast<unsigned>(call.heads), static_cast<unsigned>(packed.count)), sum_threads}, stream,
               "attention's gradient of bias", packed, by_key);
    const ScorePlan plan = warpgroups ? memory.plan : ScorePlan();
    const bool from_stored = wanted.dq && call.q.dtype == DType::bf16;
    const auto take_part = [&](const AttentionSequences& s, const ScorePlan& of, int head, bool all_scores) {
        Gradients part = by_key;
        part.first_head = head;
        part.heads = std::min(static_cast<int>(of.key_heads) * call.group, call.heads - head);
        part.ds = scores_in(memory, of.row, call, s, head, part.heads);
        part.ds.is_dbias = all_scores;
        launch_warpgroup_by_key(call, s, part, stream);
        if (from_stored) launch_warpgroup_by_stored(call, s, part, stream);
        return part.ds;
    };
    const auto each_part = [&](const ScorePlan& of, const auto& use) {
        for (int head = 0; head < call.heads; head += static_cast<int>(of.key_heads) * call.group) use(head);
    };
    const auto on_warpgroups = [&](const AttentionSequences& s) {
        if (plan.elements > 0) return each_part(plan, [&](int head) { take_part(s, plan, head, false); });
        if (wanted.dk || wanted.dv || by_key.dbias) launch_warpgroup_by_key(call, s, by_key, stream);
        if (!wanted.dq) return;
        if (by_key.ds && call.q.dtype == DType::bf16 &&
            !s.of_queries)  // of f16, dbias may have lost the last bits of ds
            launch_warpgroup_by_stored(call, s, by_key, stream);
        else
            launch_warpgroup_by_query(call, s, wanted, stream);
    };
    // dbias as a sum: the first and the last turn of each sum are those that its heads and sequences have.
    const auto add_bias = [&](const AttentionSequences& s, int head) {
        const StoredScores ds = take_part(s, bias, head, true);
        const bool shares_heads = wanted.bias_heads == 1;
        const Index next_head = head + ds.heads, next_sequence = s.first + Index(s.count);
        const bool first_head = !shares_heads || head == 0, last_head = !shares_heads || next_head == call.heads;
        const bool first_sequence = !bias.heads_first || s.first == 0;
        const bool last_sequence = !bias.heads_first || next_sequence == core::sequence_count(in);
        launch_bias_sums(call, ds, wanted, memory.bias_sums, first_head && first_sequence, last_head && last_sequence,
                         stream);
    };
    if (bias.elements > 0) {
        const auto each_sequences = [&](const auto& use) { for_each_sequences(in, call, packed, use, bias.sequences); };
        if (bias.heads_first)
            each_part(bias, [&](int head) { each_sequences([&](const AttentionSequences& s) { add_bias(s, head); }); });
        else
            each_sequences([&](const AttentionSequences& s) { each_part(bias, [&](int head) { add_bias(s, head); }); });
        if (wanted.dq && !from_stored)
            for_each([&](const AttentionSequences& s) { launch_warpgroup_by_query(call, s, wanted, stream); });
    } else if (warpgroups) {
        for_each_sequences(in, call, packed, on_warpgroups,
                           plan.elements > 0 ? plan.sequences : AttentionSequences::most);
    }
    if (warps) for_each([&](const AttentionSequences& s) { launch_warp_gradients(call, s, wanted, stream); });
    const bool split_bias = split && takes_split_bias(in, grad.dbias);
    if (split) {
        Gradients of = wanted;
        if (!split_bias) of.dbias = View();
        for_each([&](const AttentionSequences& s) { launch_split_gradients(call, s, memory.split, of, stream); });
    }
    if (bias.of_keys > 0) launch_bias_sums(call, key_sums, wanted, nullptr, true, true, stream);
    for_each([&](const AttentionSequences& s) {
        launch_gradients(call, s, planes, wanted, stream);
        if (wanted.dbias) {
            Gradients of_bias = wanted;
            if (!bias_by_key && !bias && !split_bias) of_bias.redo_keys = {};
            launch_bias_gradient(call, s, planes, of_bias, stream);
        }
    });
    if (grad.dsink)
        launch(sink_gradient_kernel,
               {dim3(static_cast<unsigned>(call.heads)), sum_threads, sum_threads * static_cast<int>(sizeof(double))},
               stream, "attention's gradient of the sink", memory.rows, call.total_queries, view_of(grad.dsink));
}

}  // namespace softdelta::cuda

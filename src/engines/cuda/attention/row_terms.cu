// What the backward pass needs of each row beside its sums: D = rowsum(do∘o) − dlse, and the row's share of the sink's
// gradient. Rows that are far (far_rows.h) are marked.
#include "engines/cuda/attention/far_rows.h"
#include "engines/cuda/attention/rows.h"
#include "engines/cuda/attention/sink_gradient.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

namespace {

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
        out_.sink[at] = sink_share(call_, head_, out_.sums.top[at], out_.sums.log_sum[at], D);
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

}  // namespace

void launch_row_terms(const AttentionCall& call, const AttentionSequences& packed, const SavedRows& saved,
                      const RowTerms& out, RowPass pass, const Redo& far, int* far_heads, cudaStream_t stream) {
    const Index all = blocks_of(call.total_queries, term_warps * term_rows);
    const bool few = pass == RowPass::again;
    launch(row_term_kernel,
           {Blocks(few ? few_blocks(all, call.heads) : all, call.heads), 32 * term_warps, 0, few && far.early}, stream,
           "attention's row terms", call, packed, saved, out, pass, far, far_heads);
}

}  // namespace softdelta::cuda

// Rows of q, k, v or do of one head of one sequence, and their copies in shared memory.
#pragma once

#include "engines/cuda/attention/call.h"
#include "engines/cuda/attention/planes/planes.h"

namespace softdelta::cuda {

// Whether rows are whole units of 16 bytes, of that type of 16 bits.
__host__ __device__ inline bool has_units(const View& view, int channels, DType type = DType::bf16) {
    return view.dtype == type && has_whole_rows(view, channels);
}

class Rows {
  public:
    __device__ Rows(const View& view, Index base, Index count, int channels)
        : view_(&view), base_(base), count_(count), channels_(channels), units_(has_units(view, channels)) {}

    // Of q, or of do which lies as q does.
    __device__ static Rows of_queries(const View& view, const AttentionSequence& s, int head, int channels) {
        return {view, query_row(view, s, 0, head), s.q_count, channels};
    }
    // Of k or v: paged keys lie where the table says.
    __device__ static Rows of_keys(const View& view, const AttentionCall& call, const AttentionSequence& s, int head,
                                   int channels) {
        Rows rows(view, head * view.stride[2], s.k_count, channels);
        if (call.block_rows > 0) {
            rows.call_ = &call;
            rows.sequence_ = s.key_batch;
        } else {
            rows.base_ += s.key_batch * view.stride[0] + s.k_begin * view.stride[1];
        }
        return rows;
    }

    __device__ Index offset(Index row) const {
        const Index* stride = view_->stride;
        if (call_ == nullptr) return base_ + row * stride[1];
        const View& table = call_->block_table;
        const Index block = load_index(table, sequence_ * table.stride[0] + row / call_->block_rows * table.stride[1]);
        const Index held = min(max(block, Index(0)), call_->blocks - 1);
        return base_ + held * stride[0] + row % call_->block_rows * stride[1];
    }
    // Where rows are whole units of 16 bytes: the 8 elements of unit u; how many of `rows` from `first` on have it.
    __device__ const std::uint16_t* unit(Index row, int u) const { return data() + offset(row) + 8 * u; }
    __device__ int left(Index first, int u, int rows) const {
        return 8 * u < channels_ ? static_cast<int>(min(count_ - first, Index(rows))) : 0;
    }
    // Of any type and layout; zeros beyond rows and channels.
    __device__ void load_unit(Index row, int u, float (&x)[8]) const {
        load_row(*view_, offset(row), view_->stride[3], 8 * u, row < count_ ? channels_ : 0, x);
    }
    __device__ bool is_paged() const { return call_ != nullptr; }
    __device__ Index row_stride() const { return view_->stride[1]; }
    __device__ const std::uint16_t* data() const { return static_cast<const std::uint16_t*>(view_->data); }
    // Rarely called, so out of line.
    __device__ __attribute__((noinline)) float at(Index row, int channel) const {
        return load(*view_, offset(row) + channel * view_->stride[3]);
    }
    __device__ __attribute__((noinline)) float dot(Index row, const Rows& other, Index other_row) const {
        float sum = 0;
        for (int c = 0; c < channels_; ++c) sum = fmaf(at(row, c), other.at(other_row, c), sum);
        return sum;
    }

    // Rows [first, first + n) and zeros beyond them, as planes, by all threads of the block. With `nonfinite` [n], a
    // row with Inf or NaN is marked there, and such numbers are 0 in the tile: they would spoil what has no weight for
    // them. The caller waits for the block before and after.
    template <int planes, int n, int columns>
    __device__ void copy(PlaneTile<planes, n, columns> tile, Index first, int* nonfinite, int thread,
                         int threads) const {
        if (nonfinite != nullptr) {
            for (int r = thread; r < n; r += threads) nonfinite[r] = 0;
            __syncthreads();
        }
        if (planes == 1 && units_)
            copy_units(tile[0], first, n, nonfinite, thread, threads);
        else
            copy_elements(tile, first, nonfinite, thread, threads);
    }

  private:
    // Units of 8 elements as they lie.
    template <int columns>
    __device__ void copy_units(const Tile<Plane, columns>& tile, Index first, int n, int* nonfinite, int thread,
                               int threads) const {
        constexpr int units = columns / 8;
#pragma unroll 4
        for (int i = thread; i < n * units; i += threads) {
            const int r = i / units, u = i % units;
            const Index row = first + r;
            std::uint32_t x[1][4] = {};
            if (row < count_ && 8 * u < channels_) {
                const uint4 eight =
                    *reinterpret_cast<const uint4*>(static_cast<const Plane*>(view_->data) + offset(row) + 8 * u);
                x[0][0] = eight.x, x[0][1] = eight.y, x[0][2] = eight.z, x[0][3] = eight.w;
                if (nonfinite != nullptr) mark(x, nonfinite + r);
            }
            *reinterpret_cast<uint4*>(shared_at(tile.unit(r, u))) = uint4{x[0][0], x[0][1], x[0][2], x[0][3]};
        }
    }

    // Of any type and layout; out of line, for the code is long.
    template <int planes, int n, int columns>
    __device__ __attribute__((noinline)) void copy_elements(PlaneTile<planes, n, columns> tile, Index first,
                                                            int* nonfinite, int thread, int threads) const {
        with_type(*view_, [&](const auto* data) {
            const Index step = view_->stride[3];
            for (int i = thread; i < n * (columns / 8); i += threads) {
                const int r = i / (columns / 8), u = i % (columns / 8), left = channels_ - 8 * u;
                const Index row = first + r;
                std::uint32_t out[planes][4] = {};
                if (row < count_ && left > 0) {
                    const auto* from = data + offset(row) + 8 * u * step;
                    unrolled<4>([&](int c) {
                        const float x = 2 * c < left ? to_float(from[2 * c * step]) : 0.0F;
                        const float y = 2 * c + 1 < left ? to_float(from[(2 * c + 1) * step]) : 0.0F;
                        std::uint32_t both[planes];
                        split<planes>(x, y, both);
                        unrolled<planes>([&](int p) { out[p][c] = both[p]; });
                    });
                    if (nonfinite != nullptr) mark(out, nonfinite + r);
                }
                unrolled<planes>([&](int p) {
                    *reinterpret_cast<uint4*>(shared_at(tile[p].unit(r, u))) =
                        uint4{out[p][0], out[p][1], out[p][2], out[p][3]};
                });
            }
        });
    }

    // What is not finite has all of it in the first plane.
    template <int planes>
    __device__ static void mark(std::uint32_t (&x)[planes][4], int* nonfinite) {
        unrolled<4>([&](int c) {
            if (!ptx::has_nonfinite(x[0][c], Plane())) return;
            *nonfinite = 1;
            const float2 both = ptx::unpack(x[0][c], Plane());
            x[0][c] = ptx::pack(isfinite(both.x) ? both.x : 0.0F, isfinite(both.y) ? both.y : 0.0F, Plane());
        });
    }

    const View* view_;
    Index base_, count_;
    int channels_;
    bool units_;                           // rows are whole units of 16 bytes of bf16
    const AttentionCall* call_ = nullptr;  // paged
    Index sequence_ = 0;
};

// The lane's elements of row r (half 0) or r + 8 (half 1) of a sum [16, 8·n], each made into value(element), to a row
// of memory.
template <int rows, int n, class Value>
__device__ inline void store_row(const View& to, Index offset, Acc<rows, n>& sum, int half, int channels, int lane,
                                 const Value& value) {
    with_type(to, [&](auto* data) {
        sum.each([&](float e, int of_half, int column) {
            const int channel = column + own_column(lane);
            if (of_half == half && channel < channels) assign(data + offset + channel * to.stride[3], value(e));
        });
    });
}

// What a tile's nonfinite rows add to the weighted sum: numbers that are not finite, where they have a weight. The
// weights [16, n] are those of the warp's rows; a lane has (row r, columns 2c and 2c + 1) and the same of row r
// + 8.
template <int n, int columns>
__device__ inline void add_nonfinite_rows(Acc<16, columns>& sum, Acc<16, n>& weights, const Rows& rows, Index first,
                                          const int* nonfinite, int channels, int lane) {
#pragma unroll 1
    for (int j = 0; j < n; ++j) {
        if (nonfinite[j] == 0) continue;
        float weight[2] = {};
        weights.each([&](float e, int half, int column) {
            const float x = __shfl_sync(0xffffffffu, e, lane / 4 * 4 + j % 8 / 2);
            if (column / 8 == j / 8 && column % 2 == j % 2) weight[half] = x;
        });
        sum.each([&](float& e, int half, int column) {
            const int channel = column + own_column(lane);
            if (channel >= channels) return;
            const float x = rows.at(first + j, channel);
            if (!isfinite(x) && weight[half] != 0) e += weight[half] * x;
        });
    }
}

}  // namespace softdelta::cuda

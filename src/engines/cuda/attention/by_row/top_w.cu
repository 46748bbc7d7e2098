// top_w: a block finds the keys that a query keeps, by the bits of their addends from the highest on.
//
//     the sign turned, addends are ordered as integers: 8 bits of them at a time, a count for each of 256 values says
//     in which the smallest kept addend lies
#include "engines/cuda/attention/addends.h"
#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {

namespace {

constexpr int select_threads = 256, digits = 256,
              select_bytes = (digits + select_threads + 2) * static_cast<int>(sizeof(int));

__device__ inline std::uint32_t ordered(float x) {
    const std::uint32_t bits = reinterpret_cast<const std::uint32_t&>(x);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ inline float from_ordered(std::uint32_t order) {
    const std::uint32_t bits = (order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order;
    return reinterpret_cast<const float&>(bits);
}

class Selection {
  public:
    __device__ Selection(const Addends& addends, Index query, Range keys, Index top_w)
        : addends_(addends), query_(query), keys_(keys), top_w_(top_w) {}

    __device__ KeptKeys run() {
        std::uint32_t smallest = 0;  // its digits so far
        Index left = top_w_;         // to keep of those that begin with them
        for (int shift = 24; shift >= 0; shift -= 8) {
            count(smallest, shift);
            if (thread_ == 0) choose(left);
            __syncthreads();
            const int digit = counts_[digits + select_threads], above = counts_[digits + select_threads + 1];
            __syncthreads();
            if (digit < 0) return {-INFINITY, -1};  // fewer keys than top_w
            smallest |= static_cast<std::uint32_t>(digit) << shift;
            left -= above;
        }
        return {from_ordered(smallest), last_of(smallest, static_cast<int>(left))};
    }

  private:
    // −∞, a key that is not seen, counts nowhere.
    __device__ bool order_of(Index key, std::uint32_t& order) const {
        const float addend = addends_.before_selection(query_, key);
        order = ordered(rank_of(addend) + 0.0F);  // −0 is 0
        return addend != -INFINITY;
    }

    // The digits that follow `prefix`, of all keys that begin with it.
    __device__ void count(std::uint32_t prefix, int shift) const {
        for (int i = thread_; i < digits; i += select_threads) counts_[i] = 0;
        __syncthreads();
        const std::uint32_t before = shift == 24 ? 0u : ~0u << (shift + 8);
        for (Index j = keys_.begin + thread_; j < keys_.end; j += select_threads) {
            std::uint32_t order;
            if (order_of(j, order) && (order & before) == prefix) atomicAdd(counts_ + (order >> shift & 255u), 1);
        }
        __syncthreads();
    }

    // The digit of the smallest that is kept, and how many are above it; −1: all are kept.
    __device__ void choose(Index left) const {
        int digit = digits - 1, above = 0;
        while (digit >= 0 && above + counts_[digit] < left) above += counts_[digit--];
        counts_[digits + select_threads] = digit;
        counts_[digits + select_threads + 1] = above;
    }

    // The key of that rank among those with an addend, counted from 1. Each thread has keys that lie side by side.
    __device__ int last_of(std::uint32_t smallest, int rank) const {
        const Index each = (keys_.end - keys_.begin + select_threads - 1) / select_threads;
        const Index begin = keys_.begin + thread_ * each, end = min(begin + each, keys_.end);
        int mine = 0;
        for (Index j = begin; j < end; ++j) {
            std::uint32_t order;
            if (order_of(j, order) && order == smallest) ++mine;
        }
        int* const of_threads = counts_ + digits;
        of_threads[thread_] = mine;
        __syncthreads();
        int before = 0;
        for (int t = 0; t < thread_; ++t) before += of_threads[t];
        if (before < rank && rank <= before + mine) {
            Index j = begin;
            for (int found = before;; ++j) {
                std::uint32_t order;
                if (order_of(j, order) && order == smallest && ++found == rank) break;
            }
            counts_[digits + select_threads] = static_cast<int>(j);
        }
        __syncthreads();
        return counts_[digits + select_threads];
    }

    const Addends& addends_;
    Index query_;
    Range keys_;
    Index top_w_;
    int thread_ = static_cast<int>(threadIdx.x);
    int* counts_ = reinterpret_cast<int*>(ptx::shared_memory());  // [digits], [select_threads], what is chosen
};

__global__ void __launch_bounds__(select_threads)
    selection_kernel(const __grid_constant__ AttentionPass pass, KeptKeys* kept) {
    const AttentionCall& call = pass.call;
    const RowTile at = pass.sequences.tile(pass.sequences.of_queries, static_cast<int>(blockIdx.x) / tile_rows);
    if (!at) return;
    const AttentionSequence s = pass.sequences[at.i];
    const Index query = at.first + blockIdx.x % tile_rows;
    const int head = static_cast<int>(blockIdx.y);
    if (query >= s.q_count) return;
    const Addends addends(call, s, head);
    const KeptKeys found = Selection(addends, query, visible_keys(call, s, query), call.top_w).run();
    if (threadIdx.x == 0) kept[call.row_of(s, head) + query] = found;
}

}  // namespace

void launch_selection(const AttentionPass& pass, KeptKeys* kept, cudaStream_t stream) {
    launch(selection_kernel,
           {row_block_grid<false>(row_blocks(pass.sequences.of_queries, pass.call.queries, 1), pass.call.heads,
                                  pass.sequences.of_queries, pass.sequences),
            select_threads, select_bytes},
           stream, "the keys that attention keeps", pass, kept);
}

}  // namespace softdelta::cuda

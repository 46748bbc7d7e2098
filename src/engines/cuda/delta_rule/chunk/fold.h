// What the two fold kernels share: a block of 8 warps folds one chunk of a value head.
#pragma once

#include "engines/cuda/delta_rule/chunk/folded.h"
#include "engines/cuda/delta_rule/chunk/inverse.h"
#include "engines/cuda/delta_rule/chunk/rows.h"
#include "engines/cuda/delta_rule/gate.h"

namespace softdelta::cuda {

constexpr int fold_threads = 256;
constexpr float highest_rise = 1;  // e^rise multiplies the rounding errors of what erasing cancels

template <class T, int K, bool channel>
class Fold {
  public:
    using Record = FoldedChunk<K, channel>;
    using Keys = Tile<T, K>;
    using Square = Tile<T, chunk_rows>;
    using Inverse = ChunkInverse<fold_threads>;

    __device__ Fold(const DeltaCall& the_call, const DeltaSequences& sequences, const FoldedChunks& folded)
        : call(the_call),
          s(sequences[static_cast<int>(blockIdx.z)]),
          c(static_cast<Index>(blockIdx.x)),
          hv(static_cast<int>(blockIdx.y)),
          thread(static_cast<int>(threadIdx.x)),
          warp(static_cast<int>(threadIdx.x) / 32),
          lane(static_cast<int>(threadIdx.x) % 32),
          rows(static_cast<int>(min(s.count - c * chunk_rows, Index(chunk_rows)))),
          record(folded.record(folded.slot(s, sequences.first + static_cast<int>(blockIdx.z), c, sequences.packed), hv,
                               Record::bytes)) {}

    // Offset of row i in a tensor of value heads.
    __device__ Index value_row(const View& v, int i) const {
        return s.batch * v.stride[0] + (s.begin + c * chunk_rows + i) * v.stride[1] + hv * v.stride[2];
    }
    __device__ float beta(int i) const {
        if (i >= rows) return 0;
        return call.beta ? make_beta(call, load(call.beta, value_row(call.beta, i))) : 1.0F;
    }

    // 1/√(Σx² + 1e-6) of row thread / 4, by four neighbouring threads; whether it holds Inf or NaN.
    __device__ float norm_of(const Keys& tile, bool& odd) const {
        const int row = thread / 4;
        float sum = 0;
#pragma unroll 4
        for (int u = thread % 4; u < Keys::units; u += 4) {
            const uint4 x = *reinterpret_cast<const uint4*>(shared_at(tile.unit(row, u)));
            for (const std::uint32_t two : {x.x, x.y, x.z, x.w}) {
                odd = odd || ptx::has_nonfinite(two, T());
                const float2 both = ptx::unpack(two, T());
                sum = fmaf(both.x, both.x, fmaf(both.y, both.y, sum));
            }
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        return call.l2norm ? 1 / sqrtf(sum + 1e-6F) : 1.0F;
    }

    // A tile of 16-bit elements, two neighbours of rows r and r + 8 of each accumulator.
    __device__ static void store_packed(const Square& to, int row, int n, int lane, std::uint32_t low,
                                        std::uint32_t high) {
        *reinterpret_cast<std::uint32_t*>(shared_at(to.unit(row + lane / 4, n) + 4 * (lane % 4))) = low;
        *reinterpret_cast<std::uint32_t*>(shared_at(to.unit(row + lane / 4 + 8, n) + 4 * (lane % 4))) = high;
    }

    // Shared memory to the record.
    __device__ void copy_out(const void* from, int to, int bytes) const {
        const auto* data = static_cast<const char*>(from);
        for (int i = 16 * thread; i < bytes; i += 16 * fold_threads)
            *reinterpret_cast<uint4*>(record + to + i) = *reinterpret_cast<const uint4*>(data + i);
    }

    const DeltaCall& call;
    const DeltaSequence s;
    const Index c;
    const int hv, thread, warp, lane, rows;
    char* const record;
};

}  // namespace softdelta::cuda

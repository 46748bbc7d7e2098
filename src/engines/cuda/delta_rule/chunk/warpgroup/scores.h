// The warpgroup of the scores: looks whether there is Inf or NaN in a chunk before others go on with it, and makes its
// scores where they are not in the record.
#pragma once

#include "engines/cuda/delta_rule/chunk/shared_fold.h"
#include "engines/cuda/delta_rule/chunk/warpgroup/stages.h"

namespace softdelta::cuda::chunk_scan {

template <class T, int K, Keys keys>
class Scores {
    using Layout = Shared<T, K, keys>;

  public:
    const DeltaCall& call;
    Layout shared;
    bool wanted;
    int warp, lane;

    __device__ void run(int chunks) const {
        for (int c = 0; c < chunks; ++c) {
            if (c == 0) look(0);
            if (c + 1 < chunks) look(c + 1);
            if constexpr (!Layout::scored)
                if (wanted) make(c);
            shared.stages().release(c, lane);
        }
    }

  private:
    // The fold has seen the keys that it had.
    __device__ void look(int c) const {
        shared.stages().wait_until_filled(c);
        bool odd = has_nonfinite(shared.values_of(c)) || shared.factors_of(c).by_token != 0;
        if constexpr (!Layout::scored) odd = has_nonfinite(shared.read(c)) || odd;
        if constexpr (keys == Keys::only_written) odd = has_nonfinite(shared.write(c)) || odd;
        if (odd) shared.odd_of(c) = 1;
        shared.seen().announce(c, lane);
    }
    template <class Rows>
    __device__ bool has_nonfinite(const Rows& tile) const {
        const char* const from = shared_at(tile.base + 16u * static_cast<std::uint32_t>(32 * warp + lane));
        bool odd = false;
#pragma unroll
        for (int i = 0; i < C * Rows::units / group; ++i) {
            const uint4 x = *reinterpret_cast<const uint4*>(from + 16 * group * i);
            for (const std::uint32_t two : {x.x, x.y, x.z, x.w}) odd = odd | ptx::has_nonfinite(two, T());
        }
        return odd;
    }
    __device__ void make(int c) const {
        const KeyProducts<T, K, true> products{call, warp, lane};
        const int row = 16 * warp + lane / 4;
        float x[C / 8][4] = {}, norms[2] = {1, 1};
        products.begin(shared.read(c), shared.write(c), x);
        if (call.l2norm) make_norms(c, norms);
        products.end(shared.decays_of(c), true, {call.scale * norms[0], call.scale * norms[1]}, x);
        shared.scores().wait_until_free(c);
        store_products(shared.score_of(c), 16 * warp, lane, x);
        if (call.l2norm && lane % 4 == 0)
            for (int half = 0; half < 2; ++half) shared.factors_of(c).read[row + 8 * half] *= norms[half];
        shared.scores().hand_on(c, lane);
    }
    // 1/√(Σq² + 1e-6) of the lane's rows; two lanes share a row.
    __device__ void make_norms(int c, float (&norms)[2]) const {
        float sum = 0;
#pragma unroll 4
        for (int u = lane % 2; u < KeyTile<T, K>::units; u += 2) {
            const uint4 x = *reinterpret_cast<const uint4*>(shared_at(shared.read(c).unit(16 * warp + lane / 2, u)));
            sum += dot<T>(x, x);
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            norms[half] = 1 / sqrtf(__shfl_sync(0xffffffffu, sum, 2 * (lane / 4 + 8 * half)) + 1e-6F);
    }
};

}  // namespace softdelta::cuda::chunk_scan

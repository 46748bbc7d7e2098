// What a chunk needs before states are known, for gates that all channels share, or for none:
//     score = scale·(q kᵀ)∘e^(G_i − G_j)     inverse = (I + L)⁻¹,  L = β∘(p kᵀ)∘e^(E_i − G_j)
// Gates are summed in f64. A warp has 16 rows of the scores, L and the inverse. The inverse is a long chain. So blocks
// are small, and a multiprocessor runs as many as it has memory for. Warpgroups: four warps multiply together (sm_90a).
#include <algorithm>

#include "engines/cuda/delta_rule/fold/inverse.h"
#include "engines/cuda/delta_rule/fold/launch.h"
#include "engines/cuda/delta_rule/fold/norms.h"
#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/saved.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

namespace {

constexpr int C = chunk_rows, threads = 128;

struct Small {
    RowFactors factors;
    float anchors[4][C];
};

template <class T, int K, bool own_p>
struct Shared {
    static constexpr int key_bytes = Tile<T, K>::bytes(C), memory_bytes = static_cast<int>(sizeof(InverseMemory));
    static constexpr int made = 2 * ChunkRecord::square_bytes;  // score and inverse lie where keys lay, then its memory
    static constexpr int tiles = std::max((own_p ? 3 : 2) * key_bytes, made + memory_bytes), small = tiles,
                         bytes = small + static_cast<int>(sizeof(Small));
    static_assert(small % 16 == 0);
};

template <class T, int K, bool own_p, bool warpgroups>
class BackwardFold {
    using Layout = Shared<T, K, own_p>;
    using Keys = KeyTile<T, K>;
    using Square = Tile<T, C>;

  public:
    __device__ BackwardFold(const ChunkGradients& of, const ChunkPosition& at)
        : call_(of.call), s_(at.s), c_(at.c), rows_(at.rows()), saved_(of.saved) {}

    __device__ void run() {
        if (thread_ == 0 && blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) *saved_.taken = 0;
        if (rows_ <= 0) return;
        const GivenTokens given(call_, s_, warp_ == 0 ? c_ : s_.count, hv_, lane_);
        const int h = call_.key_head(hv_);
        copy_rows<threads>(q(), call_.q, s_, c_, h, 0, call_.key_size, thread_);
        copy_rows<threads>(k(), call_.k, s_, c_, h, 0, call_.key_size, thread_);
        if (own_p) copy_rows<threads>(p(), call_.p, s_, c_, h, 0, call_.key_size, thread_);
        ChunkFlags& flags = saved_.flags_of(slot_, hv_);
        if (thread_ == 0) {
            flags = {};
            small_.factors.by_token = 0;
        }
        bool nonfinite = false;
        if (warp_ == 0) nonfinite = make_gates(given);
        ptx::wait_for_copies();
        if constexpr (warpgroups) ptx::publish_to_products();
        __syncthreads();
        float x[C / 8][4];
        begin_multiply_keys<T, warpgroups>(q(), k(), 16 * warp_, lane_, x);
        nonfinite = make_norms() || nonfinite;
        __syncthreads();
        make_factors();
        __syncthreads();
        if constexpr (warpgroups) ptx::wait_for_products<0>(x);
        nonfinite = scale(true, x) || nonfinite;
        std::uint32_t score[C / 16][4];
        to_left<T>(score, x);

        const bool erases = call_.erase != core::Erase::nothing;
        if (erases) {
            begin_multiply_keys<T, warpgroups>(p(), k(), 16 * warp_, lane_, x);
            if constexpr (warpgroups) ptx::wait_for_products<0>(x);
        }
        __syncthreads();  // the tiles of keys become those of the scores and of the inverse
        char* record = saved_.record(slot_, hv_);
        const Square scores{base_}, inverses{base_ + ChunkRecord::inverse};
        unrolled<C / 8>([&](int n) {
            store_packed(scores, 16 * warp_, n, lane_, score[n / 2][n % 2 * 2], score[n / 2][n % 2 * 2 + 1]);
        });
        copy_own_rows(scores, record, warp_, lane_);
        if (erases) nonfinite = scale(false, x) || nonfinite;
        if (nonfinite) flags.record = 1, small_.factors.by_token = 1;
        if (erases) {
            float inverse[C / 8][4];
            WarpInverse<T>{*reinterpret_cast<InverseMemory*>(memory_ + Layout::made), warp_, lane_}.run(
                x, inverse, [] { __syncthreads(); });
            store_products(inverses, 16 * warp_, lane_, inverse);
            copy_own_rows(inverses, record + ChunkRecord::inverse, warp_, lane_);
        }
        __syncthreads();
        copy_out(&small_.factors, record + ChunkRecord::factors, static_cast<int>(sizeof(RowFactors)), thread_,
                 threads);
    }

  private:
    __device__ Keys q() const { return {base_}; }
    __device__ Keys k() const { return {base_ + Layout::key_bytes}; }
    __device__ Keys p() const { return {base_ + (own_p ? 2 : 1) * Layout::key_bytes}; }
    // By one warp. Gates are at least −750: e^−750 is 0.
    __device__ bool make_gates(const GivenTokens& given) {
        RowFactors& f = small_.factors;
        const GateSumsOfTokens of(call_, HeadGate(call_, hv_), given, rows_, lane_, -750.0, f.beta);
        f.sums[2 * lane_ + 1] = of.first;
        f.sums[2 * lane_ + 2] = of.second;
        if (lane_ == 0) f.sums[0] = f.sums[C + 1] = 0;
        return of.nonfinite();
    }

    // 1/√(Σx² + 1e-6) of row thread / 2, by two neighbouring threads, or 1.
    __device__ float norm_of(const Keys& tile) const {
        if (!call_.l2norm) return 1.0F;
        const int row = thread_ / 2;
        float sum = 0;
        bool far = false;
#pragma unroll 4
        for (int u = thread_ % 2; u < Keys::units; u += 2) {
            const uint4 x = *reinterpret_cast<const uint4*>(shared_at(tile.unit(row, u)));
            for (const std::uint32_t two : {x.x, x.y, x.z, x.w}) far = far | is_far<T>(two);
            sum += dot<T>(x, x);
        }
        return norm_of_squares(sum_of_lanes<2>(sum), far);
    }
    // Whether a row is too large for them.
    __device__ bool make_norms() {
        const float q_norm = norm_of(q()), k_norm = norm_of(k());
        const float p_norm = own_p ? norm_of(p()) : k_norm;
        if (thread_ % 2 == 0) {
            small_.factors.q_norm[thread_ / 2] = q_norm;
            small_.factors.k_norm[thread_ / 2] = k_norm;
            small_.factors.p_norm[thread_ / 2] = p_norm;
        }
        return q_norm == 0 || k_norm == 0 || p_norm == 0;
    }
    __device__ void make_factors() {
        RowFactors& f = small_.factors;
        const double* G = f.sums + 1;
        if (thread_ < C) {
            f.read[thread_] = call_.scale * fast_exp(static_cast<float>(G[thread_])) * f.q_norm[thread_];
            f.erase[thread_] = fast_exp(static_cast<float>(G[thread_ - call_.erase_shift()])) * f.p_norm[thread_];
            f.write[thread_] = fast_exp(static_cast<float>(G[C - 1] - G[thread_])) * f.k_norm[thread_];
            if (thread_ == 0) f.last = expf(static_cast<float>(G[C - 1]));
            if (thread_ < 2) f.unused[thread_] = 0;
        }
        // For the warp's rows, r the last row before them: e^(G_r − G_j).
        for (int j = lane_; j < 16 * warp_; j += 32)
            small_.anchors[warp_][j] = fast_exp(static_cast<float>(f.sums[16 * warp_] - G[j])) * f.k_norm[j];
        __syncwarp();
    }

    __device__ bool scale(bool of_q, float (&x)[C / 8][4]) const {
        const RowFactors& f = small_.factors;
        const double* G = f.sums + 1;
        float own[2], to_anchor[2];
        double from[2];
        unrolled<2>([&](int half) {
            const int i = 16 * warp_ + lane_ / 4 + 8 * half;
            from[half] = G[i - (of_q ? 0 : call_.erase_shift())];
            own[half] = of_q ? call_.scale * f.q_norm[i] : f.beta[i] * f.p_norm[i];
            to_anchor[half] = own[half] * fast_exp(static_cast<float>(from[half] - f.sums[16 * warp_]));
        });
        const auto within = [&](int half, int j) {
            const int column = 16 * warp_ + j;
            return fast_exp(static_cast<float>(from[half] - G[column])) * f.k_norm[column];
        };
        return decay_between_rows(of_q, warp_, lane_, own, to_anchor, small_.anchors[warp_], within, x);
    }

    const DeltaCall& call_;
    const DeltaSequence s_;
    const Index c_;
    const int hv_ = static_cast<int>(blockIdx.x), thread_ = static_cast<int>(threadIdx.x), warp_ = thread_ / 32,
              lane_ = thread_ % 32, rows_;
    const Index slot_ = s_.first_slot + c_;
    const SavedChunks& saved_;
    char* memory_ = ptx::shared_memory();
    std::uint32_t base_ = ptx::shared_address(memory_);
    Small& small_ = *reinterpret_cast<Small*>(memory_ + Layout::small);
};

template <class T, int K, bool own_p, bool warpgroups>
__global__ void __launch_bounds__(threads, own_p ? 4 : 6)
    backward_fold_kernel(const __grid_constant__ ChunkGradients of) {
    if constexpr (warpgroups) ptx::follow_launch_before();
    BackwardFold<T, K, own_p, warpgroups>(of, chunk_of_block(of.sequences)).run();
}

__global__ void __launch_bounds__(threads)
    kept_flags_kernel(const __grid_constant__ ChunkGradients of, const int* kept_by_token) {
    const int number = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x),
              n = static_cast<int>(blockIdx.y), hv = number % of.saved.heads;
    if (number == 0 && n == 0) *of.saved.taken = 0;
    const auto [s, c] = of.sequences.chunk(number / of.saved.heads, n);
    if (c * C >= s.count) return;
    const Index slot = s.first_slot + c;
    of.saved.flags_of(slot, hv) = {static_cast<std::uint16_t>(kept_by_token[slot * of.saved.heads + hv]), 0, 0, 0};
}

}  // namespace

void launch_kept_flags(const ChunkGradients& of, const int* kept_by_token, cudaStream_t stream) {
    const Blocks blocks(blocks_of(of.sequences.chunks * of.call.heads, threads), of.sequences.rows_of_grid());
    launch(kept_flags_kernel, {blocks, threads}, stream, "what the forward pass kept", of, kept_by_token);
}

void launch_backward_fold(Level level, const ChunkGradients& of, cudaStream_t stream) {
    const auto with = [&]<int K, bool own_p>() {
        const bool warpgroups = level == Level::sm_90a;
        launch(warpgroups ? backward_fold_kernel<SavedElement, K, own_p, true>
                          : backward_fold_kernel<SavedElement, K, own_p, false>,
               {blocks_by_head(of), threads, Shared<SavedElement, K, own_p>::bytes, warpgroups}, stream,
               "the delta rules' fold for gradients", of);
    };
    if (of.call.own_p)
        with.template operator()<128, true>();
    else if (of.saved.size == 64)
        with.template operator()<64, false>();
    else
        with.template operator()<128, false>();
}

}  // namespace softdelta::cuda

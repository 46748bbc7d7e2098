// The fold of gates that all channels share, or of none:
//     score = scale·(q kᵀ)∘e^(G_i − G_j)     solve = (I + L)⁻¹∘β,  L = β∘(p kᵀ)∘e^(E_i − G_j)
// Gates are summed in f64. Warps 0–3 make 16 rows of the scores each, 4–7 of L.
#include "engines/cuda/delta_rule/chunk/fold.h"
#include "engines/cuda/delta_rule/chunk/launch_fold.h"
#include "engines/cuda/grid.h"

namespace softdelta::cuda {

namespace {

constexpr int C = chunk_rows;

struct Small {
    ChunkFactors factors;
    double sums[C + 2];  // of the gates before each token
    float anchors[4][C];
    float beta[C], q_norm[C], k_norm[C], p_norm[C];
};

template <class T, int K, bool own_p>
struct Shared {
    using Inverse = ChunkInverse<fold_threads>;
    static constexpr int key_bytes = Tile<T, K>::bytes(C);
    static constexpr int lower = (own_p ? 3 : 2) * key_bytes, inverse = lower + Inverse::square_bytes,
                         products = inverse + Inverse::square_bytes, small = products + Inverse::sums_bytes,
                         bytes = small + static_cast<int>(sizeof(Small));
    static_assert(small % 16 == 0);
};

template <class T, int K, bool own_p>
class SharedFold : public Fold<T, K, false> {
    using Base = Fold<T, K, false>;
    using Layout = Shared<T, K, own_p>;
    using Base::call;
    using Base::lane;
    using Base::rows;
    using Base::thread;
    using Base::warp;
    using typename Base::Inverse;
    using typename Base::Keys;
    using typename Base::Record;
    using typename Base::Square;

  public:
    __device__ SharedFold(const DeltaCall& the_call, const DeltaSequences& sequences, const FoldedChunks& folded)
        : Base(the_call, sequences, folded),
          memory_(ptx::shared_memory()),
          base_(ptx::shared_address(memory_)),
          small_(*reinterpret_cast<Small*>(memory_ + Layout::small)) {}

    __device__ void run() {
        if (rows <= 0) return;
        const int h = call.key_head(this->hv);
        copy_rows(q(), call.q, this->s, this->c, h, 0, call.key_size, thread, fold_threads);
        copy_rows(k(), call.k, this->s, this->c, h, 0, call.key_size, thread, fold_threads);
        if (own_p) copy_rows(p(), call.p, this->s, this->c, h, 0, call.key_size, thread, fold_threads);
        if (thread == 0) small_.factors.by_token = 0;
        __syncthreads();
        if (warp == 0) make_gates_of_chunk();
        ptx::wait_for_copies();
        __syncthreads();
        make_norms();
        __syncthreads();
        make_factors();
        __syncthreads();

        float x[C / 8][4];
        const bool erases = call.erase != core::Erase::nothing;
        const bool of_q = warp < 4;
        const int block = warp % 4;
        if (of_q || erases) {
            multiply_keys(of_q ? q() : p(), 16 * block, x);
            scale(of_q, block, x);
        }
        __syncthreads();  // the tile of q becomes that of the scores, that of k the inverse's
        if (of_q) {
            const Square to{base_};
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
                this->store_packed(to, 16 * block, n, lane, ptx::pack(x[n][0], x[n][1], T()),
                                   ptx::pack(x[n][2], x[n][3], T()));
        } else if (erases) {
#pragma unroll
            for (int n = 0; n < C / 8; ++n) {
                if (n / 2 > block) continue;
                float* to = lower() + (16 * block + lane / 4) * Inverse::row + 8 * n + 2 * (lane % 4);
                *reinterpret_cast<float2*>(to) = {x[n][0], x[n][1]};
                *reinterpret_cast<float2*>(to + 8 * Inverse::row) = {x[n][2], x[n][3]};
            }
        }
        const Square solve{base_ + Record::square_bytes};
        if (erases) {
            const Inverse inverse{lower(), reinterpret_cast<float*>(memory_ + Layout::inverse),
                                  reinterpret_cast<float*>(memory_ + Layout::products)};
            inverse.run(thread);
            pack_solve(inverse.X, Inverse::row, small_.beta, solve, memory_ + Record::square_bytes, thread,
                       fold_threads);
        }
        __syncthreads();
        this->copy_out(memory_, 0, (erases ? 2 : 1) * Record::square_bytes);
        this->copy_out(&small_.factors, Record::factors, static_cast<int>(sizeof(ChunkFactors)));
    }

  private:
    static_assert(2 * Record::square_bytes <= 2 * Layout::key_bytes);

    __device__ Keys q() const {
        return {base_};
    }
    __device__ Keys k() const {
        return {base_ + Layout::key_bytes};
    }
    __device__ Keys p() const {
        return {base_ + (own_p ? 2 : 1) * Layout::key_bytes};
    }
    __device__ float* lower() const {
        return reinterpret_cast<float*>(memory_ + Layout::lower);
    }

    // Gates and β of 64 tokens by one warp. Sums in f64 of gates that are at least −750: e^−750 is 0.
    __device__ void make_gates_of_chunk() {
        const HeadGate head(call, this->hv);
        double g[2];
        float rise = 0;
        bool odd = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 2 * lane + i;
            const bool gated = row < rows && call.gate != core::Gate::none;
            g[i] = gated ? head.gate(call, call.g ? load(call.g, this->value_row(call.g, row)) : 0.0F) : 0.0;
            const float beta = this->beta(row);
            rise += static_cast<float>(fmax(g[i], 0.0));
            odd = odd || isnan(g[i]) || !isfinite(beta);
            small_.beta[row] = beta;
        }
        const double first = fmax(g[0], -750.0), second = fmax(g[1], -750.0);
        double sum = first + second;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            const double before = __shfl_up_sync(0xffffffffu, sum, lanes);
            if (lane >= lanes) sum += before;
        }
        double* G = small_.sums + 1;
        G[2 * lane] = sum - second;
        G[2 * lane + 1] = sum;
        if (lane == 0) small_.sums[0] = 0;
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) rise += __shfl_xor_sync(0xffffffffu, rise, lanes);
        odd = odd || !(rise <= highest_rise);
        if (odd) small_.factors.by_token = 1;
    }

    __device__ void make_norms() {
        bool odd = false;
        const float q_norm = this->norm_of(q(), odd), k_norm = this->norm_of(k(), odd);
        const float p_norm = own_p ? this->norm_of(p(), odd) : k_norm;
        if (thread % 4 == 0) {
            small_.q_norm[thread / 4] = q_norm;
            small_.k_norm[thread / 4] = k_norm;
            small_.p_norm[thread / 4] = p_norm;
        }
        if (odd) small_.factors.by_token = 1;
    }

    // The row before i that erasing looks from: E_i = G_(i − shift).
    __device__ int shift() const {
        return call.erase == core::Erase::from_previous_state ? 1 : 0;
    }

    __device__ void make_factors() {
        const double* G = small_.sums + 1;
        ChunkFactors& f = small_.factors;
        if (thread < C) {
            f.read[thread] = call.scale * expf(static_cast<float>(G[thread])) * small_.q_norm[thread];
            f.erase[thread] = expf(static_cast<float>(G[thread - shift()])) * small_.p_norm[thread];
            f.write[thread] = expf(static_cast<float>(G[C - 1] - G[thread])) * small_.k_norm[thread];
            if (thread == 0) f.last = expf(static_cast<float>(G[C - 1]));
            if (thread < 2) f.unused[thread] = 0;
        }
        // For the rows of each block, r the last row before them: e^(G_r − G_j).
        const int block = thread / C, j = thread % C;
        small_.anchors[block][j] =
            j < 16 * block ? expf(static_cast<float>(small_.sums[16 * block] - G[j])) * small_.k_norm[j] : 0.0F;
    }

    // Rows [row, row + 16) of left·kᵀ, up to the diagonal.
    __device__ void multiply_keys(const Keys& left, int row, float (&x)[C / 8][4]) const {
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] = 0;
#pragma unroll 2
        for (int depth = 0; depth < K / 16; ++depth) {
            std::uint32_t a[4], b[4];
            left.load_left(a, row, depth, lane);
#pragma unroll
            for (int n = 0; n < C / 16; ++n) {
                if (16 * n > row) break;
                k().load_right(b, 16 * n, depth, lane);
                ptx::multiply(x[2 * n], a, b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], a, b[2], b[3], T());
            }
        }
    }

    // The decays between rows: of scores up to the diagonal, of L below it.
    __device__ void scale(bool of_q, int block, float (&x)[C / 8][4]) const {
        const double* G = small_.sums + 1;
        const int back = of_q ? 0 : shift();
        float own[2];
        double from[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 16 * block + lane / 4 + 8 * half;
            from[half] = G[i - back];
            own[half] = of_q ? call.scale * small_.q_norm[i] : small_.beta[i] * small_.p_norm[i];
        }
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int half = e / 2, i = 16 * block + lane / 4 + 8 * half, j = 8 * n + 2 * (lane % 4) + e % 2;
                if (n / 2 > block) {
                    x[n][e] = 0;
                } else if (n / 2 < block) {
                    const float to_anchor = expf(static_cast<float>(from[half] - small_.sums[16 * block]));
                    x[n][e] *= own[half] * to_anchor * small_.anchors[block][j];
                } else {
                    const bool seen = of_q ? j <= i : j < i;
                    x[n][e] = seen
                                  ? x[n][e] * own[half] * expf(static_cast<float>(from[half] - G[j])) * small_.k_norm[j]
                                  : 0.0F;
                }
            }
    }

    char* memory_;
    std::uint32_t base_;
    Small& small_;
};

template <class T, int K, bool own_p>
__global__ void __launch_bounds__(fold_threads)
    fold_shared_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                       const __grid_constant__ FoldedChunks folded) {
    SharedFold<T, K, own_p>(call, sequences, folded).run();
}

}  // namespace

template <class T>
void launch_fold_shared(const DeltaCall& call, const DeltaSequences& sequences, const FoldedChunks& folded,
                        cudaStream_t stream) {
    const dim3 blocks = fold_blocks(call, sequences);
    const char* what = "the delta rules' fold";
    if (call.own_p)
        launch(fold_shared_kernel<T, 128, true>, {blocks, fold_threads, Shared<T, 128, true>::bytes}, stream, what,
               call, sequences, folded);
    else if (call.key_size <= 64)
        launch(fold_shared_kernel<T, 64, false>, {blocks, fold_threads, Shared<T, 64, false>::bytes}, stream, what,
               call, sequences, folded);
    else
        launch(fold_shared_kernel<T, 128, false>, {blocks, fold_threads, Shared<T, 128, false>::bytes}, stream, what,
               call, sequences, folded);
}
template void launch_fold_shared<__nv_bfloat16>(const DeltaCall&, const DeltaSequences&, const FoldedChunks&,
                                                cudaStream_t);
template void launch_fold_shared<__half>(const DeltaCall&, const DeltaSequences&, const FoldedChunks&, cudaStream_t);

}  // namespace softdelta::cuda

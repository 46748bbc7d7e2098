// The fold of a gate for each channel (erasing from the decayed state). A chunk is four blocks of 16 rows. Within a
// block, with L the sum of its gates up to a row and R the sum after it, no exponent is positive:
//
//     block I against an earlier block J   (q e^(L_i + blocks between)) (k e^(R_j))ᵀ        matrix products
//     block I against itself               Σ_m q_im k_jm e^(L_im − L_jm)                    term by term
//
// and the same with k instead of q for L of the inverse. Sums of gates in f32 from max(g, −100): what e^−100 leaves of
// a 16-bit number is 0.
#include "engines/cuda/delta_rule/chunk/fold.h"
#include "engines/cuda/delta_rule/chunk/launch_fold.h"
#include "engines/cuda/grid.h"

namespace softdelta::cuda {

namespace {

constexpr int C = chunk_rows, K = 128;

struct Small {
    ChunkFactors factors;
    float last[K];       // e^(sum of all gates)
    float totals[4][K];  // of a block's gates
    float own[4][K];     // e^total
    float before[4][K];  // e^(totals of earlier blocks)
    float after[4][K];   // e^(totals of later blocks)
    float beta[C], q_norm[C], k_norm[C];
};

template <class T>
struct Shared {
    using Inverse = ChunkInverse<fold_threads>;
    static constexpr int key_bytes = Tile<T, K>::bytes(C);
    static constexpr int lower = 3 * key_bytes, sums = lower + Inverse::square_bytes;
    static constexpr int sums_bytes = C * K * 4;  // then the inverse
    static constexpr int products = sums + sums_bytes, small = products + Inverse::sums_bytes,
                         bytes = small + static_cast<int>(sizeof(Small));
    static_assert(Inverse::square_bytes <= sums_bytes && small % 16 == 0);
};

template <class T>
class ChannelFold : public Fold<T, K, true> {
    using Base = Fold<T, K, true>;
    using Layout = Shared<T>;
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
    __device__ ChannelFold(const DeltaCall& the_call, const DeltaSequences& sequences, const FoldedChunks& folded)
        : Base(the_call, sequences, folded),
          memory_(ptx::shared_memory()),
          base_(ptx::shared_address(memory_)),
          small_(*reinterpret_cast<Small*>(memory_ + Layout::small)) {}

    __device__ void run() {
        if (rows <= 0) return;
        const int h = call.key_head(this->hv);
        copy_rows(q(), call.q, this->s, this->c, h, 0, call.key_size, thread, fold_threads);
        copy_rows(k(), call.k, this->s, this->c, h, 0, call.key_size, thread, fold_threads);
        for (int i = thread; i < static_cast<int>(sizeof(ChunkFactors) / 4); i += fold_threads)
            reinterpret_cast<int*>(&small_.factors)[i] = 0;
        __syncthreads();
        make_sums();
        ptx::wait_for_copies();
        __syncthreads();
        make_norms();
        if (thread < K) make_block_factors(thread);
        __syncthreads();
        multiply_diagonal(warp % 4, warp / 4);
        __syncthreads();
        scale_keys();
        __syncthreads();

        const bool of_q = warp < 4;
        const int block = warp % 4;
        float x[C / 8][4] = {};
        multiply_earlier(of_q ? q() : k(), block, x);
        __syncthreads();  // the tile of q becomes that of the scores, that of k the inverse's
        if (of_q)
            store_scores(block, x);
        else
            store_lower(block, x);
        const Inverse inverse{lower(), sums(), reinterpret_cast<float*>(memory_ + Layout::products)};
        inverse.run(thread);
        pack_solve(inverse.X, Inverse::row, small_.beta, Square{base_ + Record::square_bytes},
                   memory_ + Record::square_bytes, thread, fold_threads);
        __syncthreads();
        this->copy_out(memory_, 0, 2 * Record::square_bytes);
        this->copy_out(&small_.factors, Record::factors, static_cast<int>(sizeof(ChunkFactors)));
        this->copy_out(small_.last, Record::last, K * 4);
    }

  private:
    // q, k: as given, then q e^L and k e^L with norm and scale; later: k e^R.
    __device__ Keys q() const { return {base_}; }
    __device__ Keys k() const { return {base_ + Layout::key_bytes}; }
    __device__ Keys later() const { return {base_ + 2 * Layout::key_bytes}; }
    __device__ float* lower() const { return reinterpret_cast<float*>(memory_ + Layout::lower); }
    __device__ float* sums() const { return reinterpret_cast<float*>(memory_ + Layout::sums); }  // L [64, K]

    // L of two blocks for each thread, and β.
    __device__ void make_sums() {
        const int m = thread % K;
        const HeadGate head(call, this->hv);
        const bool inside = m < call.key_size;
        const float dt = call.dt_bias && inside
                             ? load(call.dt_bias, (Index(this->hv) * call.key_size + m) * call.dt_bias.stride[0])
                             : 0.0F;
        const bool bounded = call.raw_gate == core::RawGate::lower_bound;
        float rise = 0;
        bool odd = false;
        for (int n = 0; n < 2; ++n) {
            const int block = 2 * (thread / K) + n;
            float sum = 0, given[16];
#pragma unroll
            for (int i = 0; i < 16; ++i)
                given[i] = inside && call.g && 16 * block + i < rows
                               ? load(call.g, this->value_row(call.g, 16 * block + i) + m * call.g.stride[3])
                               : 0.0F;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float g = call.g ? given[i] : head.constant;
                if (call.raw_gate != core::RawGate::none)
                    g = bounded ? static_cast<float>(call.lower_bound) * sigmoid(head.rate * (g + dt))
                                : -head.rate * softplus(g + dt);
                if (!inside || 16 * block + i >= rows) g = 0;
                odd = odd || isnan(g);
                rise += fmaxf(g, 0.0F);
                sum += fmaxf(g, -100.0F);
                sums()[(16 * block + i) * K + m] = sum;
            }
            small_.totals[block][m] = sum;
        }
        if (odd || !(rise <= highest_rise / 2)) small_.factors.by_token = 1;
        if (thread >= C) return;
        const float beta = this->beta(thread);
        small_.beta[thread] = beta;
        if (!isfinite(beta)) small_.factors.by_token = 1;
    }

    __device__ void make_norms() {
        bool odd = false;
        const float q_norm = this->norm_of(q(), odd), k_norm = this->norm_of(k(), odd);
        if (thread % 4 == 0) {
            small_.q_norm[thread / 4] = q_norm * call.scale;
            small_.k_norm[thread / 4] = k_norm;
        }
        if (odd) small_.factors.by_token = 1;
    }

    __device__ void make_block_factors(int m) {
        float before = 0, after = 0;
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            small_.own[block][m] = expf(small_.totals[block][m]);
            small_.before[block][m] = expf(before);
            before += small_.totals[block][m];
        }
#pragma unroll
        for (int block = 3; block >= 0; --block) {
            small_.after[block][m] = expf(after);
            after += small_.totals[block][m];
        }
        small_.last[m] = expf(before);
    }

    // A block of rows against itself, every other row; a lane has four channels.
    __device__ void multiply_diagonal(int block, int odd_rows) {
        const auto four = [&](const Keys& tile, int row, float(&x)[4]) {
            const uint2 both = *reinterpret_cast<const uint2*>(shared_at(tile.unit(row, lane / 2) + 8 * (lane % 2)));
            const float2 low = ptx::unpack(both.x, T()), high = ptx::unpack(both.y, T());
            x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
        };
        const float4* L = reinterpret_cast<const float4*>(sums() + 16 * block * K) + lane;
        for (int i = odd_rows; i < 16; i += 2) {
            float of_q[4], of_k[4], score[16], erase[16];
            four(q(), 16 * block + i, of_q);
            four(k(), 16 * block + i, of_k);
            const float4 own = L[i * (K / 4)];
#pragma unroll
            for (int part = 0; part < 4; ++part)
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int j = 4 * part + n;
                    score[j] = erase[j] = 0;
                    if (4 * part > i) continue;
                    float key[4];
                    four(k(), 16 * block + j, key);
                    const float4 sum = L[j * (K / 4)];
                    const float decay[4] = {__expf(own.x - sum.x), __expf(own.y - sum.y), __expf(own.z - sum.z),
                                            __expf(own.w - sum.w)};
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float y = j > i ? 0.0F : key[e] * decay[e];
                        score[j] = fmaf(of_q[e], y, score[j]);
                        erase[j] = fmaf(of_k[e], y, erase[j]);
                    }
                }
            sum_sixteen(score);
            sum_sixteen(erase);
            if (lane % 2 != 0) continue;
            const int j = own_sum(), row = 16 * block + i, column = 16 * block + j;
            // Scores go above the diagonal, transposed: nothing else lies there.
            if (j <= i) lower()[column * Inverse::row + row] = score[0] * small_.q_norm[row] * small_.k_norm[column];
            if (j < i)
                lower()[row * Inverse::row + column] =
                    erase[0] * small_.beta[row] * small_.k_norm[row] * small_.k_norm[column];
        }
    }
    // 16 sums over the warp; own_sum() is which one a lane has in x[0].
    __device__ void sum_sixteen(float (&x)[16]) const {
        halve<8>(x, 16);
        halve<4>(x, 8);
        halve<2>(x, 4);
        halve<1>(x, 2);
        x[0] += __shfl_xor_sync(0xffffffffu, x[0], 1);
    }
    // Of 2n sums a lane keeps n, and adds what its partner has of them.
    template <int n>
    __device__ void halve(float (&x)[16], int lanes) const {
        const bool high = (lane & lanes) != 0;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float given = high ? x[i] : x[n + i];
            x[i] = (high ? x[n + i] : x[i]) + __shfl_xor_sync(0xffffffffu, given, lanes);
        }
    }
    __device__ int own_sum() const {
        return lane / 2;
    }

    // Keys with decays: into the record, and in place for the products of different blocks.
    __device__ void scale_keys() {
        for (int u = thread; u < C * Keys::units; u += fold_threads) {
            const int row = u / Keys::units, unit = u % Keys::units, m = 8 * unit, block = row / 16;
            float L[8], total[8], before[8], after[8];
            load_eight(sums() + row * K + m, L);
            load_eight(small_.totals[block] + m, total);
            load_eight(small_.before[block] + m, before);
            load_eight(small_.after[block] + m, after);
            float of_q[8], of_k[8], up[8], rest[8], read[8], erase[8], write[8];
            unpack_eight(q().unit(row, unit), of_q);
            unpack_eight(k().unit(row, unit), of_k);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float decay = __expf(L[e]), left = __expf(total[e] - L[e]);
                of_q[e] *= small_.q_norm[row] * decay;
                rest[e] = of_k[e] * small_.k_norm[row] * left;
                up[e] = of_k[e] * small_.k_norm[row] * decay;
                read[e] = of_q[e] * before[e];
                erase[e] = up[e] * before[e];
                write[e] = rest[e] * after[e];
            }
            pack_eight(of_q, shared_at(q().unit(row, unit)));
            pack_eight(up, shared_at(k().unit(row, unit)));
            pack_eight(rest, shared_at(later().unit(row, unit)));
            const int place = static_cast<int>(q().unit(row, unit) - base_);
            pack_eight(read, this->record + Record::read + place);
            pack_eight(erase, this->record + Record::erase + place);
            pack_eight(write, this->record + Record::write + place);
        }
    }
    __device__ static void load_eight(const float* from, float (&x)[8]) {
        const float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + 4);
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }
    __device__ static void unpack_eight(std::uint32_t from, float (&x)[8]) {
        const uint4 all = *reinterpret_cast<const uint4*>(shared_at(from));
        const std::uint32_t pairs[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 both = ptx::unpack(pairs[i], T());
            x[2 * i] = both.x;
            x[2 * i + 1] = both.y;
        }
    }
    __device__ static void pack_eight(const float (&x)[8], char* to) {
        *reinterpret_cast<uint4*>(to) = {ptx::pack(x[0], x[1], T()), ptx::pack(x[2], x[3], T()),
                                         ptx::pack(x[4], x[5], T()), ptx::pack(x[6], x[7], T())};
    }

    // Rows of a block against the blocks before it, the nearest first; what lies between decays the left operand.
    __device__ void multiply_earlier(const Keys& left, int block, float (&x)[C / 8][4]) const {
        if (block == 0) return;
#pragma unroll 1
        for (int depth = 0; depth < K / 16; ++depth) {
            std::uint32_t a[4], b[4];
            left.load_left(a, 16 * block, depth, lane);
#pragma unroll
            for (int earlier = 2; earlier >= 0; --earlier) {
                if (earlier >= block) continue;
                if (earlier + 1 < block) decay_left(a, small_.own[earlier + 1], depth);
                later().load_right(b, 16 * earlier, depth, lane);
                ptx::multiply(x[2 * earlier], a, b[0], b[1], T());
                ptx::multiply(x[2 * earlier + 1], a, b[2], b[3], T());
            }
        }
    }
    __device__ void decay_left(std::uint32_t (&a)[4], const float* factor, int depth) const {
        const float* own = factor + 16 * depth + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 both = ptx::unpack(a[i], T());
            const float* f = own + 8 * (i / 2);
            a[i] = ptx::pack(both.x * f[0], both.y * f[1], T());
        }
    }

    __device__ void store_scores(int block, const float (&x)[C / 8][4]) const {
        const Square to{base_};
#pragma unroll
        for (int n = 0; n < C / 8; ++n) {
            float y[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = 16 * block + lane / 4 + 8 * (e / 2), j = 8 * n + 2 * (lane % 4) + e % 2;
                y[e] = n / 2 < block ? x[n][e] : n / 2 == block && j <= i ? lower()[j * Inverse::row + i] : 0.0F;
            }
            this->store_packed(to, 16 * block, n, lane, ptx::pack(y[0], y[1], T()), ptx::pack(y[2], y[3], T()));
        }
    }
    __device__ void store_lower(int block, const float (&x)[C / 8][4]) const {
#pragma unroll
        for (int n = 0; n < C / 8; ++n) {
            if (n / 2 >= block) continue;
            const int row = 16 * block + lane / 4;
            const float low = small_.beta[row], high = small_.beta[row + 8];
            float* to = lower() + row * Inverse::row + 8 * n + 2 * (lane % 4);
            *reinterpret_cast<float2*>(to) = {low * x[n][0], low * x[n][1]};
            *reinterpret_cast<float2*>(to + 8 * Inverse::row) = {high * x[n][2], high * x[n][3]};
        }
    }

    char* memory_;
    std::uint32_t base_;
    Small& small_;
};

template <class T>
__global__ void __launch_bounds__(fold_threads)
    fold_channel_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                        const __grid_constant__ FoldedChunks folded) {
    ChannelFold<T>(call, sequences, folded).run();
}

}  // namespace

template <class T>
void launch_fold_channel(const DeltaCall& call, const DeltaSequences& sequences, const FoldedChunks& folded,
                         cudaStream_t stream) {
    launch(fold_channel_kernel<T>, {fold_blocks(call, sequences), fold_threads, Shared<T>::bytes}, stream,
           "the delta rules' fold", call, sequences, folded);
}
template void launch_fold_channel<__nv_bfloat16>(const DeltaCall&, const DeltaSequences&, const FoldedChunks&,
                                                 cudaStream_t);
template void launch_fold_channel<__half>(const DeltaCall&, const DeltaSequences&, const FoldedChunks&, cudaStream_t);

}  // namespace softdelta::cuda

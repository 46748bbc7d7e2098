// The fold of a gate for each channel (erasing from the decayed state), a block of 8 warps for each chunk. A chunk is
// four blocks of 16 rows. Within a block, with L the sum of its gates up to a row and R the sum after it, no exponent
// is positive:
//
//     block I against an earlier block J   (q e^(L_i + blocks between)) (k e^(R_j))ᵀ
//     block I against itself       channel_diagonal.h
//
// and the same with k instead of q for L of the inverse. Sums of gates in f32 from max(g, −100): what e^−100 leaves of
// a 16-bit number is 0. They are divided by ln 2, so that exponentials are powers of two.
//
// One file: every step works on the tiles of the one before.
#include <type_traits>

#include "engines/cuda/delta_rule/fold/channel_diagonal.h"
#include "engines/cuda/delta_rule/fold/channel_gates.h"
#include "engines/cuda/delta_rule/fold/inverse.h"
#include "engines/cuda/delta_rule/fold/launch.h"
#include "engines/cuda/delta_rule/fold/norms.h"
#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

namespace {

constexpr int C = chunk_rows, K = 128;
constexpr int threads = 256;
constexpr int sum_row = K + 8;               // floats; rows in different banks
constexpr float highest_block_rise = 1e-4F;  // within a block all gates are taken to fall: e^−|L_i − L_a|

struct Small {
    ChunkFactors factors;
    float last[K];       // e^(sum of all gates)
    float totals[4][K];  // of a block's gates
    float own[4][K];     // e^total
    float before[4][K];  // e^(totals of earlier blocks)
    float after[4][K];   // e^(totals of later blocks)
    float q_norm[C], k_norm[C];
    int steep[4];  // whether a block's gates are
};

template <class T>
struct Shared {
    static constexpr int key_bytes = KeyTile<T, K>::bytes(C);
    static constexpr int sums = 3 * key_bytes, inverse = sums,  // when sums were read
        small = sums + C * sum_row * 4, bytes = small + static_cast<int>(sizeof(Small));
    static_assert(small % 16 == 0 && inverse + static_cast<int>(sizeof(InverseMemory)) <= small &&
                  bytes <= least_shared_bytes);
};

template <class T>
class ChannelFold {
    using Layout = Shared<T>;
    using Record = FoldedChunk<K, true>;
    using Keys = KeyTile<T, K>;
    using Square = SquareTile<T>;
    using Block = float[2][4];  // 16 rows and columns, as accumulators lie

  public:
    __device__ ChannelFold(const ChunkForward& of, const ChunkPosition& at)
        : call_(of.call),
          s_(at.s),
          c_(at.c),
          rows_(at.rows()),
          record_(of.folded.record(s_.first_slot + c_, hv_, Record::bytes)) {}

    __device__ void run() {
        if (rows_ <= 0) return;
        const int h = call_.key_head(hv_);
        copy_rows<threads>(q(), call_.q, s_, c_, h, 0, call_.key_size, thread_);
        copy_rows<threads>(k(), call_.k, s_, c_, h, 0, call_.key_size, thread_);
        for (int i = thread_; i < static_cast<int>(sizeof(ChunkFactors) / 4); i += threads)
            reinterpret_cast<int*>(&small_.factors)[i] = 0;
        if (thread_ < 4) small_.steep[thread_] = 0;
        __syncthreads();
        make_sums();
        ptx::wait_for_copies();
        __syncthreads();
        make_norms();
        if (thread_ < K) make_block_factors(thread_);
        __syncthreads();
        // Warps 0–3 have the scores' 16 rows each, warps 4–7 those of L.
        const bool of_q = warp_ < 4;
        const int block = warp_ % 4;
        Block own;
        multiply_diagonal(block, warp_ / 4, own);
        __syncthreads();
        scale_keys();
        __syncthreads();
        float x[C / 8][4] = {};
        multiply_earlier(of_q ? q() : k(), block, x);
        __syncthreads();  // the tile of q becomes that of the scores, that of k the inverse's
        end(of_q, block, own, x);
        if (!of_q) {
            float inverse[C / 8][4];
            WarpInverse<T>{*reinterpret_cast<InverseMemory*>(memory_ + Layout::inverse), block, lane_}.run(
                x, inverse, [] { ptx::barrier(1, 128); });
            store_products(Square{base_ + Record::solve}, 16 * block, lane_, inverse);
        }
        __syncthreads();
        copy_out(memory_, record_, 2 * Record::square_bytes, thread_, threads);
        copy_out(&small_.factors, record_ + Record::factors, static_cast<int>(sizeof(ChunkFactors)), thread_, threads);
        copy_out(small_.last, record_ + Record::last, K * 4, thread_, threads);
    }

  private:
    // q, k: as given, then q e^L and k e^L with norm and scale; later: k e^R.
    __device__ Keys q() const { return {base_}; }
    __device__ Keys k() const { return {base_ + Layout::key_bytes}; }
    __device__ Keys later() const { return {base_ + 2 * Layout::key_bytes}; }
    __device__ float* sums() const { return reinterpret_cast<float*>(memory_ + Layout::sums); }  // L [64, K]

    // L of two channels of a block for each thread, and β.
    __device__ void make_sums() {
        const int m = 2 * (thread_ % (K / 2)), block = thread_ / (K / 2), rows = rows_ - 16 * block;
        const bool inside = m < call_.key_size && rows > 0, has_beta = thread_ < C && thread_ < rows_;
        // All loads are issued before any is used.
        PairGates gates(call_, hv_, m, inside ? rows : 0);
        if (inside && call_.g) gates.load(s_.row(call_.g, c_ * C + 16 * block, hv_));
        float beta = has_beta ? 1.0F : 0.0F;
        if (has_beta && call_.beta) beta = load(call_.beta, s_.row(call_.beta, c_ * C + thread_, hv_));
        gates.make(HeadGate(call_, hv_));
        float2 sum = {0, 0};
        unrolled<16>([&](int i) {
            sum.x = fmaf(fmaxf(gates.g[i].x, -100.0F), log2_e, sum.x);
            sum.y = fmaf(fmaxf(gates.g[i].y, -100.0F), log2_e, sum.y);
            *reinterpret_cast<float2*>(sums() + (16 * block + i) * sum_row + m) = sum;
        });
        *reinterpret_cast<float2*>(small_.totals[block] + m) = sum;
        if (!(fminf(sum.x, sum.y) >= -mildest_total)) small_.steep[block] = 1;
        if (gates.rise_far(highest_block_rise)) small_.factors.by_token = 1;
        if (thread_ >= C) return;
        if (has_beta && call_.beta) beta = make_beta(call_, beta);
        small_.factors.beta()[thread_] = beta;
        if (!isfinite(beta)) small_.factors.by_token = 1;
    }

    // 1/√(Σx² + 1e-6) of row thread / 4, by four neighbouring threads, or 1.
    __device__ float norm_of(const Keys& tile) const {
        if (!call_.l2norm) return 1;
        const int row = thread_ / 4;
        float sum = 0;
        const bool far = any_of<Keys::units / 4>([&](int n) {
            const uint4 x = *reinterpret_cast<const uint4*>(shared_at(tile.unit(row, 4 * n + thread_ % 4)));
            const std::uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
            unrolled<4>([&](int i) {
                const float2 both = ptx::unpack(pairs[i], T());
                sum = fmaf(both.x, both.x, fmaf(both.y, both.y, sum));
            });
            return any_of<4>([&](int i) { return is_far<T>(pairs[i]); });
        });
        if (far) small_.factors.by_token = 1;
        return norm_of_squares(sum_of_lanes<4>(sum), far);
    }
    __device__ void make_norms() {
        const float q_norm = norm_of(q()), k_norm = norm_of(k());
        if (thread_ % 4 != 0) return;
        small_.q_norm[thread_ / 4] = q_norm * call_.scale;
        small_.k_norm[thread_ / 4] = k_norm;
    }

    __device__ void make_block_factors(int m) {
        float before = 0, after = 0;
        unrolled<4>([&](int block) {
            small_.own[block][m] = ptx::exp2(small_.totals[block][m]);
            small_.before[block][m] = ptx::exp2(before);
            before += small_.totals[block][m];
        });
        unrolled<4>([&](int i) {
            const int block = 3 - i;
            small_.after[block][m] = ptx::exp2(after);
            after += small_.totals[block][m];
        });
        small_.last[m] = ptx::exp2(before);
    }

    // A block of rows against itself: a pair of warps shares the channels, then one keeps the sums of q, the other
    // those of k.
    __device__ void multiply_diagonal(int block, int part, Block& own) {
        const DiagonalBlock<T, K, sum_row> diagonal{q(),   k(),  sums() + 16 * block * sum_row, small_.totals[block],
                                                    block, lane_};
        Block scores, erase;
        if (std::is_same_v<T, __half> || small_.steep[block] != 0)
            diagonal.multiply_by_halves(K / 32 * part, K / 32 * (part + 1), scores, erase);
        else
            diagonal.multiply(K / 32 * part, K / 32 * (part + 1), scores, erase);
        // What the other warp of the pair keeps goes through memory, where the tile of k e^R will lie.
        auto* places = reinterpret_cast<float4*>(memory_ + 2 * Layout::key_bytes);
        const auto place = [&](int warp, int n) -> float4& { return places[(2 * warp + n) * 32 + lane_]; };
        unrolled<2>([&](int n) {
            float4& to = place(warp_, n);
            to = part == 0 ? float4{erase[n][0], erase[n][1], erase[n][2], erase[n][3]}
                           : float4{scores[n][0], scores[n][1], scores[n][2], scores[n][3]};
        });
        __syncthreads();
        unrolled<2>([&](int n) {
            const float4 got = place(warp_ ^ 4, n);
            const float add[4] = {got.x, got.y, got.z, got.w};
            unrolled<4>([&](int e) {
                own[n][e] = (part == 0 ? scores[n][e] : erase[n][e]) + add[e];
                // An Inf or NaN of a row shows in the row's product with its own key.
                if (8 * n + 2 * (lane_ % 4) + e % 2 == lane_ / 4 + 8 * (e / 2) && !isfinite(own[n][e]))
                    small_.factors.by_token = 1;
            });
        });
    }

    // Keys with decays: into the record, and in place for the products of different blocks. A thread has eight channels
    // of four rows of a block, whose factors it reads once.
    __device__ void scale_keys() {
        constexpr int rows_at_once = threads / Keys::units / 4;
        const int unit = thread_ % Keys::units, m = 8 * unit, block = thread_ / Keys::units % 4;
        float total[8], before[8], after[8];
        load_eight(small_.totals[block] + m, total);
        load_eight(small_.before[block] + m, before);
        load_eight(small_.after[block] + m, after);
#pragma unroll 1
        for (int row = 16 * block + thread_ / Keys::units / 4; row < 16 * (block + 1); row += rows_at_once) {
            float L[8];
            load_eight(sums() + row * sum_row + m, L);
            float of_q[8], of_k[8], up[8], rest[8], read[8], erase[8], write[8];
            unpack_eight(q().unit(row, unit), of_q);
            unpack_eight(k().unit(row, unit), of_k);
            const float q_norm = small_.q_norm[row], k_norm = small_.k_norm[row];
            unrolled<8>([&](int e) {
                const float decay = ptx::exp2(L[e]), left = ptx::exp2(total[e] - L[e]);
                of_q[e] *= q_norm * decay;
                rest[e] = of_k[e] * k_norm * left;
                up[e] = of_k[e] * k_norm * decay;
                read[e] = of_q[e] * before[e];
                erase[e] = up[e] * before[e];
                write[e] = rest[e] * after[e];
            });
            pack_eight(of_q, shared_at(q().unit(row, unit)));
            pack_eight(up, shared_at(k().unit(row, unit)));
            pack_eight(rest, shared_at(later().unit(row, unit)));
            const int place = static_cast<int>(q().unit(row, unit) - base_);
            pack_eight(read, record_ + Record::read + place);
            pack_eight(erase, record_ + Record::erase + place);
            pack_eight(write, record_ + Record::write + place);
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
        unrolled<4>([&](int i) {
            const float2 both = ptx::unpack(pairs[i], T());
            x[2 * i] = both.x;
            x[2 * i + 1] = both.y;
        });
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
            left.load_left(a, 16 * block, depth, lane_);
            unrolled<3>([&](int i) {
                const int earlier = 2 - i;
                if (earlier >= block) return;
                if (earlier + 1 < block) decay_left(a, small_.own[earlier + 1], depth);
                later().load_right(b, 16 * earlier, depth, lane_);
                ptx::multiply(x[2 * earlier], a, b[0], b[1], T());
                ptx::multiply(x[2 * earlier + 1], a, b[2], b[3], T());
            });
        }
    }
    __device__ void decay_left(std::uint32_t (&a)[4], const float* factor, int depth) const {
        const float* own = factor + 16 * depth + 2 * (lane_ % 4);
        unrolled<4>([&](int i) {
            const float2 both = ptx::unpack(a[i], T());
            const float* f = own + 8 * (i / 2);
            a[i] = ptx::pack(both.x * f[0], both.y * f[1], T());
        });
    }

    // A warp's rows: the block of the diagonal, with norms, comes to those before it; scores go to their tile.
    __device__ void end(bool of_q, int block, const Block& own, float (&x)[C / 8][4]) const {
        const float* row_factor = of_q ? small_.q_norm : small_.k_norm;
        float factor[2];
        Block diagonal;
        unrolled<2>([&](int half) {
            const int i = 16 * block + lane_ / 4 + 8 * half;
            factor[half] = of_q ? 1.0F : small_.factors.beta()[i];
            unrolled<2, 2>([&](int n, int e) {
                diagonal[n][2 * half + e] =
                    own[n][2 * half + e] * row_factor[i] * small_.k_norm[16 * block + 8 * n + 2 * (lane_ % 4) + e];
            });
        });
        unrolled<C / 8, 4>([&](int n, int e) {
            x[n][e] = n / 2 > block ? 0.0F : factor[e / 2] * (n / 2 == block ? diagonal[n % 2][e] : x[n][e]);
        });
        if (!of_q) return;
        store_products(Square{base_}, 16 * block, lane_, x);
    }

    const DeltaCall& call_;
    const DeltaSequence s_;
    const Index c_;
    const int hv_ = static_cast<int>(blockIdx.y), thread_ = static_cast<int>(threadIdx.x), warp_ = thread_ / 32,
              lane_ = thread_ % 32, rows_;
    char* const record_;
    char* memory_ = ptx::shared_memory();
    std::uint32_t base_ = ptx::shared_address(memory_);
    Small& small_ = *reinterpret_cast<Small*>(memory_ + Layout::small);
};

template <class T>
__global__ void __launch_bounds__(threads, 2) fold_channel_kernel(const __grid_constant__ ChunkForward of) {
    ptx::let_next_begin();
    ChannelFold<T>(of, of.sequences.chunk(blockIdx.x, static_cast<int>(blockIdx.z))).run();
}

}  // namespace

void launch_fold_channel(const ChunkForward& of, cudaStream_t stream) {
    with_half(of.call, [&]<class T>() {
        launch(fold_channel_kernel<T>, {fold_blocks(of), threads, Shared<T>::bytes}, stream, "the delta rules' fold",
               of);
    });
}

}  // namespace softdelta::cuda

// The fold of a gate for each channel (erasing from the decayed state), a block of 8 warps for each chunk. A chunk is
// four blocks of 16 rows. Within a block, with L the sum of its gates up to a row and R the sum after it, no exponent
// is positive:
//
//     block I against an earlier block J   (q e^(L_i + blocks between)) (k e^(R_j))ᵀ
//     block I against itself, by halves    rows i of the second half, j of the first, a the last row of the first:
//                                          (q e^(L_i − L_a)) (k e^(L_a − L_j))ᵀ
//                                          and each half likewise, down to single rows
//
// and the same with k instead of q for L of the inverse. Sums of gates in f32 from max(g, −100): what e^−100 leaves of
// a 16-bit number is 0. They are kept in units of ln 2, for powers of two.
//
// One file: every step works on the tiles of the one before.
#include <type_traits>

#include "engines/cuda/delta_rule/chunk/inverse.h"
#include "engines/cuda/delta_rule/chunk/launch_fold.h"
#include "engines/cuda/delta_rule/chunk/rows.h"
#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/grid.h"
#include "engines/cuda/lanes.h"

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
    float beta[C], q_norm[C], k_norm[C];
};

template <class T>
struct Shared {
    static constexpr int key_bytes = KeyTile<T, K>::bytes(C);
    static constexpr int inverse = 3 * key_bytes, sums = inverse + static_cast<int>(sizeof(WarpInverse::Memory)),
                         small = sums + C * sum_row * 4, bytes = small + static_cast<int>(sizeof(Small));
    static_assert(small % 16 == 0);
};

template <class T>
class ChannelFold {
    using Layout = Shared<T>;
    using Record = FoldedChunk<K, true>;
    using Keys = KeyTile<T, K>;
    using Square = SquareTile<T>;
    using Block = float[2][4];  // 16 rows and columns, as accumulators lie

  public:
    __device__ ChannelFold(const DeltaCall& call, const DeltaSequences& sequences, const FoldedChunks& folded)
        : call_(call),
          s_(sequences[static_cast<int>(blockIdx.z)]),
          c_(static_cast<Index>(blockIdx.x)),
          hv_(static_cast<int>(blockIdx.y)),
          thread_(static_cast<int>(threadIdx.x)),
          warp_(static_cast<int>(threadIdx.x) / 32),
          lane_(static_cast<int>(threadIdx.x) % 32),
          rows_(static_cast<int>(min(s_.count - c_ * C, Index(C)))),
          record_(folded.record(folded.slot(s_, sequences.first + static_cast<int>(blockIdx.z), c_, sequences.packed),
                                hv_, Record::bytes)),
          memory_(ptx::shared_memory()),
          base_(ptx::shared_address(memory_)),
          small_(*reinterpret_cast<Small*>(memory_ + Layout::small)),
          with_beta_(folded.with_beta) {}

    __device__ void run() {
        if (rows_ <= 0) return;
        const int h = call_.key_head(hv_);
        copy_full_rows<T, K>(q(), call_.q, s_, c_, h, rows_, call_.key_size, thread_, threads);
        copy_full_rows<T, K>(k(), call_.k, s_, c_, h, rows_, call_.key_size, thread_, threads);
        for (int i = thread_; i < static_cast<int>(sizeof(ChunkFactors) / 4); i += threads)
            reinterpret_cast<int*>(&small_.factors)[i] = 0;
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
        finish(of_q, block, own, x);
        if (!of_q) {
            const Square solve{base_ + Record::square_bytes};
            float inverse[C / 8][4];
            WarpInverse{*reinterpret_cast<WarpInverse::Memory*>(memory_ + Layout::inverse), block, lane_}.run(
                x, inverse, [] { ptx::barrier(1, 128); });
#pragma unroll
            for (int n = 0; n < C / 8; ++n) {
                const float* beta = small_.beta + 8 * n + 2 * (lane_ % 4);
                const float low = with_beta_ ? beta[0] : 1.0F, high = with_beta_ ? beta[1] : 1.0F;
                store_packed(solve, 16 * block, n, lane_, ptx::pack(inverse[n][0] * low, inverse[n][1] * high, T()),
                             ptx::pack(inverse[n][2] * low, inverse[n][3] * high, T()));
            }
        }
        __syncthreads();
        copy_out(memory_, record_, 2 * Record::square_bytes, thread_, threads);
        copy_out(&small_.factors, record_ + Record::factors, static_cast<int>(sizeof(ChunkFactors)), thread_, threads);
        copy_out(small_.last, record_ + Record::last, K * 4, thread_, threads);
    }

  private:
    // q, k: as given, then q e^L and k e^L with norm and scale; later: k e^R.
    __device__ Keys q() const {
        return {base_};
    }
    __device__ Keys k() const {
        return {base_ + Layout::key_bytes};
    }
    __device__ Keys later() const {
        return {base_ + 2 * Layout::key_bytes};
    }
    __device__ float* sums() const {
        return reinterpret_cast<float*>(memory_ + Layout::sums);
    }  // L [64, K]

    // L of two channels of a block for each thread, and β.
    __device__ void make_sums() {
        const int m = 2 * (thread_ % (K / 2)), block = thread_ / (K / 2), rows = rows_ - 16 * block;
        float2 g[16] = {}, dt = {0, 0};
        const bool inside = m < call_.key_size && rows > 0, given = inside && call_.g;
        // Everything is on its way before anything is used.
        const bool packed = given && load_gates(block, rows, m, g);
        const View& dt_bias = call_.dt_bias;
        const Index first = (Index(hv_) * call_.key_size + m) * dt_bias.stride[0];
        if (inside && dt_bias) dt = {load(dt_bias, first), load(dt_bias, first + dt_bias.stride[0])};
        const bool has_beta = thread_ < C && thread_ < rows_;
        const Index beta_row = call_.beta ? value_row(call_.beta, thread_) : 0;
        float beta = has_beta ? 1.0F : 0.0F;
        if (has_beta && call_.beta) beta = load(call_.beta, beta_row);
        const HeadGate head(call_, hv_);
        if (packed) unpack_gates(g);
        if (!given)
            for_each(
                g, [&](float, float) { return inside ? head.constant : 0.0F; }, dt);
        if (given) {
            if (call_.raw_gate == core::RawGate::softplus)
                for_each(
                    g, [&](float x, float t) { return -head.rate * fast_softplus(x + t); }, dt);
            if (call_.raw_gate == core::RawGate::lower_bound) {
                const auto bound = static_cast<float>(call_.lower_bound);
                for_each(
                    g, [&](float x, float t) { return bound * fast_sigmoid(head.rate * (x + t)); }, dt);
            }
        }
        bool falls = true;
        float2 sum = {0, 0};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (i >= rows) g[i] = {0, 0};
            falls = falls && g[i].x <= 0 && g[i].y <= 0;
            sum.x = fmaf(fmaxf(g[i].x, -100.0F), log2_e, sum.x);
            sum.y = fmaf(fmaxf(g[i].y, -100.0F), log2_e, sum.y);
            *reinterpret_cast<float2*>(sums() + (16 * block + i) * sum_row + m) = sum;
        }
        *reinterpret_cast<float2*>(small_.totals[block] + m) = sum;
        if (!falls && rises_far(g)) small_.factors.by_token = 1;
        if (thread_ >= C) return;
        if (has_beta && call_.beta) beta = make_beta(call_, beta);
        small_.beta[thread_] = beta;
        if (!isfinite(beta)) small_.factors.by_token = 1;
    }
    template <class Gate>
    __device__ static void for_each(float2 (&g)[16], const Gate& gate, float2 dt) {
#pragma unroll
        for (float2& x : g) x = {gate(x.x, dt.x), gate(x.y, dt.y)};
    }
    // What the caller gave for channels m and m + 1 of a block's rows. Loads of pairs that lie side by side do not wait
    // for each other: those of 16 bits stay as they are, in x, until unpack_gates(). Whether they do.
    __device__ bool load_gates(int block, int rows, int m, float2 (&g)[16]) const {
        const View& v = call_.g;
        bool packed = false;
        with_type(v, [&](const auto* data) {
            using G = std::remove_cvref_t<decltype(*data)>;
            const G* at = data + value_row(v, 16 * block) + m * v.stride[3];
            const bool pairs =
                v.stride[3] == 1 && v.stride[1] % 2 == 0 && reinterpret_cast<std::uintptr_t>(at) % (2 * sizeof(G)) == 0;
            if (!pairs) {
#pragma unroll 1
                for (int i = 0; i < 16; ++i) {
                    float2 both = {0, 0};
                    if (i < rows) both = {to_float(at[i * v.stride[1]]), to_float(at[i * v.stride[1] + v.stride[3]])};
#pragma unroll
                    for (int to = 0; to < 16; ++to)
                        if (to == i) g[to] = both;
                }
                return;
            }
            packed = sizeof(G) == 2;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                if constexpr (sizeof(G) == 4)
                    g[i] = ptx::load_pair(at, i < rows);
                else
                    g[i].x = __uint_as_float(ptx::load_word(at, i < rows));
                at += v.stride[1];
            }
        });
        return packed;
    }
    __device__ void unpack_gates(float2 (&g)[16]) const {
        const bool bf16 = call_.g.dtype == DType::bf16;
#pragma unroll
        for (float2& x : g) {
            const std::uint32_t both = __float_as_uint(x.x);
            x = bf16 ? ptx::unpack(both, __nv_bfloat16()) : ptx::unpack(both, __half());
        }
    }
    // Of a block's gates, some of which are positive or NaN.
    __device__ static bool rises_far(const float2 (&g)[16]) {
        float x = 0, y = 0;
        bool odd = false;
#pragma unroll
        for (const float2& each : g) {
            x += fmaxf(each.x, 0.0F);
            y += fmaxf(each.y, 0.0F);
            odd = odd || isnan(each.x) || isnan(each.y);
        }
        return odd || !(fmaxf(x, y) <= highest_block_rise);
    }

    // 1/√(Σx² + 1e-6) of row thread / 4, by four neighbouring threads, or 1.
    __device__ float norm_of(const Keys& tile) const {
        if (!call_.l2norm) return 1;
        const int row = thread_ / 4;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < Keys::units / 4; ++n) {
            const uint4 x = *reinterpret_cast<const uint4*>(shared_at(tile.unit(row, 4 * n + thread_ % 4)));
            const std::uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 both = ptx::unpack(pairs[i], T());
                sum = fmaf(both.x, both.x, fmaf(both.y, both.y, sum));
            }
        }
        return 1 / sqrtf(sum_of_lanes<4>(sum) + 1e-6F);
    }
    __device__ void make_norms() {
        const float q_norm = norm_of(q()), k_norm = norm_of(k());
        if (thread_ % 4 != 0) return;
        small_.q_norm[thread_ / 4] = q_norm * call_.scale;
        small_.k_norm[thread_ / 4] = k_norm;
    }

    __device__ void make_block_factors(int m) {
        float before = 0, after = 0;
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            small_.own[block][m] = ptx::exp2(small_.totals[block][m]);
            small_.before[block][m] = ptx::exp2(before);
            before += small_.totals[block][m];
        }
#pragma unroll
        for (int block = 3; block >= 0; --block) {
            small_.after[block][m] = ptx::exp2(after);
            after += small_.totals[block][m];
        }
        small_.last[m] = ptx::exp2(before);
    }

    // A block of rows against itself: a pair of warps shares the channels, then one keeps the sums of q, the other
    // those of k.
    __device__ void multiply_diagonal(int block, int part, Block& own) {
        constexpr int levels = 4;  // halves of 8, 4, 2, 1 rows
        Block of_q[levels + 1] = {}, of_k[levels] = {};
#pragma unroll 1
        for (int depth = K / 32 * part; depth < K / 32 * (part + 1); ++depth) {
            std::uint32_t q_left[4], k_left[4];
            q().load_left(q_left, 16 * block, depth, lane_);
            k().load_left(k_left, 16 * block, depth, lane_);
            multiply_block(of_q[levels], q_left, k_left, true);
            const float* L = sums() + 16 * block * sum_row + 16 * depth + 2 * (lane_ % 4);
            float2 at[4], q_pair[4], k_pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                at[i] = *reinterpret_cast<const float2*>(L + (lane_ / 4 + 8 * (i % 2)) * sum_row + 8 * (i / 2));
                q_pair[i] = ptx::unpack(q_left[i], T());
                k_pair[i] = ptx::unpack(k_left[i], T());
            }
#pragma unroll
            for (int level = 0; level < levels; ++level) {
                const int half = 8 >> level;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = lane_ / 4 + 8 * (i % 2), last = row / (2 * half) * (2 * half) + half - 1;
                    const float2 from = *reinterpret_cast<const float2*>(L + last * sum_row + 8 * (i / 2));
                    const float x = ptx::exp2(-fabsf(at[i].x - from.x)), y = ptx::exp2(-fabsf(at[i].y - from.y));
                    q_left[i] = ptx::pack(q_pair[i].x * x, q_pair[i].y * y, T());
                    k_left[i] = ptx::pack(k_pair[i].x * x, k_pair[i].y * y, T());
                }
                multiply_block(of_q[level], q_left, k_left, level > 0);
                multiply_block(of_k[level], k_left, k_left, level > 0);
            }
        }
        Block scores, erase;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = lane_ / 4 + 8 * (e / 2), j = 8 * n + 2 * (lane_ % 4) + e % 2, apart = i ^ j;
                const auto of_pair = [&](const Block* of) {
                    return apart >= 8 ? of[0][n][e] : apart >= 4 ? of[1][n][e] : apart >= 2 ? of[2][n][e] : of[3][n][e];
                };
                scores[n][e] = j > i ? 0.0F : j == i ? of_q[levels][n][e] : of_pair(of_q);
                erase[n][e] = j >= i ? 0.0F : of_pair(of_k);
            }
        // What the other warp of the pair keeps goes through memory.
        auto* places = reinterpret_cast<float4*>(memory_ + Layout::inverse);
        const auto place = [&](int warp, int n) -> float4& { return places[(2 * warp + n) * 32 + lane_]; };
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float4& to = place(warp_, n);
            to = part == 0 ? float4{erase[n][0], erase[n][1], erase[n][2], erase[n][3]}
                           : float4{scores[n][0], scores[n][1], scores[n][2], scores[n][3]};
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float4 got = place(warp_ ^ 4, n);
            const float add[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                own[n][e] = (part == 0 ? scores[n][e] : erase[n][e]) + add[e];
                // An Inf or NaN of a row shows in the row's product with its own key.
                if (8 * n + 2 * (lane_ % 4) + e % 2 == lane_ / 4 + 8 * (e / 2) && !isfinite(own[n][e]))
                    small_.factors.by_token = 1;
            }
        }
    }
    // Left operands of rows serve as right ones: rows as columns of the product.
    __device__ static void multiply_block(Block& d, const std::uint32_t (&left)[4], const std::uint32_t (&right)[4],
                                          bool both) {
        ptx::multiply(d[0], left, right[0], right[2], T());
        if (both) ptx::multiply(d[1], left, right[1], right[3], T());
    }

    // Keys with decays: into the record, and in place for the products of different blocks.
    __device__ void scale_keys() {
        for (int u = thread_; u < C * Keys::units; u += threads) {
            const int row = u / Keys::units, unit = u % Keys::units, m = 8 * unit, block = row / 16;
            float L[8], total[8], before[8], after[8];
            load_eight(sums() + row * sum_row + m, L);
            load_eight(small_.totals[block] + m, total);
            load_eight(small_.before[block] + m, before);
            load_eight(small_.after[block] + m, after);
            float of_q[8], of_k[8], up[8], rest[8], read[8], erase[8], write[8];
            unpack_eight(q().unit(row, unit), of_q);
            unpack_eight(k().unit(row, unit), of_k);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float decay = ptx::exp2(L[e]), left = ptx::exp2(total[e] - L[e]);
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
            left.load_left(a, 16 * block, depth, lane_);
#pragma unroll
            for (int earlier = 2; earlier >= 0; --earlier) {
                if (earlier >= block) continue;
                if (earlier + 1 < block) decay_left(a, small_.own[earlier + 1], depth);
                later().load_right(b, 16 * earlier, depth, lane_);
                ptx::multiply(x[2 * earlier], a, b[0], b[1], T());
                ptx::multiply(x[2 * earlier + 1], a, b[2], b[3], T());
            }
        }
    }
    __device__ void decay_left(std::uint32_t (&a)[4], const float* factor, int depth) const {
        const float* own = factor + 16 * depth + 2 * (lane_ % 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 both = ptx::unpack(a[i], T());
            const float* f = own + 8 * (i / 2);
            a[i] = ptx::pack(both.x * f[0], both.y * f[1], T());
        }
    }

    // A warp's rows: the block of the diagonal, with norms, comes to those before it; scores go to their tile.
    __device__ void finish(bool of_q, int block, const Block& own, float (&x)[C / 8][4]) const {
        const float* row_factor = of_q ? small_.q_norm : small_.k_norm;
        float factor[2];
        Block diagonal;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 16 * block + lane_ / 4 + 8 * half;
            factor[half] = of_q ? 1.0F : small_.beta[i];
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    diagonal[n][2 * half + e] =
                        own[n][2 * half + e] * row_factor[i] * small_.k_norm[16 * block + 8 * n + 2 * (lane_ % 4) + e];
        }
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                x[n][e] = n / 2 > block ? 0.0F : factor[e / 2] * (n / 2 == block ? diagonal[n % 2][e] : x[n][e]);
        if (!of_q) return;
        store_products(Square{base_}, 16 * block, lane_, x);
    }

    __device__ Index value_row(const View& v, int i) const {
        return s_.batch * v.stride[0] + (s_.begin + c_ * C + i) * v.stride[1] + hv_ * v.stride[2];
    }

    const DeltaCall& call_;
    const DeltaSequence s_;
    const Index c_;
    const int hv_, thread_, warp_, lane_, rows_;
    char* const record_;
    char* memory_;
    std::uint32_t base_;
    Small& small_;
    const bool with_beta_;
};

template <class T>
__global__ void __launch_bounds__(threads, 2)
    fold_channel_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                        const __grid_constant__ FoldedChunks folded) {
    ChannelFold<T>(call, sequences, folded).run();
}

template <class T>
void launch_for(const DeltaCall& call, const DeltaSequences& sequences, const FoldedChunks& folded,
                cudaStream_t stream) {
    launch(fold_channel_kernel<T>, {fold_blocks(call, sequences), threads, Shared<T>::bytes}, stream,
           "the delta rules' fold", call, sequences, folded);
}

}  // namespace

void launch_fold_channel(Level, const DeltaCall& call, core::DType type, const DeltaSequences& sequences,
                         const FoldedChunks& folded, cudaStream_t stream) {
    (type == core::DType::bf16 ? launch_for<__nv_bfloat16> : launch_for<__half>)(call, sequences, folded, stream);
}

}  // namespace softdelta::cuda

// All gradients of a chunk and key head, its value heads one after the other, for gates that all channels share, or for
// none (docs/math.md, "Backward", "Unfold"):
//
//     P  = scale·tril(dO Uᵀ)∘e^(G_i − G_j)       Q = −stril(dR Uᵀ)∘e^(E_i − G_j)
//     dq = scale·e^G∘(dO Sᵀ) + P k               e = −e^E∘(dR Sᵀ) + Q k
//     dk = e^(G_last − G)∘(U dS'ᵀ) + Pᵀ q + Qᵀ βp     dp = βe     dβ = rowsum(dR∘v) + rowsum(p∘e)
//
// and dg, the sum of the terms that span a gate. A warp has 16 rows and a quarter of the channels.
#include "engines/cuda/delta_rule/chunk/launch_fold.h"
#include "engines/cuda/delta_rule/chunk/rows.h"
#include "engines/cuda/delta_rule/chunk_backward/saved.h"
#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/grid.h"

namespace softdelta::cuda {

namespace {

constexpr int C = chunk_rows, threads = 512, quarters = 4;

struct Small {
    RowFactors factors;
    float anchors[4][C];             // e^(G_r − G_j), r the last row before a block of 16
    float from_start[C], to_end[C];  // e^G, e^(G_last − G)
    float since_erase[C];            // e^E
    float read[quarters][C], erase[quarters][C], write[quarters][C], erased[quarters][C];  // sums over channels
    float of_values[C];                                                                    // rowsum(dR∘v)
    float pairs[2][2][C], columns[2][4][C];                                                // of P, of Q: sum_spans()
    float spans[C];
    float along[3][quarters][C];  // q∘dq, k∘dk, p∘dp
    float through[threads / 32];
};

template <class T, int D, bool own_p>
struct Shared {
    static constexpr int rows_bytes = Tile<T, D>::bytes(C);
    static constexpr int key_tiles = own_p ? 3 : 2;
    static constexpr int d_o = key_tiles * rows_bytes, d_r = d_o + rows_bytes, u = d_r + rows_bytes,
                         state = u + rows_bytes, dstate = state + Tile<T, D>::bytes(D),
                         pairs = dstate + Tile<T, D>::bytes(D), small = pairs + 2 * ChunkRecord::square_bytes,
                         bytes = small + static_cast<int>(sizeof(Small));
    static_assert(sizeof(RowFactors) % 16 == 0);
};

template <class T, int D, bool own_p>
class Finish {
    using Layout = Shared<T, D, own_p>;
    using Rows = Tile<T, D>;
    using Square = Tile<T, C>;
    static constexpr int N = D / 8 / quarters;  // accumulators of 8 columns of a warp
    using Sums = float[N][4];

  public:
    __device__ Finish(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                      const SavedChunks& saved)
        : call_(call),
          grad_(grad),
          saved_(saved),
          s_(sequences[static_cast<int>(blockIdx.z)]),
          c_(static_cast<Index>(blockIdx.x)),
          h_(static_cast<int>(blockIdx.y)),
          thread_(static_cast<int>(threadIdx.x)),
          lane_(static_cast<int>(threadIdx.x) % 32),
          block_(static_cast<int>(threadIdx.x) / 32 % 4),
          quarter_(static_cast<int>(threadIdx.x) / 128),
          rows_(static_cast<int>(min(s_.count - c_ * C, Index(C)))),
          slot_(saved.slot(s_, sequences.first + static_cast<int>(blockIdx.z), c_, sequences.packed)),
          erases_(call.erase != core::Erase::nothing),
          memory_(ptx::shared_memory()),
          base_(ptx::shared_address(memory_)),
          small_(*reinterpret_cast<Small*>(memory_ + Layout::small)) {}

    __device__ void run() {
        if (rows_ <= 0) return;
        for (int i = 0; i < call_.group; ++i)
            if (saved_.goes_by_token(slot_, call_.value_head(h_, i)) != 0) return;
        copy_rows(q(), call_.q, s_, c_, h_, 0, call_.key_size, thread_, threads);
        copy_rows(k(), call_.k, s_, c_, h_, 0, call_.key_size, thread_, threads);
        if (own_p) copy_rows(p(), call_.p, s_, c_, h_, 0, call_.key_size, thread_, threads);
        Sums dq = {}, dk = {}, dp = {};
        for (int i = 0; i < call_.group; ++i) add_value_head(call_.value_head(h_, i), i == 0, dq, dk, own_p ? dp : dk);
        store_all(dq, dk, dp);
    }

  private:
    __device__ Rows q() const { return {base_}; }
    __device__ Rows k() const { return {base_ + Layout::rows_bytes}; }
    __device__ Rows p() const { return {base_ + (own_p ? 2 : 1) * Layout::rows_bytes}; }
    __device__ Rows d_o() const { return {base_ + Layout::d_o}; }
    __device__ Rows d_r() const { return {base_ + Layout::d_r}; }
    __device__ Rows u() const { return {base_ + Layout::u}; }
    __device__ Rows state() const { return {base_ + Layout::state}; }
    __device__ Rows dstate() const { return {base_ + Layout::dstate}; }
    __device__ Square pairs(int which) const { return {base_ + Layout::pairs + which * ChunkRecord::square_bytes}; }
    __device__ int row(int half_of_block) const { return 16 * block_ + lane_ / 4 + 8 * half_of_block; }
    __device__ Index value_row(const View& v, int hv, int i) const {
        return s_.batch * v.stride[0] + (s_.begin + c_ * C + i) * v.stride[1] + hv * v.stride[2];
    }

    __device__ void add_value_head(int hv, bool first, Sums& dq, Sums& dk, Sums& dp) {
        if (!first) __syncthreads();
        copy_rows(d_o(), grad_.d_o, s_, c_, hv, 0, grad_.d_o ? call_.value_size : 0, thread_, threads);
        copy_bytes(u().base, saved_.u(slot_, hv), Layout::rows_bytes, thread_, threads);
        if (erases_) copy_bytes(d_r().base, saved_.dr(slot_, hv), Layout::rows_bytes, thread_, threads);
        copy_bytes(base_ + Layout::small, saved_.record(slot_, hv) + ChunkRecord::factors,
                   static_cast<int>(sizeof(RowFactors)), thread_, threads);
        ptx::commit_copies();
        copy_bytes(state().base, saved_.state(slot_, hv), D * D * 2, thread_, threads);
        ptx::commit_copies();
        copy_bytes(dstate().base, saved_.dstate(slot_, hv), D * D * 2, thread_, threads);
        ptx::commit_copies();
        ptx::wait_for_copies_but<2>();
        __syncthreads();
        if (first && call_.l2norm) normalise();
        make_factors();
        if (erases_) multiply_values(hv);
        __syncthreads();

        const int which = quarter_ % 2;
        if (which == 0 || erases_) make_pairs(which, quarter_ / 2);
        ptx::wait_for_copies_but<1>();
        __syncthreads();
        {
            Sums x = {};
            multiply_state(d_o(), state(), x);
            float factor[2], sums[2] = {};
            for (int i = 0; i < 2; ++i) factor[i] = call_.scale * small_.from_start[row(i)];
            scale_and_dot(q(), factor, x, sums);
            keep_row_sums(small_.read[quarter_], sums);
            add(x, dq);
            multiply_pairs(pairs(0), k(), dq);
        }
        if (erases_) {
            Sums e = {};
            multiply_state(d_r(), state(), e);
            float factor[2], sums[2] = {};
            for (int i = 0; i < 2; ++i) factor[i] = -small_.since_erase[row(i)];
            scale_and_dot(p(), factor, e, sums);
            for (int i = 0; i < 2; ++i) sums[i] *= small_.factors.beta[row(i)];
            keep_row_sums(small_.erase[quarter_], sums);

            multiply_pairs(pairs(1), k(), e);
            sums[0] = sums[1] = 0;
            factor[0] = factor[1] = 1;
            scale_and_dot(p(), factor, e, sums);
            keep_row_sums(small_.erased[quarter_], sums);
            for (int i = 0; i < 2; ++i) factor[i] = small_.factors.beta[row(i)];
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int m = 0; m < 4; ++m) dp[n][m] = fmaf(factor[m / 2], e[n][m], dp[n][m]);
        }
        add_later_blocks();
        ptx::wait_for_copies();
        __syncthreads();
        multiply_states();
        {
            Sums x = {};
            multiply_state(u(), dstate(), x);
            float factor[2], sums[2] = {};
            for (int i = 0; i < 2; ++i) factor[i] = small_.to_end[row(i)];
            scale_and_dot(k(), factor, x, sums);
            keep_row_sums(small_.write[quarter_], sums);
            add(x, dk);
        }
        multiply_pairs_transposed(pairs(0), q(), false, dk);
        if (erases_) multiply_pairs_transposed(pairs(1), p(), true, dk);
        __syncthreads();
        if (thread_ < 32) finish_gates(hv);
        if (thread_ >= 64 && thread_ < 64 + C && grad_.dbeta) finish_beta(hv, thread_ - 64);
    }

    // Rows of q, k and p with their norms.
    __device__ void normalise() const {
        const RowFactors& f = small_.factors;
        const auto scale_rows = [&](const Rows& tile, const float* norm) {
            for (int i = thread_; i < C * Rows::units; i += threads) {
                const int r = i / Rows::units;
                auto* at = reinterpret_cast<uint4*>(shared_at(tile.unit(r, i % Rows::units)));
                const uint4 x = *at;
                const auto times = [&](std::uint32_t two) {
                    const float2 both = ptx::unpack(two, T());
                    return ptx::pack(both.x * norm[r], both.y * norm[r], T());
                };
                *at = {times(x.x), times(x.y), times(x.z), times(x.w)};
            }
        };
        scale_rows(q(), f.q_norm);
        scale_rows(k(), f.k_norm);
        if (own_p) scale_rows(p(), f.p_norm);
    }

    // The row before i that erasing looks from: E_i = G_(i − shift).
    __device__ int shift() const {
        return call_.erase == core::Erase::from_previous_state ? 1 : 0;
    }

    __device__ void make_factors() const {
        const double* sums = small_.factors.sums;
        const double* G = sums + 1;
        if (thread_ < C) {
            small_.from_start[thread_] = expf(static_cast<float>(G[thread_]));
            small_.since_erase[thread_] = expf(static_cast<float>(G[thread_ - shift()]));
            small_.to_end[thread_] = expf(static_cast<float>(G[C - 1] - G[thread_]));
        }
        if (thread_ >= 4 * C) return;
        const int block = thread_ / C, j = thread_ % C;
        small_.anchors[block][j] = j < 16 * block ? expf(static_cast<float>(sums[16 * block] - G[j])) : 0.0F;
    }

    // rowsum(dR∘v), a row by eight neighbouring threads.
    __device__ void multiply_values(int hv) const {
        const int r = thread_ / 8;
        const auto* v = static_cast<const T*>(call_.v.data) + value_row(call_.v, hv, r);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < Rows::units / 8; ++i) {
            const int unit = thread_ % 8 + 8 * i;
            if (r >= rows_ || 8 * unit >= call_.value_size) continue;
            const uint4 x = *reinterpret_cast<const uint4*>(shared_at(d_r().unit(r, unit)));
            const uint4 y = *reinterpret_cast<const uint4*>(v + 8 * unit);
            sum += dot(x, y);
        }
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (thread_ % 8 == 0) small_.of_values[r] = sum;
    }
    __device__ static float dot(const uint4& x, const uint4& y) {
        const std::uint32_t left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 a = ptx::unpack(left[i], T()), b = ptx::unpack(right[i], T());
            sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
        }
        return sum;
    }

    // --- pairs of tokens

    // x [16, 32] = rows of the warp's block of left · rightᵀ, columns of one half, up to the diagonal
    __device__ void multiply_rows(const Rows& left, const Rows& right, int half, float (&x)[C / 16][4]) const {
#pragma unroll
        for (int n = 0; n < C / 16; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] = 0;
        if (2 * half > block_) return;
#pragma unroll 2
        for (int depth = 0; depth < D / 16; ++depth) {
            std::uint32_t a[4], b[4];
            left.load_left(a, 16 * block_, depth, lane_);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                if (2 * half + n > block_) break;
                right.load_right(b, 32 * half + 16 * n, depth, lane_);
                ptx::multiply(x[2 * n], a, b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], a, b[2], b[3], T());
            }
        }
    }

    // The block's rows of P or Q, one half of their columns; and what they add to the gates that they span.
    __device__ void make_pairs(int which, int column_half) const {
        const bool of_score = which == 0;
        float x[C / 16][4], y[C / 16][4];
        multiply_rows(of_score ? d_o() : d_r(), u(), column_half, x);
        multiply_rows(of_score ? q() : p(), k(), column_half, y);
        const double* G = small_.factors.sums + 1;
        const int back = of_score ? 0 : shift();
        float own[2], to_anchor[2], beta[2];
        double from[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            from[half] = G[row(half) - back];
            own[half] = of_score ? call_.scale : -1.0F;
            beta[half] = of_score ? 1.0F : small_.factors.beta[row(half)];
            to_anchor[half] = own[half] * expf(static_cast<float>(from[half] - small_.factors.sums[16 * block_]));
        }
        const Square to = pairs(which);
#pragma unroll
        for (int n = 0; n < C / 16; ++n) {
            const int tile = C / 16 * column_half + n;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int half = e / 2, i = row(half), j = 8 * tile + 2 * (lane_ % 4) + e % 2;
                if (tile / 2 > block_)
                    x[n][e] = 0;
                else if (tile / 2 < block_)
                    x[n][e] *= to_anchor[half] * small_.anchors[block_][j];
                else
                    x[n][e] = (of_score ? j <= i : j < i)
                                  ? x[n][e] * own[half] * expf(static_cast<float>(from[half] - G[j]))
                                  : 0.0F;
                y[n][e] *= x[n][e] * beta[half];
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<std::uint32_t*>(shared_at(to.unit(row(half), tile) + 4 * (lane_ % 4))) =
                    ptx::pack(x[n][2 * half], x[n][2 * half + 1], T());
        }
        sum_spans(which, column_half, !of_score && shift() == 1, y);
    }

    // pairs[s] = Σ_(j < s) c_j(s), where c_j(s) sums the terms of column j over rows i ≥ s of the block, i > s where
    // erasing comes before the decay; and whole columns, for blocks before this one.
    __device__ void sum_spans(int which, int column_half, bool exclusive, float (&t)[C / 16][4]) const {
        const int r = lane_ / 4;
        float sums[2] = {};
#pragma unroll
        for (int n = 0; n < C / 16; ++n) {
            const int tile = C / 16 * column_half + n;
            if (tile / 2 > block_) break;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float up = t[n][e], down = t[n][2 + e], first = 0;
                if (exclusive) {
                    first = up;
                    const float next_up = __shfl_down_sync(0xffffffffu, up, 4);
                    const float next_down = __shfl_down_sync(0xffffffffu, down, 4);
                    const float of_eight = __shfl_sync(0xffffffffu, down, lane_ % 4);
                    up = r < 7 ? next_up : of_eight;
                    down = r < 7 ? next_down : 0.0F;
                }
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) {
                    const float more_up = __shfl_down_sync(0xffffffffu, up, lanes);
                    const float more_down = __shfl_down_sync(0xffffffffu, down, lanes);
                    if (lane_ + lanes < 32) {
                        up += more_up;
                        down += more_down;
                    }
                }
                up += __shfl_sync(0xffffffffu, down, lane_ % 4);
                const int j = 8 * tile + 2 * (lane_ % 4) + e;
                if (r == 0) small_.columns[which][block_][j] = up + first;
                if (j < row(0)) sums[0] += up;
                if (j < row(1)) sums[1] += down;
            }
        }
        keep_row_sums(small_.pairs[which][column_half], sums);
    }
    // spans[s]: the block of row s and those after it.
    __device__ void add_later_blocks() const {
        const int r = thread_ / 8, part = thread_ % 8;
        float sum = part < (erases_ ? 4 : 2) ? small_.pairs[part / 2][part % 2][r] : 0.0F;
        for (int which = 0; which < (erases_ ? 2 : 1); ++which)
            for (int block = r / 16 + 1; block < 4; ++block)
                for (int j = part; j < r; j += 8) sum += small_.columns[which][block][j];
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (part == 0) small_.spans[r] = sum;
    }

    // --- rows of keys

    // x += rows of left [64, V] · a state [V, K]
    __device__ void multiply_state(const Rows& left, const Rows& right, Sums& x) const {
#pragma unroll 2
        for (int depth = 0; depth < D / 16; ++depth) {
            std::uint32_t a[4], b[4];
            left.load_left(a, 16 * block_, depth, lane_);
#pragma unroll
            for (int n = 0; n < N / 2; ++n) {
                right.load_right_upright(b, 16 * depth, quarter_ * (N / 2) + n, lane_);
                ptx::multiply(x[2 * n], a, b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], a, b[2], b[3], T());
            }
        }
    }
    // x += rows of a lower triangle [64, 64] · right [64, K]
    __device__ void multiply_pairs(const Square& left, const Rows& right, Sums& x) const {
        for (int depth = 0; depth <= block_; ++depth) {
            std::uint32_t a[4], b[4];
            left.load_left(a, 16 * block_, depth, lane_);
#pragma unroll
            for (int n = 0; n < N / 2; ++n) {
                right.load_right_upright(b, 16 * depth, quarter_ * (N / 2) + n, lane_);
                ptx::multiply(x[2 * n], a, b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], a, b[2], b[3], T());
            }
        }
    }
    // x += columns of a lower triangle, with_beta: its rows times β, · right [64, K]
    __device__ void multiply_pairs_transposed(const Square& left, const Rows& right, bool with_beta, Sums& x) const {
        for (int depth = block_; depth < C / 16; ++depth) {
            std::uint32_t a[4], b[4];
            left.load_transposed_result(a, 16 * depth, block_, lane_);
            if (with_beta) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* beta = small_.factors.beta + 16 * depth + 8 * (i / 2) + 2 * (lane_ % 4);
                    const float2 both = ptx::unpack(a[i], T());
                    a[i] = ptx::pack(both.x * beta[0], both.y * beta[1], T());
                }
            }
#pragma unroll
            for (int n = 0; n < N / 2; ++n) {
                right.load_right_upright(b, 16 * depth, quarter_ * (N / 2) + n, lane_);
                ptx::multiply(x[2 * n], a, b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], a, b[2], b[3], T());
            }
        }
    }
    // x ∘= factor of its row; sums: rowsum(x∘rows) over the warp's channels, in all lanes of a row.
    __device__ void scale_and_dot(const Rows& rows, const float (&factor)[2], Sums& x, float (&sums)[2]) const {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 other = two(rows, n, half);
                x[n][2 * half] *= factor[half];
                x[n][2 * half + 1] *= factor[half];
                sums[half] = fmaf(x[n][2 * half], other.x, fmaf(x[n][2 * half + 1], other.y, sums[half]));
            }
    }
    // What lies where the accumulators' elements are.
    __device__ float2 two(const Rows& rows, int n, int half) const {
        return ptx::unpack(*reinterpret_cast<const std::uint32_t*>(
                               shared_at(rows.unit(row(half), quarter_ * N + n) + 4 * (lane_ % 4))),
                           T());
    }
    __device__ void keep_row_sums(float* to, const float (&sums)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = sums[half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (lane_ % 4 == 0) to[row(half)] = sum;
        }
    }
    __device__ static void add(const Sums& x, Sums& to) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) to[n][i] += x[n][i];
    }

    // rowsum(S∘dS')
    __device__ void multiply_states() const {
        const auto* left = reinterpret_cast<const uint4*>(shared_at(state().base)) + thread_;
        const auto* right = reinterpret_cast<const uint4*>(shared_at(dstate().base)) + thread_;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < D * D / 8 / threads; ++i) sum += dot(left[i * threads], right[i * threads]);
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (lane_ == 0) small_.through[thread_ / 32] = sum;
    }

    // --- gates and β

    __device__ static float sum_of(const float (&x)[quarters][C], int r) {
        return (x[0][r] + x[1][r]) + (x[2][r] + x[3][r]);
    }

    // dg_s = through + Σ_(i ≥ s) (read_i + erase_i) + Σ_(j < s) write_j + pairs (i ≥ s > j), by a warp; erasing before
    // the decay: erase_i of i > s.
    __device__ void finish_gates(int hv) const {
        if (call_.gate == core::Gate::none || (!grad_.dg && !saved_.shares)) return;
        const bool before_decay = shift() == 1;
        float through = 0;
        for (const float x : small_.through) through += x;
        through *= small_.factors.last;
        float read[2], erase[2], write[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = 2 * lane_ + i;
            read[i] = sum_of(small_.read, r);
            erase[i] = erases_ ? sum_of(small_.erase, r) : 0.0F;
            write[i] = sum_of(small_.write, r);
        }
        float later = read[0] + erase[0] + read[1] + erase[1], earlier = write[0] + write[1];
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            const float more = __shfl_down_sync(0xffffffffu, later, lanes);
            if (lane_ + lanes < 32) later += more;
            const float less = __shfl_up_sync(0xffffffffu, earlier, lanes);
            if (lane_ >= lanes) earlier += less;
        }
        // Without the lane's own: those of its neighbour.
        const float rest = __shfl_down_sync(0xffffffffu, later, 1), before = __shfl_up_sync(0xffffffffu, earlier, 1);
        later = lane_ < 31 ? rest : 0.0F;
        earlier = lane_ > 0 ? before : 0.0F;
        float dg[2];
        const float of_last = read[1] + (before_decay ? 0.0F : erase[1]);
        dg[1] = later + of_last;
        dg[0] = later + read[1] + erase[1] + read[0] + (before_decay ? 0.0F : erase[0]);
        dg[0] += earlier;
        dg[1] += earlier + write[0];

        const HeadGate head(call_, hv);
        double sum = 0, dA_log = 0;
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const int r = 2 * lane_ + i;
            if (r >= rows_) continue;
            double dx = static_cast<double>((i == 0 ? dg[0] : dg[1]) + through + small_.spans[r]);
            if (call_.g) {
                dx = head.adjoint(call_, load(call_.g, value_row(call_.g, hv, r)), head.bias, dx, dA_log);
                if (grad_.dg) store(grad_.dg, value_row(grad_.dg, hv, r), static_cast<float>(dx));
            }
            sum += dx;
        }
        if (!saved_.shares) return;
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
            dA_log += __shfl_xor_sync(0xffffffffu, dA_log, lanes);
        }
        if (lane_ != 0) return;
        saved_.shares[slot_ * saved_.heads + hv] = sum;
        saved_.shares[(saved_.slots + slot_) * saved_.heads + hv] = dA_log;
    }
    __device__ void finish_beta(int hv, int r) const {
        if (r >= rows_) return;
        double dbeta = static_cast<double>(small_.of_values[r] + sum_of(small_.erased, r));
        if (call_.raw_beta != core::RawBeta::none) {
            const float given = load(call_.beta, value_row(call_.beta, hv, r));
            dbeta *= exact_beta(call_, given) * exact_sigmoid(-static_cast<double>(given));
        }
        store(grad_.dbeta, value_row(grad_.dbeta, hv, r), static_cast<float>(dbeta));
    }

    // --- results

    __device__ void store_all(Sums& dq, Sums& dk, Sums& dp) const {
        const RowFactors& f = small_.factors;
        if (call_.l2norm) {
            keep_along(0, q(), dq);
            keep_along(1, k(), dk);
            if (own_p) keep_along(2, p(), dp);
        }
        __syncthreads();
        store_rows(0, q(), f.q_norm, grad_.dq, dq);
        store_rows(1, k(), f.k_norm, grad_.dk, dk);
        if (own_p) store_rows(2, p(), f.p_norm, grad_.dp, dp);
    }
    __device__ void keep_along(int which, const Rows& rows, Sums& x) const {
        float sums[2] = {}, factor[2] = {1, 1};
        scale_and_dot(rows, factor, x, sums);
        keep_row_sums(small_.along[which][quarter_], sums);
    }
    // Through the warp's part of the tile, which nobody else reads any more; y = x r: dx = r (dy − y Σ dy∘y).
    __device__ void store_rows(int which, const Rows& tile, const float* norm, const View& to, Sums& x) const {
        if (!to) return;
        float along[2] = {}, r[2] = {1, 1};
        for (int half = 0; half < 2 && call_.l2norm; ++half) {
            along[half] = sum_of(small_.along[which], row(half));
            r[half] = norm[row(half)];
        }
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 y = two(tile, n, half);
                const float low = r[half] * (x[n][2 * half] - y.x * along[half]),
                            high = r[half] * (x[n][2 * half + 1] - y.y * along[half]);
                *reinterpret_cast<std::uint32_t*>(shared_at(tile.unit(row(half), quarter_ * N + n) + 4 * (lane_ % 4))) =
                    ptx::pack(low, high, T());
            }
        __syncwarp();
        auto* data = static_cast<T*>(to.data) + s_.batch * to.stride[0] + h_ * to.stride[2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const int at = 32 * i + lane_, own = 16 * block_ + at / N, unit = quarter_ * N + at % N;
            if (own >= rows_ || 8 * unit >= call_.key_size) continue;
            *reinterpret_cast<uint4*>(data + (s_.begin + c_ * C + own) * to.stride[1] + 8 * unit) =
                *reinterpret_cast<const uint4*>(shared_at(tile.unit(own, unit)));
        }
    }

    const DeltaCall& call_;
    const GradientViews& grad_;
    const SavedChunks& saved_;
    const DeltaSequence s_;
    const Index c_;
    const int h_, thread_, lane_, block_, quarter_, rows_;
    const Index slot_;
    const bool erases_;
    char* memory_;
    std::uint32_t base_;
    Small& small_;
};

template <class T, int D, bool own_p>
__global__ void __launch_bounds__(threads, 1)
    finish_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                  const __grid_constant__ SavedChunks saved, const __grid_constant__ GradientViews grad) {
    Finish<T, D, own_p>(call, sequences, grad, saved).run();
}

}  // namespace

template <class T>
void launch_finish(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                   const SavedChunks& saved, cudaStream_t stream) {
    dim3 blocks = fold_blocks(call, sequences);
    blocks.y = static_cast<unsigned>(call.key_heads());
    const auto with = [&]<int D, bool own_p>() {
        launch(finish_kernel<T, D, own_p>, {blocks, threads, Shared<T, D, own_p>::bytes}, stream,
               "gradients of the delta rules", call, sequences, saved, grad);
    };
    if (call.own_p)
        with.template operator()<128, true>();
    else if (saved.size == 64)
        with.template operator()<64, false>();
    else
        with.template operator()<128, false>();
}
template void launch_finish<__nv_bfloat16>(const DeltaCall&, const DeltaSequences&, const GradientViews&,
                                           const SavedChunks&, cudaStream_t);
template void launch_finish<__half>(const DeltaCall&, const DeltaSequences&, const GradientViews&, const SavedChunks&,
                                    cudaStream_t);

}  // namespace softdelta::cuda

// One block computes one value head of a sequence for a slab of value columns, chunk after chunk (docs/math.md, "The
// chunk form"; gates that all channels share). Everything that depends on the state is transposed, so that it stays in
// registers: a consumer warp holds 16 rows of Sᵀ [V, K] as accumulators, and what one product yields is the left
// operand of the next. Right operands, which all warps read, lie in shared memory.
//
//     prepare (4 warps)         score = scale·(q kᵀ)∘e^(G_i − G_j)      A = (I + L)⁻¹∘β,  L = β∘(p kᵀ)∘e^(E_i − G_j)
//     consume (16 columns a warp)   Rᵀ = vᵀ − (Sᵀ pᵀ)∘e^E               [16, 64] = [16, K]·[K, 64]
//                                   Uᵀ = Rᵀ Aᵀ                          [16, 64] = [16, 64]·[64, 64]
//                                   oᵀ = (Sᵀ qᵀ)∘scale·e^G + Uᵀ scoreᵀ
//                                   Sᵀ = e^G_last·Sᵀ + (Uᵀ∘e^(G_last − G)) k
//
// While chunk c is consumed, c + 1 is prepared and c + 2 is on its way from memory; one barrier a chunk. Row factors of
// the l2norm join the decays of their token. A chunk whose gates rise, or that holds Inf or NaN, goes token by token:
// no exponential of a large positive difference, and nothing travels backwards in time.
#include "engines/cuda/delta_rule/chunk.h"

#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/grid.h"
#include "engines/cuda/tile.h"

namespace softdelta::cuda {

namespace {

constexpr int C = 64;  // tokens of a chunk
constexpr int stages = 3;
constexpr int prepare_warps = 4;
constexpr float highest_rise = 1;  // e^rise multiplies the rounding errors of what erasing cancels

struct ChunkOutputs {
    View o, final_state, states;
};

// What the consumers need of a chunk besides its tiles.
struct Decays {
    float read[C];   // scale·e^G, with the norm of q
    float erase[C];  // e^E, with the norm of p
    float write[C];  // e^(G_last − G), with the norm of k
    float last;      // e^G_last
    bool by_token;
    float gate[C], beta[C], q_norm[C], k_norm[C], p_norm[C];
};

template <class T, int K, int slab, bool own_p>
struct Shared {
    static constexpr int key_bytes = Tile<T, K>::bytes(C), value_bytes = Tile<T, slab>::bytes(C);
    static constexpr int stage_bytes = (own_p ? 3 : 2) * key_bytes + value_bytes;
    static constexpr int square_bytes = Tile<T, C>::bytes(C);
    static constexpr int lower_row = C + 4;  // floats; rows in different banks

    static constexpr int squares = stages * stage_bytes, lower = squares + 4 * square_bytes;
    static constexpr int inverse = lower + C * lower_row * 4, decays = inverse + C * lower_row * 4,
                         gates = decays + 2 * static_cast<int>(sizeof(Decays));
    static constexpr int anchors = gates + (C + 2) * 8, products = anchors + prepare_warps * C * 4;
    static constexpr int bytes = products + 3 * 16 * 20 * 4;
};

__device__ inline float sum_of_warp(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

template <class T, int K, int warps, bool own_p>
class Chunks {
    static constexpr int slab = 16 * warps;
    using Layout = Shared<T, K, slab, own_p>;
    using Keys = Tile<T, K>;
    using Values = Tile<T, slab>;
    using Square = Tile<T, C>;

  public:
    __device__ Chunks(const DeltaCall& call, const DeltaSequences& sequences, const ChunkOutputs& out, char* memory)
        : call_(call),
          sequences_(sequences),
          out_(out),
          s_(sequences[static_cast<int>(blockIdx.z)]),
          hv_(static_cast<int>(blockIdx.y)),
          first_column_(static_cast<int>(blockIdx.x) * slab),
          memory_(memory),
          base_(ptx::shared_address(memory)) {}

    __device__ void run() {
        const int chunks = static_cast<int>((s_.count + C - 1) / C);
        const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
        if (warp >= warps)
            run_prepare(chunks, static_cast<int>(threadIdx.x) - 32 * warps, lane);
        else
            run_consume(chunks, warp, lane);
    }

  private:
    __device__ void run_prepare(int chunks, int thread, int lane) {
        ptx::release_registers<104>();
        const HeadGate head(call_, hv_);
        if (chunks > 0) load_tiles(0, thread, 32 * prepare_warps);
        if (chunks > 1) load_tiles(1, thread, 32 * prepare_warps);
        Given given = load_given(0, lane);
        ptx::wait_for_copies();
        ptx::barrier(1, 32 * prepare_warps);
        for (int c = 0; c < chunks; ++c) {
            // Chunk c is prepared while c − 1 is consumed; c + 1 is loaded, for c = 0 it already is.
            if (c > 0 && c + 1 < chunks) load_tiles(c + 1, thread, 32 * prepare_warps);
            const Given next = c + 1 < chunks ? load_given(c + 1, lane) : Given{};
            prepare(c, head, given, thread, lane);
            given = next;
            ptx::wait_for_copies();
            __syncthreads();
        }
        __syncthreads();
    }
    __device__ void run_consume(int chunks, int warp, int lane) {
        ptx::take_registers<200>();
        load_state(warp, lane);
        __syncthreads();
        for (int c = 0; c < chunks; ++c) {
            if (out_.states) store_saved(c, warp, lane);
            if (decays(c).by_token || values_are_odd(c, warp, lane))
                consume_tokens(c, warp, lane);
            else
                consume(c, warp, lane);
            if (c + 1 < chunks) __syncthreads();
        }
        if (chunks > 0) __syncthreads();
        if (out_.final_state && s_.state >= 0) {
            const View& v = out_.final_state;
            store_state(v, s_.state * v.stride[0] + hv_ * v.stride[1], v.stride[call_.state_row],
                        v.stride[call_.state_column], warp, lane);
        }
    }

    __device__ Keys q(int c) const { return {stage(c)}; }
    __device__ Keys k(int c) const { return {stage(c) + Layout::key_bytes}; }
    __device__ Keys p(int c) const { return {stage(c) + (own_p ? 2 : 1) * Layout::key_bytes}; }
    __device__ Values v(int c) const { return {stage(c) + (own_p ? 3 : 2) * Layout::key_bytes}; }
    __device__ Square score(int c) const { return {base_ + Layout::squares + c % 2 * 2 * Layout::square_bytes}; }
    __device__ Square solve(int c) const { return {score(c).base + Layout::square_bytes}; }
    __device__ Decays& decays(int c) const { return reinterpret_cast<Decays*>(memory_ + Layout::decays)[c % 2]; }
    __device__ float* lower() const { return reinterpret_cast<float*>(memory_ + Layout::lower); }
    __device__ float* inverse() const { return reinterpret_cast<float*>(memory_ + Layout::inverse); }
    __device__ double* gate_sums() const {
        return reinterpret_cast<double*>(memory_ + Layout::gates);
    }  // [C + 1]: of tokens before
    __device__ float* anchors() const { return reinterpret_cast<float*>(memory_ + Layout::anchors); }
    __device__ float* products() const { return reinterpret_cast<float*>(memory_ + Layout::products); }
    __device__ std::uint32_t stage(int c) const { return base_ + c % stages * Layout::stage_bytes; }
    __device__ int rows(int c) const { return static_cast<int>(min(s_.count - Index(c) * C, Index(C))); }
    __device__ char* at(std::uint32_t address) const { return memory_ + (address - base_); }

    // --- from memory

    template <class Rows>
    __device__ void load_rows(const Rows& tile, const View& from, int c, int head, int first, int size, int thread,
                              int threads) const {
        const auto* data = static_cast<const T*>(from.data) + s_.batch * from.stride[0] + head * from.stride[2] + first;
        const int count = rows(c);
        for (int i = thread; i < C * Rows::units; i += threads) {
            const int row = i / Rows::units, u = i % Rows::units;
            const bool take = row < count && first + 8 * u < size;
            const Index token = s_.begin + Index(c) * C + row;
            ptx::copy_async(tile.unit(row, u), take ? data + token * from.stride[1] + 8 * u : data, take);
        }
    }
    __device__ void load_tiles(int c, int thread, int threads) const {
        const int h = hv_ / call_.group;
        load_rows(q(c), call_.q, c, h, 0, call_.key_size, thread, threads);
        load_rows(k(c), call_.k, c, h, 0, call_.key_size, thread, threads);
        if (own_p) load_rows(p(c), call_.p, c, h, 0, call_.key_size, thread, threads);
        load_rows(v(c), call_.v, c, hv_, first_column_, call_.value_size, thread, threads);
    }

    // Element (row of Sᵀ: value column, column: key channel) of accumulator [n][i].
    template <class Visit>
    __device__ void for_each_of_state(int warp, int lane, Visit&& visit) {
#pragma unroll
        for (int n = 0; n < K / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = first_column_ + 16 * warp + lane / 4 + 8 * (i / 2);
                const int channel = 8 * n + 2 * (lane % 4) + i % 2;
                visit(state_[n][i], channel, column, channel < call_.key_size && column < call_.value_size);
            }
    }
    __device__ void load_state(int warp, int lane) {
        const View& v = call_.initial_state;
        const bool given = v && s_.state >= 0;
        const Index offset = given ? s_.state * v.stride[0] + hv_ * v.stride[1] : 0;
        for_each_of_state(warp, lane, [&](float& x, int channel, int column, bool inside) {
            x = given && inside
                    ? load(v, offset + channel * v.stride[call_.state_row] + column * v.stride[call_.state_column])
                    : 0.0F;
        });
    }
    __device__ void store_state(const View& v, Index offset, Index row, Index column_step, int warp, int lane) {
        for_each_of_state(warp, lane, [&](float x, int channel, int column, bool inside) {
            if (inside) store(v, offset + channel * row + column * column_step, x);
        });
    }
    __device__ void store_saved(int c, int warp, int lane) {
        const View& v = out_.states;
        const Index token = Index(c) * C;
        if (token % sequences_.interval != 0) return;
        store_state(
            v,
            s_.batch * v.stride[0] + (s_.first_saved + token / sequences_.interval) * v.stride[1] + hv_ * v.stride[2],
            v.stride[call_.state_row + 1], v.stride[call_.state_column + 1], warp, lane);
    }

    // --- prepare

    // What the caller gave for two tokens of a lane; on its way from memory while the chunk before is prepared.
    struct Given {
        float gate[2], beta[2];
    };
    __device__ Given load_given(int c, int lane) const {
        Given x{};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 2 * lane + i;
            if (row >= rows(c)) continue;
            const Index t = s_.begin + Index(c) * C + row;
            const auto at = [&](const View& v) { return s_.batch * v.stride[0] + t * v.stride[1] + hv_ * v.stride[2]; };
            if (call_.g) x.gate[i] = load(call_.g, at(call_.g));
            x.beta[i] = call_.beta ? load(call_.beta, at(call_.beta)) : 1.0F;
        }
        return x;
    }

    // Gates and β of 64 tokens by one warp. Sums in f64 of gates that are at least −750: e^−750 is 0.
    __device__ void prepare_gates(int c, const HeadGate& head, const Given& given, int lane) const {
        Decays& d = decays(c);
        double g[2];
        float rise = 0;
        bool odd = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool inside = 2 * lane + i < rows(c);
            g[i] = inside && call_.gate != core::Gate::none ? head.gate(call_, given.gate[i]) : 0;
            const float beta = inside ? make_beta(call_, given.beta[i]) : 0;
            rise += static_cast<float>(fmax(g[i], 0.0));
            odd = odd || isnan(g[i]) || !isfinite(beta);
            d.gate[2 * lane + i] = static_cast<float>(g[i]);
            d.beta[2 * lane + i] = beta;
        }
        const double first = fmax(g[0], -750.0), second = fmax(g[1], -750.0);
        double sum = first + second;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            const double before = __shfl_up_sync(0xffffffffu, sum, lanes);
            if (lane >= lanes) sum += before;
        }
        double* G = gate_sums() + 1;
        G[2 * lane] = sum - second;
        G[2 * lane + 1] = sum;
        if (lane == 0) gate_sums()[0] = 0;
        odd = odd || !(sum_of_warp(rise) <= highest_rise);
        if (__any_sync(0xffffffffu, odd) && lane == 0) d.by_token = true;
    }

    // 1/√(Σx² + 1e-6) of a row, by two neighbouring threads.
    __device__ float norm_of(const Keys& tile, int thread) const {
        if (!call_.l2norm) return 1;
        const int row = thread / 2, first = thread % 2 * (Keys::units / 2);
        float sum = 0;
#pragma unroll 4
        for (int u = first; u < first + Keys::units / 2; ++u) {
            const uint4 x = *reinterpret_cast<const uint4*>(at(tile.unit(row, u)));
            for (const std::uint32_t two : {x.x, x.y, x.z, x.w}) {
                const float2 both = ptx::unpack(two, T());
                sum = fmaf(both.x, both.x, fmaf(both.y, both.y, sum));
            }
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        return 1 / sqrtf(sum + 1e-6F);
    }

    __device__ void prepare(int c, const HeadGate& head, const Given& given, int thread, int lane) const {
        constexpr int threads = 32 * prepare_warps;
        Decays& d = decays(c);
        const int warp = thread / 32;
        const bool erases = call_.erase != core::Erase::nothing;
        const int shift = call_.erase == core::Erase::from_previous_state ? 1 : 0;  // E_i = G_(i − 1)
        if (thread == 0) d.by_token = false;
        if (warp == 0) {
            __syncwarp();
            prepare_gates(c, head, given, lane);
        }
        const float q_norm = norm_of(q(c), thread), k_norm = norm_of(k(c), thread);
        const float p_norm = own_p ? norm_of(p(c), thread) : k_norm;
        if (thread % 2 == 0) {
            d.q_norm[thread / 2] = q_norm;
            d.k_norm[thread / 2] = k_norm;
            d.p_norm[thread / 2] = p_norm;
        }
        ptx::barrier(1, threads);

        const double* G = gate_sums() + 1;
        if (thread < C) {
            d.read[thread] = call_.scale * expf(static_cast<float>(G[thread])) * d.q_norm[thread];
            d.erase[thread] = expf(static_cast<float>(G[thread - shift])) * d.p_norm[thread];
            d.write[thread] = expf(static_cast<float>(G[C - 1] - G[thread])) * d.k_norm[thread];
            if (thread == 0) d.last = expf(static_cast<float>(G[C - 1]));
        }
        // Before the warp's rows, r the last of those: e^(G_r − G_j), and e^(G_i − G_r) for its own rows.
        const int first = 16 * warp;
        const double anchor = gate_sums()[first];
        float* to_anchor = anchors() + C * warp;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int j = lane + 32 * i;
            to_anchor[j] = j < first ? expf(static_cast<float>(anchor - G[j])) * d.k_norm[j] : 0.0F;
        }
        __syncwarp();
        Rows own;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = first + lane / 4 + 8 * half;
            own.read[half] = expf(static_cast<float>(G[i] - anchor)) * call_.scale * d.q_norm[i];
            own.erase[half] = expf(static_cast<float>(G[i - shift] - anchor)) * d.beta[i] * d.p_norm[i];
        }
        float x[C / 8][4];
        multiply_keys(q(c), c, first, lane, x);
        bool odd = diagonal_is_odd(x, warp, lane);
        const Square out = score(c);
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = first + lane / 4 + 8 * half, j = 8 * n + 2 * (lane % 4);
                float y[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float factor = own.read[half] * to_anchor[j + e];
                    if (n / 2 == warp)
                        factor = j + e <= i ? expf(static_cast<float>(G[i] - G[j + e])) * call_.scale * d.q_norm[i] *
                                                  d.k_norm[j + e]
                                            : 0.0F;
                    y[e] = n / 2 <= warp ? x[n][2 * half + e] * factor : 0.0F;
                }
                *reinterpret_cast<std::uint32_t*>(at(out.unit(i, n) + 4 * (lane % 4))) = ptx::pack(y[0], y[1], T());
            }
        if (erases) {
            multiply_keys(p(c), c, first, lane, x);
            odd = odd || diagonal_is_odd(x, warp, lane);
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = first + lane / 4 + 8 * half, j = 8 * n + 2 * (lane % 4);
                    if (n / 2 > warp) continue;
                    float2 y;
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float factor = own.erase[half] * to_anchor[j + e];
                        if (n / 2 == warp)
                            factor = j + e < i ? expf(static_cast<float>(G[i - shift] - G[j + e])) * d.beta[i] *
                                                     d.p_norm[i] * d.k_norm[j + e]
                                               : 0.0F;
                        (e == 0 ? y.x : y.y) = x[n][2 * half + e] * factor;
                    }
                    *reinterpret_cast<float2*>(lower() + i * Layout::lower_row + j) = y;
                }
        }
        if (odd) d.by_token = true;
        if (erases) invert(c, thread, lane);
    }

    struct Rows {
        float read[2], erase[2];  // of rows r and r + 8
    };

    // Inf or NaN in a row of either operand shows in its product with itself.
    __device__ bool diagonal_is_odd(const float (&x)[C / 8][4], int warp, int lane) const {
        bool odd = false;
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 16 * warp + lane / 4 + 8 * (i / 2), column = 8 * n + 2 * (lane % 4) + i % 2;
                if (row == column) odd = odd || !isfinite(x[n][i]);
            }
        return odd;
    }

    // Rows [row, row + 16) of left·kᵀ, up to the diagonal.
    __device__ void multiply_keys(const Keys& left, int c, int row, int lane, float (&x)[C / 8][4]) const {
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] = 0;
        for (int depth = 0; depth < K / 16; ++depth) {
            std::uint32_t a[4], b[4];
            left.load_left(a, row, depth, lane);
#pragma unroll
            for (int n = 0; n < C / 16; ++n) {
                if (16 * n > row) break;
                k(c).load_right(b, 16 * n, depth, lane);
                ptx::multiply(x[2 * n], a, b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], a, b[2], b[3], T());
            }
        }
    }

    // X = (I + L)⁻¹ in blocks of 16 rows: those on the diagonal by substitution, a warp each; then, diagonal by
    // diagonal,
    //     X_IJ = −X_II Σ_{J ≤ M < I} L_IM X_MJ
    __device__ void invert(int c, int thread, int lane) const {
        constexpr int threads = 32 * prepare_warps, row = Layout::lower_row;
        const int warp = thread / 32;
        const float* L = lower();
        float* X = inverse();
        __syncwarp();
        if (lane < 16) {  // column j of the inverse of the warp's block: x_i = δ_ij − Σ_{l<i} L_il x_l
            const float* block = L + 16 * warp * (row + 1);
            float* to = X + 16 * warp * (row + 1);
            const int j = lane;
            float x[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float sum = i == j ? 1.0F : 0.0F;
#pragma unroll
                for (int l = 0; l < i; ++l) sum = fmaf(-block[i * row + l], x[l], sum);
                x[i] = sum;
                to[i * row + j] = sum;
            }
        }
        ptx::barrier(1, threads);
        invert_diagonal<1>(thread);
        invert_diagonal<2>(thread);
        invert_diagonal<3>(thread);
        // X∘β for the consumers; nothing above the diagonal is read there but within its blocks.
        const Square out = solve(c);
        const Decays& d = decays(c);
        for (int u = thread; u < C * C / 8; u += threads) {
            const int i = u / (C / 8), j = u % (C / 8) * 8;
            if (j / 16 > i / 16) continue;
            const float4 low = *reinterpret_cast<const float4*>(X + i * row + j);
            const float4 high = *reinterpret_cast<const float4*>(X + i * row + j + 4);
            const float* beta = d.beta + j;
            *reinterpret_cast<uint4*>(at(out.unit(i, j / 8))) = {
                ptx::pack(low.x * beta[0], low.y * beta[1], T()), ptx::pack(low.z * beta[2], low.w * beta[3], T()),
                ptx::pack(high.x * beta[4], high.y * beta[5], T()), ptx::pack(high.z * beta[6], high.w * beta[7], T())};
        }
    }

    // Blocks (J + distance, J), each by a team of warps; a thread has some columns of a row.
    template <int distance>
    __device__ void invert_diagonal(int thread) const {
        constexpr int threads = 32 * prepare_warps, row = Layout::lower_row, sum_row = 20;
        constexpr int team = distance == 1 ? 32 : distance == 2 ? 64 : 128, columns = 256 / team;
        const int J = thread / team, I = J + distance, member = thread % team;
        const int i = member / (team / 16), first = member % (team / 16) * columns;
        const bool works = I < 4;
        const float* L = lower();
        float* X = inverse();
        float* sums = products() + J * 16 * sum_row;
        float y[columns] = {};
        if (works)
            for (int m = 16 * J; m < 16 * I; ++m) {
                const float left = L[(16 * I + i) * row + m];
#pragma unroll
                for (int e = 0; e < columns; ++e) y[e] = fmaf(left, X[m * row + 16 * J + first + e], y[e]);
            }
#pragma unroll
        for (int e = 0; e < columns; ++e)
            if (works) sums[i * sum_row + first + e] = y[e];
        ptx::barrier(1, threads);
        float z[columns] = {};
        if (works)
            for (int m = 0; m <= i; ++m) {
                const float left = -X[(16 * I + i) * row + 16 * I + m];
#pragma unroll
                for (int e = 0; e < columns; ++e) z[e] = fmaf(left, sums[m * sum_row + first + e], z[e]);
            }
#pragma unroll
        for (int e = 0; e < columns; ++e)
            if (works) X[(16 * I + i) * row + 16 * J + first + e] = z[e];
        ptx::barrier(1, threads);
    }

    // --- consume

    // x [16, 64] = left [16, 16·depths] rightᵀ, right [64, 16·depths]
    template <int depths, class Right>
    __device__ void multiply_transposed(const std::uint32_t (&left)[depths][4], const Right& right, bool triangular,
                                        int lane, float (&x)[C / 8][4]) const {
#pragma unroll
        for (int depth = 0; depth < depths; ++depth)
#pragma unroll
            for (int n = 0; n < C / 16; ++n) {
                if (triangular && n < depth) continue;  // a lower triangle: nothing before the diagonal's rows
                std::uint32_t b[4];
                right.load_right(b, 16 * n, depth, lane);
                ptx::multiply(x[2 * n], left[depth], b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], left[depth], b[2], b[3], T());
            }
    }

    __device__ void consume(int c, int warp, int lane) {
        const Decays& d = decays(c);
        const bool erases = call_.erase != core::Erase::nothing;
        const int pair = 2 * (lane % 4);
        std::uint32_t state[K / 16][4], u[C / 16][4];
        to_left<T>(state, state_);

        float x[C / 8][4] = {};
        if (erases) multiply_transposed(state, p(c), false, lane, x);
#pragma unroll
        for (int n = 0; n < C / 16; ++n) {
            std::uint32_t value[4];
            v(c).load_transposed_result(value, 16 * n, warp, lane);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                float(&to)[4] = x[2 * n + m / 2];
                const int token = 16 * n + 8 * (m / 2) + pair;
                const float2 both = ptx::unpack(value[m], T());
                to[2 * (m % 2)] = both.x - d.erase[token] * to[2 * (m % 2)];
                to[2 * (m % 2) + 1] = both.y - d.erase[token + 1] * to[2 * (m % 2) + 1];
            }
        }
        float U[C / 8][4] = {};
        if (erases) {
            to_left<T>(u, x);
            multiply_transposed(u, solve(c), true, lane, U);
        } else {
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) U[n][i] = x[n][i];
        }
        if (out_.o) {
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) x[n][i] = 0;
            multiply_transposed(state, q(c), false, lane, x);
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) x[n][i] *= d.read[8 * n + pair + i % 2];
            to_left<T>(u, U);
            multiply_transposed(u, score(c), true, lane, x);
            store_outputs(c, x, warp, lane);
        }
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) U[n][i] *= d.write[8 * n + pair + i % 2];
        to_left<T>(u, U);
#pragma unroll
        for (int n = 0; n < K / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) state_[n][i] *= d.last;
#pragma unroll
        for (int depth = 0; depth < C / 16; ++depth)
#pragma unroll
            for (int n = 0; n < K / 16; ++n) {
                std::uint32_t b[4];
                k(c).load_right_upright(b, 16 * depth, n, lane);
                ptx::multiply(state_[2 * n], u[depth], b[0], b[1], T());
                ptx::multiply(state_[2 * n + 1], u[depth], b[2], b[3], T());
            }
    }

    // oᵀ through the tile of values, whose columns of this warp nobody else reads, to whole rows of memory.
    __device__ void store_outputs(int c, const float (&x)[C / 8][4], int warp, int lane) const {
        const Values tile = v(c);
        __syncwarp();
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const std::uint32_t both = ptx::transpose(ptx::pack(x[n][2 * half], x[n][2 * half + 1], T()));
                *reinterpret_cast<std::uint32_t*>(at(tile.unit(8 * n + lane / 4, 2 * warp + half) + 4 * (lane % 4))) =
                    both;
            }
        __syncwarp();
        const View& o = out_.o;
        auto* data = static_cast<T*>(o.data) + s_.batch * o.stride[0] + hv_ * o.stride[2] + first_column_;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = (32 * i + lane) / 2, u = 2 * warp + lane % 2;
            if (row >= rows(c) || first_column_ + 8 * u >= call_.value_size) continue;
            const uint4 values = *reinterpret_cast<const uint4*>(at(tile.unit(row, u)));
            *reinterpret_cast<uint4*>(data + (s_.begin + Index(c) * C + row) * o.stride[1] + 8 * u) = values;
        }
    }

    // Two neighbouring elements of a row.
    template <class Rows>
    __device__ float2 elements(const Rows& tile, int row, int column) const {
        return ptx::unpack(*reinterpret_cast<const std::uint32_t*>(at(tile.unit(row, column / 8) + 2 * (column % 8))),
                           T());
    }

    // Inf or NaN in the warp's values: they stay in their row when it goes token by token.
    __device__ bool values_are_odd(int c, int warp, int lane) const {
        bool odd = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 x = *reinterpret_cast<const uint4*>(at(v(c).unit((32 * i + lane) / 2, 2 * warp + lane % 2)));
            for (const std::uint32_t two : {x.x, x.y, x.z, x.w}) odd = odd || ptx::has_nonfinite(two, T());
        }
        return __any_sync(0xffffffffu, odd);
    }

    // Σ over channels of row·Sᵀ: for value columns r and r + 8.
    __device__ float2 multiply_row(const Keys& tile, int row, int lane) const {
        float2 sum = {0, 0};
#pragma unroll
        for (int n = 0; n < K / 8; ++n) {
            const float2 x = elements(tile, row, 8 * n + 2 * (lane % 4));
            sum.x = fmaf(x.x, state_[n][0], fmaf(x.y, state_[n][1], sum.x));
            sum.y = fmaf(x.x, state_[n][2], fmaf(x.y, state_[n][3], sum.y));
        }
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            sum.x += __shfl_xor_sync(0xffffffffu, sum.x, lanes);
            sum.y += __shfl_xor_sync(0xffffffffu, sum.y, lanes);
        }
        return sum;
    }

    __device__ void decay_state(float g) {
        constexpr float step = 80;
        float rest = fminf(g, 4 * step);
        do {
            const float factor = expf(fminf(rest, step));
#pragma unroll
            for (int n = 0; n < K / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) state_[n][i] *= factor;
            rest -= step;
        } while (rest > 0);
    }

    __device__ void consume_tokens(int c, int warp, int lane) {
        const Decays& d = decays(c);
        const bool erases = call_.erase != core::Erase::nothing;
        const bool before_decay = call_.erase == core::Erase::from_previous_state;
        const int column = 16 * warp + lane / 4;
        for (int i = 0; i < rows(c); ++i) {
            float2 erased = {0, 0};
            if (before_decay) erased = multiply_row(p(c), i, lane);
            if (call_.gate != core::Gate::none) decay_state(d.gate[i]);
            if (erases && !before_decay) erased = multiply_row(p(c), i, lane);
            const T* values = reinterpret_cast<const T*>(at(v(c).unit(i, 2 * warp)));
            const T* more = reinterpret_cast<const T*>(at(v(c).unit(i, 2 * warp + 1)));
            float2 write = {to_float(values[lane / 4]), to_float(more[lane / 4])};
            if (erases) {
                write.x = d.beta[i] * (write.x - d.p_norm[i] * erased.x);
                write.y = d.beta[i] * (write.y - d.p_norm[i] * erased.y);
            }
#pragma unroll
            for (int n = 0; n < K / 8; ++n) {
                const float2 key = elements(k(c), i, 8 * n + 2 * (lane % 4));
                const float x = key.x * d.k_norm[i], y = key.y * d.k_norm[i];
                state_[n][0] = fmaf(x, write.x, state_[n][0]);
                state_[n][1] = fmaf(y, write.x, state_[n][1]);
                state_[n][2] = fmaf(x, write.y, state_[n][2]);
                state_[n][3] = fmaf(y, write.y, state_[n][3]);
            }
            if (!out_.o) continue;
            const float2 read = multiply_row(q(c), i, lane);
            const float factor = call_.scale * d.q_norm[i];
            if (lane % 4 != 0) continue;
            const Index offset = s_.batch * out_.o.stride[0] + (s_.begin + Index(c) * C + i) * out_.o.stride[1] +
                                 hv_ * out_.o.stride[2] + first_column_ + column;
            if (first_column_ + column < call_.value_size) store(out_.o, offset, factor * read.x);
            if (first_column_ + column + 8 < call_.value_size) store(out_.o, offset + 8, factor * read.y);
        }
    }

    const DeltaCall& call_;
    const DeltaSequences& sequences_;
    const ChunkOutputs& out_;
    DeltaSequence s_;
    int hv_, first_column_;
    char* memory_;
    std::uint32_t base_;
    float state_[K / 8][4];
};

template <class T, int K, int warps, bool own_p>
__global__ void __launch_bounds__(32 * (warps + prepare_warps), 1)
    chunk_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                 const __grid_constant__ ChunkOutputs out) {
    Chunks<T, K, warps, own_p>(call, sequences, out, ptx::shared_memory()).run();
}

template <class T, int K, int warps, bool own_p>
void launch_chunks(const DeltaCall& call, const DeltaSequences& sequences, const ChunkOutputs& out,
                   cudaStream_t stream) {
    constexpr int slab = 16 * warps, bytes = Shared<T, K, slab, own_p>::bytes;
    const auto kernel = chunk_kernel<T, K, warps, own_p>;
    const dim3 grid(static_cast<unsigned>((call.value_size + slab - 1) / slab), static_cast<unsigned>(call.heads),
                    static_cast<unsigned>(sequences.count));
    launch(kernel, {grid, 32 * (warps + prepare_warps), bytes}, stream, "the delta rules' chunk kernel", call,
           sequences, out);
}

template <class T>
void launch_for(const DeltaCall& call, const DeltaSequences& sequences, const ChunkOutputs& out, cudaStream_t stream) {
    const auto with = [&](auto keys, auto own_p) {
        constexpr int K = decltype(keys)::value;
        constexpr bool own = decltype(own_p)::value;
        launch_chunks<T, K, 8, own>(call, sequences, out, stream);
    };
    using std::integral_constant;
    if (call.own_p)
        with(integral_constant<int, 64>(), std::true_type());
    else if (call.key_size <= 64)
        with(integral_constant<int, 64>(), std::false_type());
    else
        with(integral_constant<int, 128>(), std::false_type());
}

// Rows of 16-byte units.
bool has_units(const core::Tensor& t) {
    if (!t || t.count() == 0) return true;
    bool fits = t.stride[3] == 1 && t.shape[3] % 8 == 0 && reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
    for (std::size_t dim = 0; dim < 3; ++dim) fits = fits && (t.shape[dim] == 1 || t.stride[dim] % 8 == 0);
    return fits;
}

// Hopper has the shared memory that three chunks on their way need; older GPUs take the token kernel.
bool has_room(core::Device device) {
    constexpr int needed = Shared<__nv_bfloat16, 128, 128, false>::bytes;
    int bytes = 0;
    return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.id) == cudaSuccess &&
           bytes >= needed;
}

}  // namespace

bool takes_chunks(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::DeltaOutputs& out) {
    constexpr Index fewest_tokens = 32;  // below, the token kernel is as fast
    const core::DType type = in.q.dtype;
    if (options.rule.gate == core::Gate::channel || (type != core::DType::bf16 && type != core::DType::f16))
        return false;
    for (const core::Tensor* t : {&in.k, &in.p, &in.v, &out.o})
        if (*t && t->dtype != type) return false;
    for (const core::Tensor* t : {&in.q, &in.k, &in.p, &in.v, &out.o})
        if (!has_units(*t)) return false;
    if (out.states && options.state_interval % C != 0) return false;
    const Index most_keys = options.rule.own_p ? 64 : 128;  // what shared memory holds
    return in.q.shape[3] <= most_keys && in.q.shape[1] >= fewest_tokens && !in.state_indices && has_room(in.q.device);
}

void chunk_forward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                   const core::DeltaOutputs& out) {
    const OnDevice device(in.q.device);
    const DeltaCall call = delta_call(in, options);
    const ChunkOutputs outputs{view_of(out.o), view_of(out.final_state), view_of(out.states)};
    const Index sequences = core::sequence_count(in);
    for (Index first = 0; first < sequences; first += DeltaSequences::most) {
        const Index count = std::min<Index>(DeltaSequences::most, sequences - first);
        const DeltaSequences some = delta_sequences(in, options, sequences, first, count);
        (in.q.dtype == core::DType::bf16 ? launch_for<__nv_bfloat16> : launch_for<__half>)(call, some, outputs,
                                                                                           stream_of(execution));
    }
}

}  // namespace softdelta::cuda

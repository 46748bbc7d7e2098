// The fold of gates that all channels share, or of none, by four warps:
//     score = scale·(q kᵀ)∘e^(G_i − G_j)     solve = (I + L)⁻¹∘β,  L = β∘(p kᵀ)∘e^(E_i − G_j)
// Gates are summed in f64. A warp has 16 rows of the scores and of L, and of the inverse.
#pragma once

#include "engines/cuda/delta_rule/fold/inverse.h"
#include "engines/cuda/delta_rule/fold/launch.h"
#include "engines/cuda/delta_rule/fold/norms.h"
#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {
// What the warps of a fold need beside the tiles.
struct SharedFoldMemory {
    double sums[chunk_rows + 2];  // of the gates before each token
    KeyDecays decays;
    float beta[chunk_rows], q_norm[chunk_rows], p_norm[chunk_rows];
};

template <class T, int K>
struct SharedFoldTiles {
    KeyTile<T, K> q, k, p;  // p: the tile of k where a rule has no p of its own
    SquareTile<T> score, solve;
    ChunkFactors* factors;
    SharedFoldMemory* memory;
    InverseMemory* inverse;
};

// Products of a chunk's keys with what decays lie between: the warp's 16 rows of the scores, or of L.
template <class T, int K, bool warpgroups>
class KeyProducts {
  public:
    static constexpr int C = chunk_rows;

    const DeltaCall& call;
    int warp, lane;

    // left·rightᵀ, the warp's 16 rows: all columns in the background, or those up to the diagonal.
    __device__ void begin(const KeyTile<T, K>& left, const KeyTile<T, K>& right, float (&x)[C / 8][4]) const {
        begin_multiply_keys<T, warpgroups>(left, right, 16 * warp, lane, x);
    }
    // decay_between_rows(). running: groups of products that were begun since.
    template <int running = 0>
    __device__ bool end(const KeyDecays& m, bool of_q, const float (&own)[2], float (&x)[C / 8][4]) const {
        if constexpr (warpgroups) ptx::wait_for_products<running>(x);
        const float* within = m.within[warp] + 1;
        float from[2], to_anchor[2];
        unrolled<2>([&](int half) {
            from[half] = within[lane / 4 + 8 * half - (of_q ? 0 : call.erase_shift())];
            to_anchor[half] = own[half] * fast_exp(from[half]);
        });
        return decay_between_rows(
            of_q, warp, lane, own, to_anchor, m.anchors[warp],
            [&](int half, int j) { return fast_exp(from[half] - within[j]) * m.k_norm[16 * warp + j]; }, x);
    }

    // Scores of the warp's rows; to a tile.
    __device__ void make_scores(const SharedFoldTiles<T, K>& tiles, float (&x)[C / 8][4]) const {
        begin(tiles.q, tiles.k, x);
        const float* norms = tiles.memory->q_norm + 16 * warp + lane / 4;
        if (end(tiles.memory->decays, true, {call.scale * norms[0], call.scale * norms[8]}, x))
            tiles.factors->by_token = 1;
    }
    __device__ void make_scores(const SharedFoldTiles<T, K>& tiles) const {
        float x[C / 8][4] = {};
        make_scores(tiles, x);
        store_products(tiles.score, 16 * warp, lane, x);
    }
};

// What the backward pass reads of a chunk's rows, by the threads of a fold; q's norms are 1 where q has no tile.
template <class T = __nv_bfloat16>
__device__ inline void keep_factors(const KeptChunks& kept, Index chunk, const ChunkFactors& f,
                                    const SharedFoldMemory& m, int thread) {
    RowFactors& to = kept.factors<T>(chunk);
    const int row = thread % chunk_rows;
    if (thread < chunk_rows) {
        to.read[row] = f.read[row];
        to.erase[row] = f.erase[row];
        to.write[row] = f.write[row];
        to.beta[row] = m.beta[row];
    } else {
        to.q_norm[row] = m.q_norm[row];
        to.k_norm[row] = m.decays.k_norm[row];
        to.p_norm[row] = m.p_norm[row];
        to.sums[row] = m.sums[row];
    }
    if (thread != 0) return;
    to.sums[chunk_rows] = m.sums[chunk_rows];
    to.sums[chunk_rows + 1] = 0;
    to.last = f.last;
    to.by_token = kept.by_token[chunk] = f.by_token;
    to.unused[0] = to.unused[1] = 0;
}

// queries: q has a tile and its norms are wanted.
template <class T, int K, bool erases, bool warpgroups, bool queries = true>
class SharedFold {
  public:
    static constexpr int threads = 128;

    // barrier: of its threads alone.
    __device__ SharedFold(const DeltaCall& call, const DeltaSequence& s, int hv, int thread, int barrier = 1)
        : call_(call), s_(s), head_(call, hv), hv_(hv), thread_(thread), barrier_(barrier) {}

    // What warp 0 needs of chunk c.
    __device__ GivenTokens load_given(Index c) const { return {call_, s_, warp_ == 0 ? c : s_.count, hv_, lane_}; }

    // Factors and solve of chunk c, by all threads of the fold; tiles of keys are there. What a kernel does in between
    // are its steps: have_factors(), where scores can be made (makes_scores: the products of keys begin after them);
    // have_products(), when keys were read; have_inverse(inverse), when nobody reads its memory any more.
    template <class Steps>
    __device__ void run(Index c, const GivenTokens& given, const SharedFoldTiles<T, K>& tiles,
                        const Steps& steps) const {
        SharedFoldMemory& m = *tiles.memory;
        const int rows = s_.rows(c);
        const KeyProducts<T, K, warpgroups> keys{call_, warp_, lane_};
        float x[C / 8][4] = {};
        if constexpr (erases && !Steps::makes_scores) keys.begin(tiles.p, tiles.k, x);
        if (warp_ == 0) make_gates_of_chunk(given, rows, *tiles.factors, m);
        make_norms(tiles, m);
        ptx::barrier(barrier_, threads);
        make_factors(*tiles.factors, m, call_.erase_shift());
        steps.have_factors();
        if constexpr (erases) {
            const int row = 16 * warp_ + lane_ / 4;
            if constexpr (Steps::makes_scores) keys.begin(tiles.p, tiles.k, x);
            if (keys.end(m.decays, false, {m.beta[row] * m.p_norm[row], m.beta[row + 8] * m.p_norm[row + 8]}, x))
                tiles.factors->by_token = 1;
            steps.have_products();
            float inverse[C / 8][4];
            WarpInverse<T>{*tiles.inverse, warp_, lane_}.run(x, inverse, [&] { ptx::barrier(barrier_, threads); });
            steps.have_inverse(inverse);
            unrolled<C / 8, 4>([&](int n, int e) { inverse[n][e] *= m.beta[8 * n + 2 * (lane_ % 4) + e % 2]; });
            store_products(tiles.solve, 16 * warp_, lane_, inverse);
        }
    }

  private:
    static constexpr int C = chunk_rows;

    // By one warp. Gates are at least −100: what e^−100 leaves of a 16-bit number is 0.
    __device__ void make_gates_of_chunk(const GivenTokens& given, int rows, ChunkFactors& f,
                                        SharedFoldMemory& m) const {
        const GateSumsOfTokens of(call_, head_, given, rows, lane_, -100.0, m.beta);
        double* G = m.sums + 1;
        G[2 * lane_] = of.first;
        G[2 * lane_ + 1] = of.second;
        const double last = __shfl_sync(0xffffffffu, of.second, max(lane_ / 8 * 8 - 1, 0)),
                     anchor = lane_ < 8 ? 0.0 : last;
        float* within = m.decays.within[lane_ / 8] + 1 + 2 * (lane_ % 8);
        within[0] = static_cast<float>(of.first - anchor);
        within[1] = static_cast<float>(of.second - anchor);
        if (lane_ % 8 == 0) within[-1] = 0;
        const bool nonfinite = __any_sync(0xffffffffu, of.nonfinite());
        if (lane_ != 0) return;
        m.sums[0] = 0;
        f.by_token = nonfinite ? 1 : 0;
        f.unused[0] = f.unused[1] = 0;
    }

    // 1/√(Σx² + 1e-6) of rows, or 1; two threads of a row take turns with tiles.
    __device__ void make_norms(const SharedFoldTiles<T, K>& tiles, SharedFoldMemory& m) const {
        const int row = thread_ % C;
        if (thread_ < C) {
            m.q_norm[row] = queries ? norm_of_query(tiles.q, row) : 1.0F;
            if (call_.own_p) m.p_norm[row] = norm_of(tiles.p, row);
        } else {
            const float norm = norm_of(tiles.k, row);
            m.decays.k_norm[row] = norm;
            if (!call_.own_p) m.p_norm[row] = norm;
        }
    }
    // That of q is summed in the order of the scan's outputs (scan/warpgroup/outputs.h), so that both give the same
    // bits.
    __device__ float norm_of_query(const KeyTile<T, K>& tile, int row) const {
        if (!call_.l2norm) return 1;
        float sums[2] = {};
        bool far = false;
#pragma unroll 4
        for (int u = 0; u < KeyTile<T, K>::units; ++u) {
            const uint4 x = *reinterpret_cast<const uint4*>(shared_at(tile.unit(row, u)));
            for (const std::uint32_t two : {x.x, x.y, x.z, x.w}) far = far | is_far<T>(two);
            sums[u % 2] += dot<T>(x, x);
        }
        return norm_of_squares(sums[0] + sums[1], far);
    }
    __device__ float norm_of(const KeyTile<T, K>& tile, int row) const {
        if (!call_.l2norm) return 1;
        float sums[4] = {};
        bool far = false;
#pragma unroll 4
        for (int u = 0; u < KeyTile<T, K>::units; ++u) {
            const uint4 x = *reinterpret_cast<const uint4*>(shared_at(tile.unit(row, u)));
            const std::uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
            far = far | any_of<4>([&](int i) { return is_far<T>(pairs[i]); });
            unrolled<4>([&](int i) { sums[i] = add_squares<T>(pairs[i], sums[i]); });
        }
        return norm_of_squares((sums[0] + sums[1]) + (sums[2] + sums[3]), far);
    }

    __device__ void make_factors(ChunkFactors& f, SharedFoldMemory& m, int shift) const {
        const double* G = m.sums + 1;
        if (thread_ < C) {
            f.read[thread_] = call_.scale * fast_exp(static_cast<float>(G[thread_])) * m.q_norm[thread_];
            f.erase[thread_] = fast_exp(static_cast<float>(G[thread_ - shift])) * m.p_norm[thread_];
            if (m.q_norm[thread_] == 0 || m.p_norm[thread_] == 0) f.by_token = 1;
        } else {
            const int row = thread_ - C;
            f.write[row] = fast_exp(static_cast<float>(G[C - 1] - G[row])) * m.decays.k_norm[row];
            if (m.decays.k_norm[row] == 0) f.by_token = 1;
            if (row == 0) f.last = expf(static_cast<float>(G[C - 1]));
        }
        // For the warp's rows, r the last row before them: e^(G_r − G_j).
        for (int j = lane_; j < 16 * warp_; j += 32)
            m.decays.anchors[warp_][j] = fast_exp(static_cast<float>(m.sums[16 * warp_] - G[j])) * m.decays.k_norm[j];
        __syncwarp();
    }

    const DeltaCall& call_;
    const DeltaSequence& s_;
    const HeadGate head_;
    const int hv_, thread_, warp_ = thread_ / 32, lane_ = thread_ % 32, barrier_;
};

// use.template operator()<K, own_p, erases>()
template <class Use>
void with_shared_fold(const DeltaCall& call, const Use& use) {
    with_keys(call, [&]<int K, Keys keys>() {
        if constexpr (keys != Keys::with_gates)
            use.template operator()<K, keys == Keys::own_p, keys != Keys::only_written>();
    });
}

}  // namespace softdelta::cuda

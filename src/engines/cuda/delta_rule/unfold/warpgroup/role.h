// What the multiplying warpgroups of unfold.cu share: products of a chunk's tiles, rows of gradients as
// accumulators, and the pairs of tokens. A warp has 16 rows and all channels.
#pragma once

#include "engines/cuda/delta_rule/fold/launch.h"
#include "engines/cuda/delta_rule/scan/backward/columns.h"
#include "engines/cuda/delta_rule/unfold/gates.h"
#include "engines/cuda/delta_rule/unfold/spans.h"
#include "engines/cuda/delta_rule/unfold/warpgroup/boxes.h"
#include "engines/cuda/delta_rule/unfold/warpgroup/tiles.h"

namespace softdelta::cuda {

template <class T>
struct UnfoldWarpgroup {
    static constexpr int C = chunk_rows, D = 128;
    using Memory = WarpgroupMemory<T>;
    using Rows = KeyTile<T, D>;
    using States = Tile<T, D, D>;
    using Square = SquareTile<T>;
    using Sums = float[D / 8][4];   // [64, D] of a warpgroup
    using Pairs = float[C / 8][4];  // [64, 64]
    using Left = std::uint32_t[C / 16][4];
    using Diagonal = float[2][4];  // a warp's block [16, 16]

    __device__ explicit UnfoldWarpgroup(const ChunkGradients& of)
        : pass(of), call(of.call), grad(of.grad), saved(of.saved) {}

    // take(place, step) for the block's chunks in order, when their keys are there.
    template <class Take>
    __device__ void for_each_chunk(const Take& take) {
        for (unsigned step = 0;; ++step) {
            m.keys().wait(step);
            const ChunkPlace& at = small.places[step % 4];
            if (at.left_out != 0) return;
            take(at, step);
        }
    }

    // Registers are scarce: places that depend on the lane are computed anew.
    __device__ void forget() {
        ptx::forget(thread);
        ptx::forget(lane);
    }
    __device__ bool has_gate_gradients() const { return call.gate != core::Gate::none && (grad.dg || saved.shares); }
    __device__ int row(int half) const { return 16 * warp + lane / 4 + 8 * half; }

    __device__ void load_transposed(const Square& of, Left& out) const {
        unrolled<C / 16>([&](int depth) { of.load_transposed_result(out[depth], 16 * depth, 16 * warp, lane); });
    }

    // to += factor∘x, or = where it is the first; and of each row of_sum·Σ x∘keys to `sums`.
    template <bool first>
    __device__ void add_rows(const float (&factor)[2], const float (&of_sum)[2], const Sums& x, const Rows& keys,
                             Sums& to, float* sums) const {
        float sum[2] = {};
        unrolled<D / 16>([&](int n) {
            std::uint32_t words[4];
            keys.load_left(words, 16 * warp, n, lane);
            unrolled<4>([&](int i) {
                // a word of row i % 2, accumulator 2·n + i / 2
                const int half = i % 2;
                const float2 key = ptx::unpack(words[i], T());
                const float(&from)[4] = x[2 * n + i / 2];
                float(&out)[4] = to[2 * n + i / 2];
                sum[half] = fmaf(from[2 * half], key.x, fmaf(from[2 * half + 1], key.y, sum[half]));
                unrolled<2>([&](int i) {
                    const int e = 2 * half + i;
                    out[e] = first ? factor[half] * from[e] : fmaf(factor[half], from[e], out[e]);
                });
            });
        });
        keep_row_sums(sums, of_sum[0] * sum[0], of_sum[1] * sum[1]);
    }
    // In the background: x = rows · S
    __device__ void begin_states(unsigned n, const Rows& rows, Sums& x) const {
        m.of_state().wait(n);
        ptx::begin_products(x);
        begin_product<T>(x, rows, m.states(Memory::state), false);
        ptx::commit_products();
    }
    // to += factor∘(rows · S) + pairs · k, with sums of the first as add_rows() has them; the first of a key head has
    // begun its product with S. have_rows(): they were read.
    template <bool first, class Then>
    __device__ void add_states_and_pairs(unsigned n, const Rows& rows, int which, const Rows& keys, const Rows& k,
                                         const float (&factor)[2], const float (&of_sum)[2], Sums& to, float* sums,
                                         const Then& have_rows) {
        const Square square = m.square(which);
        Sums other;
        Sums& x = first ? to : other;
        if (!first) begin_states(n, rows, x);
        if (!first) {
            m.of_square(which).wait(n);
            ptx::begin_products(to);
            begin_product<T>(to, square, k, true);
            ptx::commit_products();
        }
        ptx::wait_for_products<0>(x);
        if (!first) ptx::keep_registers(to);
        forget();
        have_rows();
        add_rows<first>(factor, of_sum, x, keys, to, sums);
        if (first) {
            m.of_square(which).wait(n);
            ptx::begin_products(to);
            begin_product<T>(to, square, k, true);
            ptx::commit_products();
        }
        ptx::wait_for_products<0>(to);
        m.of_square(which).release(n, lane);
    }
    __device__ void keep_row_sums(float* to, float low, float high) const {
        low = sum_of_lanes<4>(low);
        high = sum_of_lanes<4>(high);
        if (lane % 4 == 0) to[row(0)] = low, to[row(1)] = high;
    }

    // --- pairs of tokens

    // P' or Q' of the warp's rows, with norms of both keys and β, to its square; and what pairs add to gates.
    // erased: rowsum(p∘Q k). have_products(): d and u were read; have_pairs(): few registers are in use.
    template <class HaveProducts, class HavePairs>
    __device__ void make_pairs(int which, unsigned n, const Rows& d, const Rows& keys, const Rows& u, const Rows& k,
                               const RowFactors& f, GateSums& sums, const HaveProducts& have_products,
                               const HavePairs& have_pairs) {
        Pairs x, y;
        ptx::begin_products(x, y);
        begin_transposed<T>(x, d, u);
        begin_transposed<T>(y, keys, k);
        ptx::commit_products();
        make_anchors(which, f);
        ptx::wait_for_products<0>(x);
        ptx::keep_registers(y);
        have_products();
        const auto turns = m.of_square(which);
        turns.acquire(n);
        Diagonal of_y;
        float before[2] = {};
        scale_pairs(which, n, f, x, y, of_y, before, sums);
        turns.commit_to_products(n);
        have_pairs();
        forget();
        sum_diagonal_spans(of_y, before, which == 1 && call.erase_shift() == 1, lane, sums.pairs[which] + 16 * warp);
    }

    // Through the gradients with norms, of dq or dk: dx = r dy − r² y Σ (r dy)∘y, y as given.
    __device__ void store_rows(const View& to, const ChunkPlace& at, const Rows& given, const float (&norm)[2],
                               Sums& x) const {
        if (!to) return;
        if (call.l2norm) take_norms_back(given, norm, x);
        write_rows(to, at, x);
    }
    // The same of a full chunk, by the copy engine, through a tile that nobody reads any more. May be written again
    // after wait_for_stored_boxes() of the first lanes.
    __device__ void store_rows_by_engine(const View& to, const Boxes& boxes, const ChunkPlace& at, const Rows& tile,
                                         const Rows& given, const float (&norm)[2], Sums& x) const {
        if (call.l2norm) take_norms_back(given, norm, x);
        store_results<T>(tile, x, 16 * warp, lane);
        ptx::publish_to_products();
        __syncwarp();
        if (lane != 0) return;
        const int row = static_cast<int>(at.tokens.begin) + 16 * warp, i2 = to.stride[2] == 0 ? 0 : at.h,
                  i3 = to.stride[0] == 0 ? 0 : static_cast<int>(at.tokens.batch);
        const std::uint32_t from = tile.base + static_cast<std::uint32_t>(16 * warp * 128);
        store_box(boxes, from, 0, row, i2, i3);
        store_box(boxes, from + Rows::panel_bytes, 64, row, i2, i3);
    }
    __device__ void write_rows(const View& to, const ChunkPlace& at, const Sums& x) const {
        const bool second = lane % 2 == 1;
        auto* data = static_cast<T*>(to.data) + at.row(to, at.h, 0) + 8 * (lane % 2) + 2 * (lane & 2);
        unrolled<2>([&](int half) {
            T* const own = data + row(half) * to.stride[1];
            const int channels = row(half) < at.rows() ? call.key_size - 8 * (lane % 2) : 0;
            unrolled<D / 16>([&](int i) {
                const int n = 2 * i;
                const uint2 words = exchange_words(ptx::pack(x[n][2 * half], x[n][2 * half + 1], T()),
                                                   ptx::pack(x[n + 1][2 * half], x[n + 1][2 * half + 1], T()), second);
                if (8 * n < channels) *reinterpret_cast<uint2*>(own + 8 * n) = words;
            });
        });
    }

    const ChunkGradients& pass;
    const DeltaCall& call;
    const GradientViews& grad;
    const SavedChunks& saved;
    int thread = static_cast<int>(threadIdx.x) % warpgroup_threads, lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // known to be it
    const bool erases = call.erase != core::Erase::nothing;
    const Memory m{ptx::shared_address(ptx::shared_memory())};
    WarpgroupNumbers& small = *reinterpret_cast<WarpgroupNumbers*>(ptx::shared_memory() + Memory::small);

    // For the warp's rows, r the last row before them.
    __device__ void make_anchors(int which, const RowFactors& f) const {
        __syncwarp();
        for (int j = lane; j < 16 * warp; j += 32)
            small.anchors[which][warp][j] =
                fast_exp(static_cast<float>(f.sums[16 * warp] - f.sums[j + 1])) * f.k_norm[j];
        __syncwarp();
    }
    // The warp's 16 rows and 16 columns of a square.
    __device__ void store_block(int which, int block, const Diagonal& x) const {
        store_results<T>(m.square(which), x, 16 * warp, lane, block);
    }
    // Of x, P' or Q' to their square. of_y: the terms of the gates of the block on the diagonal, and `before` those of
    // whole rows before it.
    __device__ void scale_pairs(int which, unsigned n_th, const RowFactors& f, const Pairs& x, const Pairs& y,
                                Diagonal& of_y, float (&before)[2], GateSums& sums) const {
        const bool of_score = which == 0;
        const double* G = f.sums + 1;
        float own[2], to_anchor[2], beta[2], sum[2] = {};
        double from[2];
        unrolled<2>([&](int half) {
            const int i = row(half);
            from[half] = G[i - (of_score ? 0 : call.erase_shift())];
            own[half] = of_score ? call.scale * f.q_norm[i] : -f.p_norm[i];
            beta[half] = of_score ? 1.0F : f.beta[i];
            to_anchor[half] = own[half] * fast_exp(static_cast<float>(from[half] - f.sums[16 * warp]));
        });
        Diagonal of_x;
        unrolled<C / 16>([&](int block) {
            if (block > warp) {
                const Diagonal none = {};
                if (n_th == 0) store_block(which, block, none);  // it stays so
                return;
            }
            if (block == warp) {
                unrolled<2, 4>(
                    [&](int n, int e) { of_x[n][e] = x[2 * block + n][e], of_y[n][e] = y[2 * block + n][e]; });
                return;
            }
            Diagonal made, terms;
            unrolled<2>([&](int n) {
                const float2 factor =
                    *reinterpret_cast<const float2*>(small.anchors[which][warp] + 16 * block + 8 * n + 2 * (lane % 4));
                unrolled<4>([&](int e) {
                    made[n][e] = x[2 * block + n][e] * (to_anchor[e / 2] * (e % 2 == 0 ? factor.x : factor.y));
                    terms[n][e] = y[2 * block + n][e] * made[n][e];
                    before[e / 2] += terms[n][e];
                    made[n][e] *= beta[e / 2];
                });
            });
            store_block(which, block, made);
            sum_columns(terms[0], terms[1], beta, lane, sums.columns[which][warp] + 16 * block);
        });
        // Exponentials for the block on the diagonal alone, whichever it is: once in the text.
        unrolled<2, 4>([&](int n, int e) {
            const int i = row(e / 2), column = 16 * warp + 8 * n + 2 * (lane % 4) + e % 2;
            const float decay = fast_exp(static_cast<float>(from[e / 2] - G[column])) * f.k_norm[column];
            const bool taken = column < i || (of_score && column == i);
            of_x[n][e] = taken ? of_x[n][e] * own[e / 2] * decay : 0.0F;
            of_y[n][e] *= of_x[n][e];
            sum[e / 2] += of_y[n][e];
            of_x[n][e] *= beta[e / 2];
            of_y[n][e] *= beta[e / 2];
        });
        store_block(which, warp, of_x);
        unrolled<2>([&](int half) {
            before[half] = sum_of_lanes<4>(before[half]);
            sum[half] = sum_of_lanes<4>(sum[half]) + before[half];
            if (!of_score && lane % 4 == 0) sums.erased[row(half)] = sum[half];
            before[half] *= beta[half];
        });
    }
    __device__ void take_norms_back(const Rows& given, const float (&norm)[2], Sums& x) const {
        float along[2] = {};
        unrolled<2>([&](int pass) {
            unrolled<D / 16>([&](int n) {
                std::uint32_t words[4];
                given.load_left(words, 16 * warp, n, lane);
                unrolled<4>([&](int i) {
                    const int half = i % 2;
                    const float2 y = ptx::unpack(words[i], T());
                    float(&of)[4] = x[2 * n + i / 2];
                    if (pass == 0) {
                        along[half] = fmaf(of[2 * half], y.x, fmaf(of[2 * half + 1], y.y, along[half]));
                    } else {
                        of[2 * half] = fmaf(-along[half], y.x, of[2 * half]);
                        of[2 * half + 1] = fmaf(-along[half], y.y, of[2 * half + 1]);
                    }
                });
            });
            if (pass != 0) return;
            unrolled<2>([&](int half) { along[half] = sum_of_lanes<4>(along[half]) * norm[half] * norm[half]; });
        });
    }
};

}  // namespace softdelta::cuda

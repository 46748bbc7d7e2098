// The last steps of unfold.cu: what a block's gradients become, from pairs within it to the results.
#pragma once

#include "engines/cuda/delta_rule/unfold/channel_gate/pairs.h"
#include "engines/cuda/delta_rule/unfold/spans.h"

namespace softdelta::cuda {

template <class T, bool in_parts = false>
struct ChannelResults {
    using Layout = ChannelMemory<T, in_parts>;

    ChannelTiles<T, in_parts>& my;

    // The sum of what spans all of a block's gates: of a channel and block of the warp by each lane.
    __device__ void sum_spanning() const {
        const int block = my.block_of(my.lane / 16), m = 16 * my.slice + my.lane % 16;
        float own[blocks], sum = my.small.through[0][m] + my.small.through[1][m];
        unrolled<blocks>([&](int b) {
            own[b] = my.small.own[b][m];
            sum *= own[b];
        });
        float factor = my.small.own[block][m];
        unrolled<blocks - 1>([&](int i) {
            const int I = i + 1;
            const bool later = I > block;
            sum = fmaf(later ? factor : 0.0F, later ? my.small.later[I - 1][block][m] : 0.0F, sum);
            factor *= later ? own[I] : 1.0F;
        });
        factor = 1;
        unrolled<blocks>([&](int i) {
            const int J = blocks - 1 - i;
            if (J < block) sum = fmaf(factor, my.small.earlier[J][m], sum);
            factor *= own[J];
        });
        my.small.spanning[block][m] = sum;
        __syncwarp();
    }

    // x and y become dq, without scale, and dk.
    __device__ void unfold_block(int block, const BlockTokens& L, BlockTokens& x, BlockTokens& E,
                                 BlockTokens& y) const {
        BlockRows rows;
        BlockGradients d{x, E, y, {}};
        my.load_keys(Layout::q, block, rows.q);
        my.with_rows(my.small.q_norm, block, [&](int n, int i, float norm) { rows.q[n][i] *= my.call.scale * norm; });
        my.load_keys(Layout::k, block, rows.k);
        my.with_rows(my.small.k_norm, block, [&](int n, int i, float norm) { rows.k[n][i] *= norm; });
        my.with_rows(my.small.minus_beta, block,
                     [&](int n, int i, float minus_beta) { rows.minus_beta[n][i % 2] = minus_beta; });
        unrolled<2>([&](int half) {
            const float total = my.up_to_eight(L, 1, half), spanning = my.small.spanning[block][my.channel(half)];
            unrolled<2, 2>([&](int n, int e) {
                const int i = 2 * half + e;
                const float decay = ptx::exp2(L[n][i]);
                rows.L[n][i] = L[n][i];
                x[n][i] *= decay;
                E[n][i] *= decay;
                y[n][i] *= ptx::exp2(total - L[n][i]);
                d.dg[n][i] = spanning;
            });
        });
        ChannelPairs<T, in_parts>{my}.add_halves(block, rows, d);
        unrolled<2, 4>([&](int n, int i) { y[n][i] = fmaf(rows.minus_beta[n][i % 2], E[n][i], y[n][i]); });
        sum_channels(2, block, rows.k, E);
        if (my.call.l2norm) {
            sum_channels(0, block, rows.q, x);
            sum_channels(1, block, rows.k, y);
        }
        store_gates(block, d.dg);
    }

    // Gradients through raw gates. A derivative that has vanished beats the infinite argument that it belongs to.
    __device__ void store_gates(int block, BlockTokens& dg) const {
        const float rate = my.small.rate;
        const int rows = my.small.rows - my.first_token(block);
        BlockTokens x = {};
        if (my.call.raw_gate != core::RawGate::none) my.load_given(block, x);
        // dx, of_rate = derivative of the gate and of what it does to A_log at (given, dg)
        const auto take_back = [&](const auto& derive) {
            my.with_bias(x, [&](int n, int i, float given) {
                float of_rate = 0;
                dg[n][i] = derive(given, dg[n][i], of_rate);
                x[n][i] = of_rate;
            });
        };
        if (my.call.raw_gate == core::RawGate::softplus)
            take_back([&](float given, float d, float& of_rate) {
                of_rate = d == 0 ? 0.0F : -rate * fast_softplus(given) * d;
                return d == 0 ? 0.0F : -rate * fast_sigmoid(given) * d;
            });
        if (my.call.raw_gate == core::RawGate::lower_bound) {
            const float factor = my.small.bound * rate;
            take_back([&](float given, float d, float& of_rate) {
                const float e = ptx::exp2(-log2_e * fabsf(rate * given)), part = ptx::reciprocal(1 + e);
                d *= factor * (e * part * part);
                of_rate = d == 0 ? 0.0F : d * given;
                return d;
            });
        }
        if (my.saved.shares) {
            unrolled<2>([&](int half) {
                float sum = 0, dA_log = 0;
                unrolled<2, 2>([&](int n, int e) {
                    sum += 8 * n + e < rows ? dg[n][2 * half + e] : 0.0F;
                    dA_log += 8 * n + e < rows ? x[n][2 * half + e] : 0.0F;
                });
                my.keep(my.sums.shares[0][block], sum_of_lanes<4>(sum), half);
                my.keep(my.sums.shares[1][block], sum_of_lanes<4>(dA_log), half);
            });
        }
        if (!my.grad.dg) return;
        const View& v = my.grad.dg;
        const Index offset = my.row_of(v, my.first_token(block), my.hv) + my.channel(0) * v.stride[3];
        with_type(v, [&](auto* data) {
            unrolled<2>([&](int half) {
                auto* to = data + offset + 8 * half * v.stride[3];
                const int stored = my.channel(half) < my.call.key_size ? rows : 0;
                unrolled<2, 2>([&](int n, int e) {
                    if (8 * n + e < stored) assign(to + (8 * n + e) * v.stride[1], dg[n][2 * half + e]);
                });
            });
        });
    }
    __device__ void store_share(int which, int m) const {
        if (m >= my.call.key_size) return;
        const auto& x = my.sums.shares[which];
        my.saved.shares[((which * my.saved.all_slots + my.saved.first_slot + my.slot) * my.saved.heads + my.hv) *
                            my.call.key_size +
                        m] = static_cast<double>((x[0][m] + x[1][m]) + (x[2][m] + x[3][m]));
    }

    // --- rows

    // The block's rows: Σ a∘x over the warp's channels.
    __device__ void sum_channels(int which, int block, const BlockTokens& a, const BlockTokens& x) const {
        const auto both = [&](int n, int e) { return fmaf(a[n][e], x[n][e], a[n][2 + e] * x[n][2 + e]); };
        const float sum = sum_of_rows(both(0, 0), both(0, 1), both(1, 0), both(1, 1), my.lane);
        if ((my.lane & 4) == 0)
            my.sums.parts[which][my.slice][my.first_token(block) + 8 * (my.lane / 16) + my.lane / 8 % 2] = sum;
    }
    // Over all channels, of the warp's rows; dβ = rowsum(dR∘v) + rowsum(k∘e).
    __device__ void sum_rows() const {
        const int r = my.row_of_two(my.lane);
        const auto sum = [&](int which) {
            float sum = 0;
            unrolled<channel_slices>([&](int slice) { sum += my.sums.parts[which][slice][r]; });
            return sum;
        };
        if (my.call.l2norm) {
            unrolled<2>([&](int which) { my.sums.rows[which][my.slice][r] = sum(which); });
            __syncwarp();
        }
        if (my.slice != 0 || !my.grad.dbeta || r >= my.small.rows) return;
        float dbeta = my.small.of_values[r] - sum(2);
        if (my.call.raw_beta != core::RawBeta::none)
            dbeta *= -my.small.minus_beta[r] * sigmoid(-my.small.given_beta[r]);
        store(my.grad.dbeta, my.row_of(my.grad.dbeta, r, my.hv), dbeta);
    }
    // y = x r: dx = r (dy − y Σ dy∘y). Through the warp's part of a tile that nobody reads any more; in parts, of the
    // keys' own.
    __device__ void store_keys(int which, int from, int through, const float* norm, const View& to, int block,
                               BlockTokens& d) const {
        if (!to) return;
        const float scale = which == 0 ? my.call.scale : 1.0F;
        if (my.call.l2norm) {
            BlockTokens y;
            my.load_keys(from, block, y);
            my.with_rows(my.sums.rows[which][my.slice], block, [&](int n, int i, float along) { y[n][i] *= along; });
            my.with_rows(norm, block, [&](int n, int i, float r) { d[n][i] = r * (scale * d[n][i] - r * y[n][i]); });
        } else {
            unrolled<2, 4>([&](int n, int i) { d[n][i] *= scale; });
        }
        const auto rows = [&] {
            if constexpr (in_parts)
                return my.tile(from);
            else
                return my.value_tile(through);
        }();
        std::uint32_t words[4];
        my.pack(d, words);
        if constexpr (ptx::has_warpgroups && !in_parts) {
            rows.store_transposed_result(words, 16 * block, 16 * my.slice, my.lane);
        } else {
            unrolled<4>([&](int i) {
                *reinterpret_cast<std::uint32_t*>(shared_at(
                    rows.unit(16 * block + 8 * (i / 2) + my.lane / 4, 2 * my.slice + i % 2) + 4 * (my.lane % 4))) =
                    ptx::transpose(words[i]);
            });
        }
        __syncwarp();
        const int row = 16 * block + my.lane / 2, unit = 2 * my.slice + my.lane % 2;
        if (row < my.small.rows && 8 * unit < my.call.key_size)
            *reinterpret_cast<uint4*>(static_cast<T*>(to.data) + my.row_of(to, row, my.h) + 8 * unit) =
                *reinterpret_cast<const uint4*>(shared_at(rows.unit(row, unit)));
    }
};

}  // namespace softdelta::cuda

// The last steps of channel.cu: what a block's gradients become, from pairs within it to the results.
#pragma once

#include "engines/cuda/delta_rule/finish/channel/pairs.h"

namespace softdelta::cuda {

template <class T>
class ChannelResults : public ChannelPairs<T> {
  public:
    using Base = ChannelPairs<T>;
    using Base::add_halves;
    using Base::call_;
    using Base::channel;
    using Base::first_token;
    using Base::grad_;
    using Base::group_;
    using Base::h_;
    using Base::hv_;
    using Base::is_row;
    using Base::keep;
    using Base::lane_;
    using Base::load_given;
    using Base::load_keys;
    using Base::row_of;
    using Base::saved_;
    using Base::slot_;
    using Base::small_;
    using Base::sums_;
    using Base::tile;
    using Base::up_to_eight;
    using Base::with_rows;
    using typename Base::Layout;
    using typename Base::Rows;

    using Base::Base;

    // The sum of what spans all of a block's gates.
    __device__ void sum_spanning(int block, int m) const {
        float sum = small_.through[0][m] + small_.through[1][m], factor = 1;
        for (int b = 0; b < blocks; ++b) sum *= small_.own[b][m];
        for (int I = block; I < blocks; ++I) {
            if (I > block) sum = fmaf(factor, small_.later[I - 1][block][m], sum);
            factor *= small_.own[I][m];
        }
        factor = 1;
        for (int J = blocks - 1; J >= 0; --J) {
            if (J < block) sum = fmaf(factor, small_.earlier[J][m], sum);
            factor *= small_.own[J][m];
        }
        small_.spanning[block][m] = sum;
    }

    // x and y become dq, without scale, and dk.
    __device__ void finish_block(int block, const BlockTokens& L, BlockTokens& x, BlockTokens& E,
                                 BlockTokens& y) const {
        BlockRows rows;
        BlockGradients d{x, E, y, {}};
        load_keys(Layout::q, block, rows.q);
        with_rows(small_.q_norm, block, [&](int n, int i, float norm) { rows.q[n][i] *= call_.scale * norm; });
        load_keys(Layout::k, block, rows.k);
        with_rows(small_.k_norm, block, [&](int n, int i, float norm) { rows.k[n][i] *= norm; });
        with_rows(small_.minus_beta, block,
                  [&](int n, int i, float minus_beta) { rows.minus_beta[n][i % 2] = minus_beta; });
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float total = up_to_eight(L, 1, half), spanning = small_.spanning[block][channel(half)];
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int i = 2 * half + e;
                    const float decay = ptx::exp2(L[n][i]);
                    rows.L[n][i] = L[n][i];
                    x[n][i] *= decay;
                    E[n][i] *= decay;
                    y[n][i] *= ptx::exp2(total - L[n][i]);
                    d.dg[n][i] = spanning;
                }
        }
        add_halves(block, rows, d);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) y[n][i] = fmaf(rows.minus_beta[n][i % 2], E[n][i], y[n][i]);
        sum_channels(2, block, rows.k, E);
        if (call_.l2norm) {
            sum_channels(0, block, rows.q, x);
            sum_channels(1, block, rows.k, y);
        }
        store_gates(block, d.dg);
    }

    // Gradients through raw gates. A derivative that has vanished beats the infinite argument that it belongs to.
    __device__ void store_gates(int block, const BlockTokens& dg) const {
        const float rate = small_.rate;
        const bool raw = call_.raw_gate != core::RawGate::none;
        BlockTokens x = {};
        if (raw) load_given(block, x);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float dt = small_.bias[channel(half)];
            float dx[4], sum = 0, dA_log = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int n = i / 2, e = i % 2;
                const float given = x[n][2 * half + e] + dt;
                float of_rate = 0;
                dx[i] = dg[n][2 * half + e];
                if (call_.raw_gate == core::RawGate::softplus) {
                    of_rate = dx[i] == 0 ? 0.0F : -rate * fast_softplus(given) * dx[i];
                    dx[i] = dx[i] == 0 ? 0.0F : -rate * fast_sigmoid(given) * dx[i];
                } else if (call_.raw_gate == core::RawGate::lower_bound) {
                    const float at = rate * given;
                    dx[i] *= static_cast<float>(call_.lower_bound) * fast_sigmoid_slope(at) * rate;
                    of_rate = dx[i] == 0 ? 0.0F : dx[i] * given;
                }
                if (!is_row(block, n, e)) continue;
                sum += dx[i];
                dA_log += of_rate;
            }
            if (saved_.shares) {
                keep(sums_.shares[0][block], sum_of_lanes<4>(sum), half);
                keep(sums_.shares[1][block], sum_of_lanes<4>(dA_log), half);
            }
            if (!grad_.dg || channel(half) >= call_.key_size) continue;
            const View& v = grad_.dg;
            const Index offset = row_of(v, first_token(block), hv_) + channel(half) * v.stride[3];
            with_type(v, [&](auto* data) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (is_row(block, i / 2, i % 2)) assign(data + offset + (8 * (i / 2) + i % 2) * v.stride[1], dx[i]);
            });
        }
    }
    __device__ void store_share(int which, int m) const {
        if (m >= call_.key_size) return;
        const auto& x = sums_.shares[which];
        saved_.shares[((which * saved_.all_slots + saved_.first_slot + slot_) * saved_.heads + hv_) * call_.key_size +
                      m] = static_cast<double>((x[0][m] + x[1][m]) + (x[2][m] + x[3][m]));
    }

    // --- rows

    // The block's rows: Σ a∘x over the warp's channels. Of 4 sums a lane keeps 2, then 1, and adds what the others
    // have.
    __device__ void sum_channels(int which, int block, const BlockTokens& a, const BlockTokens& x) const {
        float sums[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sums[i] = fmaf(a[i / 2][i % 2], x[i / 2][i % 2], a[i / 2][2 + i % 2] * x[i / 2][2 + i % 2]);
        const bool high = (lane_ & 16) != 0, second = (lane_ & 8) != 0;
#pragma unroll
        for (int e = 0; e < 2; ++e)
            sums[e] = (high ? sums[2 + e] : sums[e]) + __shfl_xor_sync(0xffffffffu, high ? sums[e] : sums[2 + e], 16);
        float sum = (second ? sums[1] : sums[0]) + __shfl_xor_sync(0xffffffffu, second ? sums[0] : sums[1], 8);
        sum += __shfl_xor_sync(0xffffffffu, sum, 4);
        if ((lane_ & 4) == 0) sums_.parts[which][group_][first_token(block) + (high ? 8 : 0) + (second ? 1 : 0)] = sum;
    }
    // Over all channels; dβ = rowsum(dR∘v) + rowsum(k∘e).
    __device__ void sum_row(int which, int r) const {
        float sum = 0;
#pragma unroll
        for (int group = 0; group < channel_groups; ++group) sum += sums_.parts[which][group][r];
        sums_.rows[which][r] = sum;
        if (which != 2 || !grad_.dbeta || r >= small_.rows) return;
        float dbeta = small_.of_values[r] - sum;
        if (call_.raw_beta != core::RawBeta::none)
            dbeta *= -small_.minus_beta[r] * sigmoid(-load(call_.beta, row_of(call_.beta, r, hv_)));
        store(grad_.dbeta, row_of(grad_.dbeta, r, hv_), dbeta);
    }
    // y = x r: dx = r (dy − y Σ dy∘y). Through the warp's part of a tile that nobody
    // reads any more.
    __device__ void store_keys(int which, int from, int through, const float* norm, const View& to, int block,
                               BlockTokens& d) const {
        if (!to) return;
        const float scale = which == 0 ? call_.scale : 1.0F;
        if (call_.l2norm) {
            BlockTokens y;
            load_keys(from, block, y);
            with_rows(sums_.rows[which], block, [&](int n, int i, float along) { y[n][i] *= along; });
            with_rows(norm, block, [&](int n, int i, float r) { d[n][i] = r * (scale * d[n][i] - r * y[n][i]); });
        } else {
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) d[n][i] *= scale;
        }
        const Rows rows = tile(through);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<std::uint32_t*>(
                    shared_at(rows.unit(16 * block + 8 * n + lane_ / 4, 2 * group_ + half) + 4 * (lane_ % 4))) =
                    ptx::transpose(ptx::pack(d[n][2 * half], d[n][2 * half + 1], T()));
        __syncwarp();
        const int row = 16 * block + lane_ / 2, unit = 2 * group_ + lane_ % 2;
        if (row < small_.rows && 8 * unit < call_.key_size)
            *reinterpret_cast<uint4*>(static_cast<T*>(to.data) + row_of(to, row, h_) + 8 * unit) =
                *reinterpret_cast<const uint4*>(shared_at(rows.unit(row, unit)));
    }
};

}  // namespace softdelta::cuda

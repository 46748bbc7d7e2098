// The last part of channel.cu: a thread has a channel of a block of 16 rows. It adds the block's own pairs, sums what
// spans each gate, and writes the results.
#pragma once

#include "engines/cuda/delta_rule/finish/channel_tiles.h"

namespace softdelta::cuda {

template <class T>
class ChannelRows : public ChannelTiles<T> {
  public:
    using Base = ChannelTiles<T>;
    using Base::Base;
    using Base::C;
    using Base::call_;
    using Base::D;
    using Base::diagonal;
    using Base::given_gate;
    using Base::grad_;
    using Base::h_;
    using Base::hv_;
    using Base::key;
    using Base::lane_;
    using Base::load_gates;
    using Base::row_of;
    using Base::rows_;
    using Base::saved_;
    using Base::slot_;
    using Base::small_;
    using Base::sums;
    using Base::thread_;
    using typename Base::Gates;

    // The sum of what spans all of a block's gates.
    __device__ float through_block(int block, int m) const {
        float sum = 0, factor = 1;
        for (const auto& part : small_.through) sum += part[m];
        for (int b = 0; b < blocks; ++b) sum *= small_.own[b][m];
        for (int I = block; I < blocks; ++I) {
            if (I > block) sum = fmaf(factor, small_.later[I][block][m], sum);
            factor *= small_.own[I][m];
        }
        factor = 1;
        for (int J = blocks - 1; J >= 0; --J) {
            if (J < block) sum = fmaf(factor, small_.earlier[J][m], sum);
            factor *= small_.own[J][m];
        }
        return sum;
    }

    __device__ void finish_channel(int block, int m) const {
        constexpr int R = rows_of_block;
        const int first = R * block;
        float* dq = sums(0) + first * sum_row + m;
        float* e = sums(1) + first * sum_row + m;
        float* dk = sums(2) + first * sum_row + m;
        Gates gates;
        load_gates(block, m, gates);
        float q[R], k[R], with_beta[R], decays[R], dg[R];
#pragma unroll
        for (int i = 0; i < R; ++i) {
            q[i] = key(call_.q, small_.q_norm, first + i, m);
            k[i] = key(call_.k, small_.k_norm, first + i, m);
            with_beta[i] = small_.beta[first + i] * k[i];
            decays[i] = __expf(gates.g[i]);
        }
        // From beyond the block.
        float total = 0, L = 0, sum = through_block(block, m);
#pragma unroll
        for (const float g : gates.g) total += g;
#pragma unroll
        for (int i = 0; i < R; ++i) {
            L += gates.g[i];
            const float before = __expf(L), after = __expf(fminf(total - L, 0.0F));
            dq[i * sum_row] *= call_.scale * before;
            e[i * sum_row] *= before;
            dk[i * sum_row] *= after;
            dg[i] = sum;
            sum = fmaf(k[i], dk[i * sum_row], sum);
        }
        sum = 0;
#pragma unroll
        for (int i = R; i-- > 0;) {
            sum = fmaf(q[i], dq[i * sum_row], fmaf(with_beta[i], e[i * sum_row], sum));
            dg[i] += sum;
        }
        // Pairs of the block.
        const PairCoefficients* c = diagonal(block);
        float pair_dq[R] = {}, pair_e[R] = {};
#pragma unroll
        for (int j = 0; j < R; ++j) {
            const float own = c[j * R + j].read;
            float between = 1, of_key = own * q[j], spanning = 0;
#pragma unroll
            for (int i = j + 1; i < R; ++i) {
                const PairCoefficients of = c[i * R + j];
                between *= decays[i];
                of_key = fmaf(between, fmaf(of.read, q[i], of.erase * with_beta[i]), of_key);
                pair_dq[i] = fmaf(between * of.read, k[j], pair_dq[i]);
                pair_e[i] = fmaf(between * of.erase, k[j], pair_e[i]);
                spanning = fmaf(q[i], pair_dq[i], fmaf(with_beta[i], pair_e[i], spanning));
            }
            if (j + 1 < R) dg[j + 1] += spanning;
            dk[j * sum_row] += of_key;
            dq[j * sum_row] = fmaf(own, k[j], dq[j * sum_row]);
        }
        float along[R];
#pragma unroll
        for (int i = 0; i < R; ++i) {
            dq[i * sum_row] += pair_dq[i];
            e[i * sum_row] += pair_e[i];
            dk[i * sum_row] = fmaf(small_.beta[first + i], e[i * sum_row], dk[i * sum_row]);
            along[i] = k[i] * e[i * sum_row];
        }
        store_gates(block, m, gates.dt, dg);
        keep_rows(2, block, along);
        if (call_.l2norm) {
#pragma unroll
            for (int i = 0; i < R; ++i) along[i] = q[i] * dq[i * sum_row];
            keep_rows(0, block, along);
#pragma unroll
            for (int i = 0; i < R; ++i) along[i] = k[i] * dk[i * sum_row];
            keep_rows(1, block, along);
        }
        __syncthreads();
        store_keys(grad_.dq, call_.q, small_.q_norm, 0, block, m, dq);
        store_keys(grad_.dk, call_.k, small_.k_norm, 1, block, m, dk);
        if (thread_ < C && grad_.dbeta) finish_beta(thread_);
        finish_shares();
    }

    // Sums over the warp's channels of 16 rows.
    __device__ void keep_rows(int which, int block, float (&x)[rows_of_block]) const {
        halve<8>(x, 16);
        halve<4>(x, 8);
        halve<2>(x, 4);
        halve<1>(x, 2);
        x[0] += __shfl_xor_sync(0xffffffffu, x[0], 1);
        if (lane_ % 2 == 0) small_.rows[which][thread_ % D / 32][rows_of_block * block + lane_ / 2] = x[0];
    }
    // Of 2n sums a lane keeps n, and adds what its partner has of them.
    template <int n>
    __device__ void halve(float (&x)[16], int lanes) const {
        const bool high = (lane_ & lanes) != 0;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float given = high ? x[i] : x[n + i];
            x[i] = (high ? x[n + i] : x[i]) + __shfl_xor_sync(0xffffffffu, given, lanes);
        }
    }
    __device__ float row_sum(int which, int r) const {
        const auto& x = small_.rows[which];
        return (x[0][r] + x[1][r]) + (x[2][r] + x[3][r]);
    }

    // y = x r: dx = r (dy − y Σ dy∘y)
    __device__ void store_keys(const View& to, const View& from, const float* norm, int which, int block, int m,
                               const float* d) const {
        if (!to || m >= call_.key_size) return;
#pragma unroll 4
        for (int i = 0; i < rows_of_block; ++i) {
            const int r = rows_of_block * block + i;
            if (r >= rows_) break;
            float dx = d[i * sum_row];
            if (call_.l2norm) dx = norm[r] * (dx - key(from, norm, r, m) * row_sum(which, r));
            assign(static_cast<T*>(to.data) + row_of(to, r, h_) + m, dx);
        }
    }
    __device__ void finish_beta(int r) const {
        if (r >= rows_) return;
        double dbeta = static_cast<double>(small_.of_values[r] + row_sum(2, r));
        if (call_.raw_beta != core::RawBeta::none) {
            const float given = load(call_.beta, row_of(call_.beta, r, hv_));
            dbeta *= exact_beta(call_, given) * exact_sigmoid(-static_cast<double>(given));
        }
        store(grad_.dbeta, row_of(grad_.dbeta, r, hv_), static_cast<float>(dbeta));
    }

    // The way back through raw gates. A derivative that has vanished beats the infinite argument that it belongs to.
    __device__ void store_gates(int block, int m, float dt, const float (&dg)[rows_of_block]) const {
        const HeadGate head(call_, hv_);
        double sum = 0, dA_log = 0;
        const bool inside = m < call_.key_size;
#pragma unroll
        for (int i = 0; i < rows_of_block; ++i) {
            const int r = rows_of_block * block + i;
            if (!inside || r >= rows_) continue;
            float dx = dg[i], of_rate = 0;
            const float x = call_.raw_gate != core::RawGate::none ? given_gate(head, r, m) + dt : 0.0F;
            if (call_.raw_gate == core::RawGate::softplus) {
                dx = dg[i] == 0 ? 0.0F : -head.rate * sigmoid(x) * dg[i];
                of_rate = dg[i] == 0 ? 0.0F : -head.rate * softplus(x) * dg[i];
            } else if (call_.raw_gate == core::RawGate::lower_bound) {
                const float at = head.rate * x;
                dx = dg[i] * static_cast<float>(call_.lower_bound) * sigmoid(at) * sigmoid(-at) * head.rate;
                of_rate = dx == 0 ? 0.0F : dx * x;
            }
            if (const View& v = grad_.dg) store(v, row_of(v, r, hv_) + m * v.stride[3], dx);
            sum += static_cast<double>(dx);
            dA_log += static_cast<double>(of_rate);
        }
        small_.shares[0][block][m] = sum;
        small_.shares[1][block][m] = dA_log;
    }
    __device__ void finish_shares() const {
        if (!saved_.shares || thread_ >= 2 * D) return;
        const int which = thread_ / D, m = thread_ % D;
        if (m >= call_.key_size) return;
        const auto& x = small_.shares[which];
        saved_.shares[((which * saved_.all_slots + saved_.first_slot + slot_) * saved_.heads + hv_) * call_.key_size +
                      m] = (x[0][m] + x[1][m]) + (x[2][m] + x[3][m]);
    }
};

}  // namespace softdelta::cuda

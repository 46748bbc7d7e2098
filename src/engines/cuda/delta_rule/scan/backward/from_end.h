// The scan from the end, for each chunk from dS' after it to dS before it:
//     dUᵀ = (dS'ᵀ kᵀ)∘e^(G_last − G) + dOᵀ score     dRᵀ = dUᵀ inverse     dv = β∘dR
//     dSᵀ = e^G_last·dS'ᵀ + (dOᵀ∘scale·e^G) q − (dRᵀ∘β e^E) p
#pragma once

#include "engines/cuda/delta_rule/scan/backward/columns.h"
#include "engines/cuda/delta_rule/tokens/chunk_back.h"

namespace softdelta::cuda {

template <class T, int K, int warps, KeyKind kind, bool warpgroups>
class ScanFromEnd : ColumnScan<T, K, warps, kind, warpgroups, kind == KeyKind::plain ? 2 : 3, 2, true> {
    using Base = ColumnScan<T, K, warps, kind, warpgroups, kind == KeyKind::plain ? 2 : 3, 2, true>;
    using Base::C;
    using Base::call;
    using Base::channel;
    using Base::factors;
    using Base::hv;
    using Base::keys;
    using Base::lane;
    using Base::s;
    using Base::saved;
    using Base::staged;
    using Base::state_;
    using Base::values;
    using Base::warp;

  public:
    using Base::bytes;

    __device__ ScanFromEnd(const DeltaCall& call, const DeltaSequences& sequences, int sequence,
                           const SavedChunks& saved, const GradientViews& grad)
        : Base(call, sequences, sequence, saved), grad_(grad) {}

    __device__ void run() {
        Base::run(
            grad_.dfinal_state, [&](int thread) { return copies(thread); },
            [&](int c, int thread) {
                this->save_made(0, thread, saved.dr(this->first_slot + c, hv));
                if (grad_.dv) this->write_made(c, 1, thread, grad_.dv);
            },
            [&](int c) {
                if constexpr (warpgroups)
                    take_by_warpgroup(c);
                else
                    take(c);
            },
            [&] {
                LaneState<K> state;
#pragma unroll
                for (int n = 0; n < K / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) state[n][i] = state_[n][i];
                this->store_state(grad_.dinitial_state, state);
            });
    }

  private:
    __device__ auto copies(int thread) const {
        const ChunkRows<T, Base::slab> d_o(grad_.d_o, s, hv, this->first_column, grad_.d_o ? call.value_size : 0,
                                           thread);
        if constexpr (channel) {
            return [this, thread, d_o](int c) {
                using Record = FoldedChunk<128, true>;
                const char* record = saved.channel_record(this->first_slot + c, hv);
                Base::template copy_record<Base::key_bytes>(keys(c, 0).base, record + Record::read, thread);
                Base::template copy_record<Base::key_bytes>(keys(c, 1).base, record + Record::write, thread);
                Base::template copy_record<Base::key_bytes>(keys(c, 2).base, record + Record::erase, thread);
                Base::template copy_record<2 * Record::square_bytes>(this->square(c, 0).base, record, thread);
                d_o.copy(values(c), c, this->rows(c), thread);
                this->copy_channel_factors(c, record, thread);
            };
        } else {
            const int h = call.key_head(hv);
            const ChunkRows<T, K> q(call.q, s, h, 0, call.key_size, thread), k(call.k, s, h, 0, call.key_size, thread),
                p(kind == KeyKind::own_p ? call.p : call.k, s, h, 0, call.key_size, thread);
            return [this, thread, d_o, q, k, p](int c) {
                const int rows = this->rows(c);
                q.copy(keys(c, 0), c, rows, thread);
                k.copy(keys(c, 1), c, rows, thread);
                if constexpr (kind == KeyKind::own_p) p.copy(keys(c, 2), c, rows, thread);
                d_o.copy(values(c), c, rows, thread);
                this->copy_squares(c, saved.record(this->first_slot + c, hv), call.erase != core::Erase::nothing,
                                   thread);
            };
        }
    }

    __device__ void take(int c) {
        const Index slot = this->first_slot + c;
        const bool by_record = this->goes_by_token(c), nonfinite = this->values_are_nonfinite(c);
        if (nonfinite) saved.flags_of(slot, hv).gradients = 1;
        std::uint32_t state[K / 16][4];
        to_left<T>(state, state_);
        save_state<T, K>(saved.dstate(slot, hv), this->own_column(), lane, state);
        if (by_record || nonfinite)
            take_chunk_by_token(c);
        else
            take_chunk(c, state);
    }

    __device__ void take_chunk(int c, const std::uint32_t (&state)[K / 16][4]) {
        const RowFactors& f = factors(c);
        const float* beta = channel ? this->channel_factors(c).beta : f.beta;
        const bool erases = channel || call.erase != core::Erase::nothing;
        const int pair = 2 * (lane % 4);
        const Index slot = this->first_slot + c;
        std::uint32_t d_o[C / 16][4];
#pragma unroll
        for (int n = 0; n < C / 16; ++n) values(c).load_transposed_result(d_o[n], 16 * n, warp, lane);

        float x[C / 8][4] = {};
        this->multiply_transposed(state, keys(c, 1), false, x);
        if constexpr (!channel) this->scale(x, f.write);
        this->multiply_lower(d_o, this->square(c, 0), x);
        std::uint32_t left[C / 16][4];
        if (erases) {
            to_left<T>(left, x);
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) x[n][i] = 0;
            this->multiply_lower(left, this->square(c, 1), x);
        }
        if (erases) {
            this->save_rows(c, x, saved.dr(slot, hv));
            this->scale(x, beta);
        }
        if (grad_.dv) this->write_rows(c, x, grad_.dv);

        this->decay_state(c);
        if constexpr (!channel) this->scale(d_o, f.read);
        this->add_to_state(d_o, keys(c, 0), state_);
        if (!erases) return;
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] *= channel ? -1.0F : -f.erase[8 * n + pair + i % 2];
        to_left<T>(left, x);
        this->add_to_state(left, keys(c, kind == KeyKind::plain ? 1 : 2), state_);
    }

    // The same, by a warpgroup whose products run in the background.
    __device__ void take_by_warpgroup(int c) {
        const RowFactors& f = factors(c);
        const float* beta = channel ? this->channel_factors(c).beta : f.beta;
        const int pair = 2 * (lane % 4);
        const Index slot = this->first_slot + c;
        float x[C / 8][4], y[C / 8][4];
        std::uint32_t state[K / 16][4], d_o[C / 16][4];
        to_left<T>(state, state_);
        this->load_values(c, d_o);
        ptx::begin_products(state, x, d_o, y);
        this->begin_multiply_transposed(state, keys(c, 1), x);
        this->begin_multiply(d_o, this->square(c, 0), y);
        const bool nonfinite = this->values_are_nonfinite(c);
        if (nonfinite) saved.flags_of(slot, hv).gradients = 1;
        if (nonfinite || this->goes_by_token(c)) [[unlikely]] {
            ptx::wait_for_products<0>(x);
            ptx::keep_registers(y);
            this->save_state_of(saved.dstate(slot, hv));
            take_chunk_by_token(c);
            if constexpr (staged) this->hand_on(c, false, [] {});
            return;
        }
        this->save_state_of(saved.dstate(slot, hv));
        this->decay_state(c);
        std::uint32_t read[C / 16][4], left[C / 16][4];
        this->load_values(c, read);
        if constexpr (!channel) this->scale(read, f.read);
        ptx::wait_for_products<1>(x);
        if constexpr (!channel) this->scale(x, f.write);
        ptx::wait_for_products<0>(y);
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] += y[n][i];
        to_left<T>(left, x);
        ptx::begin_products(left, y, read, state_);
        this->begin_multiply(left, this->square(c, 1), y);
        this->begin_add_to_state(read, keys(c, 0));
        ptx::wait_for_products<1>(y);
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[n][i] = y[n][i] * beta[8 * n + pair + i % 2] * (channel ? -1.0F : -f.erase[8 * n + pair + i % 2]);
        std::uint32_t erased[C / 16][4];
        to_left<T>(erased, x);
        ptx::begin_products(erased);
        this->begin_add_to_state(erased, keys(c, kind == KeyKind::plain ? 1 : 2));
        const auto make_dv = [&] {
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) y[n][i] *= beta[8 * n + pair + i % 2];
        };
        if constexpr (staged) {
            this->hand_on(c, true, [&] {
                this->give_rows(0, y);
                make_dv();
                this->give_rows(1, y);
            });
        } else {
            this->save_rows(c, y, saved.dr(slot, hv));
            if (grad_.dv) {
                make_dv();
                this->write_rows(c, y, grad_.dv);
            }
        }
        ptx::wait_for_products<0>(state_);
    }

    __device__ void take_chunk_by_token(int c) {
        const View d_o = grad_.d_o;
        this->with_wide_state(
            [&](WideState<K>& wide) {
                take_tokens_back<K>(&call, &d_o, s, hv, Index(c) * C, this->rows(c), this->own_column(), lane, wide);
            },
            [](double x) { return in_range(x); });
    }

    // e^g of a gate of 200 is beyond f32. Where the token before wipes the state, 0 is left of it: of a finite number.
    __device__ static float in_range(double x) {
        constexpr double largest = 1e30;  // sums of its products stay finite, too
        return static_cast<float>(isfinite(x) ? fmin(fmax(x, -largest), largest) : x);
    }

    const GradientViews& grad_;
};

}  // namespace softdelta::cuda

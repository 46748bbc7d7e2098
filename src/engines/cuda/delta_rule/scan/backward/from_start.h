// The scan from the start once more, for what the backward pass needs of it: the state before each chunk, and U:
//     Rᵀ = β∘(vᵀ − (Sᵀ pᵀ)∘e^E)     Uᵀ = Rᵀ inverseᵀ     Sᵀ = e^G_last·Sᵀ + (Uᵀ∘e^(G_last − G)) k
#pragma once

#include "engines/cuda/delta_rule/scan/backward/columns.h"

namespace softdelta::cuda {

template <class T, int K, int warps, KeyKind kind, bool warpgroups>
class ScanFromStart : ColumnScan<T, K, warps, kind, warpgroups, kind == KeyKind::plain ? 1 : 2, 1, false> {
    using Base = ColumnScan<T, K, warps, kind, warpgroups, kind == KeyKind::plain ? 1 : 2, 1, false>;
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
    using Base::Base;
    using Base::bytes;

    __device__ void run() {
        Base::run(
            call.initial_state, [&](int thread) { return copies(thread); },
            [&](int c, int thread) { this->save_made(0, thread, saved.u(this->first_slot + c, hv)); },
            [&](int c) {
                if constexpr (warpgroups)
                    take_by_warpgroup(c);
                else
                    take(c);
            },
            [] {});
    }

  private:
    __device__ auto copies(int thread) const {
        const ChunkRows<T, Base::slab> v(call.v, s, hv, this->first_column, call.value_size, thread);
        if constexpr (channel) {
            return [this, thread, v](int c) {
                using Record = FoldedChunk<128, true>;
                const char* record = saved.channel_record(this->first_slot + c, hv);
                Base::template copy_record<Base::key_bytes>(keys(c, 0).base, record + Record::write, thread);
                Base::template copy_record<Base::key_bytes>(keys(c, 1).base, record + Record::erase, thread);
                Base::template copy_record<Record::square_bytes>(this->square(c, 0).base, record + Record::solve,
                                                                 thread);
                v.copy(values(c), c, this->rows(c), thread);
                this->copy_channel_factors(c, record, thread);
            };
        } else {
            const int h = call.key_head(hv);
            const ChunkRows<T, K> k(call.k, s, h, 0, call.key_size, thread),
                p(kind == KeyKind::own_p ? call.p : call.k, s, h, 0, call.key_size, thread);
            return [this, thread, v, k, p](int c) {
                const int rows = this->rows(c);
                k.copy(keys(c, 0), c, rows, thread);
                if constexpr (kind == KeyKind::own_p) p.copy(keys(c, 1), c, rows, thread);
                v.copy(values(c), c, rows, thread);
                this->copy_squares(c, saved.record(this->first_slot + c, hv), call.erase != core::Erase::nothing,
                                   thread);
            };
        }
    }

    __device__ void take(int c) {
        const Index slot = this->first_slot + c;
        const bool by_record = this->goes_by_token(c), nonfinite = this->values_are_nonfinite(c);
        if (nonfinite || (channel && by_record)) saved.flags_of(slot, hv).values = 1;
        std::uint32_t state[K / 16][4];
        to_left<T>(state, state_);
        save_state<T, K>(saved.state(slot, hv), this->own_column(), lane, state);
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
        std::uint32_t left[C / 16][4];
        float x[C / 8][4] = {};
        if (erases) this->multiply_transposed(state, keys(c, kind == KeyKind::plain ? 0 : 1), false, x);
#pragma unroll
        for (int n = 0; n < C / 16; ++n) {
            std::uint32_t value[4];
            values(c).load_transposed_result(value, 16 * n, warp, lane);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                float(&to)[4] = x[2 * n + m / 2];
                const int token = 16 * n + 8 * (m / 2) + pair;
                const float2 both = ptx::unpack(value[m], T());
                float* out = to + 2 * (m % 2);
                if (erases) {
                    out[0] = beta[token] * (both.x - (channel ? 1.0F : f.erase[token]) * out[0]);
                    out[1] = beta[token + 1] * (both.y - (channel ? 1.0F : f.erase[token + 1]) * out[1]);
                } else {
                    out[0] = both.x;
                    out[1] = both.y;
                }
            }
        }
        float U[C / 8][4] = {};
        if (erases) {
            to_left<T>(left, x);
            this->multiply_transposed(left, this->square(c, 0), true, U);
        } else {
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) U[n][i] = x[n][i];
        }
        this->save_rows(c, U, saved.u(this->first_slot + c, hv));
        if constexpr (!channel) this->scale(U, f.write);
        this->decay_state(c);
        to_left<T>(left, U);
        this->add_to_state(left, keys(c, 0), state_);
    }

    // The same, by a warpgroup whose products run in the background.
    __device__ void take_by_warpgroup(int c) {
        const RowFactors& f = factors(c);
        const float* beta = channel ? this->channel_factors(c).beta : f.beta;
        const int pair = 2 * (lane % 4);
        const Index slot = this->first_slot + c;
        float x[C / 8][4], U[C / 8][4];
        std::uint32_t state[K / 16][4], value[C / 16][4], left[C / 16][4], written[C / 16][4];
        to_left<T>(state, state_);
        ptx::begin_products(state, x);
        this->begin_multiply_transposed(state, keys(c, kind == KeyKind::plain ? 0 : 1), x);
        const bool nonfinite = this->values_are_nonfinite(c), by_record = this->goes_by_token(c);
        if (nonfinite || (channel && by_record)) saved.flags_of(slot, hv).values = 1;
        if (nonfinite || by_record) [[unlikely]] {
            ptx::wait_for_products<0>(x);
            this->save_state_of(saved.state(slot, hv));
            take_chunk_by_token(c);
            if constexpr (staged) this->hand_on(c, false, [] {});
            return;
        }
        this->save_state_of(saved.state(slot, hv));
        this->load_values(c, value);
        this->decay_state(c);
        ptx::wait_for_products<0>(x);
#pragma unroll
        for (int n = 0; n < C / 16; ++n)
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const int token = 16 * n + 8 * (m / 2) + pair;
                const float2 both = ptx::unpack(value[n][m], T());
                float* out = x[2 * n + m / 2] + 2 * (m % 2);
                out[0] = beta[token] * (both.x - (channel ? 1.0F : f.erase[token]) * out[0]);
                out[1] = beta[token + 1] * (both.y - (channel ? 1.0F : f.erase[token + 1]) * out[1]);
            }
        to_left<T>(left, x);
        ptx::begin_products(left, U);
        this->begin_multiply_transposed(left, this->square(c, 0), U);
        ptx::wait_for_products<0>(U);
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] = channel ? U[n][i] : U[n][i] * f.write[8 * n + pair + i % 2];
        to_left<T>(written, x);
        ptx::begin_products(written, state_);
        this->begin_add_to_state(written, keys(c, 0));
        if constexpr (staged)
            this->hand_on(c, true, [&] { this->give_rows(0, U); });
        else
            this->save_rows(c, U, saved.u(slot, hv));
        ptx::wait_for_products<0>(state_);
    }

    __device__ void take_chunk_by_token(int c) {
        const View none;
        this->with_wide_state(
            [&](WideState<K>& wide) {
                take_tokens<K>(&call, s, hv, Index(c) * C, this->rows(c), this->own_column(), lane, &none, wide);
            },
            [](double x) { return static_cast<float>(x); });
    }
};

}  // namespace softdelta::cuda

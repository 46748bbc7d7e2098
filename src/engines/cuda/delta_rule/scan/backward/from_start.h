// The scan from the start once more, for what the backward pass needs of it: the state before each chunk, and U:
//     Rᵀ = β∘(vᵀ − (Sᵀ pᵀ)∘e^E)     Uᵀ = Rᵀ inverseᵀ     Sᵀ = e^G_last·Sᵀ + (Uᵀ∘e^(G_last − G)) k
#pragma once

#include "engines/cuda/delta_rule/scan/backward/columns.h"

namespace softdelta::cuda {

template <class T, int K, int warps, Keys kind, bool warpgroups>
struct ScanFromStart {
    using Columns = ColumnScan<T, K, warps, kind, warpgroups, kind == Keys::plain ? 1 : 2, 1, false>;
    using Memory = typename Columns::Memory;
    static constexpr int C = chunk_rows;
    static constexpr bool channel = Columns::channel, staged = Columns::staged;

    Columns my;

    __device__ void run() {
        my.run(
            my.call.initial_state, my.call.v,
            [&](int c, int thread) { my.for_each_made(0, thread, my.to_tile(my.saved.u(my.first_slot + c, my.hv))); },
            [&](int c) { take(c); }, [] {});
    }

    __device__ void take(int c) {
        const RowFactors& f = my.m.factors(c);
        const float* beta = my.m.beta_of(c);
        const bool erases = warpgroups || channel || my.call.erase != core::Erase::nothing;
        const int pair = 2 * (my.lane % 4);
        const Index slot = my.first_slot + c;
        float x[C / 8][4], U[C / 8][4];
        std::uint32_t state[K / 16][4], value[C / 16][4], left[C / 16][4], written[C / 16][4];
        const auto products = my.products();
        to_left<T>(state, my.state);
        const auto begin = [&] {
            if (erases) products.begin_transposed(x, state, my.m.keys(c, kind == Keys::plain ? 0 : 1), false, false);
        };
        if constexpr (warpgroups) begin();
        const bool nonfinite = my.values_are_nonfinite(c), by_record = my.m.goes_by_token(c);
        if (nonfinite || (channel && by_record)) my.saved.flags_of(slot, my.hv).values = 1;
        if (nonfinite || by_record) [[unlikely]] {
            if constexpr (warpgroups) products.template wait<0>(x);
            my.save_state_of(my.saved.state(slot, my.hv));
            take_chunk_by_token(c);
            if constexpr (staged) my.hand_on(c, false, [] {});
            return;
        }
        my.save_state_of(my.saved.state(slot, my.hv));
        if constexpr (!warpgroups) begin();
        my.load_values(c, value);
        my.decay_state(c);
        products.template wait<0>(x);
        unrolled<C / 16, 4>([&](int n, int m) {
            const int token = 16 * n + 8 * (m / 2) + pair;
            const float2 both = ptx::unpack(value[n][m], T());
            float* out = x[2 * n + m / 2] + 2 * (m % 2);
            out[0] = erases ? beta[token] * (both.x - (channel ? 1.0F : f.erase[token]) * out[0]) : both.x;
            out[1] = erases ? beta[token + 1] * (both.y - (channel ? 1.0F : f.erase[token + 1]) * out[1]) : both.y;
        });
        if (erases) {
            to_left<T>(left, x);
            products.begin_transposed(U, left, my.m.square(c, 0), false, true);
            products.template wait<0>(U);
        } else {
            unrolled<C / 8, 4>([&](int n, int i) { U[n][i] = x[n][i]; });
        }
        // What a warpgroup stores, it stores while products run.
        const auto store = [&] { my.store_rows(c, U, my.to_tile(my.saved.u(slot, my.hv))); };
        if constexpr (!warpgroups) store();
        unrolled<C / 8, 4>(
            [&](int n, int i) { x[n][i] = channel ? U[n][i] : U[n][i] * f.write[8 * n + pair + i % 2]; });
        to_left<T>(written, x);
        products.begin(my.state, written, my.m.keys(c, 0), true, false);
        if constexpr (staged)
            my.hand_on(c, true, [&] { my.give_rows(0, U); });
        else if constexpr (warpgroups)
            store();
        products.template wait<0>(my.state);
    }

    __device__ void take_chunk_by_token(int c) {
        const View none;
        my.with_wide_state(
            [&](WideState<K>& wide) {
                take_tokens<K>(&my.call, my.s, my.hv, Index(c) * C, my.s.rows(c), my.own_column(), my.lane, &none,
                               wide);
            },
            [](double x) { return static_cast<float>(x); });
    }
};

}  // namespace softdelta::cuda

// The scan from the end, for each chunk from dS' after it to dS before it:
//     dUᵀ = (dS'ᵀ kᵀ)∘e^(G_last − G) + dOᵀ score     dRᵀ = dUᵀ inverse     dv = β∘dR
//     dSᵀ = e^G_last·dS'ᵀ + (dOᵀ∘scale·e^G) q − (dRᵀ∘β e^E) p
#pragma once

#include "engines/cuda/delta_rule/scan/backward/columns.h"

namespace softdelta::cuda {

template <class T, int K, int warps, Keys kind, bool warpgroups>
struct ScanFromEnd {
    using Columns = ColumnScan<T, K, warps, kind, warpgroups, kind == Keys::plain ? 2 : 3, 2, true>;
    using Memory = typename Columns::Memory;
    static constexpr int C = chunk_rows;
    static constexpr bool channel = Columns::channel, staged = Columns::staged, split = Memory::split;

    Columns my;
    const GradientViews& grad;

    __device__ void run() {
        my.run(
            grad.dfinal_state, grad.d_o,
            [&](int c, int thread) {
                my.for_each_made(0, thread, my.to_tile(my.saved.dr(my.first_slot + c, my.hv)));
                if (grad.dv) my.for_each_made(1, thread, my.to_tensor(c, grad.dv));
            },
            [&](int c) { take(c); }, [&] { my.store_state(grad.dinitial_state); });
    }

    __device__ void take(int c) {
        const RowFactors& f = my.m.factors(c);
        const float* beta = my.m.beta_of(c);
        const bool erases = warpgroups || channel || my.call.erase != core::Erase::nothing;
        const int pair = 2 * (my.lane % 4);
        const Index slot = my.first_slot + c;
        float x[C / 8][4], y[C / 8][4];
        std::uint32_t state[K / 16][operand_words<T>], d_o[C / 16][operand_words<T>];
        const auto products = my.products();
        to_left<T>(state, my.state);
        if constexpr (split) products.begin_transposed(x, state, my.m.keys(c, 1), false, false);
        my.wait_for_rows();
        const auto begin = [&] {
            my.load_values(c, d_o);
            if constexpr (!split) products.begin_transposed(x, state, my.m.keys(c, 1), false, false);
            if constexpr (warpgroups) products.begin(y, d_o, my.m.square(c, 0), false, true);
        };
        if constexpr (warpgroups) begin();
        const bool nonfinite = my.values_are_nonfinite(c);
        if (nonfinite) my.saved.flags_of(slot, my.hv).gradients = 1;
        if (nonfinite || my.m.goes_by_token(c)) [[unlikely]] {
            if constexpr (warpgroups) {
                products.template wait<0>(x);
                ptx::keep_registers(y);
            }
            my.save_state_of(my.saved.dstate(slot, my.hv));
            take_chunk_by_token(c);
            if constexpr (staged) my.hand_on(c, false, [] {});
            my.have_squares(c);
            my.have_rows(c, grad.d_o);
            return;
        }
        my.save_state_of(my.saved.dstate(slot, my.hv));
        if constexpr (!warpgroups) begin();
        my.decay_state(c);
        std::uint32_t read[C / 16][operand_words<T>], left[C / 16][operand_words<T>], erased[C / 16][operand_words<T>];
        my.load_values(c, read);
        if constexpr (!channel) my.scale(read, f.read);
        products.template wait<1>(x);
        if constexpr (!channel) my.scale(x, f.write);
        if constexpr (warpgroups) {
            products.template wait<0>(y);
            unrolled<C / 8, 4>([&](int n, int i) { x[n][i] += y[n][i]; });
        } else {
            products.begin(x, d_o, my.m.square(c, 0), true, true);
        }
        to_left<T>(left, x);
        if (erases)
            products.begin(y, left, my.m.square(c, 1), false, true);
        else
            unrolled<C / 8, 4>([&](int n, int i) { y[n][i] = x[n][i]; });
        my.have_squares(c);
        products.begin(my.state, read, my.m.keys(c, 0), true, false);
        products.template wait<1>(y);
        if (erases) {
            unrolled<C / 8, 4>([&](int n, int i) {
                x[n][i] = y[n][i] * beta[8 * n + pair + i % 2] * (channel ? -1.0F : -f.erase[8 * n + pair + i % 2]);
            });
            to_left<T>(erased, x);
            products.begin(my.state, erased, my.m.keys(c, kind == Keys::plain ? 1 : 2), true, false);
        }
        const auto make_dv = [&] {
            if (erases) my.scale(y, beta);
        };
        if constexpr (staged) {
            my.hand_on(c, true, [&] {
                my.give_rows(0, y);
                make_dv();
                my.give_rows(1, y);
            });
        } else {
            if (erases) my.store_rows(c, y, my.to_tile(my.saved.dr(slot, my.hv)));
            if (grad.dv) {
                make_dv();
                my.store_rows(c, y, my.to_tensor(c, grad.dv));
            }
        }
        my.have_rows(c, grad.d_o);
        products.template wait<0>(my.state);
    }

    __device__ void take_chunk_by_token(int c) {
        const View d_o = grad.d_o;
        my.with_wide_state(
            [&](WideState<K>& wide) {
                take_tokens_back<K>(&my.call, &d_o, my.s, my.hv, Index(c) * C, my.s.rows(c), my.own_column(), my.lane,
                                    wide);
            },
            [](double x) { return in_range(x); });
    }

    // e^g of a gate of 200 is beyond f32. Where the token before wipes the state, 0 is left of it: of a finite number.
    __device__ static float in_range(double x) {
        constexpr double largest = 1e30;  // sums of its products stay finite, too
        return static_cast<float>(isfinite(x) ? fmin(fmax(x, -largest), largest) : x);
    }
};

}  // namespace softdelta::cuda

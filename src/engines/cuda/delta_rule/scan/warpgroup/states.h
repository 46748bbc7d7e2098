// A warpgroup that goes from state to state, of 64 value columns:
//
//     Rᵀ = vᵀ − (Sᵀ pᵀ)∘e^E     Uᵀ = Rᵀ solveᵀ     Sᵀ = e^G_last·Sᵀ + (Uᵀ∘e^(G_last − G)) k
//
// (gates of channels: scan/scan.h), and nothing else: Sᵀ and U go to others (outputs.h) while products run; who reads
// them publishes them to products, for that takes as long as a small product.
#pragma once

#include "engines/cuda/delta_rule/scan/state.h"
#include "engines/cuda/delta_rule/scan/warpgroup/stages.h"

namespace softdelta::cuda::chunk_scan {
template <class T, int K, Keys keys, int slabs>
struct States {
    using Layout = Shared<T, K, keys, slabs>;
    static constexpr bool channel = Layout::channel, erases = keys != Keys::only_written,
                          may_overflow = std::is_same_v<T, __half>;

    ScanState<T, K> my;
    const int strip;  // of the block's value columns, those of the warp

    // which: of the block's slabs.
    __device__ States(const ChunkForward& of, const DeltaSequence& s, const ScanPlace& place, int which)
        : my(of, s, place.hv, place.first_column + which * slab, static_cast<int>(threadIdx.x) / 32 % 4),
          strip(4 * which + my.warp) {}

    __device__ void run(const Layout& shared, int chunks) {
        my.load_state();
        for (int c = 0; c < chunks; ++c) {
            if (my.out.states) [[unlikely]]
                my.store_saved(c);
            if constexpr (slabs > 1) ptx::forget(my.lane);  // few registers: places are made anew
            shared.seen().wait(c);
            bool nonfinite = false;
            if constexpr (may_overflow) {
                nonfinite = ptx::any(by_token_barrier, slabs * warpgroup_threads,
                                     my.is_too_large() || shared.by_token_of(c) != 0);
                if (nonfinite && threadIdx.x == 0) shared.by_token_of(c) = 1;
            }
            if (!take(shared, c, nonfinite)) {
                my.take_chunk_by_token(c);  // outputs included
                shared.updates().commit(c, my.lane);
            }
            shared.stages().release(c, my.lane);
        }
        my.store_final_state();
    }

    // False, and nothing done, where the chunk goes token by token. Where others can be waited for, or told, products
    // run.
    __device__ bool take(const Layout& shared, int c, bool nonfinite) {
        constexpr bool has_registers = slabs == 1;
        const ChunkFactors& f = shared.factors_of(c);
        const auto values = shared.values_of(c);
        float x[C / 8][4] = {};
        std::uint32_t value[C / 16][4];
        float2 erase[C / 8] = {}, write[C / 8];
        {
            std::uint32_t state[K / 16][4];
            to_left<T>(state, my.state);
            if constexpr (erases) {
                ptx::begin_products(state, x);
                begin_transposed<T>(x, state, shared.erase(c));
                ptx::commit_products();
            }
            if constexpr (!may_overflow) nonfinite = shared.by_token_of(c) != 0;
            unrolled<C / 16>([&](int n) { values.load_transposed_result(value[n], 16 * n, 16 * strip, my.lane); });
            if constexpr (erases && has_registers) load_factors(f.erase, erase);
            hand_on_state(shared, c);
            if (nonfinite) [[unlikely]] {
                if constexpr (erases) ptx::wait_for_products<0>(x);
                return false;
            }
            if constexpr (erases) ptx::wait_for_products<0>(x);
        }
        if constexpr (erases && !has_registers) load_factors(f.erase, erase);
        unrolled<C / 16, 4>([&](int n, int m) {
            float(&to)[4] = x[2 * n + m / 2];
            const float2 both = ptx::unpack(value[n][m], T());
            const float2 factor = erases ? erase[2 * n + m / 2] : float2{1, 1};
            to[2 * (m % 2)] = rest<channel>(both.x, factor.x, to[2 * (m % 2)]);
            to[2 * (m % 2) + 1] = rest<channel>(both.y, factor.y, to[2 * (m % 2) + 1]);
        });
        if constexpr (erases) {
            std::uint32_t r[C / 16][4];
            to_left<T>(r, x);
            ptx::begin_products(r, x);
            begin_transposed<T>(x, r, shared.solve_of(c));
            ptx::commit_products();
        }
        decay_state(shared, c);
        if constexpr (!channel) load_factors(f.write, write);
        if constexpr (erases) ptx::wait_for_products<0>(x);
        std::uint32_t update[C / 16][4], written[C / 16][4];
        to_left<T>(update, x);
        if constexpr (!channel) {
            unrolled<C / 8, 4>([&](int n, int i) { x[n][i] *= i % 2 == 0 ? write[n].x : write[n].y; });
        }
        to_left<T>(written, x);
        ptx::begin_products(written, my.state);
        begin_product<T>(my.state, written, shared.write(c), true);
        ptx::commit_products();
        if constexpr (erases) {  // else values are U
            if constexpr (channel) {
                ptx::keep_registers(x);
                to_left<T>(update, x);
            }
            unrolled<C / 16>([&](int n) { values.store_transposed_result(update[n], 16 * n, 16 * strip, my.lane); });
        }
        shared.updates().commit(c, my.lane);
        ptx::wait_for_products<0>(my.state);
        return true;
    }
    // Sᵀ before the chunk, made once more: registers that products read are not to be read meanwhile.
    __device__ void hand_on_state(const Layout& shared, int c) {
        shared.states().acquire(c);
        ptx::keep_registers(my.state);
        store_results<T>(shared.state_copy(), my.state, 16 * strip, my.lane);
        shared.states().commit(c, my.lane);
    }
    // Of the lane's columns.
    __device__ void load_factors(const float* from, float2 (&factors)[C / 8]) const {
        unrolled<C / 8>(
            [&](int n) { factors[n] = *reinterpret_cast<const float2*>(from + 8 * n + 2 * (my.lane % 4)); });
    }
    __device__ void decay_state(const Layout& shared, int c) {
        const float all = channel ? 1.0F : shared.factors_of(c).last;
        unrolled<K / 8>([&](int n) {
            float2 last = {all, all};
            if (channel) last = *reinterpret_cast<const float2*>(shared.last_of(c) + 8 * n + 2 * (my.lane % 4));
            unrolled<4>([&](int i) { my.state[n][i] *= i % 2 == 0 ? last.x : last.y; });
        });
    }
};

}  // namespace softdelta::cuda::chunk_scan

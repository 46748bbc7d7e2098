// The gradients of shared_gate.cu on warpgroups (sm_90a), each with a part of its own:
//
//     loader    copies tiles of the next value heads as soon as their places are free, rowsum(S∘dS')
//     reader    P, dq = scale·e^G∘(dO S) + P k
//     eraser    Q, dβ, dg
//     writer    dk = e^(G_last − G)∘(U dS'ᵀ) + Pᵀ q + Qᵀ βk + βe, e = −e^E∘(dR S) + Q k
//
// Single: a key head has one value head. They wait for tiles alone, never all for each other. Keys stay as given: pairs
// have norms as factors.
#include <algorithm>

#include "engines/cuda/delta_rule/unfold/warpgroup/loader.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

constexpr int role_count = 4;
// Registers of the roles: 512 in all. With fewer for one that multiplies, the compiler lets all products wait for each
// other, and says so (C7512).
struct RoleRegisters {
    static constexpr int loader = 32, reader = 168, writer = 176, eraser = 136;
};

template <class T, bool single>
struct Reader {
    using Own = UnfoldWarpgroup<T>;
    static constexpr int barrier = 3;

    Own my;
    const UnfoldBoxes& boxes;

    __device__ void run() {
        unsigned n = 0;
        bool storing = false;  // the copy engine reads dq from the tile of dO before
        my.for_each_chunk([&](const ChunkPlace& at, unsigned step) {
            const auto q = my.m.key(step, 0), k = my.m.key(step, 1);
            const bool by_engine = at.rows() == Own::C && boxes.dq.given;
            typename Own::Sums dq;
            float norm[2];
            if (!single) clear(dq);
            for (int i = 0; i < my.call.group; ++i, ++n) {
                my.forget();
                my.m.of_factors().wait(n);
                my.m.of_u().wait(n);
                my.m.of_d_o().wait(n);
                const RowFactors& f = my.small.factors[n % 2];
                GateSums& sums = my.small.sums[n % 2];
                my.make_pairs(
                    0, n, my.m.d_o_of(n), q, my.m.rows(Own::Memory::u), k, f, sums,
                    [&] { my.m.of_u().release(n, my.lane); },
                    [&] {
                        if (single) my.begin_states(n, my.m.d_o_of(n), dq);
                    });
                my.forget();
                if (storing) {
                    if (my.lane == 0) wait_for_stored_boxes();
                    my.m.of_d_o().release(n - 1, my.lane);
                    storing = false;
                }
                norm[0] = f.q_norm[my.row(0)], norm[1] = f.q_norm[my.row(1)];
                const float factor[2] = {f.read[my.row(0)], f.read[my.row(1)]};
                my.template add_states_and_pairs<single>(n, my.m.d_o_of(n), 0, q, k, factor, factor, dq, sums.read,
                                                         [&] {
                                                             my.m.of_state().release(n, my.lane);
                                                             storing = by_engine && i + 1 == my.call.group;
                                                             if (!storing) my.m.of_d_o().release(n, my.lane);
                                                         });
                my.m.of_sums().commit(n, my.lane);
            }
            my.forget();
            if (by_engine) {
                ptx::barrier(barrier, warpgroup_threads);  // nobody multiplies the tile any more
                my.store_rows_by_engine(my.grad.dq, boxes.dq, at, my.m.d_o_of(n - 1), q, norm, dq);
            } else {
                my.store_rows(my.grad.dq, at, q, norm, dq);
            }
            my.m.keys().release(step, my.lane);
        });
        if (storing && my.lane == 0) wait_for_stored_boxes();
    }
};

// rowsum(dR∘v), the part of dβ in β∘v, of a warp's 16 rows: v is read before dR is there. Four lanes share a row; those
// of every second row take the halves of 128 bytes the other way round, so that a load has eight units in different
// banks.
template <class T>
class WarpValues {
  public:
    __device__ WarpValues(const DeltaCall& call, const ChunkPlace& at, int hv, int warp, int lane) {
        const int row = 16 * warp + lane / 4;
        const T* from = static_cast<const T*>(call.v.data) + at.row(call.v, hv, row);
        unrolled<8>([&](int i) {
            const int u = unit(i % 4, lane), half = i / 4;
            v_[half][i % 4] = {0, 0, 0, 0};
            if (row + 8 * half < at.rows() && 8 * u < call.value_size)
                v_[half][i % 4] = *reinterpret_cast<const uint4*>(from + 8 * half * call.v.stride[1] + 8 * u);
        });
    }
    template <class Rows>
    __device__ void dot_rows(const Rows& d_r, int warp, int lane, float* to) const {
        unrolled<2>([&](int half) {
            const int row = 16 * warp + 8 * half + lane / 4;
            float sums[4] = {};
            unrolled<4>([&](int i) {
                add_dot<T>(*reinterpret_cast<const uint4*>(shared_at(d_r.unit(row, unit(i, lane)))), v_[half][i], sums);
            });
            if (has_diagonal_sum(lane)) to[row] = diagonal_sum(sums, lane);
        });
    }

  private:
    __device__ static int unit(int i, int lane) { return 8 * (i / 2) + 4 * ((i + lane / 4) % 2) + lane % 4; }

    uint4 v_[2][4];
};

template <class T, bool single>
struct Eraser {
    using Own = UnfoldWarpgroup<T>;
    using Rows = typename Own::Rows;
    static constexpr int barrier = 2;

    Own my;

    __device__ void run() {
        unsigned n = 0;
        const bool of_gates = my.has_gate_gradients();
        my.for_each_chunk([&](const ChunkPlace& at, unsigned step) {
            for (int i = 0; i < my.call.group; ++i, ++n) {
                my.forget();
                const int hv = my.call.value_head(at.h, i);
                my.m.of_factors().wait(n);
                const RowFactors& f = my.small.factors[n % 2];
                GateSums& sums = my.small.sums[n % 2];
                if (my.erases) {
                    erase(at, hv, n, my.m.key(step, 1), f, sums);
                } else {
                    my.m.of_u().wait(n);
                    my.m.of_u().release(n, my.lane);
                }
                my.m.of_sums().wait(n);
                ptx::barrier(barrier, warpgroup_threads);
                if (of_gates) {
                    sum_later_blocks(sums);
                    ptx::barrier(barrier, warpgroup_threads);
                    if (my.warp == 0) end_gates(at, hv, f, sums);
                }
                if (my.grad.dbeta && my.warp >= 2)
                    unfold_beta(my.pass, at, hv, my.thread - 64,
                                my.erases ? sums.of_values[my.thread - 64] +
                                                (sums.erase[my.thread - 64] + sums.erased[my.thread - 64])
                                          : 0.0F);
                my.m.of_factors().release(n, my.lane);
            }
            my.m.keys().release(step, my.lane);
        });
    }

    __device__ void erase(const ChunkPlace& at, int hv, unsigned n, const Rows& k, const RowFactors& f,
                          GateSums& sums) {
        const auto d_r = my.m.rows(Own::Memory::d_r);
        const WarpValues<T> v(my.call, at, hv, my.warp, my.lane);
        my.m.of_d_r().wait(n);
        v.dot_rows(d_r, my.warp, my.lane, sums.of_values);
        my.forget();
        my.m.of_u().wait(n);
        const auto have_products = [&] {
            my.m.of_u().release(n, my.lane);
            my.m.of_d_r().release(n, my.lane);
        };
        my.make_pairs(1, n, d_r, k, my.m.rows(Own::Memory::u), k, f, sums, have_products, [] {});
    }

    // spans of the warp's block of rows: its pairs, and those of the blocks after it.
    __device__ void sum_later_blocks(GateSums& sums) const {
        const auto column = [&](int j) {
            float sum = 0;
            for (int which = 0; which < (my.erases ? 2 : 1); ++which)
                for (int block = my.warp + 1; block < 4; ++block) sum += sums.columns[which][block][j];
            return sum;
        };
        float before = 0;
        for (int j = my.lane; j < 16 * my.warp; j += 32) before += column(j);
        before = sum_of_warp(before);
        const int s = 16 * my.warp + my.lane % 16;
        float earlier = running_sum_of_lanes<16>(column(s), my.lane % 16);
        earlier = __shfl_up_sync(0xffffffffu, earlier, 1);
        if (my.lane >= 16) return;
        sums.spans[s] =
            sums.pairs[0][s] + (my.erases ? sums.pairs[1][s] : 0.0F) + (before + (my.lane > 0 ? earlier : 0.0F));
    }
    __device__ void end_gates(const ChunkPlace& at, int hv, const RowFactors& f, const GateSums& sums) const {
        GateParts of;
        unrolled<2>([&](int i) {
            const int r = 2 * my.lane + i;
            of.read[i] = sums.read[r];
            of.erase[i] = my.erases ? f.beta[r] * sums.erase[r] : 0.0F;
            of.write[i] = sums.write[r];
            of.spans[i] = sums.spans[r];
        });
        unfold_gates(my.pass, at, hv, my.lane, of, (sums.through[0] + sums.through[1]) * f.last);
    }
};

template <class T, bool single>
struct Writer {
    using Own = UnfoldWarpgroup<T>;
    using Rows = typename Own::Rows;
    using Sums = typename Own::Sums;

    Own my;

    __device__ void run() {
        unsigned n = 0;
        my.for_each_chunk([&](const ChunkPlace& at, unsigned step) {
            const auto q = my.m.key(step, 0), k = my.m.key(step, 1);
            typename Own::Sums dk;
            float norm[2];
            if (!single) clear(dk);
            for (int i = 0; i < my.call.group; ++i, ++n) {
                my.m.of_factors().wait(n);
                const RowFactors& f = my.small.factors[n % 2];
                GateSums& sums = my.small.sums[n % 2];
                norm[0] = f.k_norm[my.row(0)], norm[1] = f.k_norm[my.row(1)];
                add_states(n, k, f, sums, dk);
                my.m.of_sums().commit(n, my.lane);
                add_pairs(n, q, k, dk);
            }
            my.forget();
            my.store_rows(my.grad.dk, at, k, norm, dk);
            my.m.keys().release(step, my.lane);
        });
    }

    __device__ void add_states(unsigned n, const Rows& k, const RowFactors& f, GateSums& sums, Sums& dk) {
        my.forget();
        const auto u = my.m.rows(Own::Memory::u);
        const auto dstate = my.m.states(Own::Memory::dstate);
        const float factor[2] = {f.write[my.row(0)], f.write[my.row(1)]};
        my.m.of_u().wait(n);
        my.m.of_dstate().wait(n);
        Sums x;
        Sums& of_dstate = single ? dk : x;
        multiply(u, dstate, of_dstate);
        my.forget();
        my.m.of_u().release(n, my.lane);
        my.m.of_dstate().release(n, my.lane);
        my.template add_rows<single>(factor, factor, of_dstate, k, dk, sums.write);
        my.forget();
        if (!my.erases) {
            my.m.of_state().wait(n);
            my.m.of_state().release(n, my.lane);
            return;
        }
        my.m.of_d_r().wait(n);
        my.m.of_state().wait(n);
        multiply(my.m.rows(Own::Memory::d_r), my.m.states(Own::Memory::state), x);
        my.m.of_d_r().release(n, my.lane);
        my.m.of_state().release(n, my.lane);
        const float of_sum[2] = {-f.erase[my.row(0)], -f.erase[my.row(1)]};
        const float of_rows[2] = {of_sum[0] * f.beta[my.row(0)], of_sum[1] * f.beta[my.row(1)]};
        my.template add_rows<false>(of_rows, of_sum, x, k, dk, sums.erase);
    }
    __device__ void multiply(const Rows& rows, const typename Own::States& right, Sums& x) const {
        ptx::begin_products(x);
        begin_product<T>(x, rows, right, false);
        ptx::commit_products();
        ptx::wait_for_products<0>(x);
    }
    __device__ void add_pairs(unsigned n, const Rows& q, const Rows& k, Sums& dk) {
        my.forget();
        typename Own::Left left, other;
        my.m.of_square(0).wait(n);
        my.load_transposed(my.m.square(0), left);
        my.m.of_square(0).release(n, my.lane);
        ptx::begin_products(dk, left);
        begin_product<T>(dk, left, q, true);
        ptx::commit_products();
        if (my.erases) {
            my.m.of_square(1).wait(n);
            my.load_transposed(my.m.square(1), other);
            ptx::begin_products(other);
            begin_product<T>(dk, other, k, true);
            begin_product<T>(dk, my.m.square(1), k, true);
            ptx::commit_products();
        }
        ptx::wait_for_products<0>(dk);
        if (my.erases) my.m.of_square(1).release(n, my.lane);
    }
};

template <class T, bool single>
__global__ void __launch_bounds__(role_count* warpgroup_threads, 1)
    unfold_warpgroup_kernel(const __grid_constant__ UnfoldBoxes boxes,  // they come first: 2 % on an H200
                            const __grid_constant__ ChunkGradients of) {
    if constexpr (ptx::has_warpgroups) {
        ptx::let_next_begin();
        const WarpgroupMemory<T> m{ptx::shared_address(ptx::shared_memory())};
        if (threadIdx.x == 0) {
            constexpr int warps = 4;
            m.keys().start(1, 3 * warps);
            m.of_d_o().start(1, warps);
            m.of_d_r().start(1, 2 * warps);
            m.of_u().start(1, 3 * warps);
            m.of_state().start(1, 2 * warps + Loader<T>::tracing_warps);
            m.of_dstate().start(1, warps + Loader<T>::tracing_warps);
            m.of_square(0).start(warpgroup_threads, 2 * warps);
            m.of_square(1).start(warpgroup_threads, warps);
            m.of_sums().start(2 * warps + Loader<T>::tracing_warps, warps);
            m.of_factors().start(1, warps);
        }
        __syncthreads();
        ptx::wait_for_launch_before();
        const int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / warpgroup_threads, 0);
        if (role == 0) {
            ptx::release_registers<RoleRegisters::loader>();
            Loader<T>{UnfoldWarpgroup<T>(of), boxes}.run();
        } else if (role == 1) {
            ptx::take_registers<RoleRegisters::reader>();
            Reader<T, single>{UnfoldWarpgroup<T>(of), boxes}.run();
        } else if (role == 2) {
            ptx::take_registers<RoleRegisters::eraser>();
            Eraser<T, single>{UnfoldWarpgroup<T>(of)}.run();
        } else {
            ptx::take_registers<RoleRegisters::writer>();
            Writer<T, single>{UnfoldWarpgroup<T>(of)}.run();
        }
    }
}

}  // namespace

void launch_unfold_warpgroups(const ChunkGradients& of, cudaStream_t stream) {
    const Index chunks = of.sequences.most_chunks() * of.call.key_heads();
    const Blocks blocks(std::min<Index>(chunks, multiprocessors()));
    const auto with = [&]<bool single>() {
        launch(unfold_warpgroup_kernel<SavedElement, single>,
               {blocks, role_count * warpgroup_threads, WarpgroupMemory<SavedElement>::bytes, true}, stream,
               "gradients of the delta rules", unfold_boxes(of), of);
    };
    of.call.group == 1 ? with.template operator()<true>() : with.template operator()<false>();
}

}  // namespace softdelta::cuda

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
#include "engines/cuda/delta_rule/unfold/warpgroup/unfold.h"
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
class Reader : WarpgroupRole<T> {
    using Base = WarpgroupRole<T>;
    using Base::call_;
    using Base::grad_;
    using Base::lane_;
    using Base::m_;
    using Base::row;
    using Base::small_;
    static constexpr int barrier = 3;

  public:
    __device__ Reader(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                      const SavedChunks& saved, const UnfoldBoxes& boxes)
        : Base(call, sequences, grad, saved), boxes_(boxes) {}

    __device__ void run() {
        unsigned n = 0;
        bool storing = false;  // the copy engine reads dq from the tile of dO before
        this->for_each_chunk([&](const ChunkPlace& at, unsigned step) {
            const auto q = m_.key(step, 0), k = m_.key(step, 1);
            const bool by_engine = at.rows() == Base::C && boxes_.dq.given;
            typename Base::Sums dq;
            float norm[2];
            if (!single) this->clear(dq);
            for (int i = 0; i < call_.group; ++i, ++n) {
                this->forget();
                m_.of_factors().wait_until_there(n);
                m_.of_u().wait_until_there(n);
                m_.of_d_o().wait_until_there(n);
                const RowFactors& f = small_.factors[n % 2];
                GateSums& sums = small_.sums[n % 2];
                this->make_pairs(
                    0, n, m_.d_o_of(n), q, m_.rows(Base::Memory::u), k, f, sums, [&] { m_.of_u().release(n, lane_); },
                    [&] {
                        if (single) this->begin_states(n, m_.d_o_of(n), dq);
                    });
                this->forget();
                if (storing) {
                    if (lane_ == 0) wait_for_stored_boxes();
                    m_.of_d_o().release(n - 1, lane_);
                    storing = false;
                }
                norm[0] = f.q_norm[row(0)], norm[1] = f.q_norm[row(1)];
                const float factor[2] = {f.read[row(0)], f.read[row(1)]};
                this->template add_states_and_pairs<single>(n, m_.d_o_of(n), 0, q, k, factor, factor, dq, sums.read,
                                                            [&] {
                                                                m_.of_state().release(n, lane_);
                                                                storing = by_engine && i + 1 == call_.group;
                                                                if (!storing) m_.of_d_o().release(n, lane_);
                                                            });
                m_.of_sums().come(n, lane_);
            }
            this->forget();
            if (by_engine) {
                ptx::barrier(barrier, warpgroup_threads);  // nobody multiplies the tile any more
                this->store_rows_by_engine(grad_.dq, boxes_.dq, at, m_.d_o_of(n - 1), q, norm, dq);
            } else {
                this->store_rows(grad_.dq, at, q, norm, dq);
            }
            m_.keys().release(step, lane_);
        });
        if (storing && lane_ == 0) wait_for_stored_boxes();
    }

  private:
    const UnfoldBoxes& boxes_;
};

// rowsum(dR∘v), the part of dβ in β∘v, of a warp's 16 rows: v is read before dR is there. Four lanes share a row; those
// of odd rows take the halves of 128 bytes the other way round, so that a load has eight units in different banks.
template <class T>
class WarpValues {
  public:
    __device__ WarpValues(const DeltaCall& call, const ChunkPlace& at, int hv, int warp, int lane) {
        const int row = 16 * warp + lane / 4;
        const T* from = static_cast<const T*>(call.v.data) + at.row(call.v, hv, row);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int u = unit(i % 4, lane), half = i / 4;
            v_[half][i % 4] = {0, 0, 0, 0};
            if (row + 8 * half < at.rows() && 8 * u < call.value_size)
                v_[half][i % 4] = *reinterpret_cast<const uint4*>(from + 8 * half * call.v.stride[1] + 8 * u);
        }
    }
    template <class Rows>
    __device__ void dot_rows(const Rows& d_r, int warp, int lane, float* to) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * warp + 8 * half + lane / 4;
            float sums[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                add_dot<T>(*reinterpret_cast<const uint4*>(shared_at(d_r.unit(row, unit(i, lane)))), v_[half][i], sums);
            if (has_diagonal_sum(lane)) to[row] = diagonal_sum(sums, lane);
        }
    }

  private:
    __device__ static int unit(int i, int lane) {
        return 8 * (i / 2) + 4 * ((i + lane / 4) % 2) + lane % 4;
    }

    uint4 v_[2][4];
};

template <class T, bool single>
class Eraser : WarpgroupRole<T> {
    using Base = WarpgroupRole<T>;
    using Base::call_;
    using Base::D;
    using Base::erases_;
    using Base::grad_;
    using Base::lane_;
    using Base::m_;
    using Base::row;
    using Base::saved_;
    using Base::small_;
    using Base::thread_;
    using Base::warp_;
    using typename Base::Rows;
    using Values = WarpValues<T>;
    static constexpr int barrier = 2;

  public:
    using Base::Base;

    __device__ void run() {
        unsigned n = 0;
        const bool of_gates = this->has_gate_gradients();
        this->for_each_chunk([&](const ChunkPlace& at, unsigned step) {
            for (int i = 0; i < call_.group; ++i, ++n) {
                this->forget();
                const int hv = call_.value_head(at.h, i);
                m_.of_factors().wait_until_there(n);
                const RowFactors& f = small_.factors[n % 2];
                GateSums& sums = small_.sums[n % 2];
                if (erases_) {
                    erase(at, hv, n, m_.key(step, 1), f, sums);
                } else {
                    m_.of_u().wait_until_there(n);
                    m_.of_u().release(n, lane_);
                }
                m_.of_sums().wait_until_there(n);
                ptx::barrier(barrier, warpgroup_threads);
                if (of_gates) {
                    sum_later_blocks(sums);
                    ptx::barrier(barrier, warpgroup_threads);
                    if (warp_ == 0) end_gates(at, hv, f, sums);
                }
                if (grad_.dbeta && warp_ >= 2)
                    unfold_beta(
                        call_, grad_, at, hv, thread_ - 64,
                        erases_ ? sums.of_values[thread_ - 64] + (sums.erase[thread_ - 64] + sums.erased[thread_ - 64])
                                : 0.0F);
                m_.of_factors().release(n, lane_);
            }
            m_.keys().release(step, lane_);
        });
    }

  private:
    __device__ void erase(const ChunkPlace& at, int hv, unsigned n, const Rows& k, const RowFactors& f,
                          GateSums& sums) {
        const auto d_r = m_.rows(Base::Memory::d_r);
        const Values v(call_, at, hv, warp_, lane_);
        m_.of_d_r().wait_until_there(n);
        v.dot_rows(d_r, warp_, lane_, sums.of_values);
        this->forget();
        m_.of_u().wait_until_there(n);
        const auto have_products = [&] {
            m_.of_u().release(n, lane_);
            m_.of_d_r().release(n, lane_);
        };
        this->make_pairs(1, n, d_r, k, m_.rows(Base::Memory::u), k, f, sums, have_products, [] {});
    }

    // spans of the warp's block of rows: its pairs, and those of the blocks after it.
    __device__ void sum_later_blocks(GateSums& sums) const {
        const auto column = [&](int j) {
            float sum = 0;
            for (int which = 0; which < (erases_ ? 2 : 1); ++which)
                for (int block = warp_ + 1; block < 4; ++block) sum += sums.columns[which][block][j];
            return sum;
        };
        float before = 0;
        for (int j = lane_; j < 16 * warp_; j += 32) before += column(j);
        before = sum_of_warp(before);
        const int s = 16 * warp_ + lane_ % 16;
        float earlier = running_sum_of_lanes<16>(column(s), lane_ % 16);
        earlier = __shfl_up_sync(0xffffffffu, earlier, 1);
        if (lane_ >= 16) return;
        sums.spans[s] =
            sums.pairs[0][s] + (erases_ ? sums.pairs[1][s] : 0.0F) + (before + (lane_ > 0 ? earlier : 0.0F));
    }
    __device__ void end_gates(const ChunkPlace& at, int hv, const RowFactors& f, const GateSums& sums) const {
        GateParts of;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = 2 * lane_ + i;
            of.read[i] = sums.read[r];
            of.erase[i] = erases_ ? f.beta[r] * sums.erase[r] : 0.0F;
            of.write[i] = sums.write[r];
            of.spans[i] = sums.spans[r];
        }
        unfold_gates(call_, grad_, saved_, at, hv, lane_, of, (sums.through[0] + sums.through[1]) * f.last);
    }
};

template <class T, bool single>
class Writer : WarpgroupRole<T> {
    using Base = WarpgroupRole<T>;
    using Base::call_;
    using Base::D;
    using Base::erases_;
    using Base::grad_;
    using Base::lane_;
    using Base::m_;
    using Base::row;
    using Base::small_;
    using Base::thread_;
    using Base::warp_;

  public:
    using Base::Base;

    __device__ void run() {
        unsigned n = 0;
        this->for_each_chunk([&](const ChunkPlace& at, unsigned step) {
            const auto q = m_.key(step, 0), k = m_.key(step, 1);
            typename Base::Sums dk;
            float norm[2];
            if (!single) this->clear(dk);
            for (int i = 0; i < call_.group; ++i, ++n) {
                m_.of_factors().wait_until_there(n);
                const RowFactors& f = small_.factors[n % 2];
                GateSums& sums = small_.sums[n % 2];
                norm[0] = f.k_norm[row(0)], norm[1] = f.k_norm[row(1)];
                add_states(n, k, f, sums, dk);
                m_.of_sums().come(n, lane_);
                add_pairs(n, q, k, dk);
            }
            this->forget();
            this->store_rows(grad_.dk, at, k, norm, dk);
            m_.keys().release(step, lane_);
        });
    }

  private:
    using Rows = typename Base::Rows;
    using Sums = typename Base::Sums;

    __device__ void add_states(unsigned n, const Rows& k, const RowFactors& f, GateSums& sums, Sums& dk) {
        this->forget();
        const auto u = m_.rows(Base::Memory::u);
        const auto dstate = m_.states(Base::Memory::dstate);
        const float factor[2] = {f.write[row(0)], f.write[row(1)]};
        m_.of_u().wait_until_there(n);
        m_.of_dstate().wait_until_there(n);
        Sums x;
        Sums& of_dstate = single ? dk : x;
        multiply(u, dstate, of_dstate);
        this->forget();
        m_.of_u().release(n, lane_);
        m_.of_dstate().release(n, lane_);
        this->template add_rows<single>(factor, factor, of_dstate, k, dk, sums.write);
        this->forget();
        if (!erases_) {
            m_.of_state().wait_until_there(n);
            m_.of_state().release(n, lane_);
            return;
        }
        m_.of_d_r().wait_until_there(n);
        m_.of_state().wait_until_there(n);
        ptx::begin_products(x);
        this->multiply_states(m_.rows(Base::Memory::d_r), m_.states(Base::Memory::state), x);
        ptx::commit_products();
        ptx::wait_for_products<0>(x);
        m_.of_d_r().release(n, lane_);
        m_.of_state().release(n, lane_);
        const float of_sum[2] = {-f.erase[row(0)], -f.erase[row(1)]};
        const float of_rows[2] = {of_sum[0] * f.beta[row(0)], of_sum[1] * f.beta[row(1)]};
        this->template add_rows<false>(of_rows, of_sum, x, k, dk, sums.erase);
    }
    __device__ void multiply(const Rows& rows, const typename Base::States& right, Sums& x) const {
        ptx::begin_products(x);
        this->multiply_states(rows, right, x);
        ptx::commit_products();
        ptx::wait_for_products<0>(x);
    }
    __device__ void add_pairs(unsigned n, const Rows& q, const Rows& k, Sums& dk) {
        this->forget();
        typename Base::Left left, other;
        m_.of_square(0).wait_until_there(n);
        this->load_transposed(m_.square(0), left);
        m_.of_square(0).release(n, lane_);
        ptx::begin_products(dk, left);
        this->add_product(left, q, dk);
        ptx::commit_products();
        if (erases_) {
            m_.of_square(1).wait_until_there(n);
            this->load_transposed(m_.square(1), other);
            ptx::begin_products(other);
            this->add_product(other, k, dk);
            this->add_product(m_.square(1), k, dk);
            ptx::commit_products();
        }
        ptx::wait_for_products<0>(dk);
        if (erases_) m_.of_square(1).release(n, lane_);
    }
};

template <class T, bool single>
__global__ void __launch_bounds__(role_count* warpgroup_threads, 1)
    unfold_warpgroup_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                            const __grid_constant__ SavedChunks saved, const __grid_constant__ GradientViews grad,
                            const __grid_constant__ UnfoldBoxes boxes) {
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
            Loader<T>(call, sequences, grad, saved, boxes).run();
        } else if (role == 1) {
            ptx::take_registers<RoleRegisters::reader>();
            Reader<T, single>(call, sequences, grad, saved, boxes).run();
        } else if (role == 2) {
            ptx::take_registers<RoleRegisters::eraser>();
            Eraser<T, single>(call, sequences, grad, saved).run();
        } else {
            ptx::take_registers<RoleRegisters::writer>();
            Writer<T, single>(call, sequences, grad, saved).run();
        }
    }
}

}  // namespace

template <class T>
void launch_unfold_warpgroups(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                              const SavedChunks& saved, cudaStream_t stream) {
    const dim3 all = fold_blocks(call, sequences);
    const unsigned chunks = all.x * static_cast<unsigned>(call.key_heads()) * all.z;
    const dim3 blocks(std::min(chunks, static_cast<unsigned>(multiprocessors())));
    const auto with = [&]<bool single>() {
        launch(unfold_warpgroup_kernel<T, single>,
               {blocks, role_count * warpgroup_threads, WarpgroupMemory<T>::bytes, true}, stream,
               "gradients of the delta rules", call, sequences, saved, grad,
               unfold_boxes(call, sequences, grad, saved));
    };
    call.group == 1 ? with.template operator()<true>() : with.template operator()<false>();
}
template void launch_unfold_warpgroups<__nv_bfloat16>(const DeltaCall&, const DeltaSequences&, const GradientViews&,
                                                      const SavedChunks&, cudaStream_t);

}  // namespace softdelta::cuda

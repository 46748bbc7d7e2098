// The warpgroup of the outputs: o = (q S)∘scale·e^G + score U. S and U come from the warpgroups that go from state to
// state; these wait only until S is taken. It makes the scores where they are not in the record, and stores what the
// forward pass keeps and the fold has not.
#pragma once

#include "engines/cuda/delta_rule/fold/shared_gate.h"
#include "engines/cuda/delta_rule/scan/state.h"
#include "engines/cuda/delta_rule/scan/warpgroup/kept.h"
#include "engines/cuda/delta_rule/scan/warpgroup/stages.h"

namespace softdelta::cuda::chunk_scan {
// keeps: S before each chunk and U go to out.kept.
template <class T, int K, Keys keys, int slabs, bool keeps>
class Outputs {
    using Layout = Shared<T, K, keys, slabs>;
    static constexpr bool channel = Layout::channel, scored = Layout::scored;
    static constexpr int columns = slabs * slab;

  public:
    const DeltaCall& call;
    const DeltaSequence& s;
    const ChunkOutputs& out;
    const KeptBoxes& boxes;
    const Layout shared;
    const ScanPlace& place;
    const int warp;
    int lane;

    // slot: of the first chunk.
    __device__ void run(int chunks, Index slot) {
        const bool taken = keeps || static_cast<bool>(out.o);
        for (int c = 0; c < chunks; ++c) {
            const Index kept = (slot + c) * call.heads + place.hv;
            if constexpr (slabs > 1) ptx::forget(lane);  // few registers: places are made anew
            shared.seen().wait(c);
            taken ? take(c, kept) : pass(c);
            wait_for_kept();
            shared.stages().release(c, lane);
        }
    }

  private:
    struct Sums {  // no plain array: the compiler would put it into memory, into the place of a state of another role
        float of[columns / 8][4];
    };

    // Nothing is between the products that others could be waited for.
    __device__ void take(int c, Index kept) const {
        float score[C / 8][4] = {}, norms[2] = {1, 1};
        Sums sums = {};
        auto& o = sums.of;
        const KeyProducts<T, K, true> products{call, warp, lane};
        ptx::begin_products(o);
        if constexpr (!scored) products.begin(shared.read(c), shared.write(c), score);
        shared.states().wait_for_products(c);
        begin_transposed<T>(o, shared.read(c), shared.state_copy());  // q S
        ptx::commit_products();
        if constexpr (keeps) keep_state(c, kept);
        std::uint32_t left[C / 16][4];
        if constexpr (scored) {
            unrolled<C / 16>([&](int depth) { shared.score_of(c).load_left(left[depth], 16 * warp, depth, lane); });
        } else {
            if (call.l2norm) make_norms(c, norms);
            const bool nonfinite = products.template end<1>(shared.decays_of(c), true,
                                                            {call.scale * norms[0], call.scale * norms[1]}, score);
            to_left<T>(left, score);
            if constexpr (keeps)
                if (place.first_column == 0) keep_scores(c, kept, left, norms, nonfinite);
        }
        ptx::wait_for_products<0>(o);
        wait_for_kept();
        shared.states().release(c, lane);
        if constexpr (!channel) {
            const float* const read = shared.factors_of(c).read + 16 * warp + lane / 4;
            const float factor[2] = {read[0] * norms[0], read[8] * norms[1]};
            unrolled<columns / 8, 4>([&](int n, int i) { o[n][i] *= factor[i / 2]; });
        }
        shared.updates().wait_for_products(c);
        if (shared.by_token_of(c) != 0) [[unlikely]]  // who has the state stores its outputs
            return;
        ptx::begin_products(left, o);
        begin_product<T>(o, left, shared.values_of(c), true);
        ptx::commit_products();
        if constexpr (keeps) keep_rows(c, kept);
        ptx::wait_for_products<0>(o);
        if (keeps && !out.o) return;
        ptx::barrier(output_barrier, warpgroup_threads);  // nobody multiplies q any more
        store(c, sums);
    }
    // Nobody wants outputs.
    __device__ void pass(int c) const {
        shared.states().wait(c);
        shared.states().release(c, lane);
        shared.updates().wait(c);
    }
    // 1/√(Σq² + 1e-6) of the lane's rows; two lanes share a row.
    __device__ void make_norms(int c, float (&norms)[2]) const {
        float sum = 0;
#pragma unroll 4
        for (int u = lane % 2; u < KeyTile<T, K>::units; u += 2) {
            const uint4 x = *reinterpret_cast<const uint4*>(shared_at(shared.read(c).unit(16 * warp + lane / 2, u)));
            sum += dot<T>(x, x);
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        unrolled<2>([&](int half) {
            norms[half] = 1 / sqrtf(__shfl_sync(0xffffffffu, sum, 2 * (lane / 4 + 8 * half)) + 1e-6F);
        });
    }

    // Through the tile of q, to whole rows of memory: each warp its own.
    __device__ void store(int c, const Sums& sums) const {
        const auto& o = sums.of;
        constexpr int units = columns / 8, rows_at_once = 32 / units;
        const auto tile = shared.outputs_of(c);
        store_results<T>(tile, o, 16 * warp, lane);
        __syncwarp();
        const int u = lane % units, first = 16 * warp + lane / units, rows = s.rows(c);
        const Index step = out.o.stride[1];
        auto* to = static_cast<T*>(out.o.data) + s.batch * out.o.stride[0] + (s.begin + Index(c) * C + first) * step +
                   place.hv * out.o.stride[2] + place.first_column + 8 * u;
        const bool inside = place.first_column + 8 * u < call.value_size;
        unrolled<16 / rows_at_once>([&](int n) {
            const int i = n * rows_at_once;
            if (inside && first + i < rows)
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(shared_at(tile.unit(first + i, u)));
            to += rows_at_once * step;
        });
    }

    // S before the chunk, and why it goes token by token.
    __device__ void keep_state(int c, Index kept) const {
        if (!keeps_tiles()) return;
        out.kept.keep_reason(kept, shared.factors_of(c).by_token, shared.by_token_of(c) != 0, channel);
        store_panels<K / 64>(boxes.state, shared.state_copy(), 0, kept * KeptChunks::size + place.first_column);
    }
    __device__ void keep_rows(int c, Index kept) const {
        if (keeps_tiles()) store_panels<slabs>(boxes.U, shared.values_of(c), place.first_column, kept * C);
    }
    // By one thread, which waits until what it keeps may be written again.
    __device__ static bool keeps_tiles() {
        return threadIdx.x % warpgroup_threads == 0;
    }
    __device__ static void wait_for_kept() {
        if (keeps && keeps_tiles()) wait_for_stored_boxes();
    }
    template <int panels, class Rows>
    __device__ static void store_panels(const Boxes& to, const Rows& from, int column, Index row) {
        unrolled<panels>([&](int p) {
            store_box(to, from.base + static_cast<std::uint32_t>(p * Rows::panel_bytes), column + 64 * p,
                      static_cast<int>(row), 0, 0);
        });
    }
    // nonfinite: a score is not finite.
    __device__ void keep_scores(int c, Index kept, const std::uint32_t (&score)[C / 16][4], const float (&norms)[2],
                                bool nonfinite) const {
        char* const record = out.kept.record(kept);
        RowFactors& factors = out.kept.factors(kept);
        const int second = lane % 2;
        unrolled<2>([&](int half) {
            const int row = 16 * warp + 8 * half + lane / 4;
            unrolled<C / 16>([&](int depth) {
                *reinterpret_cast<uint2*>(record + SquareTile<T>{0}.unit(row, 2 * depth + second) + 4 * (lane & 2)) =
                    exchange_words(score[depth][half], score[depth][half + 2], second != 0);
            });
            if (!call.l2norm || lane % 4 != 0) return;
            factors.q_norm[row] = norms[half];
            factors.read[row] = shared.factors_of(c).read[row] * norms[half];
        });
        if (nonfinite) out.kept.keep_reason(kept, shared.factors_of(c).by_token, true, channel);
    }
};

}  // namespace softdelta::cuda::chunk_scan

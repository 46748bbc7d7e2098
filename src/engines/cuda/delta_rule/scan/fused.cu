// Fold and scan in one kernel of sm_90a, for gates that all channels share: a block has a value head of a sequence and
// 128 value columns, and every operand is read once. Three warpgroups work side by side:
//
//     warps 0–3    copies of keys(c + 2) and values(c + 1) in the background, scan(c) of 64 value columns
//     warps 4–7    scan(c) of the other 64, scores(c + 1)
//     warps 8–11   factors and solve(c + 1)
//
// Then all wait for each other, and go one chunk further.
#include "engines/cuda/delta_rule/fold/shared_gate.h"
#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/scan/scan.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

// Between the steps of the fold: tells the warps of the scores. No name of this file alone, for level sm_80 does not
// use it.
struct LetScoresBegin {
    static constexpr bool makes_scores = false;

    int barrier;

    __device__ void have_factors() const { ptx::arrive(barrier, 256); }
    __device__ void have_products() const {}
    __device__ void have_inverse(const float (&)[chunk_rows / 8][4]) const {}
};

namespace {

constexpr int C = chunk_rows, slab = 128;
constexpr int scan_warps = 8, warps = 12;
// The fold arrives, the warps of the scores wait: they read what the fold wrote before it arrived (bar.arrive
// synchronizes with bar.sync). Nobody writes that again before the __syncthreads() at the end of the step.
constexpr int factors_barrier = 4;

template <class T, int K, bool own_p>
struct Shared {
    static constexpr int key_bytes = KeyTile<T, K>::bytes(C), keys_bytes = (own_p ? 3 : 2) * key_bytes;
    static constexpr int value_bytes = Tile<T, slab>::bytes(C), square_bytes = SquareTile<T>::bytes(C);
    static constexpr int values = 3 * keys_bytes, squares = values + 2 * value_bytes,
                         memory = squares + 4 * square_bytes,
                         factors = memory + static_cast<int>(sizeof(WholeFoldMemory)),
                         sequence = factors + 2 * static_cast<int>(sizeof(ChunkFactors)),
                         bytes = sequence + static_cast<int>(sizeof(DeltaSequence));
    static_assert(bytes <= 227 * 1024);

    std::uint32_t base;

    __device__ KeyTile<T, K> key(int c, int which) const {
        return {base + static_cast<std::uint32_t>(c % 3 * keys_bytes + which * key_bytes)};
    }
    __device__ Tile<T, slab> value(int c) const {
        return {base + static_cast<std::uint32_t>(values + c % 2 * value_bytes)};
    }
    __device__ SquareTile<T> square(int c, int which) const {
        return {base + static_cast<std::uint32_t>(squares + (c % 2 * 2 + which) * square_bytes)};
    }
    __device__ ChunkFactors* factors_of(int c) const {
        return reinterpret_cast<ChunkFactors*>(shared_at(base + factors)) + c % 2;
    }
    __device__ ChunkTiles<T, K, slab> for_scan(int c) const {
        return {key(c, 0),    key(c, own_p ? 2 : 1), key(c, 1),     value(c),
                square(c, 0), square(c, 1),          factors_of(c), nullptr};
    }
    __device__ SharedFoldTiles<T, K> for_fold(int c) const {
        auto* const of_fold = reinterpret_cast<WholeFoldMemory*>(shared_at(base + memory));
        return {key(c, 0),    key(c, 1),     key(c, own_p ? 2 : 1), square(c, 0),
                square(c, 1), factors_of(c), &of_fold->rest,        &of_fold->inverse};
    }
};

template <class T, int K, bool own_p, bool erases>
__global__ void __launch_bounds__(32 * warps, 1) fused_kernel(const __grid_constant__ ChunkForward of) {
    if constexpr (ptx::has_warpgroups) {
        const DeltaCall& call = of.call;
        // In shared memory: registers are scarce.
        DeltaSequence& s = *reinterpret_cast<DeltaSequence*>(ptx::shared_memory() + Shared<T, K, own_p>::sequence);
        if (threadIdx.x == 0) s = of.sequences[static_cast<int>(blockIdx.z)];
        __syncthreads();
        const int hv = static_cast<int>(blockIdx.y), first_column = static_cast<int>(blockIdx.x) * slab;
        const int chunks = s.chunks();
        const Shared<T, K, own_p> shared{ptx::shared_address(ptx::shared_memory())};
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (warp < scan_warps) {
            ptx::take_registers<200>();
            constexpr int threads = 128;
            const int thread = static_cast<int>(threadIdx.x) % threads, h = call.key_head(hv);
            ChunkScan<T, K, slab, false, erases, true, false> scan{{of, s, hv, first_column, warp}};
            scan.my.load_state();
            for (int c = -2; c < chunks; ++c) {
                if (warp < 4) {
                    if (c + 2 < chunks) {
                        copy_rows<threads>(shared.key(c + 2, 0), call.q, s, c + 2, h, 0, call.key_size, thread);
                        copy_rows<threads>(shared.key(c + 2, 1), call.k, s, c + 2, h, 0, call.key_size, thread);
                        if (own_p)
                            copy_rows<threads>(shared.key(c + 2, 2), call.p, s, c + 2, h, 0, call.key_size, thread);
                    }
                    if (c >= -1 && c + 1 < chunks)
                        copy_rows<threads>(shared.value(c + 1), call.v, s, c + 1, hv, first_column, call.value_size,
                                           thread);
                }
                if (c >= 0) scan.take(c, shared.for_scan(c));
                if (warp < 4) {
                    ptx::wait_for_copies();
                    ptx::publish_to_products();
                } else if (c >= -1 && c + 1 < chunks) {
                    ptx::barrier(factors_barrier, 256);
                    KeyProducts<T, K, true>{call, warp - 4, thread % 32}.make_scores(shared.for_fold(c + 1));
                    ptx::publish_to_products();
                }
                __syncthreads();
            }
            scan.my.store_final_state();
        } else {
            ptx::release_registers<104>();
            const SharedFold<T, K, erases, true> fold(call, s, hv, static_cast<int>(threadIdx.x) - 32 * scan_warps);
            auto given = fold.load_given(0);
            for (int c = -2; c < chunks; ++c) {
                if (c >= -1 && c + 1 < chunks) {
                    const auto next = fold.load_given(c + 2);
                    fold.run(c + 1, given, shared.for_fold(c + 1), LetScoresBegin{factors_barrier});
                    given = next;
                    ptx::publish_to_products();
                }
                __syncthreads();
            }
        }
    }
}

}  // namespace

void launch_fused_chunks(const ChunkForward& of, cudaStream_t stream) {
    const Blocks blocks(blocks_of(of.call.value_size, slab), of.call.heads, of.sequences.count);
    with_half(of.call, [&]<class T>() {
        with_shared_fold(of.call, [&]<int K, bool own_p, bool erases>() {
            launch(fused_kernel<T, K, own_p, erases>, {blocks, 32 * warps, Shared<T, K, own_p>::bytes}, stream,
                   "the delta rules' fold and scan", of);
        });
    });
}

}  // namespace softdelta::cuda

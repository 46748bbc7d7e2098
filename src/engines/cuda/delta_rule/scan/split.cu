// The scan over folded chunks of f32 operands, on every level: products of split numbers by tf32 matrix units. There is
// no room for two stages: each tile is filled anew, by all threads, as soon as it was read; k alone, which is read to
// the end, lies there twice.
#include <algorithm>
#include <limits>

#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/scan/scan.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

constexpr int C = chunk_rows;

template <int K, int slab, Keys keys>
struct Shared {
    using Record = FoldedChunk<K, false, float>;
    static constexpr bool erases = keys != Keys::only_written, own_p = keys == Keys::own_p;
    static constexpr int key_bytes = Record::key_bytes;
    static constexpr int write = key_bytes, erase = write + 2 * key_bytes, values = erase + (own_p ? key_bytes : 0),
                         score = values + Tile<float, slab>::bytes(C), solve = score + Record::square_bytes,
                         factors = solve + (erases ? Record::square_bytes : 0),
                         bytes = factors + 2 * static_cast<int>(sizeof(ChunkFactors));

    std::uint32_t base;

    __device__ std::uint32_t factors_of(int c) const {
        return base + static_cast<std::uint32_t>(factors + c % 2 * static_cast<int>(sizeof(ChunkFactors)));
    }
    __device__ ChunkTiles<float, K, slab> tiles(int c) const {
        const std::uint32_t k = base + static_cast<std::uint32_t>(write + c % 2 * key_bytes);
        return {{base},
                {own_p ? base + erase : k},
                {k},
                {base + values},
                {base + score},
                {base + solve},
                reinterpret_cast<const ChunkFactors*>(shared_at(factors_of(c))),
                nullptr};
    }
};

template <int K, int slab, Keys keys>
struct Copies {
    using Layout = Shared<K, slab, keys>;
    using Record = typename Layout::Record;
    static constexpr int threads = 2 * slab;

    const ChunkForward& of;
    const DeltaSequence& s;
    const Layout shared;
    const int hv, first_column, chunks, thread;

    // What is read first of chunk c, and the factors; and the rest.
    __device__ void copy_keys(int c) const {
        if (c >= chunks) return;
        const DeltaCall& call = of.call;
        const int h = call.key_head(hv);
        const auto tiles = shared.tiles(c);
        if (of.out.o) copy_rows<threads>(tiles.read, call.q, s, c, h, 0, call.key_size, thread);
        if (Layout::own_p) copy_rows<threads>(tiles.erase, call.p, s, c, h, 0, call.key_size, thread);
        copy_rows<threads>(tiles.write, call.k, s, c, h, 0, call.key_size, thread);
        if (Layout::erases)
            copy_bytes<Record::square_bytes, threads>(tiles.solve.base, record(c) + Record::solve, thread);
        copy_bytes<static_cast<int>(sizeof(ChunkFactors)), threads>(shared.factors_of(c), record(c) + Record::factors,
                                                                    thread);
    }
    __device__ void copy_values(int c) const {
        if (c >= chunks) return;
        const auto tiles = shared.tiles(c);
        copy_rows<threads>(tiles.values, of.call.v, s, c, hv, first_column, of.call.value_size, thread);
        if (of.out.o) copy_bytes<Record::square_bytes, threads>(tiles.score.base, record(c), thread);
    }

  private:
    __device__ const char* record(int c) const { return of.folded.record(s.first_slot + c, hv, Record::bytes); }
};

// When all warps have read a chunk's q and solve, and its values and scores, the next ones come.
template <int K, int slab, Keys keys>
struct Refill {
    const Copies<K, slab, keys>& copies;
    const int next;

    __device__ void have_read() const {
        __syncthreads();
        copies.copy_keys(next);
    }
    __device__ void have_outputs() const {
        __syncthreads();
        copies.copy_values(next);
    }
};

template <int K, int warps, Keys keys, bool keeps>
__global__ void __launch_bounds__(32 * warps, 1) split_scan_kernel(const __grid_constant__ ChunkForward of) {
    constexpr int slab = 16 * warps;
    const DeltaSequence s = of.sequences[static_cast<int>(blockIdx.z)];
    const int hv = static_cast<int>(blockIdx.y), first_column = static_cast<int>(blockIdx.x) * slab,
              thread = static_cast<int>(threadIdx.x), chunks = s.chunks();
    const Shared<K, slab, keys> shared{ptx::shared_address(ptx::shared_memory())};
    const Copies<K, slab, keys> copies{of, s, shared, hv, first_column, chunks, thread};
    copies.copy_keys(0);
    copies.copy_values(0);
    ChunkScan<float, K, slab, false, keys != Keys::only_written, keeps> scan{{of, s, hv, first_column, thread / 32}};
    scan.my.load_state();
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
        ptx::wait_for_copies();
        __syncthreads();
        scan.take(c, shared.tiles(c), Refill<K, slab, keys>{copies, c + 1}, (s.first_slot + c) * of.folded.heads + hv);
    }
    scan.my.store_final_state();
}

template <class Use>
void with_split_keys(const DeltaCall& call, const Use& use) {
    with_keys(call, [&]<int K, Keys keys>() {
        if constexpr (keys != Keys::with_gates && Shared<K, most_slab<K>, keys>::bytes <= 227 * 1024)
            use.template operator()<K, keys>();
    });
}

template <int most>
void launch_for(const ChunkForward& of, cudaStream_t stream) {
    with_split_keys(of.call, [&]<int K, Keys keys>() {
        constexpr int slab = std::min(most, most_slab<K>), warps = slab / 16;
        auto* kernel = split_scan_kernel<K, warps, keys, false>;
        if constexpr (can_keep_chunks<float, K>)
            if (of.out.kept.states != nullptr) kernel = split_scan_kernel<K, warps, keys, true>;
        launch(kernel, {scan_blocks(of, slab), 32 * warps, Shared<K, slab, keys>::bytes}, stream,
               "the delta rules' scan over chunks", of);
    });
}

}  // namespace

int split_record_bytes(const DeltaCall& call) {
    int bytes = 0;
    with_split_keys(call, [&]<int K, Keys>() { bytes = FoldedChunk<K, false, float>::bytes; });
    return bytes;
}

int split_scan_shared_bytes(const DeltaCall& call) {
    int bytes = std::numeric_limits<int>::max();  // of what no block has room for
    with_split_keys(call, [&]<int K, Keys keys>() { bytes = Shared<K, most_slab<K>, keys>::bytes; });
    return bytes;
}

void launch_split_scan(const ChunkForward& of, cudaStream_t stream) {
    (has_many_heads(of.call, of.sequences.count) ? launch_for<128> : launch_for<64>)(of, stream);
}

}  // namespace softdelta::cuda

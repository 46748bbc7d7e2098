// Memory of unfold.cu: tiles that one warpgroup fills and the others empty, each at its own pace, and the numbers
// that they leave for each other.
#pragma once

#include <cstddef>

#include "engines/cuda/delta_rule/unfold/places.h"
#include "engines/cuda/tile/lanes.h"
#include "engines/cuda/tile/ring.h"

namespace softdelta::cuda {

// What a value head's chunk leaves for the gates; another chunk may be begun meanwhile.
struct GateSums {
    float read[chunk_rows], erase[chunk_rows], write[chunk_rows];  // over channels: q∘dq, p∘e from S, k∘dk from dS'
    float pairs[2][chunk_rows], columns[2][4][chunk_rows];         // of P, of Q: sum_spans()
    float spans[chunk_rows];                                       // of both, blocks after a row's, too
    float of_values[chunk_rows], erased[chunk_rows];               // rowsum(dR∘v), rowsum(p∘Q k)
    float through[2];                                              // rowsum(S∘dS'), over a warp's part
};

struct WarpgroupNumbers {
    ChunkPlace places[4];  // of chunks one after the other
    // Of value heads one after the other, as all that follows with a 2; copies take 16 bytes.
    alignas(16) RowFactors factors[2];
    GateSums sums[2];
    float anchors[2][4][chunk_rows];  // of P, of Q: e^(G_r − G_j), r the last row before a block of 16, with norms
};

template <class T>
struct WarpgroupMemory {
    static constexpr int D = 128, rows_bytes = KeyTile<T, D>::bytes(chunk_rows), state_bytes = Tile<T, D, D>::bytes(D),
                         square_bytes = SquareTile<T>::bytes(chunk_rows);
    static constexpr int key_tiles = 2, key_sets = 2, d_o_sets = 2;
    static constexpr int d_o = key_sets * key_tiles * rows_bytes, d_r = d_o + d_o_sets * rows_bytes,
                         u = d_r + rows_bytes, state = u + rows_bytes, dstate = state + state_bytes,
                         pairs = dstate + state_bytes, small = pairs + 2 * square_bytes,
                         counters = small + (static_cast<int>(sizeof(WarpgroupNumbers)) + 15) / 16 * 16,
                         bytes = counters + 8 * 2 * (key_sets + d_o_sets + 10);
    static_assert(bytes <= 227 * 1024);

    std::uint32_t base;

    __device__ KeyTile<T, D> rows(int at) const { return {base + static_cast<std::uint32_t>(at)}; }
    __device__ KeyTile<T, D> key(unsigned step, int which) const {
        return rows((static_cast<int>(step % key_sets) * key_tiles + which) * rows_bytes);
    }
    __device__ KeyTile<T, D> d_o_of(unsigned n) const {
        return rows(d_o + static_cast<int>(n % d_o_sets) * rows_bytes);
    }
    __device__ Tile<T, D, D> states(int at) const { return {base + static_cast<std::uint32_t>(at)}; }
    __device__ SquareTile<T> square(int which) const {
        return {base + static_cast<std::uint32_t>(pairs + which * square_bytes)};
    }

    // keys: of a chunk; all others of a chunk and value head. squares: P, Q; sums: of the gates.
    template <int places>
    __device__ Ring<places> ring(int first) const {
        return {base + static_cast<std::uint32_t>(counters + 16 * first)};
    }
    __device__ auto keys() const { return ring<key_sets>(0); }
    __device__ auto of_d_o() const { return ring<d_o_sets>(key_sets); }
    __device__ auto other(int i) const { return ring<1>(key_sets + d_o_sets + i); }
    __device__ auto of_d_r() const { return other(0); }
    __device__ auto of_u() const { return other(1); }
    __device__ auto of_state() const { return other(2); }
    __device__ auto of_dstate() const { return other(3); }
    __device__ auto of_square(int which) const { return other(4 + which); }
    __device__ auto of_factors() const { return ring<2>(key_sets + d_o_sets + 6); }
    // Those of two value heads at a time: their places become free with the factors.
    __device__ auto of_sums() const { return ring<2>(key_sets + d_o_sets + 8); }
};

}  // namespace softdelta::cuda

// Operands of f32 precision for products of warpgroups: a number is a sum of two of f16, high + low, which hold 23
// bits. A product leaves out what is smaller than those: x·y ≈ high·high + (high·low + low·high).
//
// f16 has a small range. So 64 rows of a head share a power of 2, `scale`: the largest of them lies in [2¹⁴, 2¹⁵). A
// row that is smaller than the largest by more than 2¹⁶ has lost bits, and Inf and NaN have no place there: `scale` is
// NaN then, and spoils what depends on the rows, which the kernels of planes compute again.
//
// 64 rows lie in memory as they come into shared memory, high and then low ones in each panel of 64 columns: one copy
// brings them. Rows and columns beyond the tensor are zeros.
#pragma once

#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/tile/shared.h"

namespace softdelta::cuda {

inline constexpr int split_rows = 64, most_split_channels = 128;

template <int columns>
using SplitTile = Tile<__half, columns, 2 * split_rows>;

// An operand of a call, split: [groups, heads, tiles of 64 rows]. As flags of Redo, whose tiles are twice as large.
struct SplitRows {
    __half* data = nullptr;
    float* scale = nullptr;
    int heads = 0, columns = 0;
    Index tiles = 0;

    __host__ __device__ explicit operator bool() const { return data != nullptr; }
    // The first of the two that a tile of the others' has.
    __device__ Index at(const RowTile& tile, int head) const {
        return (Index(tile.group) * heads + head) * tiles + 2 * tile.tile;
    }
    __device__ const __half* rows(Index at) const { return data + at * (2 * split_rows * columns); }
};

// q, k, v and do of a call.
struct SplitOperands {
    SplitRows q, k, v, d_o;
};

// Rows of a sequence that a call streams, from tile `begin` on: what device memory says of lengths may be wrong, and
// the list then ends before the rows do.
__device__ inline Index listed_rows(Index rows, const TileList& list, const RowTile& begin) {
    return !list ? rows : !begin ? 0 : min(rows, Index(list.most - begin.tile) * tile_rows);
}

// with.template operator()<columns, added>(): whether anything is added to scores, or caps them.
template <class With>
void with_split_kernel(const AttentionCall& call, const SplitOperands& split, const With& with) {
    const bool added = call.mask || call.bias || call.alibi_slopes || call.softcap != 0;
    if (split.q.columns == 64)
        return added ? with.template operator()<64, true>() : with.template operator()<64, false>();
    added ? with.template operator()<128, true>() : with.template operator()<128, false>();
}

// Whether kernels of split operands compute a pass; d_o: of the backward one, or absent.
bool takes_split(const core::AttentionInputs& in, const AttentionCall& call, const core::Tensor& d_o);
SplitOperands take_split_operands(const core::AttentionInputs& in, const AttentionCall& call, bool with_d_o,
                                  MemoryParts& parts);
void launch_split(const AttentionPass& pass, const SplitOperands& to, const View& d_o, cudaStream_t stream);
void launch_split_forward(const AttentionPass& pass, const SplitOperands& split, const ForwardOutputs& out,
                          cudaStream_t stream);
// dk and dv, dbias that nothing shares, and dq, of what is wanted.
void launch_split_gradients(const AttentionPass& pass, const SplitOperands& split, const Gradients& grad,
                            cudaStream_t stream);

}  // namespace softdelta::cuda

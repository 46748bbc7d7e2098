// How much of a head a pass takes at once, in one place. cpu/attention cuts calls by those that a level's table
// carries.
#pragma once

#include "engines/cpu/kernels/gemm/pairs.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Rows of scores are longer than a block by one vector, so that consecutive rows map to different cache sets.
constexpr Index padded(Index keys) {
    return keys + W;
}

// Forward: the scores of a block, 192·(256 + W)·4 bytes = 204 KiB, stay in the second-level cache between the product
// that makes them and the one that reads them. Four blocks of rows share a block of packed keys.
namespace forward_blocks {
inline constexpr Index rows = 192;
inline constexpr Index keys = 256;
inline constexpr Index unit_rows = 4 * rows;
// By matrix tiles 32 rows of scores and probabilities stay in the first-level cache (forward/by_tiles.h).
template <class P>
constexpr Index group_rows = P::Tiles::exist ? 2 * tile_size : row_tile<P>;
template <class P>
constexpr Index keys_of = P::Tiles::exist ? 512 : keys;
template <class P>
constexpr Index score_row = padded(keys_of<P>);
inline constexpr float kept_rise = 8;      // powers of two that exponentials may grow by before sums are multiplied
inline constexpr float most_total = 1024;  // of four exponentials, each at most 2^kept_rise
}  // namespace forward_blocks

// Backward: a tile step packs its keys once for all its rows, and keeps scores and dp of 96 rows,
// 2·96·(384 + W)·4 bytes = 300 KiB. Packing and the rest are 12 % of the pass.
namespace backward_blocks {
inline constexpr Index unit_rows = 384;
inline constexpr Index rows = 96;
inline constexpr Index keys = 384;
inline constexpr Index score_row = padded(keys);
}  // namespace backward_blocks

namespace decode_blocks {
inline constexpr Index rows = 16;  // of a head, at most; more are left to the forward pass
inline constexpr Index keys = 64;  // whose addresses and addends are known at once
// From what is read to what is fetched. A key of 8 heads takes 421 ns so, and 469 ns with 32 KiB (f32, one thread).
inline constexpr Index prefetch_bytes = 12 << 10;
// Heads that lie apart are read one after the other when all of them touch more between two tiles of keys than the
// first-level cache keeps beside what is fetched. Where a mask or a bias is then read anew for each, that has to be
// worth it: when they exceed the whole cache.
inline constexpr Index cache_bytes_of_masks = 48 << 10;
inline constexpr Index cache_bytes = cache_bytes_of_masks - prefetch_bytes;
}  // namespace decode_blocks

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

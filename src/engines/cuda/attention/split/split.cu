// Splits 64 rows of a head (split.h): a block for each.
#include "engines/cuda/attention/split/split.h"

#include "engines/cuda/attention/rows.h"
#include "engines/cuda/device/card.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

namespace {

constexpr int threads = 256;

template <int columns>
__global__ void __launch_bounds__(threads)
    split_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ View view, bool of_keys,
                 int channels, const __grid_constant__ SplitRows to) {
    const AttentionSequences& sequences = pass.sequences;
    constexpr int units = columns / 8, rows_at_once = threads / units, turns = split_rows / rows_at_once;
    constexpr float spread = 0x1p-16F;
    auto* const largest = reinterpret_cast<float*>(ptx::shared_memory());  // of each row
    const TileList& list = of_keys ? sequences.of_keys : sequences.of_queries;
    const RowTile at = sequences.tile(list, static_cast<int>(blockIdx.x / 2));
    if (!at) return;
    const AttentionSequence s = sequences[at.i];
    const int head = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x), odd = blockIdx.x % 2;
    const Index first = at.first + odd * split_rows;
    const Rows rows =
        of_keys ? Rows::of_keys(view, pass.call, s, head, channels) : Rows::of_queries(view, s, head, channels);
    float x[turns][8];
    unrolled<turns>([&](int turn) {
        const int row = turn * rows_at_once + thread / units;
        rows.load_unit(first + row, thread % units, x[turn]);
        float most = 0;
        unrolled<8>([&](int c) { most = isfinite(x[turn][c]) ? fmaxf(most, fabsf(x[turn][c])) : INFINITY; });
        most = maximum_of_lanes<units>(most);
        if (thread % units == 0) largest[row] = most;
    });
    __syncthreads();
    const int lane = thread % 32;
    const float most = maximum_of_warp(fmaxf(largest[lane], largest[lane + 32]));
    const auto is_lost = [&](float row) { return row != 0 && row < spread * most; };
    const bool spoiled = __any_sync(0xffffffffu, is_lost(largest[lane]) || is_lost(largest[lane + 32])) || isinf(most);
    int exponent = 0;
    if (most != 0 && !spoiled) frexpf(most, &exponent), exponent -= 15;
    const Index tile = to.at(at, head) + odd;
    if (thread == 0) to.scale[tile] = spoiled ? NAN : ldexpf(1.0F, exponent);
    __half* const rows_to = to.data + tile * (2 * split_rows * columns);
    const SplitTile<columns> place{0};
    unrolled<turns>([&](int turn) {
        const int row = turn * rows_at_once + thread / units;
        std::uint32_t high[4], low[4];
        unrolled<4>([&](int c) {
            const float a = ldexpf(x[turn][2 * c], -exponent), b = ldexpf(x[turn][2 * c + 1], -exponent);
            high[c] = ptx::pack(a, b, __half());
            const float2 of = ptx::unpack(high[c], __half());
            low[c] = ptx::pack(a - of.x, b - of.y, __half());
        });
        const auto put = [&](int r, const std::uint32_t(&four)[4]) {
            *reinterpret_cast<uint4*>(rows_to + place.unit(r, thread % units) / 2) =
                uint4{four[0], four[1], four[2], four[3]};
        };
        put(row, high);
        put(row + split_rows, low);
    });
}

// Of so many tiles as the flags have.
SplitRows take_split(const Redo& like, int heads, int channels, MemoryParts& parts) {
    SplitRows s;
    s.heads = heads, s.columns = channels <= 64 ? 64 : 128, s.tiles = 2 * like.count;
    const Index tiles = 2 * like.size;
    s.data = parts.take<__half>(tiles * (2 * split_rows * s.columns));
    s.scale = parts.take<float>(tiles);
    return s;
}

}  // namespace

bool takes_split(const core::AttentionInputs& in, const AttentionCall& call, const core::Tensor& d_o) {
    constexpr Index few_rows = 64;  // of a key head: reading keys is all there is to do, a copy of them costs more
    const auto is_f32 = [](const core::Tensor& t) { return t && t.dtype == DType::f32; };
    return (is_f32(in.q) || is_f32(in.k) || is_f32(in.v) || is_f32(d_o)) &&
           std::max(call.channels, call.value_channels) <= most_split_channels && call.block_rows == 0 &&
           call.top_w < 0 && (d_o || call.queries * call.group > few_rows) && call.queries <= most_warpgroup_rows &&
           call.keys <= most_warpgroup_rows && level_of(in.q.device) == Level::sm_90a;
}

SplitOperands take_split_operands(const core::AttentionInputs& in, const AttentionCall& call, bool with_d_o,
                                  MemoryParts& parts) {
    MemoryParts none(nullptr);
    const Redo queries = redo_of_queries(in, none), keys = redo_of_keys(in, none);
    const int channels = std::max(call.channels, call.value_channels), key_heads = call.heads / call.group;
    SplitOperands s;
    s.q = take_split(queries, call.heads, channels, parts);
    s.k = take_split(keys, key_heads, channels, parts);
    s.v = take_split(keys, key_heads, channels, parts);
    if (with_d_o) s.d_o = take_split(queries, call.heads, channels, parts);
    return s;
}

void launch_split(const AttentionPass& pass, const SplitOperands& to, const View& d_o, cudaStream_t stream) {
    const AttentionCall& call = pass.call;
    const auto take = [&](const View& view, bool of_keys, int channels, const SplitRows& rows) {
        const TileList& list = of_keys ? pass.sequences.of_keys : pass.sequences.of_queries;
        const Index tiles = row_blocks(list, of_keys ? call.keys : call.queries, tile_rows);
        const Blocks blocks(2 * tiles, rows.heads, list ? 1 : pass.sequences.count);
        launch(rows.columns == 64 ? split_kernel<64> : split_kernel<128>,
               {blocks, threads, split_rows * static_cast<int>(sizeof(float))}, stream, "attention's split operands",
               pass, view, of_keys, channels, rows);
    };
    take(call.q, false, call.channels, to.q);
    take(call.k, true, call.channels, to.k);
    take(call.v, true, call.value_channels, to.v);
    if (d_o) take(d_o, false, call.value_channels, to.d_o);
}

}  // namespace softdelta::cuda

// What kernels of warpgroups know of their tiles: types, copies of rows into them, products, and rows of results.
#pragma once

#include "engines/cuda/attention/rows.h"
#include "engines/cuda/tile/copy.h"
#include "engines/cuda/tile/registers.h"

namespace softdelta::cuda::warpgroup {

inline constexpr int warpgroup_threads = 128;

// Queries or keys of a sequence: these kernels' sequences are shorter than 2³⁰.
struct Span {
    int begin = 0, end = 0;

    Span() = default;
    __device__ Span(Index from, Index to) : begin(static_cast<int>(from)), end(static_cast<int>(to)) {}
    template <class Range>
    __device__ explicit Span(const Range& r) : Span(r.begin, r.end) {}
};

template <class T>
inline constexpr DType type_of = DType::bf16;
template <>
inline constexpr DType type_of<__half> = DType::f16;
template <>
inline constexpr DType type_of<float> = DType::f32;

// with.template operator()<T, columns>() for a call's type of 16 bits and the narrowest tiles that hold its channels.
template <int most, class With>
void with_tiles(const AttentionCall& call, const With& with) {
    const int channels = std::max(call.channels, call.value_channels);
    const auto with_columns = [&]<class T>(T) {
        if (channels <= 64) return with.template operator()<T, 64>();
        if constexpr (most > 128) {
            if (channels > 128) return with.template operator()<T, most>();
        }
        with.template operator()<T, 128>();
    };
    if (call.q.dtype == DType::f16)
        with_columns(__half());
    else
        with_columns(Plane());
}

// What weights of a product are multiplied by, as a power of 2. Half the numbers of f16 lie below 2⁻¹⁴: with 2¹⁰ a
// weight e^(score − top) keeps all its bits down to 2⁻²⁴. It is at most 1, in the forward pass at most 2⁵: below 2¹⁶.
template <class T>
inline constexpr float weight_exponent = type_of<T> == DType::f16 ? 10 : 0;
template <class T>
inline constexpr float weight_scale = type_of<T> == DType::f16 ? 0x1p-10F : 1;

// Rows [row, row + count) of a tile: those from `first` on, zeros where there are none, in the background, by a
// warpgroup.
template <int count, class T, int columns, int rows>
__device__ inline void copy_some_rows(const Tile<T, columns, rows>& tile, int row, const Rows& from, Index first,
                                      int thread) {
    constexpr int units = columns / 8, width = units > 16 ? 16 : units, step = warpgroup_threads / width;
    const int begin = thread / width;
#pragma unroll
    for (int first_unit = 0; first_unit < units; first_unit += width) {
        const int u = first_unit + thread % width;
        const int left = from.left(first, u, count) - begin;
        std::uint32_t to = tile.unit(row + begin, u);
        if (from.is_paged()) {
#pragma unroll 1
            for (int r = 0; r < count; r += step, to += step * 128)
                ptx::copy_async(to, r < left ? from.unit(first + begin + r, u) : from.data(), r < left);
        } else {
            copy_unit_of_rows<count, step>(to, from.unit(first + begin, u), step * from.row_stride(), left,
                                           from.data());
        }
    }
}
template <class T, int columns, int rows>
__device__ inline void copy_rows(const Tile<T, columns, rows>& tile, const Rows& from, Index first, int thread) {
    copy_some_rows<rows>(tile, 0, from, first, thread);
}

// A warp's sums [16, columns] to rows of memory, through rows [row, row + 16) of a tile that nobody else uses now.
// Element e of row r becomes value(r, e); `to` has rows from `offset` on, `count` of them.
template <class T, int rows, int columns, class Value>
__device__ inline void store_rows(const Tile<T, columns, rows>& tile, int row, Acc<64, columns>& sum, const View& to,
                                  Index offset, Index count, int channels, int lane, const Value& value) {
    auto* const data = static_cast<T*>(to.data) + offset;
    if (!has_units(to, channels, type_of<T>) || reinterpret_cast<std::uintptr_t>(data) % 16 != 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (lane / 4 + 8 * half < count)
                store_row(to, offset + (lane / 4 + 8 * half) * to.stride[1], sum, half, channels, lane,
                          [&](float x) { return value(half, x); });
        return;
    }
    sum.each_pair([&](float x, float y, int half, int column) {
        *reinterpret_cast<std::uint32_t*>(
            shared_at(tile.unit(row + lane / 4 + 8 * half, column / 8) + static_cast<std::uint32_t>(lane % 4 * 4))) =
            ptx::pack(value(half, x), value(half, y), T());
    });
    __syncwarp();
    constexpr int units = columns / 8, at_once = 32 / units;
    const int u = lane % units;
#pragma unroll
    for (int i = 0; i < 16; i += at_once)
        if (const int r = i + lane / units; r < count && 8 * u < channels)
            *reinterpret_cast<uint4*>(data + r * to.stride[1] + 8 * u) =
                *reinterpret_cast<const uint4*>(shared_at(tile.unit(row + r, u)));
}

}  // namespace softdelta::cuda::warpgroup

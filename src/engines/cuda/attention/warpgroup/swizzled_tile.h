// Tiles in shared memory as products of warpgroups read them: panels of 64 columns of 16 bits, one after the other.
//
//     panel 0          panel 1
//     row 0  8 units   row 0  8 units      a row of a panel is 128 bytes; its unit u lies at place u ^ (row % 8)
//     row 1            row 1
#pragma once

#include "engines/cuda/attention/rows.h"

namespace softdelta::cuda::warpgroup {

inline constexpr int group_threads = 128;

template <class T>
inline constexpr DType type_of = DType::bf16;
template <>
inline constexpr DType type_of<__half> = DType::f16;

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
inline constexpr float weight_unit = type_of<T> == DType::f16 ? 0x1p-10F : 1;

template <class T, int rows, int columns>
struct SwizzledTile {
    static_assert(sizeof(T) == 2 && rows % 8 == 0 && columns % 64 == 0);
    static constexpr int panel_bytes = rows * 128, bytes = panel_bytes * (columns / 64), units = columns / 8;

    std::uint32_t base;  // address in shared memory, a multiple of 1024

    __device__ std::uint32_t unit(int row, int u) const {
        return base + static_cast<std::uint32_t>(u / 8 * panel_bytes + row * 128 + (((u ^ row) & 7) << 4));
    }
    // An operand whose depth runs along columns [16·k, 16·k + 16), of rows from `row` on.
    __device__ std::uint64_t across(int row, int k) const {
        return ptx::shared_operand(base + static_cast<std::uint32_t>(row * 128), 0, k / 4 * panel_bytes + k % 4 * 32);
    }
    // One whose depth runs along rows [16·k, 16·k + 16), of all columns from 64·panel on.
    __device__ std::uint64_t along(int k, int panel = 0) const {
        return ptx::shared_operand(base, panel_bytes, panel * panel_bytes + k * 2048);
    }

    // Rows [first, first + rows), zeros where there are none, in the background, by a warpgroup.
    __device__ void copy(const Rows& from, Index first, int thread) const {
        constexpr int width = units > 16 ? 16 : units;
#pragma unroll
        for (int u = 0; u < units; u += width) copy_unit<width>(from, first, u + thread % width, thread / width);
    }

    // Four 8×8 blocks as sums of products lie: rows [row, row + 16), columns [16·n, 16·n + 16).
    __device__ void load_result(std::uint32_t (&out)[4], int row, int n, int lane) const {
        ptx::load_matrices(out, unit(row + (lane & 15), 2 * n + (lane >> 4)));
    }
    // Of the transpose: rows are columns [row, row + 16) here, columns rows [16·n, 16·n + 16). `row` is a multiple
    // of 16.
    __device__ void load_transposed_result(std::uint32_t (&out)[4], int row, int n, int lane) const {
        ptx::load_matrices_transposed(out, transposed_unit(row, n, lane));
    }
    __device__ void store_transposed_result(const std::uint32_t (&x)[4], int row, int n, int lane) const {
        ptx::store_matrices_transposed(transposed_unit(row, n, lane), x);
    }

  private:
    // Unit u of every step-th row.
    template <int width>
    __device__ void copy_unit(const Rows& from, Index first, int u, int begin) const {
        constexpr int step = group_threads / width;  // a multiple of 8: a thread's units lie alike
        const int left = from.left(first, u, rows) - begin;
        std::uint32_t to = unit(begin, u);
        if (from.is_paged()) {
#pragma unroll 1
            for (int r = 0; r < rows; r += step, to += step * 128)
                ptx::copy_async(to, r < left ? from.unit(first + begin + r, u) : from.data(), r < left);
            return;
        }
        const std::uint16_t* at = from.unit(first + begin, u);
        const Index distance = step * from.row_stride();
#pragma unroll
        for (int r = 0; r < rows; r += step) {
            ptx::copy_async(to + static_cast<std::uint32_t>(r * 128), r < left ? at : from.data(), r < left);
            at += distance;
        }
    }
    __device__ std::uint32_t transposed_unit(int row, int n, int lane) const {
        return unit(16 * n + (lane & 7) + ((lane >> 4) << 3), row / 8 + ((lane >> 3) & 1));
    }
};

// d [64, N] = rows [64·group, 64·group + 64) of left · rightᵀ, in the background, as a group of products of its own.
template <class T, int rows, int columns, int right_rows, int n>
__device__ inline void multiply_rows(float (&d)[n][4], const SwizzledTile<T, rows, columns>& left, int group,
                                     const SwizzledTile<T, right_rows, columns>& right) {
#pragma unroll
    for (int k = 0; k < columns / 16; ++k)
        ptx::warpgroup_multiply(d, left.across(64 * group, k), right.across(0, k), k > 0, T());
    ptx::commit_products();
}

// A warp's sums [16, columns] to rows of memory, through rows [row, row + 16) of a tile that nobody else uses now.
// Element e of row r becomes value(r, e); `to` has rows from `offset` on, `count` of them.
template <class T, int rows, int columns, class Value>
__device__ inline void store_rows(const SwizzledTile<T, rows, columns>& tile, int row,
                                  const float (&sum)[columns / 8][4], const View& to, Index offset, Index count,
                                  int channels, int lane, const Value& value) {
    auto* const data = static_cast<T*>(to.data) + offset;
    if (!has_units(to, channels, type_of<T>) || reinterpret_cast<std::uintptr_t>(data) % 16 != 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (lane / 4 + 8 * half < count)
                store_row(to, offset + (lane / 4 + 8 * half) * to.stride[1], sum, half, channels, lane,
                          [&](float x) { return value(half, x); });
        return;
    }
#pragma unroll
    for (int i = 0; i < columns / 8; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<std::uint32_t*>(
                shared_at(tile.unit(row + lane / 4 + 8 * half, i) + static_cast<std::uint32_t>(lane % 4 * 4))) =
                ptx::pack(value(half, sum[i][2 * half]), value(half, sum[i][2 * half + 1]), T());
    __syncwarp();
    constexpr int units = columns / 8;
    const int u = lane % units;
#pragma unroll
    for (int r = lane / units; r < 16; r += 32 / units)
        if (r < count && 8 * u < channels)
            *reinterpret_cast<uint4*>(data + r * to.stride[1] + 8 * u) =
                *reinterpret_cast<const uint4*>(shared_at(tile.unit(row + r, u)));
}

}  // namespace softdelta::cuda::warpgroup

// Rows of tokens between memory and tiles.
#pragma once

#include "engines/cuda/delta_rule/chunk.h"
#include "engines/cuda/tile/registers.h"

namespace softdelta::cuda {

// What one of some threads copies of a head's rows, columns from `first` on, chunk after chunk: its places are found
// once. Eight threads have a row of each panel of eight units.
template <class T, int columns, int threads>
class RowCopies {
    static constexpr int rows_at_once = threads / 8, unit = unit_elements<T>, panel = 8 * unit;
    static_assert(rows_at_once % 8 == 0 && chunk_rows % rows_at_once == 0);  // a thread's units lie alike

  public:
    __device__ RowCopies(const View& view, const Sequence& s, int head, int first, int size, int thread)
        : view_(view),
          from_(static_cast<const T*>(view.data) + s.row(view, thread / 8, head) + first + unit * (thread % 8)),
          left_(size - first) {}

    // Rows of chunk c, of which so many exist, in the background; zeros where there are none.
    template <int panel_rows>
    __device__ void copy(const Tile<T, columns, panel_rows>& tile, Index c, int rows, int thread) const {
        constexpr int panels = columns / panel, panel_bytes = panel_rows > 0 ? panel_rows * 128 : 128,
                      step_bytes = rows_at_once * (panel_rows > 0 ? 128 : tile.row_bytes);
        std::uint32_t to = tile.unit(thread / 8, thread % 8);
        const T* from = from_ + c * (chunk_rows * view_.stride[1]);
        const Index step = rows_at_once * view_.stride[1];
        if (rows >= chunk_rows && left_ >= columns) {
            unrolled<chunk_rows / rows_at_once>([&](int i) {
                unrolled<panels>([&](int p) {
                    ptx::copy_async(to + static_cast<std::uint32_t>(i * step_bytes + p * panel_bytes), from + panel * p,
                                    true);
                });
                from += step;
            });
            return;
        }
        const int column = unit * (thread % 8);
#pragma unroll 1
        for (int row = thread / 8; row < chunk_rows; row += rows_at_once, from += step, to += step_bytes)
#pragma unroll 1
            for (int p = 0; p < panels; ++p) {
                const bool take = row < rows && column + panel * p < left_;
                ptx::copy_async(to + static_cast<std::uint32_t>(p * panel_bytes), take ? from + panel * p : view_.data,
                                take);
            }
    }

  private:
    const View& view_;
    const T* from_;
    const int left_;  // columns
};

// The same of one chunk.
template <int threads, class T, int columns, int panel_rows>
__device__ void copy_rows(const Tile<T, columns, panel_rows>& tile, const View& from, const Sequence& s, Index c,
                          int head, int first, int size, int thread) {
    RowCopies<T, columns, threads>(from, s, head, first, size, thread).copy(tile, c, s.rows(c), thread);
}

// Where rows of chunk c go, a unit at a time: to a tile [64, size] in memory (of f32: [64, 128]), columns from `first`
// on; to a tensor of heads, of which so many columns exist.
template <class T>
struct RowsToTile {
    char* to;
    int first, size;

    __device__ void operator()(int row, int u, const uint4& all) const {
        if constexpr (sizeof(T) == 4)
            *reinterpret_cast<uint4*>(to + Tile<T, 128>{0}.unit(row, first / 4 + u)) = all;
        else
            *reinterpret_cast<uint4*>(to + row * size * 2 + (((first / 8 + u) ^ (row & 7)) << 4)) = all;
    }
};
template <class T>
struct RowsToTensor {
    T* to;
    Index stride;
    int rows, left;

    __device__ RowsToTensor(const View& v, const Sequence& s, Index c, int head, int first, int size)
        : to(static_cast<T*>(v.data) + s.row(v, c * chunk_rows, head) + first),
          stride(v.stride[1]),
          rows(s.rows(c)),
          left(size - first) {}
    __device__ void operator()(int row, int u, const uint4& all) const {
        constexpr int unit = unit_elements<T>;
        if (row < rows && unit * u < left) *reinterpret_cast<uint4*>(to + row * stride + unit * u) = all;
    }
};

// A warp's 16 columns of [64, …], so many units of a row, to whole rows.
template <int units, class Values, class Store>
__device__ void store_own_columns(const Values& tile, int warp, int lane, const Store& store) {
    __syncwarp();
    unrolled<chunk_rows * units / 32>([&](int i) {
        const int row = (32 * i + lane) / units, u = units * warp + lane % units;
        store(row, u, *reinterpret_cast<const uint4*>(shared_at(tile.unit(row, u))));
    });
}

// x, a warp's 16 columns of [64, …] transposed, to whole rows: through its columns of the tile, which nobody else uses.
// by_matrices: on sm_90 and newer.
template <bool by_matrices = false, class Values, class Store>
__device__ void store_transposed(const Values& tile, int warp, int lane, const std::uint32_t (&x)[chunk_rows / 16][4],
                                 const Store& store) {
    __syncwarp();
    if constexpr (by_matrices) {
        unrolled<chunk_rows / 16>([&](int n) { tile.store_transposed_result(x[n], 16 * n, 16 * warp, lane); });
    } else {
        unrolled<chunk_rows / 8, 2>([&](int n, int half) {
            const std::uint32_t both = ptx::transpose(x[n / 2][2 * (n % 2) + half]);
            *reinterpret_cast<std::uint32_t*>(
                shared_at(tile.unit(8 * n + lane / 4, 2 * warp + half) + 4 * (lane % 4))) = both;
        });
    }
    store_own_columns<2>(tile, warp, lane, store);
}
template <class T, bool by_matrices = false, class Values, class Store>
__device__ void store_transposed(const Values& tile, int warp, int lane, const float (&x)[chunk_rows / 8][4],
                                 const Store& store) {
    if constexpr (sizeof(T) == 4) {
        __syncwarp();
        unrolled<chunk_rows / 8, 4>(
            [&](int n, int e) { tile.at(8 * n + 2 * (lane % 4) + e % 2, 16 * warp + lane / 4 + e / 2 * 8) = x[n][e]; });
        store_own_columns<4>(tile, warp, lane, store);
    } else {
        std::uint32_t packed[chunk_rows / 16][4];
        to_left<T>(packed, x);
        store_transposed<by_matrices>(tile, warp, lane, packed, store);
    }
}

// Four lanes have four words each; lane c gets word c of each.
__device__ inline void transpose_quad(std::uint32_t (&w)[4], int lane) {
    unrolled<2>([&](int of_two) {
        const int step = 1 << of_two;
        const bool high = (lane & step) != 0;
        unrolled<4>([&](int i) {
            if ((i & step) != 0) return;
            const std::uint32_t given = high ? w[i] : w[i + step];
            const std::uint32_t taken = __shfl_xor_sync(0xffffffffu, given, step);
            w[i] = high ? taken : w[i];
            w[i + step] = high ? w[i + step] : taken;
        });
    });
}

// A lane's part of Sᵀ, of value columns `column` and column + 8, to a tile [V, K] in memory.
template <class T, int K>
__device__ void save_state(char* to, int column, int lane, const std::uint32_t (&state)[K / 16][operand_words<T>]) {
    const Tile<T, K> tile{0};
    if constexpr (sizeof(T) == 4) {
        unrolled<K / 16, 4>([&](int i, int pair) {  // rows r and r + 8 of 8 columns, then of the others
            const int row = column + pair % 2 * 8, first = 16 * i + pair / 2 * 8 + 2 * (lane % 4);
            *reinterpret_cast<uint2*>(to + tile.unit(row, first / 4) + first % 4 * 4) = {state[i][2 * pair],
                                                                                         state[i][2 * pair + 1]};
        });
    } else {
        unrolled<K / 32, 2>([&](int i, int half) {
            std::uint32_t w[4] = {state[2 * i][half], state[2 * i][half + 2], state[2 * i + 1][half],
                                  state[2 * i + 1][half + 2]};
            transpose_quad(w, lane);
            *reinterpret_cast<uint4*>(to + tile.unit(column + 8 * half, 4 * i + lane % 4)) = {w[0], w[1], w[2], w[3]};
        });
    }
}

// Whether a lane sees Inf or NaN (f32: or what products cannot split) in its part of the warp's 16 columns.
template <class T, class Values>
__device__ bool has_nonfinite_values(const Values& tile, int warp, int lane) {
    constexpr int units = static_cast<int>(sizeof(T));
    return any_of<2 * units>([&](int i) {
        const uint4 x =
            *reinterpret_cast<const uint4*>(shared_at(tile.unit((32 * i + lane) / units, units * warp + lane % units)));
        return ptx::has_nonfinite(x.x, T()) || ptx::has_nonfinite(x.y, T()) || ptx::has_nonfinite(x.z, T()) ||
               ptx::has_nonfinite(x.w, T());
    });
}

// Bytes as they lie.
template <int bytes, int threads>
__device__ inline void copy_bytes(std::uint32_t to, const char* from, int thread) {
    constexpr int at_once = 16 * threads;
    from += 16 * thread;
    to += 16u * static_cast<std::uint32_t>(thread);
    unrolled<(bytes + at_once - 1) / at_once>([&](int n) {
        const int i = n * at_once;
        if (i + at_once <= bytes || i + 16 * thread < bytes)
            ptx::copy_async(to + static_cast<std::uint32_t>(i), from + i, true);
    });
}

// The first rows of a tile that lies in memory as Tile<T, columns>.
template <class T, int columns, int threads, class To>
__device__ void copy_saved_tile(const To& to, const char* from, int rows, int thread) {
    using From = Tile<T, columns>;
    constexpr int rows_at_once = threads / To::units, row_bytes = 128;  // of a panel
    static_assert(rows_at_once % 8 == 0);
    const int r = thread / To::units, unit = thread % To::units;
    const std::uint32_t at = to.unit(r, unit);
    from += From{0}.unit(r, unit);
#pragma unroll
    for (int row = 0; row < rows; row += rows_at_once)
        ptx::copy_async(at + static_cast<std::uint32_t>(row * row_bytes), from + row * From::row_bytes, true);
}

// From shared memory to memory.
__device__ inline void copy_out(const void* from, char* to, int bytes, int thread, int threads) {
    const auto* data = static_cast<const char*>(from);
    for (int i = 16 * thread; i < bytes; i += 16 * threads)
        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(data + i);
}

// The 16 rows of a square that this warp has stored.
template <class T>
__device__ inline void copy_own_rows(const SquareTile<T>& from, char* to, int warp, int lane) {
    constexpr int bytes = SquareTile<T>::bytes(16);
    __syncwarp();
    copy_out(shared_at(from.base + static_cast<std::uint32_t>(warp * bytes)), to + warp * bytes, bytes, lane, 32);
}

// Of two units of a row that neighbouring lanes share, each lane's words: it gets 8 bytes of one, and four lanes have
// whole 32 bytes.
__device__ inline uint2 exchange_words(std::uint32_t low, std::uint32_t high, bool second) {
    const std::uint32_t taken = __shfl_xor_sync(0xffffffffu, second ? low : high, 1);
    return {second ? taken : low, second ? high : taken};
}

}  // namespace softdelta::cuda

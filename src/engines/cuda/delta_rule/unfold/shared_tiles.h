// A block of 16 warps with the tiles of a chunk and key head, for its gradients (shared_gate.cu): the products that
// they are made of. A warp has 16 rows and a quarter of the channels.
#pragma once

#include "engines/cuda/delta_rule/unfold/places.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

constexpr int unfold_threads = 512, quarters = 4;

struct UnfoldNumbers {
    ChunkPlace places[4];                              // of chunks one after the other, of which two are in use
    RowFactors factors[2];                             // of this value head and of the next
    float anchors[4][chunk_rows];                      // e^(G_r − G_j), r the last row before a block of 16
    float from_start[chunk_rows], to_end[chunk_rows];  // e^G, e^(G_last − G)
    float since_erase[chunk_rows];                     // e^E
    float read[quarters][chunk_rows], erase[quarters][chunk_rows], write[quarters][chunk_rows],
        erased[quarters][chunk_rows];                          // sums over channels
    float of_values[chunk_rows];                               // rowsum(dR∘v)
    float pairs[2][2][chunk_rows], columns[2][4][chunk_rows];  // of P, of Q: sum_spans()
    float spans[chunk_rows];
    float along[3][quarters][chunk_rows];  // q∘dq, k∘dk, p∘dp
    float through[unfold_threads / 32];
};

template <class T, int D, bool own_p, bool in_parts>
struct UnfoldMemory {
    static constexpr unsigned rows_bytes = Tile<T, D>::bytes(chunk_rows);
    static constexpr unsigned key_tiles = own_p ? 3 : 2, key_sets = own_p ? 1 : 2;  // of this chunk, and of the next
    static constexpr int d_o = key_sets * key_tiles * rows_bytes, d_r = d_o + rows_bytes, u = d_r + rows_bytes,
                         state = u + rows_bytes, dstate = state + Tile<T, D>::bytes(D),
                         pairs = dstate + Tile<T, D>::bytes(D), small = pairs + 2 * RecordOf<T>::square_bytes,
                         bytes = small + static_cast<int>(sizeof(UnfoldNumbers));
    static_assert(sizeof(RowFactors) % 16 == 0 && bytes <= 227 * 1024);
};
// What products over value channels read, 64 of them at a time: up to three tiles of rows; or two, and a state. A p of
// its own comes there when it is needed.
template <class T, int D, bool own_p>
struct UnfoldMemory<T, D, own_p, true> {
    static constexpr unsigned rows_bytes = Tile<T, D>::bytes(chunk_rows);
    static constexpr unsigned key_tiles = 2, key_sets = 1;
    static constexpr int pairs = key_tiles * rows_bytes, small = pairs + 2 * RecordOf<T>::square_bytes,
                         parts = (small + static_cast<int>(sizeof(UnfoldNumbers)) + 127) / 128 * 128,
                         part_rows_bytes = Tile<T, 64>::bytes(chunk_rows), state_in_part = 2 * part_rows_bytes,
                         part_bytes = state_in_part + std::max(part_rows_bytes, Tile<T, D>::bytes(64));

    // With so many parts, this one and the next.
    static constexpr int bytes(int count) { return parts + count * part_bytes; }
    static_assert(bytes(1) <= (sizeof(T) == 4 ? 227 * 1024 : least_shared_bytes) &&
                  static_cast<int>(rows_bytes) <= part_bytes);
};

// Warpgroups: four warps multiply together (sm_90a). in_parts: value channels come 64 at a time.
template <class T, int D, bool own_p, bool warpgroups, bool in_parts = false>
struct UnfoldTiles {
    static constexpr int C = chunk_rows, size = D, threads = unfold_threads;
    static constexpr bool has_p = own_p, p_in_part = own_p && in_parts, by_warpgroups = warpgroups;
    using Element = T;
    using Layout = UnfoldMemory<T, D, own_p, in_parts>;
    using Rows = KeyTile<T, D>;
    using States = Tile<T, D, D>;
    using Square = Tile<T, C>;
    static constexpr int N = D / 8 / quarters;  // accumulators of 8 columns of a warp
    using Sums = float[N][4];

    __device__ explicit UnfoldTiles(const ChunkGradients& of)
        : pass(of), call(of.call), grad(of.grad), saved(of.saved) {}

    // --- chunks and their tiles

    __device__ ChunkPlace find(unsigned number) const { return ChunkPlaces{pass}.find(number); }
    __device__ const ChunkPlace& here() const { return small.places[step % 4]; }
    __device__ ChunkPlace& next() const { return small.places[(step + 1) % 4]; }

    __device__ Rows key(unsigned step, unsigned which) const {
        return {base + (step % Layout::key_sets * Layout::key_tiles + which) * Layout::rows_bytes};
    }
    __device__ Rows q() const { return key(step, 0); }
    __device__ Rows k() const { return key(step, 1); }
    __device__ Rows p() const {
        if constexpr (p_in_part)
            return {base + Layout::parts + p_part * Layout::part_bytes};
        else
            return key(step, own_p ? 2 : 1);
    }
    __device__ Rows d_o() const { return {base + Layout::d_o}; }
    __device__ Rows d_r() const { return {base + Layout::d_r}; }
    __device__ Rows u() const { return {base + Layout::u}; }
    __device__ States state() const { return {base + Layout::state}; }
    __device__ States dstate() const { return {base + Layout::dstate}; }
    // Of a part: rows of dO, dR or U, and of a state.
    __device__ KeyTile<T, 64> part_rows(int part, int which) const {
        return {base + Layout::parts + part * Layout::part_bytes + which * Layout::part_rows_bytes};
    }
    __device__ Tile<T, D, 64> part_state(int part) const {
        return {base + Layout::parts + part * Layout::part_bytes + Layout::state_in_part};
    }
    __device__ Square pairs(int which) const { return {base + Layout::pairs + which * RecordOf<T>::square_bytes}; }
    // Registers are scarce, and L1 has no room for what would be put aside: places are computed anew.
    __device__ void forget() {
        ptx::forget(thread);
        ptx::forget(lane);
        ptx::forget(block);
    }
    __device__ const RowFactors& factors() const { return small.factors[turn]; }
    __device__ int row(int half_of_block) const { return 16 * block + lane / 4 + 8 * half_of_block; }
    __device__ int rows() const { return here().rows(); }

    // --- rows of keys

    // The warp's columns of `right`, of which product `depth` takes 16 rows.
    template <class Right>
    __device__ std::uint64_t columns(const Right& right, int depth) const {
        return right.mn_major_operand(depth, 8 * N * quarter);
    }
    // x += rows of left · right; triangular: left is a lower triangle.
    template <class Left, class Right>
    __device__ void multiply(const Left& left, const Right& right, bool triangular, Sums& x) const {
        constexpr int depths = Left::units / static_cast<int>(sizeof(T));
        if constexpr (warpgroups) {
            ptx::begin_products(x);
            begin_product<T>(x, left, right, true, 8 * N * quarter);
            ptx::commit_products();
            ptx::wait_for_products<0>(x);
        } else {
#pragma unroll 2
            for (int depth = 0; depth < (triangular ? block + 1 : depths); ++depth) {
                Operand<T> a;
                left.load_left(a, 16 * block, depth, lane);
                add_product<T>(x, a, right, depth, quarter * (N / 2), lane);
            }
        }
    }
    // The same, and y += other right.
    template <class Left, class Right>
    __device__ void multiply_both(const Left& left, const Left& other, const Right& right, bool triangular, Sums& x,
                                  Sums& y) const {
        constexpr int depths = Left::units / static_cast<int>(sizeof(T));
        if constexpr (warpgroups) {
            ptx::begin_products(x, y);
            unrolled<depths>([&](int depth) {
                ptx::warpgroup_multiply_mn_major(x, left.rows_operand(depth), columns(right, depth), true, T());
                ptx::warpgroup_multiply_mn_major(y, other.rows_operand(depth), columns(right, depth), true, T());
            });
            ptx::commit_products();
            ptx::wait_for_products<0>(x);
            ptx::keep_registers(y);
        } else {
#pragma unroll 2
            for (int depth = 0; depth < (triangular ? block + 1 : depths); ++depth) {
                Operand<T> a, c;
                left.load_left(a, 16 * block, depth, lane);
                other.load_left(c, 16 * block, depth, lane);
                add_two_products<T>(x, a, y, c, right, depth, quarter * (N / 2), lane);
            }
        }
    }
    // x += columns of a lower triangle, with_beta: its rows times β, · right [64, K]
    __device__ void multiply_pairs_transposed(const Square& left, const Rows& right, bool with_beta, Sums& x) const {
        if constexpr (warpgroups) {
            std::uint32_t a[C / 16][4];
            unrolled<C / 16>([&](int depth) { load_transposed_pairs(left, depth, with_beta, a[depth]); });
            ptx::begin_products(x, a);
            begin_product<T>(x, a, right, true, 8 * N * quarter);
            ptx::commit_products();
            ptx::wait_for_products<0>(x);
        } else {
            for (int depth = block; depth < C / 16; ++depth) {
                Operand<T> a;
                load_transposed_pairs(left, depth, with_beta, a);
                add_product<T>(x, a, right, depth, quarter * (N / 2), lane);
            }
        }
    }
    __device__ void load_transposed_pairs(const Square& left, int depth, bool with_beta, Operand<T>& a) const {
        left.load_transposed_result(a, 16 * depth, 16 * block, lane);
        if (!with_beta) return;
        unrolled<4>([&](int i) {
            const float* beta = factors().beta + 16 * depth + 8 * (i / 2) + 2 * (lane % 4);
            const float2 both = pair_of<T>(a, i);
            set_pair<T>(a, i, both.x * beta[0], both.y * beta[1]);
        });
    }
    // x ∘= factor of its row; sums: rowsum(x∘rows) over the warp's channels, in all lanes of a row.
    __device__ void scale_and_dot(const Rows& rows, const float (&factor)[2], Sums& x, float (&sums)[2]) const {
        unrolled<N, 2>([&](int n, int half) {
            const float2 other = two(rows, n, half);
            x[n][2 * half] *= factor[half];
            x[n][2 * half + 1] *= factor[half];
            sums[half] = fmaf(x[n][2 * half], other.x, fmaf(x[n][2 * half + 1], other.y, sums[half]));
        });
    }
    // What lies where the accumulators' elements are.
    __device__ float2 two(const Rows& rows, int n, int half) const {
        return load_pair(rows, row(half), 8 * (quarter * N + n) + 2 * (lane % 4));
    }
    __device__ void keep_row_sums(float* to, const float (&sums)[2]) const {
        unrolled<2>([&](int half) {
            const float sum = sum_of_lanes<4>(sums[half]);
            if (lane % 4 == 0) to[row(half)] = sum;
        });
    }
    __device__ static void add(const Sums& x, Sums& to) {
        unrolled<N, 4>([&](int n, int i) { to[n][i] += x[n][i]; });
    }

    __device__ static float sum_of(const float (&x)[quarters][C], int r) {
        return (x[0][r] + x[1][r]) + (x[2][r] + x[3][r]);
    }

    const ChunkGradients& pass;
    const DeltaCall& call;
    const GradientViews& grad;
    const SavedChunks& saved;
    unsigned step = 0;  // chunks that the block has had
    int turn = 0, p_part = 0;
    int thread = static_cast<int>(threadIdx.x), lane = thread % 32, block = thread / 32 % 4;
    const int quarter = __shfl_sync(0xffffffffu, thread / 128, 0);  // known to be the warp's
    const bool erases = call.erase != core::Erase::nothing;
    char* memory = ptx::shared_memory();
    std::uint32_t base = ptx::shared_address(memory);
    UnfoldNumbers& small = *reinterpret_cast<UnfoldNumbers*>(memory + Layout::small);
};

}  // namespace softdelta::cuda

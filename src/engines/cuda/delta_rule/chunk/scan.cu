// The scan over folded chunks, gate-blind: one block for a value head of a sequence and a slab of value columns.
// Everything that depends on the state is transposed, so that it stays in registers: a consumer warp holds 16 rows of
// Sᵀ [V, K] as accumulators, and what one product yields is the left operand of the next. Right operands, which all
// warps read, lie in shared memory.
//
//     Rᵀ = vᵀ − (Sᵀ pᵀ)∘e^E               [16, 64] = [16, K]·[K, 64]
//     Uᵀ = Rᵀ solveᵀ                      [16, 64] = [16, 64]·[64, 64]
//     oᵀ = (Sᵀ qᵀ)∘scale·e^G + Uᵀ scoreᵀ
//     Sᵀ = e^G_last·Sᵀ + (Uᵀ∘e^(G_last − G)) k
//
// Gates that all channels share multiply the products of plain q, k and p, with the factors of the l2 norm; gates of
// channels are in the keys of the record. While a chunk is consumed, four warps have the next one copied.
#include "engines/cuda/delta_rule/chunk/folded.h"
#include "engines/cuda/delta_rule/chunk/lane_state.h"
#include "engines/cuda/delta_rule/chunk/rows.h"
#include "engines/cuda/delta_rule/chunk/tokens.h"
#include "engines/cuda/grid.h"

namespace softdelta::cuda {

namespace {

constexpr int C = chunk_rows;
constexpr int stages = 2;
constexpr int copy_warps = 4;

enum class Keys { plain, own_p, with_gates };

template <class T, int K, int slab, Keys keys>
struct Shared {
    using Record = FoldedChunk<K, keys == Keys::with_gates>;
    static constexpr int key_tiles = keys == Keys::plain ? 2 : 3;
    static constexpr int values = key_tiles * Record::key_bytes, record = values + Tile<T, slab>::bytes(C);
    static constexpr int stage_bytes = (record + Record::small_bytes + 1023) / 1024 * 1024;
    static constexpr int bytes = stages * stage_bytes;
};

template <class T, int K, int warps, Keys keys>
class ChunkScan {
    static constexpr int slab = 16 * warps;
    static constexpr bool channel = keys == Keys::with_gates;
    using Layout = Shared<T, K, slab, keys>;
    using Record = typename Layout::Record;
    using KeyTile = Tile<T, K>;
    using ValueTile = Tile<T, slab>;
    using Square = Tile<T, C>;

  public:
    __device__ ChunkScan(const DeltaCall& call, const DeltaSequences& sequences, const FoldedChunks& folded,
                         const ChunkOutputs& out)
        : call_(call),
          sequences_(sequences),
          folded_(folded),
          out_(out),
          s_(sequences[static_cast<int>(blockIdx.z)]),
          hv_(static_cast<int>(blockIdx.y)),
          first_column_(static_cast<int>(blockIdx.x) * slab),
          base_(ptx::shared_address(ptx::shared_memory())) {}

    __device__ void run() {
        const int chunks = static_cast<int>((s_.count + C - 1) / C);
        const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
        if (warp >= warps)
            run_copies(chunks, static_cast<int>(threadIdx.x) - 32 * warps);
        else
            run_products(chunks, warp, lane);
    }

  private:
    __device__ void run_copies(int chunks, int thread) const {
        if constexpr (warps == 8) ptx::release_registers<40>();
        if (chunks > 0) copy_chunk(0, thread);
        ptx::wait_for_copies();
        __syncthreads();
        for (int c = 0; c < chunks; ++c) {
            if (c + 1 < chunks) copy_chunk(c + 1, thread);
            ptx::wait_for_copies();
            __syncthreads();
        }
    }
    __device__ void copy_chunk(int c, int thread) const {
        constexpr int threads = 32 * copy_warps;
        const int h = call_.key_head(hv_);
        const Index slot = folded_.slot(s_, sequences_.first + static_cast<int>(blockIdx.z), c, sequences_.packed);
        const char* record = folded_.record(slot, hv_, Record::bytes);
        if constexpr (channel) {
            copy_bytes(stage(c), record + Record::read, 3 * Record::key_bytes, thread, threads);
        } else {
            copy_rows(read_keys(c), call_.q, s_, c, h, 0, call_.key_size, thread, threads);
            copy_rows(write_keys(c), call_.k, s_, c, h, 0, call_.key_size, thread, threads);
            if constexpr (keys == Keys::own_p)
                copy_rows(erase_keys(c), call_.p, s_, c, h, 0, call_.key_size, thread, threads);
        }
        copy_rows(values(c), call_.v, s_, c, hv_, first_column_, call_.value_size, thread, threads);
        const int solve_end = call_.erase == core::Erase::nothing ? Record::solve : Record::factors;
        copy_bytes(stage(c) + Layout::record, record, solve_end, thread, threads);
        copy_bytes(stage(c) + Layout::record + Record::factors, record + Record::factors,
                   Record::small_bytes - Record::factors, thread, threads);
    }

    __device__ void run_products(int chunks, int warp, int lane) {
        if constexpr (warps == 8) ptx::take_registers<232>();
        load_state(warp, lane);
        __syncthreads();
        for (int c = 0; c < chunks; ++c) {
            if (out_.states) store_saved(c, warp, lane);
            if (factors(c).by_token != 0 || values_are_odd(c, warp, lane))
                take_chunk_by_token(c, warp, lane);
            else
                take_chunk(c, warp, lane);
            __syncthreads();
        }
        if (out_.final_state && s_.state >= 0) {
            const View& v = out_.final_state;
            store_state(v, s_.state * v.stride[0] + hv_ * v.stride[1], v.stride[call_.state_row],
                        v.stride[call_.state_column], warp, lane);
        }
    }

    // Tiles of keys lie as in a record: read, erase, write; those of plain keys read, write.
    __device__ std::uint32_t stage(int c) const {
        return base_ + static_cast<std::uint32_t>(c % stages * Layout::stage_bytes);
    }
    __device__ KeyTile read_keys(int c) const { return {stage(c)}; }
    __device__ KeyTile erase_keys(int c) const { return {stage(c) + Record::key_bytes}; }
    __device__ KeyTile write_keys(int c) const { return {stage(c) + (Layout::key_tiles - 1) * Record::key_bytes}; }
    __device__ ValueTile values(int c) const { return {stage(c) + Layout::values}; }
    __device__ Square score(int c) const { return {stage(c) + Layout::record}; }
    __device__ Square solve(int c) const { return {stage(c) + Layout::record + Record::solve}; }
    __device__ const ChunkFactors& factors(int c) const {
        return *reinterpret_cast<const ChunkFactors*>(shared_at(stage(c) + Layout::record + Record::factors));
    }
    __device__ const float* last(int c) const {
        return reinterpret_cast<const float*>(shared_at(stage(c) + Layout::record + Record::last));
    }
    __device__ int rows(int c) const { return static_cast<int>(min(s_.count - Index(c) * C, Index(C))); }

    // --- states

    __device__ int own_column(int warp, int lane) const { return first_column_ + 16 * warp + lane / 4; }
    __device__ void load_state(int warp, int lane) {
        const View v = s_.state >= 0 ? call_.initial_state : View();
        LaneState<K> state;
        load_lane_state<K>(&v, s_.state * v.stride[0] + hv_ * v.stride[1], v.stride[call_.state_row],
                           v.stride[call_.state_column], call_.key_size, call_.value_size, own_column(warp, lane), lane,
                           state);
        for_each_in(state, [](float from, float& x) { x = from; });
    }
    __device__ void store_state(const View& to, Index offset, Index row, Index column_step, int warp, int lane) {
        const View v = to;
        LaneState<K> state;
        for_each_in(state, [](float& x, float from) { x = from; });
        store_lane_state<K>(&v, offset, row, column_step, call_.key_size, call_.value_size, own_column(warp, lane),
                            lane, state);
    }
    __device__ void store_saved(int c, int warp, int lane) {
        const View& v = out_.states;
        const Index token = Index(c) * C;
        if (token % sequences_.interval != 0) return;
        store_state(
            v,
            s_.batch * v.stride[0] + (s_.first_saved + token / sequences_.interval) * v.stride[1] + hv_ * v.stride[2],
            v.stride[call_.state_row + 1], v.stride[call_.state_column + 1], warp, lane);
    }

    // --- a chunk

    // x [16, 64] = left [16, 16·depths] rightᵀ, right [64, 16·depths]
    template <int depths, class Right>
    __device__ void multiply_transposed(const std::uint32_t (&left)[depths][4], const Right& right, bool triangular,
                                        int lane, float (&x)[C / 8][4]) const {
#pragma unroll
        for (int depth = 0; depth < depths; ++depth)
#pragma unroll
            for (int n = 0; n < C / 16; ++n) {
                if (triangular && n < depth) continue;  // a lower triangle: nothing before the diagonal's rows
                std::uint32_t b[4];
                right.load_right(b, 16 * n, depth, lane);
                ptx::multiply(x[2 * n], left[depth], b[0], b[1], T());
                ptx::multiply(x[2 * n + 1], left[depth], b[2], b[3], T());
            }
    }

    __device__ void take_chunk(int c, int warp, int lane) {
        const ChunkFactors& f = factors(c);
        const bool erases = call_.erase != core::Erase::nothing;
        const int pair = 2 * (lane % 4);
        std::uint32_t state[K / 16][4], u[C / 16][4];
        to_left<T>(state, state_);

        float x[C / 8][4] = {};
        if (erases) multiply_transposed(state, keys == Keys::plain ? write_keys(c) : erase_keys(c), false, lane, x);
#pragma unroll
        for (int n = 0; n < C / 16; ++n) {
            std::uint32_t value[4];
            values(c).load_transposed_result(value, 16 * n, warp, lane);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                float(&to)[4] = x[2 * n + m / 2];
                const int token = 16 * n + 8 * (m / 2) + pair;
                const float2 both = ptx::unpack(value[m], T());
                to[2 * (m % 2)] = both.x - (channel ? 1.0F : f.erase[token]) * to[2 * (m % 2)];
                to[2 * (m % 2) + 1] = both.y - (channel ? 1.0F : f.erase[token + 1]) * to[2 * (m % 2) + 1];
            }
        }
        float U[C / 8][4] = {};
        if (erases) {
            to_left<T>(u, x);
            multiply_transposed(u, solve(c), true, lane, U);
        } else {
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) U[n][i] = x[n][i];
        }
        if (out_.o) {
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) x[n][i] = 0;
            multiply_transposed(state, read_keys(c), false, lane, x);
            if constexpr (!channel) {
#pragma unroll
                for (int n = 0; n < C / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) x[n][i] *= f.read[8 * n + pair + i % 2];
            }
            to_left<T>(u, U);
            multiply_transposed(u, score(c), true, lane, x);
            store_outputs(c, x, warp, lane);
        }
        if constexpr (channel) {
#pragma unroll
            for (int n = 0; n < K / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) state_[n][i] *= last(c)[8 * n + pair + i % 2];
        } else {
#pragma unroll
            for (int n = 0; n < C / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) U[n][i] *= f.write[8 * n + pair + i % 2];
#pragma unroll
            for (int n = 0; n < K / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) state_[n][i] *= f.last;
        }
        to_left<T>(u, U);
#pragma unroll
        for (int depth = 0; depth < C / 16; ++depth)
#pragma unroll
            for (int n = 0; n < K / 16; ++n) {
                std::uint32_t b[4];
                write_keys(c).load_right_upright(b, 16 * depth, n, lane);
                ptx::multiply(state_[2 * n], u[depth], b[0], b[1], T());
                ptx::multiply(state_[2 * n + 1], u[depth], b[2], b[3], T());
            }
    }

    // oᵀ through the tile of values, whose columns of this warp nobody else reads, to whole rows of memory.
    __device__ void store_outputs(int c, const float (&x)[C / 8][4], int warp, int lane) const {
        const ValueTile tile = values(c);
        __syncwarp();
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const std::uint32_t both = ptx::transpose(ptx::pack(x[n][2 * half], x[n][2 * half + 1], T()));
                *reinterpret_cast<std::uint32_t*>(
                    shared_at(tile.unit(8 * n + lane / 4, 2 * warp + half) + 4 * (lane % 4))) = both;
            }
        __syncwarp();
        const View& o = out_.o;
        auto* data = static_cast<T*>(o.data) + s_.batch * o.stride[0] + hv_ * o.stride[2] + first_column_;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = (32 * i + lane) / 2, u = 2 * warp + lane % 2;
            if (row >= rows(c) || first_column_ + 8 * u >= call_.value_size) continue;
            const uint4 eight = *reinterpret_cast<const uint4*>(shared_at(tile.unit(row, u)));
            *reinterpret_cast<uint4*>(data + (s_.begin + Index(c) * C + row) * o.stride[1] + 8 * u) = eight;
        }
    }

    // Inf or NaN in the warp's values: they stay in their row when it goes token by token.
    __device__ bool values_are_odd(int c, int warp, int lane) const {
        bool odd = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 x =
                *reinterpret_cast<const uint4*>(shared_at(values(c).unit((32 * i + lane) / 2, 2 * warp + lane % 2)));
            for (const std::uint32_t two : {x.x, x.y, x.z, x.w}) odd = odd || ptx::has_nonfinite(two, T());
        }
        return __any_sync(0xffffffffu, odd);
    }

    __device__ void take_chunk_by_token(int c, int warp, int lane) {
        WideState<K> wide;
        for_each_in(wide, [](double& to, float& x) { to = static_cast<double>(x); });
        const View o = out_.o;
        take_tokens<K>(&call_, s_, hv_, Index(c) * C, rows(c), own_column(warp, lane), lane, &o, wide);
        for_each_in(wide, [](double& from, float& x) { x = static_cast<float>(from); });
    }
    template <class Number, class Visit>
    __device__ void for_each_in(Number (&wide)[K / 8][4], Visit&& visit) {
#pragma unroll
        for (int n = 0; n < K / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) visit(wide[n][i], state_[n][i]);
    }

    const DeltaCall& call_;
    const DeltaSequences& sequences_;
    const FoldedChunks& folded_;
    const ChunkOutputs& out_;
    DeltaSequence s_;
    int hv_, first_column_;
    std::uint32_t base_;
    float state_[K / 8][4];
};

template <class T, int K, int warps, Keys keys>
__global__ void __launch_bounds__(32 * (warps + copy_warps), 1)
    chunk_scan_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ DeltaSequences sequences,
                      const __grid_constant__ FoldedChunks folded, const __grid_constant__ ChunkOutputs out) {
    ChunkScan<T, K, warps, keys>(call, sequences, folded, out).run();
}

// use.template operator()<K, keys>()
template <class Use>
void with_keys(const DeltaCall& call, const Use& use) {
    if (call.gate == core::Gate::channel)
        use.template operator()<128, Keys::with_gates>();
    else if (call.own_p)
        use.template operator()<128, Keys::own_p>();
    else if (call.key_size <= 64)
        use.template operator()<64, Keys::plain>();
    else
        use.template operator()<128, Keys::plain>();
}

template <class T>
void launch_for(const DeltaCall& call, const DeltaSequences& sequences, const FoldedChunks& folded,
                const ChunkOutputs& out, cudaStream_t stream) {
    with_keys(call, [&]<int K, Keys keys>() {
        const auto with_warps = [&]<int warps>() {
            constexpr int slab = 16 * warps;
            const dim3 blocks(static_cast<unsigned>((call.value_size + slab - 1) / slab),
                              static_cast<unsigned>(call.heads), static_cast<unsigned>(sequences.count));
            launch(chunk_scan_kernel<T, K, warps, keys>,
                   {blocks, 32 * (warps + copy_warps), Shared<T, K, slab, keys>::bytes}, stream,
                   "the delta rules' scan over chunks", call, sequences, folded, out);
        };
        // Few heads: less columns for each block, so that more blocks share the work.
        constexpr Index many = 100;
        if (Index(call.heads) * sequences.count >= many)
            with_warps.template operator()<8>();
        else
            with_warps.template operator()<4>();
    });
}

}  // namespace

int chunk_record_bytes(const DeltaCall& call) {
    int bytes = 0;
    with_keys(call, [&]<int K, Keys keys>() { bytes = FoldedChunk<K, keys == Keys::with_gates>::bytes; });
    return bytes;
}

int chunk_scan_shared_bytes(const DeltaCall& call) {
    int bytes = 0;
    with_keys(call, [&]<int K, Keys keys>() { bytes = Shared<__nv_bfloat16, K, 128, keys>::bytes; });
    return bytes;
}

void launch_chunk_scan(const DeltaCall& call, core::DType type, const DeltaSequences& sequences,
                       const FoldedChunks& folded, const ChunkOutputs& out, cudaStream_t stream) {
    (type == core::DType::bf16 ? launch_for<__nv_bfloat16> : launch_for<__half>)(call, sequences, folded, out, stream);
}

}  // namespace softdelta::cuda

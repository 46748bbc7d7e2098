// Few queries over many keys (decode): a block has 16 rows, queries and query heads of a key head, and a range of the
// keys. Its warps take 16 keys at a time, each with stages of its own in shared memory, and wait for nobody.
//
//     warp 0   keys 0…15    64…79   …         top, sum, o of its keys
//     warp 1   keys 16…31   80…95   …
//
// The sums of a block's warps are put together in their order, then those of the ranges, in theirs: the same bits in
// every run. How many ranges there are comes from shapes alone.
//
// Many rows of more than 256 channels (absorbed MLA): each warp has 16 rows, and all take the same keys.
#include "engines/cuda/attention/addends.h"
#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/row_end.h"
#include "engines/cuda/attention/rows.h"
#include "engines/cuda/device/card.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

namespace {

constexpr int least_rows = 16, step_keys = 16;
constexpr float log2_e = 1.44269504F;

// small: of the cards with the least shared memory.
template <class T, int columns, int value_columns, bool small, bool many>
class Decode {
    static constexpr int warps = many ? (small ? 2 : 8) : (columns > 256 ? 2 : 4) / (small && columns > 128 ? 2 : 1);
    static constexpr int key_warps = many ? 1 : warps;  // that have keys of their own
    static constexpr int stages = columns <= 64 ? 4 : columns <= 128 && !small ? 3 : 2;
    using KeyTile = Tile<T, columns>;
    using ValueTile = Tile<T, value_columns>;
    static constexpr int key_bytes = KeyTile::bytes(step_keys), stage_bytes = key_bytes + ValueTile::bytes(step_keys);
    static constexpr int block_rows = many ? 16 * warps : 16, stages_at = KeyTile::bytes(block_rows);
    static constexpr int sums_bytes =
        (many ? 0 : warps) * block_rows * (value_columns + 2) * static_cast<int>(sizeof(float));
    // Weights of f16 are multiplied by 2¹⁰: half its numbers lie below 2⁻¹⁴.
    static constexpr float weight_exponent = std::is_same_v<T, __half> ? 10 : 0;

  public:
    static constexpr int threads = 32 * warps;
    static constexpr int shared_bytes = stages_at + std::max(key_warps * stages * stage_bytes, sums_bytes);

    __host__ __device__ static int tiles(const AttentionCall& call, const DecodeParts& parts) {
        return (parts.queries * call.group + block_rows - 1) / block_rows;
    }

    __device__ Decode(const AttentionPass& pass, const DecodeParts& parts)
        : call_(pass.call),
          parts_(parts),
          s_(pass.sequences[static_cast<int>(blockIdx.z)]),
          sequence_(pass.sequences.first + static_cast<int>(blockIdx.z)) {
        const int slices = (pass.call.value_channels + value_columns - 1) / value_columns;
        const int tiles = Decode::tiles(pass.call, parts);
        first_channel_ = static_cast<int>(blockIdx.x) % slices * value_columns;
        first_row_ = parts.first * pass.call.group + static_cast<int>(blockIdx.x) / slices % tiles * block_rows;
        key_head_ = static_cast<int>(blockIdx.x) / slices / tiles;
        value_channels_ = min(pass.call.value_channels - first_channel_, value_columns);
    }

    __device__ void run() {
        if (first_row_ >= rows()) return;
        load_queries();
        const Range keys = keys_of_split();
        const AttentionSequence s = s_;  // what functions out of line point to is not in registers
        const Rows k = Rows::of_keys(call_.k, call_, s, key_head_, call_.channels);
        const Rows v = Rows::of_keys(call_.v, call_, s, key_head_, call_.value_channels);
        constexpr int step = key_warps * step_keys;
        const Index begin = keys.begin + key_warp() * step_keys;
        unrolled<stages - 1>([&](int i) { copy(k, v, begin + i * step, keys.end, i); });
        __syncthreads();  // queries
        int stage = 0;
        for (Index at = begin; at < keys.end; at += step) {
            ptx::wait_for_copies_but<stages - 2>();
            if constexpr (many)
                __syncthreads();
            else
                __syncwarp();
            copy(k, v, at + (stages - 1) * step, keys.end, stage == 0 ? stages - 1 : stage - 1);
            take(at, stage);
            stage = stage == stages - 1 ? 0 : stage + 1;
        }
        ptx::wait_for_copies();
        if constexpr (many)
            store_rows();
        else
            store_sums();
    }

  private:
    __device__ int rows() const {
        return min(parts_.first + parts_.queries, static_cast<int>(call_.queries)) * call_.group;
    }
    __device__ int query_of(int row) const { return row / call_.group; }
    __device__ int head_of(int row) const { return key_head_ * call_.group + row % call_.group; }
    __device__ int key_warp() const { return many ? 0 : warp_; }
    __device__ int own_rows() const { return many ? 16 * warp_ : 0; }  // from here on in the block
    __device__ KeyTile queries() const { return {base_}; }
    __device__ KeyTile keys(int stage) const {
        return {base_ + static_cast<std::uint32_t>(stages_at + (key_warp() * stages + stage) * stage_bytes)};
    }
    __device__ ValueTile values(int stage) const { return {keys(stage).base + static_cast<std::uint32_t>(key_bytes)}; }

    // The keys that any query sees, cut into ranges of whole steps of the block.
    __device__ Range keys_of_split() {
        const int last = query_of(min(first_row_ + block_rows, rows()) - 1);
        const Range first_sees = visible_keys(call_, s_, query_of(first_row_));
        const Range last_sees = visible_keys(call_, s_, last);
        all_ = {last_sees.begin, first_sees.end};
        constexpr int step = key_warps * step_keys;
        const Index begin = first_sees.begin / step_keys * step_keys;
        const Index each = ((last_sees.end - begin + parts_.splits - 1) / parts_.splits + step - 1) / step * step;
        return {begin + split_ * each, min(begin + (split_ + 1) * each, last_sees.end)};
    }

    __device__ void load_queries() const {
        const T* data = static_cast<const T*>(call_.q.data) + s_.batch * call_.q.stride[0];
        for (int i = static_cast<int>(threadIdx.x); i < block_rows * KeyTile::units; i += threads) {
            const int r = i / KeyTile::units, u = i % KeyTile::units, row = first_row_ + r;
            uint4 eight{};
            if (row < rows() && 8 * u < call_.channels)
                eight = *reinterpret_cast<const uint4*>(data + query_of(row) * call_.q.stride[1] +
                                                        head_of(row) * call_.q.stride[2] + 8 * u);
            *reinterpret_cast<uint4*>(shared_at(queries().unit(r, u))) = eight;
        }
    }

    // Keys and values [at, at + 16), zeros from `end` on, into a stage, as a group of copies.
    __device__ void copy(const Rows& k, const Rows& v, Index at, Index end, int stage) const {
        if (at < end) {
            const int count = static_cast<int>(min(end - at, Index(step_keys)));
            copy_rows(keys(stage), k, at, count, 0, call_.channels);
            copy_rows(values(stage), v, at, count, first_channel_, value_channels_);
        }
        ptx::commit_copies();
    }
    template <int n>
    __device__ void copy_rows(const Tile<T, n>& tile, const Rows& from, Index at, int count, int channel,
                              int channels) const {
        constexpr int units = n / 8, copiers = many ? threads : 32;
        const Index mine = from.offset(at + min(lane_ % step_keys, count - 1));  // a paged row is looked up once
        unrolled<(step_keys * units + copiers - 1) / copiers>([&](int i) {
            const int place = copiers * i + (many ? 32 * warp_ : 0) + lane_, r = place / units, u = place % units;
            const Index offset = __shfl_sync(0xffffffffu, mine, r);
            if (step_keys * units % copiers != 0 && r >= step_keys) return;
            const bool take = r < count && 8 * u < channels;
            ptx::copy_async(tile.unit(r, u), from.data() + (take ? offset + channel + 8 * u : 0), take);
        });
    }

    // 16 keys.
    __device__ void take(Index at, int stage) {
        Acc<16, step_keys> x{}, y{};  // two sums: half the time until the last product is there
#pragma unroll
        for (int depth = 0; depth < columns / 16; ++depth) {
            if (columns > 128 && 16 * depth >= call_.channels) break;
            std::uint32_t a[4], b[4];
            queries().load_left(a, own_rows(), depth, lane_);
            keys(stage).load_right(b, 0, depth, lane_);
            auto& sum = depth % 2 == 0 ? x : y;
            ptx::multiply(sum.x[0], a, b[0], b[1], T());
            ptx::multiply(sum.x[1], a, b[2], b[3], T());
        }
        each_pair_of(x, y, [&](float& e, float& next, float other, float next_other, int, int) {
            e = score(e + other);
            next = score(next + next_other);
        });
        const bool whole = at >= all_.begin && at + step_keys <= all_.end;
        if (!whole || call_.mask || call_.bias || call_.alibi_slopes) add(at, x);
        float factor[2];
        to_weights(x, factor);
        Left<T, step_keys> weights;
        x.pack(weights);
        if (__any_sync(0xffffffffu, factor[0] != 1 || factor[1] != 1)) o_.scale_rows(factor);
        add_product<T, value_columns / 8>(o_.x, weights.x[0], values(stage), 0, 0, lane_);
    }
    __device__ float score(float product) const {
        const float scaled = product * call_.scale;
        return call_.softcap != 0 ? soft_cap(scaled, call_.softcap).x : scaled;
    }

    __device__ void add(Index at, Acc<16, step_keys>& x) const {
        for_rows([&](int half) {
            const int row = min(first_row_ + own_rows() + lane_ / 4 + 8 * half, rows() - 1);
            const int query = query_of(row);
            const Addends addends(call_, s_, head_of(row));
            x.each([&](float& e, int of_half, int column) {
                if (of_half != half) return;
                const float addend = addends.at(query, at + column + own_column(lane_));
                e = addend == -INFINITY ? -INFINITY : e + addend;
            });
        });
    }

    // Scores become weights of the sums so far; `factor` is what older sums shrink by.
    __device__ void to_weights(Acc<16, step_keys>& x, float (&factor)[2]) {
        float most[2], base[2];
        x.row_max(most);
        for_rows([&](int half) {
            const float top = fmaxf(maximum_of_lanes<4>(most[half]), top_[half]);
            base[half] = top == -INFINITY ? 0.0F : top;
            factor[half] = ptx::exp2((top_[half] - base[half]) * log2_e);
            if (top_[half] == top) factor[half] = 1;
            top_[half] = top;
            sum_[half] *= factor[half];
        });
        x.each([&](float& e, int half, int) { e = ptx::exp2(fmaf(e - base[half], log2_e, weight_exponent)); });
        x.add_row_sums(sum_);
    }

    __device__ void store_rows() {
        Index part[2];
        for_rows([&](int half) {
            const int row = first_row_ + own_rows() + lane_ / 4 + 8 * half;
            const float sum = sum_of_lanes<4>(sum_[half]);
            part[half] = row < rows() ? parts_.at(call_, sequence_, head_of(row), query_of(row)) + split_ : -1;
            if (part[half] >= 0 && lane_ % 4 == 0 && first_channel_ == 0)
                parts_.ends[part[half]] = float2{top_[half], sum};
        });
        o_.each_pair([&](float e, float next, int half, int column) {
            const int c = column + own_column(lane_);
            if (part[half] >= 0 && c < value_channels_)
                *reinterpret_cast<float2*>(parts_.o + part[half] * call_.value_channels + first_channel_ + c) =
                    float2{e, next};
        });
    }

    // The warps' sums through shared memory, added in their order.
    __device__ void store_sums() {
        auto* const o = reinterpret_cast<float*>(shared_at(base_ + stages_at));  // [warps, 16, value_columns]
        float* const ends = o + warps * block_rows * value_columns;              // [warps, 16]: top, sum
        __syncthreads();
        const int own_row = warp_ * block_rows + lane_ / 4;
        for_rows([&](int half) {
            const int r = own_row + 8 * half;
            const float sum = sum_of_lanes<4>(sum_[half]);
            if (lane_ % 4 == 0) ends[2 * r] = top_[half], ends[2 * r + 1] = sum;
        });
        o_.each_pair([&](float e, float next, int half, int column) {
            *reinterpret_cast<float2*>(o + (own_row + 8 * half) * value_columns + column + own_column(lane_)) =
                float2{e, next};
        });
        __syncthreads();
        constexpr int at_once = threads / block_rows;  // threads of a row
        const int r = static_cast<int>(threadIdx.x) / at_once, row = first_row_ + r;
        if (row >= rows()) return;
        float top = -INFINITY, sum = 0, factor[warps];
        for (int w = 0; w < warps; ++w) top = fmaxf(top, ends[2 * (w * block_rows + r)]);
        const float base = top == -INFINITY ? 0.0F : top;
        unrolled<warps>([&](int w) {
            factor[w] = ptx::exp2((ends[2 * (w * block_rows + r)] - base) * log2_e);
            sum += factor[w] * ends[2 * (w * block_rows + r) + 1];
        });
        const Index part = parts_.at(call_, sequence_, head_of(row), query_of(row)) + split_;
        const int first = static_cast<int>(threadIdx.x) % at_once;
        if (first == 0 && first_channel_ == 0) parts_.ends[part] = float2{top, sum};
        for (int c = first; c < value_channels_; c += at_once) {
            float all = 0;
            unrolled<warps>([&](int w) { all += factor[w] * o[(w * block_rows + r) * value_columns + c]; });
            parts_.o[part * call_.value_channels + first_channel_ + c] = all;
        }
    }

    const AttentionCall& call_;
    const DecodeParts& parts_;
    AttentionSequence s_;
    int sequence_, split_ = static_cast<int>(blockIdx.y), warp_ = static_cast<int>(threadIdx.x) / 32,
                   lane_ = static_cast<int>(threadIdx.x) % 32;
    std::uint32_t base_ = ptx::shared_address(ptx::shared_memory());
    int first_channel_, first_row_, key_head_, value_channels_;
    Range all_{};  // keys that all rows see
    Acc<16, value_columns> o_{};
    float top_[2] = {-INFINITY, -INFINITY}, sum_[2] = {};
};

template <class D>
__global__ void __launch_bounds__(D::threads)
    decode_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ DecodeParts parts) {
    D(pass, parts).run();
}

// The ranges' sums of a query put together: o and lse. A warp has every eighth range, and a lane four channels.
constexpr int combine_warps = 8, most_splits = 256;
__global__ void __launch_bounds__(32 * combine_warps)
    combine_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ DecodeParts parts,
                   const __grid_constant__ ForwardOutputs out, float weight_scale) {
    const AttentionCall& call = pass.call;
    const AttentionSequence s = pass.sequences[static_cast<int>(blockIdx.y)];
    const int head = static_cast<int>(blockIdx.x), sequence = pass.sequences.first + static_cast<int>(blockIdx.y);
    const int i = parts.first + static_cast<int>(blockIdx.z), thread = static_cast<int>(threadIdx.x);
    if (i >= call.queries) return;
    const int warp = thread / 32, lane = thread % 32;
    auto* const of_warps = reinterpret_cast<float4*>(ptx::shared_memory());         // [combine_warps, 32]
    auto* const factors = reinterpret_cast<float*>(of_warps + 32 * combine_warps);  // [most_splits]
    const Index first = parts.at(call, sequence, head, i);

    float2 ends[most_splits / 32];
    float top = -INFINITY, sum = 0;
    unrolled<most_splits / 32>([&](int n) {
        const int p = lane + 32 * n;
        ends[n] = p < parts.splits ? parts.ends[first + p] : float2{-INFINITY, 0};
        top = fmaxf(top, ends[n].x);
    });
    top = maximum_of_warp(top);
    const bool seen = top != -INFINITY;
    unrolled<most_splits / 32>([&](int n) {
        const float factor = seen ? ptx::exp2((ends[n].x - top) * log2_e) : 0.0F;
        if (warp == 0) factors[lane + 32 * n] = factor;
        sum = fmaf(factor, ends[n].y, sum);
    });
    sum = sum_of_warp(sum) * weight_scale;
    const RowEnd end = end_of_row(call, head, top, sum, seen);
    const Range keys = visible_keys(call, s, i);
    bool nonfinite = is_lost(call, sum, seen, keys.begin < keys.end);
    if (thread == 0) store_row_end(call, out, s, head, i, end);

    const float scale = weight_scale * end.scale;
    for (int begin = 0; begin < call.value_channels; begin += 128) {
        __syncthreads();
        float4 o{};
        const int channel = begin + 4 * lane;
        if (channel < call.value_channels) {
            const float* from = parts.o + first * call.value_channels + channel;
#pragma unroll 4
            for (int p = warp; p < parts.splits; p += combine_warps) {
                const float4 x = *reinterpret_cast<const float4*>(from + p * Index(call.value_channels));
                const float f = factors[p];
                o.x = fmaf(f, x.x, o.x), o.y = fmaf(f, x.y, o.y), o.z = fmaf(f, x.z, o.z), o.w = fmaf(f, x.w, o.w);
            }
        }
        of_warps[32 * warp + lane] = o;
        __syncthreads();
        const int c = begin + thread;
        if (thread >= 128 || c >= call.value_channels) continue;
        float all = 0;
        for (int w = 0; w < combine_warps; ++w) all += reinterpret_cast<const float*>(of_warps)[128 * w + thread];
        nonfinite = nonfinite || !isfinite(all);
        if (out.o)
            store(out.o, s.batch * out.o.stride[0] + i * out.o.stride[1] + head * out.o.stride[2] + c * out.o.stride[3],
                  end.scale == 0 ? 0.0F : all * scale);
    }
    if (nonfinite) *out.redo.at({0, sequence, i / tile_rows, 0}, call.heads, head) = 1;
}

bool is_wide(const AttentionCall& call) {
    return std::max(call.channels, call.value_channels) > most_tile_channels;
}

}  // namespace

bool takes_decode(const AttentionCall& call, bool packed) {
    constexpr Index most_queries = 16, most_rows = 128, longest = Index(1) << 30;
    const DType type = call.q.dtype;
    const Index rows = call.queries * call.group;
    const bool few = call.queries <= most_queries && rows <= most_rows;
    return !packed && (type == DType::bf16 || type == DType::f16) && has_units(call.q, call.channels, type) &&
           has_units(call.k, call.channels, type) && has_units(call.v, call.value_channels, type) &&
           (few || is_wide(call)) && rows <= longest && call.channels <= most_forward_channels &&
           call.value_channels <= most_forward_channels;
}

DecodeParts take_decode_parts(const AttentionCall& call, Index sequences, MemoryParts& parts) {
    // Few tiles of rows: one block for each place of a large card, which begins once. Many: so many blocks that those
    // of the last turn do not matter.
    constexpr Index one_turn = 256, some_turns = 1024, few_tiles = 32, fewest_keys = 256;
    const Index tiles = (call.queries * call.group + least_rows - 1) / least_rows;
    const Index all = std::max<Index>(1, sequences * (call.heads / call.group) * tiles);
    DecodeParts p;
    const Index wanted = all <= few_tiles ? one_turn / all : blocks_of(some_turns, all);
    p.splits =
        static_cast<int>(std::clamp<Index>(wanted, 1, std::clamp<Index>(call.keys / fewest_keys, 1, most_splits)));
    // Many queries take turns.
    constexpr Index most_queries = 1024, most_sums = Index(1) << 27;
    const Index of_query = sequences * call.heads * p.splits;
    p.queries = static_cast<int>(
        std::min(call.queries,
                 std::clamp<Index>(most_sums / std::max<Index>(of_query * call.value_channels, 1), 16, most_queries)));
    const Index count = of_query * p.queries;
    p.o = parts.take<float>(count * call.value_channels);
    p.ends = parts.take<float2>(count);
    return p;
}

void launch_decode(const AttentionPass& pass, DecodeParts parts, const ForwardOutputs& out, cudaStream_t stream) {
    const auto& [call, sequences] = pass;
    const auto with = [&]<class T, int columns, int value_columns, bool many>() {
        const int slices = (call.value_channels + value_columns - 1) / value_columns;
        with_room<Decode<T, columns, value_columns, false, many>::shared_bytes>([&]<bool small>() {
            using D = Decode<T, columns, value_columns, small, many>;
            const Blocks blocks(call.heads / call.group * D::tiles(call, parts) * slices, parts.splits,
                                sequences.count);
            launch(decode_kernel<D>, {blocks, D::threads, D::shared_bytes}, stream, "attention of few queries", pass,
                   parts);
        });
    };
    const auto with_type = [&]<class T>(T) {
        const int channels = std::max(call.channels, call.value_channels);
        constexpr Index few_rows = 64;
        if (is_wide(call) && call.queries * call.group > few_rows) return with.template operator()<T, 576, 256, true>();
        if (channels <= 64) return with.template operator()<T, 64, 64, false>();
        if (channels <= 128) return with.template operator()<T, 128, 128, false>();
        if (call.channels <= 256) return with.template operator()<T, 256, 256, false>();
        with.template operator()<T, 576, 256, false>();
    };
    const bool is_f16 = call.q.dtype == DType::f16;
    check(
        cudaMemsetAsync(out.redo.of_group(sequences.first, call.heads), 0,
                        static_cast<std::size_t>(sequences.count * call.heads * out.redo.count) * sizeof(int), stream),
        "memory for the call");
    constexpr int shared_bytes = (most_splits + combine_warps * 128) * static_cast<int>(sizeof(float));
    for (; parts.first < call.queries; parts.first += parts.queries) {
        if (is_f16)
            with_type(__half());
        else
            with_type(Plane());
        launch(combine_kernel, {{call.heads, sequences.count, parts.queries}, 32 * combine_warps, shared_bytes}, stream,
               "sums of ranges of keys", pass, parts, out, is_f16 ? 0x1p-10F : 1.0F);
    }
}

}  // namespace softdelta::cuda

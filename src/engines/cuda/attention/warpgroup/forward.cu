// The forward kernel on warpgroups: a block has 128 queries of a head, 64 for each of two warpgroups, and a third
// copies tiles of keys. The scores of a tile are multiplied before the values of the tile before, and weighted while
// these are multiplied. Keys, bias and values have stages of their own: they become free at different times.
//
//     S = q kᵀ → scores          [64, N]
//     top' = max S, where that exceeds top by more than slack, else top     P = 2^(c·(S − top'))     sum = 2^(c·(top −
//     top'))·sum + ΣP o = 2^(c·(top − top'))·o + P v
//
// Where weights are bf16, top' may instead come from the sums: take_scores().
#include "engines/cuda/attention/launch_kernels.h"
#include "engines/cuda/attention/row_end.h"
#include "engines/cuda/attention/warpgroup/boxes.h"
#include "engines/cuda/attention/warpgroup/query_scores.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

namespace {

using namespace warpgroup;

constexpr int M = warpgroup_rows;

// Given where the copy engine copies.
struct ForwardBoxes {
    Boxes q, k, v, bias;
    bool given = false;
};

template <class T, int columns, Between between>
class WarpgroupForward {
    static constexpr bool added = between == Between::added, alone = is_bias_alone(between), scaled = added || alone;
    static constexpr int N = columns > 128 ? 64 : 128;
    static constexpr int parts = columns > 128 ? columns / 128 : 1, width = columns / parts;  // of a product's columns
    using QueryTile = Tile<T, columns, M>;
    using KeyTile = Tile<T, columns, N>;
    using AddedTile = Added<T, M, N>;
    static constexpr bool shares_bias = between == Between::shared_bias;
    static constexpr int stages = added || between == Between::bias || columns > 128 ? 2 : 3;
    using Stages = Ring<stages>;
    static constexpr int values_at = QueryTile::bytes() + stages * KeyTile::bytes();
    static constexpr int bias_at = values_at + stages * KeyTile::bytes();
    static constexpr int bias_bytes = shares_bias ? 2 * N : scaled ? AddedTile::Bias::bytes() : 0;
    static constexpr int bits_at = bias_at + stages * bias_bytes;
    static constexpr int counters_at = bits_at + (added ? AddedTile::bits_bytes : 0);

  public:
    static ForwardBoxes boxes_of(const AttentionCall& call, const AttentionSequences& sequences) {
        ForwardBoxes boxes;
        if (columns > 128 || added || !are_whole(call, sequences)) return boxes;
        boxes.q = row_boxes(call.q, call, call.queries, call.heads, call.channels, M);
        boxes.k = row_boxes(call.k, call, call.keys, call.heads / call.group, call.channels, N);
        boxes.v = row_boxes(call.v, call, call.keys, call.heads / call.group, call.value_channels, N);
        if (alone) boxes.bias = bias_boxes(call.bias, call, shares_bias ? 1 : M, shares_bias ? N : 64);
        boxes.given = boxes.q.given && boxes.k.given && boxes.v.given && (!alone || boxes.bias.given);
        return boxes;
    }
    static constexpr int sequence_at = counters_at + 3 * Stages::bytes + 8;
    static constexpr int shared_bytes = sequence_at + static_cast<int>(sizeof(AttentionSequence));

    __device__ WarpgroupForward(const AttentionCall& call, const AttentionSequences& sequences,
                                const ForwardBoxes& boxes, const ForwardOutputs& out)
        : call_(call),
          boxes_(boxes),
          out_(out),
          head_(static_cast<int>(blockIdx.x)),
          first_(static_cast<int>(gridDim.y - 1 - blockIdx.y) * M),  // the longest of a causal call first
          base_(ptx::shared_address(ptx::shared_memory())),
          s_(share_sequence(sequences, sequence_at)),
          redo_(out.redo.at(sequences.first + static_cast<int>(blockIdx.z), call.heads, head_, first_)) {}

    __device__ void run() {
        const int group = own_group();
        if (threadIdx.x == 0) {
            for (const Stages& all : {of_keys(), of_values(), of_bias()})
                all.start(boxes_.given ? 1 : 2 * group_threads, 4 * multipliers);
            ptx::start_counter(bits_free(), 4 * multipliers);
        }
        const Index last = min(Index(first_ + M), s_.q_count) - 1;
        if (first_ < s_.q_count)
            keys_ = Span(visible_keys(call_, s_, first_).begin / N * N, visible_keys(call_, s_, last).end);
        __syncthreads();
        if (group == 0) {
            ptx::release_registers<loader_registers>();
            if (!boxes_.given)
                load_tiles(static_cast<int>(threadIdx.x));
            else if (threadIdx.x == 0)
                load_boxes();
        } else {
            ptx::take_registers<multiplier_registers>();
            multiply_tiles(group - 1, static_cast<int>(threadIdx.x) % group_threads);
        }
    }

  private:
    __device__ Stages of_keys() const { return {base_ + counters_at}; }
    __device__ Stages of_values() const { return {base_ + counters_at + Stages::bytes}; }
    __device__ Stages of_bias() const { return {base_ + counters_at + 2 * Stages::bytes}; }  // and of the mask's bits
    __device__ std::uint32_t bits_free() const { return base_ + counters_at + 3 * Stages::bytes; }
    __device__ QueryTile queries() const { return {base_}; }
    __device__ KeyTile keys(int tile) const { return stage<KeyTile>(QueryTile::bytes(), tile); }
    __device__ KeyTile values(int tile) const { return stage<KeyTile>(values_at, tile); }
    __device__ typename AddedTile::Bias bias(int tile) const {
        return {base_ + static_cast<std::uint32_t>(bias_at + Stages::stage(tile) * bias_bytes)};
    }
    template <class Tile>
    __device__ Tile stage(int from, int tile) const {
        return {base_ + static_cast<std::uint32_t>(from + Stages::stage(tile) * Tile::bytes())};
    }
    __device__ bool adds_tiles() const { return added && (call_.bias || call_.mask); }

    __device__ void load_tiles(int thread) const {
        const int key_head = head_ / call_.group;
        const Rows q = Rows::of_queries(call_.q, s_, head_, call_.channels);
        const Rows k = Rows::of_keys(call_.k, call_, s_, key_head, call_.channels);
        const Rows v = Rows::of_keys(call_.v, call_, s_, key_head, call_.value_channels);
        const AddedTile extra(call_, s_, head_);
        if (keys_.begin >= keys_.end) return;
        const auto load_values = [&](int tile, int at) {
            if (!out_.o) return;
            of_values().acquire(tile);
            copy_rows(values(tile), v, at, thread);
            of_values().commit_copies(tile);
        };
        copy_rows(queries(), q, first_, thread);
        int tile = 0;
        for (int at = keys_.begin; at < keys_.end; at += N, ++tile) {  // in the order in which stages become free
            typename AddedTile::Bits bits{};
            if (added && call_.mask) bits = extra.load_bits(first_, at, thread);
            of_keys().acquire(tile);
            copy_rows(keys(tile), k, at, thread);
            if (between == Between::bias) extra.copy_bias(bias(tile), first_, at, thread);
            if (shares_bias) extra.copy_shared_bias(bias(tile).base, at, thread);
            of_keys().commit_copies(tile);
            if (tile > 0) load_values(tile - 1, at - N);
            if (!adds_tiles()) continue;
            of_bias().acquire(tile);
            if (call_.bias) extra.copy_bias(bias(tile), first_, at, thread);
            if (call_.mask) {
                ptx::wait(bits_free(), (tile & 1) ^ 1);
                extra.store_bits(base_ + bits_at, bits, thread);
            }
            of_bias().commit_copies(tile);
        }
        load_values(tile - 1, keys_.begin + (tile - 1) * N);
    }

    // The same by the copy engine, for one thread.
    __device__ void load_boxes() const {
        if (keys_.begin >= keys_.end) return;
        const int key_head = head_ / call_.group;
        const auto load_values = [&](int tile, int at) {
            if (!out_.o) return;
            const std::uint32_t counter = of_values().full(tile);
            of_values().acquire(tile);
            arrive_expecting(counter, KeyTile::bytes());
            copy_rows(values(tile), boxes_.v, call_.v, at, key_head, s_.key_batch, counter);
        };
        int tile = 0;
        for (int at = keys_.begin; at < keys_.end; at += N, ++tile) {
            const std::uint32_t counter = of_keys().full(tile);
            of_keys().acquire(tile);
            arrive_expecting(counter, KeyTile::bytes() + bias_bytes + (tile == 0 ? QueryTile::bytes() : 0));
            if (tile == 0) copy_rows(queries(), boxes_.q, call_.q, first_, head_, s_.batch, counter);
            copy_rows(keys(tile), boxes_.k, call_.k, at, key_head, s_.key_batch, counter);
            if constexpr (shares_bias)
                copy_box(bias(tile).base, boxes_.bias, at, 0, coordinate(call_.bias, 1, head_ / call_.bias_group),
                         coordinate(call_.bias, 0, s_.mask_batch), counter);
            else if constexpr (alone)
                copy_bias(bias(tile), boxes_.bias, call_, first_, at, head_, s_.mask_batch, counter);
            if (tile > 0) load_values(tile - 1, at - N);
        }
        load_values(tile - 1, keys_.begin + (tile - 1) * N);
    }

    __device__ void multiply_tiles(int group, int thread) {
        const int warp = own_warp(), lane = thread % 32;
        const int row = 64 * group + 16 * warp;
        row_ = row + lane / 4;
        const QueryScores<T, M, N, added ? Between::added : Between::nothing> scores(call_, s_, head_, first_, row,
                                                                                     lane);
        if (keys_.begin < keys_.end) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                seen_keys_[half] = Span(visible_keys(call_, s_, first_ + row_ + 8 * half));
            const Span all(visible_keys(call_, s_, first_ + 64 * group + 63).begin,
                           visible_keys(call_, s_, first_ + 64 * group).end);
            float x[N / 8][4], factor[2];
            std::uint32_t p[N / 16][4];
            const auto weigh = [&]<int running>(int tile) {  // x becomes weights, once its products are there
                const int at = keys_.begin + tile * N;
                if constexpr (alone) {
                    LoneBias<T, N, shares_bias> own;
                    if constexpr (shares_bias)
                        own.load_shared(bias(tile).base, lane);
                    else
                        own.load(bias(tile), row, lane);
                    ptx::wait_for_products<running>(x);
                    of_keys().release(tile, lane);
#pragma unroll
                    for (int i = 0; i < N / 8; ++i)
#pragma unroll
                        for (int m = 0; m < 4; ++m) {
                            const float2 b = own.at(i, m / 2);
                            x[i][m] = fmaf(x[i][m], call_.scale, m % 2 == 0 ? b.x : b.y);
                        }
                } else {
                    ptx::wait_for_products<running>(x);
                    of_keys().release(tile, lane);
                }
                if (adds_tiles()) of_bias().wait(tile);
                if (!alone) scores.take(bias(tile), base_ + bits_at, bits_free(), at, x);
                if (adds_tiles()) of_bias().release(tile, lane);
                if (at < all.begin || at + N > all.end) hide<N>(seen_keys_, at, lane, x);
                take_scores(x, factor);
            };
            take_first_turn(group);
            multiply_scores(0, group, x);
            give_turn(group);
            weigh.template operator()<0>(0);
            to_left<T, N / 8>(p, x);
            int tile = 1;
            for (int at = keys_.begin + N; at < keys_.end; at += N, ++tile) {
                take_turn(group);
                multiply_scores(tile, group, x);
                add_values(tile - 1, p);
                give_turn(group);
                weigh.template operator()<1>(tile);
                finish_values(tile - 1, lane);
                shrink(factor);
                to_left<T, N / 8>(p, x);
            }
            add_values(tile - 1, p);
            finish_values(tile - 1, lane);
        }
        const bool odd = ptx::any(1, 128 * multipliers, finish(group, warp, lane));
        if (group == 0 && thread == 0) *redo_ = odd ? 1 : 0;
    }

    __device__ static float (&part(float (&o)[columns / 8][4], int i))[width / 8][4] {
        return *reinterpret_cast<float(*)[width / 8][4]>(&o[i * (width / 8)]);
    }

    // o += P v of a tile, in the background, and its end.
    __device__ void add_values(int tile, const std::uint32_t (&p)[N / 16][4]) {
        if (!out_.o) return ptx::commit_products();
        of_values().wait_for_products(tile, boxes_.given);
        ptx::begin_products(o_);
#pragma unroll
        for (int k = 0; k < N / 16; ++k)
#pragma unroll
            for (int i = 0; i < parts; ++i)
                ptx::warpgroup_multiply_mn_major(part(o_, i), p[k], values(tile).mn_major_operand(k, i * width), true,
                                                 T());
        ptx::commit_products();
    }
    __device__ void finish_values(int tile, int lane) {
        ptx::wait_for_products<0>(o_);
        of_values().release(tile, lane);
    }
    __device__ void shrink(const float (&factor)[2]) {
        if (!__any_sync(0xffffffffu, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
        for (int i = 0; i < columns / 8; ++i)
#pragma unroll
            for (int m = 0; m < 4; ++m) o_[i][m] *= factor[m / 2];
    }

    // x = q kᵀ of a tile, in the background.
    __device__ void multiply_scores(int tile, int group, float (&x)[N / 8][4]) const {
        of_keys().wait_for_products(tile, boxes_.given);
        ptx::begin_products(x);
        multiply_rows(x, queries(), group, keys(tile));
    }

    // Scores become weights of the sums so far; `factor` is what older sums shrink by. Weights must fit T. Those of f16
    // are at most 2^slack: top_ follows the maxima. Those of bf16 may be as large as any f32: once top_ is known, and
    // near 0, it follows the sums, which are there anyway. A row that climbs by more than 2^100 from a tile to the next
    // may overflow: then it is `odd`, and another kernel makes it.
    __device__ void take_scores(float (&x)[N / 8][4], float (&factor)[2]) {
        float c = is_scaled(call_, scaled) ? log2_e : call_.scale * log2_e;
        float base[2];
        factor[0] = factor[1] = 1;
        if (follows_sums_) {
            follow_sums(c, factor);
            base[0] = top_[0], base[1] = top_[1];
        } else {
            follow_maxima(x, c, factor);
#pragma unroll
            for (int half = 0; half < 2; ++half) base[half] = top_[half] == -INFINITY ? 0.0F : top_[half];
            // c times a huge bias has lost the difference: subtracted first.
            constexpr float huge = 1024;
            if (scaled && __any_sync(0xffffffffu, fabsf(base[0]) > huge || fabsf(base[1]) > huge)) {
#pragma unroll
                for (int n = 0; n < N / 8; ++n)
#pragma unroll
                    for (int m = 0; m < 4; ++m) x[n][m] = (x[n][m] - base[m / 2]) * c;
                base[0] = base[1] = 0, c = 1;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) base[half] = base[half] * c - weight_exponent<T>;
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                x[n][m] = ptx::exp2(fmaf(x[n][m], c, -base[m / 2]));
                sum_[m / 2] += x[n][m];
            }
    }

    // top_ changes only when a weight would exceed 2^slack, or a sum 2^24: so o is seldom multiplied.
    __device__ void follow_maxima(const float (&x)[N / 8][4], float c, float (&factor)[2]) {
        constexpr float slack = type_of<T> == DType::f16 ? 5 : 8;
        static_assert(type_of<T> != DType::f16 || slack + weight_exponent<T> < 16, "2^16 is beyond f16");
        float top[2], tops[2][4];  // four maxima of a row side by side: a longer chain waits for itself
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                float& of = tops[m / 2][2 * (n % 2) + m % 2];
                of = n < 2 ? x[n][m] : fmaxf(of, x[n][m]);
            }
        bool larger = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float(&four)[4] = tops[half];
            top[half] = fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3]));
            larger = larger || (top[half] - top_[half]) * c > slack;
        }
        if (!__any_sync(0xffffffffu, larger)) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            top[half] = maximum_of_lanes<4>(top[half]);
            if ((top[half] - top_[half]) * c > slack) raise(half, top[half], c, factor);
        }
        choose_what_to_follow(c);
    }
    __device__ void follow_sums(float c, float (&factor)[2]) {
        constexpr float large = 1 << 24;
        if (!__any_sync(0xffffffffu, sum_[0] > large || sum_[1] > large)) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = sum_of_lanes<4>(sum_[half]);
            if (sum > large) raise(half, top_[half] + log2f(sum) / c, c, factor);
        }
        choose_what_to_follow(c);
    }
    __device__ void raise(int half, float top, float c, float (&factor)[2]) {
        factor[half] = ptx::exp2((top_[half] - top) * c);
        top_[half] = top;
        sum_[half] *= factor[half];
    }
    __device__ void choose_what_to_follow(float c) {
        constexpr float small = 64;
        const bool far = !(fabsf(top_[0]) * c <= small && fabsf(top_[1]) * c <= small);
        follows_sums_ = type_of<T> == DType::bf16 && !__any_sync(0xffffffffu, far);
    }

    // Whether a number is not finite.
    __device__ bool finish(int group, int warp, int lane) {
        bool odd = false;
        float scale[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = sum_of_lanes<4>(weight_unit<T> * sum_[half]);
            const bool seen = top_[half] != -INFINITY;
            const RowEnd end =
                end_of_row(call_, head_, is_scaled(call_, scaled) ? top_[half] : top_[half] * call_.scale, sum, seen);
            scale[half] = weight_unit<T> * end.scale;
            const int i = first_ + row_ + 8 * half;
            if (i >= s_.q_count) continue;
            // The sum is at least about 1, unless a score times c has lost digits. Without a key that counts although
            // one is visible, all scores are −∞.
            odd = odd || !isfinite(sum) || (seen && sum < 0.5F) ||
                  (!seen && !call_.mask && !call_.bias && seen_keys_[half].begin < seen_keys_[half].end);
            if (lane % 4 == 0) store_row_end(call_, out_, s_, head_, i, end);
#pragma unroll
            for (int n = 0; n < columns / 8; ++n)
                odd = odd || !isfinite(o_[n][2 * half]) || !isfinite(o_[n][2 * half + 1]);
        }
        const int first = first_ + 64 * group + 16 * warp;
        if (out_.o && first < s_.q_count)
            store_rows<T, M, columns>(
                queries(), 64 * group + 16 * warp, o_, out_.o,
                s_.batch * out_.o.stride[0] + (s_.q_begin + first) * out_.o.stride[1] + head_ * out_.o.stride[2],
                s_.q_count - first, call_.value_channels, lane,
                [&scale](int half, float x) { return scale[half] == 0 ? 0.0F : x * scale[half]; });
        return odd;
    }

    const AttentionCall& call_;
    const ForwardBoxes& boxes_;
    const ForwardOutputs& out_;
    int head_, first_;
    std::uint32_t base_;
    const AttentionSequence& s_;
    int* redo_;
    Span keys_, seen_keys_[2];
    int row_ = 0;
    float o_[columns / 8][4] = {};
    float top_[2] = {-INFINITY, -INFINITY}, sum_[2] = {};  // the lane's part of a sum
    bool follows_sums_ = false;
};

template <class T, int columns, Between between>
__global__ void __launch_bounds__(block_threads, 1)
    warpgroup_forward_kernel(const __grid_constant__ AttentionCall call,
                             const __grid_constant__ AttentionSequences sequences,
                             const __grid_constant__ ForwardBoxes boxes, const __grid_constant__ ForwardOutputs out) {
    if constexpr (ptx::has_warpgroups) {
        follow_launch_before();
        WarpgroupForward<T, columns, between>(call, sequences, boxes, out).run();
    }
}

template <class T, int columns, Between between>
void launch_for(const AttentionCall& call, const AttentionSequences& sequences, const ForwardOutputs& out,
                cudaStream_t stream) {
    const dim3 blocks(static_cast<unsigned>(call.heads), static_cast<unsigned>((call.queries + M - 1) / M),
                      static_cast<unsigned>(sequences.count));
    using Forward = WarpgroupForward<T, columns, between>;
    launch(warpgroup_forward_kernel<T, columns, between>, {blocks, block_threads, Forward::shared_bytes}, stream,
           "attention forward on warpgroups", call, sequences, Forward::boxes_of(call, sequences), out);
}

}  // namespace

void launch_warpgroup_forward(const AttentionCall& call, const AttentionSequences& sequences, const ForwardOutputs& out,
                              cudaStream_t stream) {
    with_tiles<warpgroup_forward_channels>(call, [&]<class T, int columns>() {
        with_between(between_of(call), [&]<Between between>() {  // a soft cap comes with any of them
            if constexpr (between != Between::cap) launch_for<T, columns, between>(call, sequences, out, stream);
        });
    });
}

}  // namespace softdelta::cuda

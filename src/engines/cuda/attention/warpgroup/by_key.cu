// dk, dv, a bias's gradient and ds on warpgroups: a block has 128 keys of a key head, 64 for each of two consumers, and
// the producer copies tiles of queries, head by head. One file: a step's products hand their registers on.
//
//     Sᵀ = k qᵀ       Pᵀ = 2^(c·Sᵀ − lse)            dv += Pᵀ do
//     dPᵀ = v doᵀ     dsᵀ = Pᵀ∘(dPᵀ − D)             dk += scale·dsᵀ q          dbias = ds, or its sum over queries
#include "engines/cuda/attention/warpgroup/gradients.h"
#include "engines/cuda/attention/warpgroup/score_gradient.h"
#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

using namespace warpgroup;

constexpr int M = warpgroup_rows;

// Where sums of both fill the registers, dk, with dbias, and dv are made by kernels of their own.
enum class Of { both, dk, dv };

// A block's shared memory: k, v, then stages of q, do, bias and ds, bits of the mask, terms of rows; mbarriers; the
// sequence. keeps: ds is stored though there is no bias in whose place it could lie.
template <class T, int columns, Between between, Of made, bool keeps>
struct KeyTiles {
    static constexpr int N = columns > 128 ? 32 : 64, stages = columns > 128 ? 2 : 3;
    static constexpr bool makes_dk = made != Of::dv;
    static constexpr bool added = between == Between::added, capped = between == Between::cap;
    static constexpr bool alone = is_bias_alone(between), biased = added || alone, masked = added || capped;
    static constexpr bool has_tiles = added || between == Between::bias;  // of bias
    static constexpr bool holds_tiles = has_tiles || keeps;               // and of ds
    using Key = Tile<T, columns, M>;
    using Query = Tile<T, columns, N>;
    using AddedTile = Added<T, N, M>;
    using Bias = typename AddedTile::Bias;
    using Stages = Ring<stages>;
    static constexpr int bias_at = 2 * Query::bytes(), bits_at = bias_at + (holds_tiles ? Bias::bytes() : 0);
    static constexpr int terms_at = bits_at + (masked ? AddedTile::bits_bytes : 0);
    static constexpr int stage_bytes = (terms_at + 3 * N * 4 + 1023) / 1024 * 1024;
    static constexpr int tile_bytes = 2 * Query::bytes() + (has_tiles ? Bias::bytes() : 0);  // copied
    static constexpr int own_bytes = (makes_dk ? 2 : 1) * Key::bytes();
    static_assert(tile_bytes % 16 == 0 && own_bytes % 16 == 0, "copies are whole units");
    static_assert(!(biased && capped), "a cap leaves no bias apart");
    static constexpr int barriers_at = 2 * Key::bytes() + stages * stage_bytes;
    static constexpr int sequence_at = barriers_at + Stages::bytes + 8 * stages;
    static constexpr int bytes = sequence_at + static_cast<int>(sizeof(AttentionSequence));

    std::uint32_t base;

    __device__ Key k() const { return {base}; }
    __device__ Key v() const { return {base + Key::bytes()}; }
    __device__ std::uint32_t stage(int tile) const {
        return base + static_cast<std::uint32_t>(2 * Key::bytes() + Stages::stage(tile) * stage_bytes);
    }
    __device__ Query q(int tile) const { return {stage(tile)}; }
    __device__ Query d_o(int tile) const { return {stage(tile) + Query::bytes()}; }
    __device__ Bias bias(int tile) const { return {stage(tile) + bias_at}; }
    __device__ std::uint32_t bits(int tile) const { return stage(tile) + bits_at; }
    __device__ float* terms(int tile) const { return reinterpret_cast<float*>(shared_at(stage(tile) + terms_at)); }
    __device__ Stages ring() const { return {base + barriers_at}; }
    // Counts the warps that have made their part of a tile of ds.
    __device__ std::uint32_t ds_made(int tile) const {
        return base + static_cast<std::uint32_t>(barriers_at + Stages::bytes + 8 * Stages::stage(tile));
    }
};

// What the roles know of their block.
template <class T, int columns, Between between, Of made, bool keeps, bool is_far>
struct KeyBlock {
    static constexpr bool far = is_far;  // rows of queries may be: the tops of their scores go first
    static_assert(!far || between == Between::added, "one kernel for all of them");
    using Tiles = KeyTiles<T, columns, between, made, keeps>;

    Tiles m;
    const AttentionCall& call;
    const OperandBoxes& boxes;
    const Gradients& grad;
    const AttentionSequences& sequences;
    const AttentionSequence& s;
    int key_head, first;
    Span queries;

    __device__ ScoreGradient<T, typename Tiles::Bias> score_gradient() const {
        return {grad, boxes.ds, static_cast<int>(s.mask_batch), first};
    }
    __device__ bool stores() const { return keeps || (Tiles::makes_dk && Tiles::has_tiles && grad.ds); }
    __device__ bool stores_boxes() const { return stores() && boxes.ds.given; }

    __device__ Span find_queries() const {
        if (first >= s.k_count) return {};
        const Span seeing(seeing_queries(call, s, first).begin / Tiles::N * Tiles::N,
                          seeing_queries(call, s, min(Index(first + M), s.k_count) - 1).end);
        if (seeing.begin >= seeing.end) return {};
        if (!stores() || grad.ds.is_dbias) return seeing;
        // What the kernel of dq reads.
        return Span(seeing.begin / M * M, min(Index((seeing.end + M - 1) / M * M), s.q_count));
    }
    template <class Take>
    __device__ void each_head(const Take& take) const {
        for (int head = key_head * call.group; head < (key_head + 1) * call.group; ++head) take(head);
    }
    template <class Take>
    __device__ void each_tile(const Take& take) const {
        int tile = 0;
        each_head([&](int head) {
            for (int at = queries.begin; at < queries.end; at += Tiles::N, ++tile) take(tile, head, at);
        });
    }
};

template <class Block>
struct KeyProducer {
    using Tiles = typename Block::Tiles;
    static constexpr int N = Tiles::N;

    const Block& b;

    // By TMA for N threads, which bring terms of rows; by cp.async for the warpgroup.
    template <bool by_tma, class T>
    __device__ void run(int thread) const {
        const Tiles& m = b.m;
        const AttentionCall& call = b.call;
        const auto own = [&](const Boxes& all, int which) -> const Boxes& {
            return own_boxes<by_tma>(all, b.sequences, b.s, which);
        };
        const Boxes &q_boxes = own(b.boxes.q, 0), &d_o_boxes = own(b.boxes.d_o, 3);
        const auto k = rows_of_keys<by_tma>(call.k, own(b.boxes.k, 1), call, b.s, b.key_head, call.channels);
        const auto v = rows_of_keys<by_tma>(call.v, own(b.boxes.v, 2), call, b.s, b.key_head, call.value_channels);
        const auto bring_own = [&](std::uint32_t full) {
            k.bring(m.k(), b.first, thread, full);
            if (Tiles::makes_dk) v.bring(m.v(), b.first, thread, full);
        };
        if (!by_tma && b.queries.begin < b.queries.end) bring_own(0);
        b.each_tile([&](int tile, int head, int at) {
            const auto q = rows_of_queries<by_tma>(call.q, q_boxes, b.s, head, call.channels);
            const auto d_o = rows_of_queries<by_tma>(b.grad.d_o, d_o_boxes, b.s, head, call.value_channels);
            const typename Tiles::AddedTile extra(call, b.s, head);
            const RowTerm term =
                thread < N ? term_of<T>(call, b.grad.rows, b.s, head, at + thread, Block::far) : RowTerm{};
            typename Tiles::AddedTile::Bits bits{};
            if (Tiles::masked && call.mask) bits = extra.load_bits(at, b.first, thread);
            m.ring().acquire(tile);
            const std::uint32_t full = m.ring().full(tile);
            if (!by_tma || thread == 0) {
                if (by_tma && tile == 0) bring_own(full);
                q.bring(m.q(tile), at, thread, full);
                d_o.bring(m.d_o(tile), at, thread, full);
                if constexpr (Tiles::has_tiles) {
                    if (call.bias)
                        extra.template bring_bias<by_tma>(m.bias(tile), b.boxes.bias, at, b.first, thread, full);
                }
            }
            if (Tiles::masked && call.mask) extra.store_bits(m.bits(tile), bits, thread);
            if (thread < N) {
                m.terms(tile)[thread] = term.lse, m.terms(tile)[N + thread] = term.D;
                if (Block::far) m.terms(tile)[2 * N + thread] = term.top;
            }
            if constexpr (!by_tma)
                m.ring().commit_copies(tile);
            else if (thread > 0)
                ptx::arrive(full);
            else
                arrive_expecting(full, Tiles::tile_bytes + (tile == 0 ? Tiles::own_bytes : 0));
        });
    }
    // By one thread: a stage is free when TMA has read what it stores of it, too.
    __device__ void store_tiles() const {
        b.each_tile([&](int tile, int head, int at) {
            ptx::wait(b.m.ds_made(tile), tile / Tiles::stages & 1);
            b.score_gradient().store_boxes(b.m.bias(tile), head, at);
            wait_for_stored_boxes();
            b.m.ring().release_by_one(tile);
        });
    }
    // dbias where no tile is.
    __device__ void clear_unseen(int thread, int threads) const {
        if (!Tiles::has_tiles || !b.stores() || !b.grad.ds.is_dbias) return;
        const Index end = min(Index((b.queries.end + N - 1) / N * N), b.grad.ds.queries);
        b.each_head([&](int head) {
            b.score_gradient().clear(head, 0, b.queries.begin, thread, threads);
            b.score_gradient().clear(head, end, b.grad.ds.queries, thread, threads);
        });
    }
};

template <class T, int columns, Between between, Of made, bool keeps, bool far>
struct KeyConsumer {
    using Block = KeyBlock<T, columns, between, made, keeps, far>;
    using Tiles = typename Block::Tiles;
    static constexpr int N = Tiles::N;
    static constexpr bool makes_dk = Tiles::makes_dk, makes_dv = made != Of::dk, capped = Tiles::capped;

    const Block& b;
    int warpgroup, warp, lane;
    Acc<64, makes_dk ? columns : 8> dk{};
    Acc<64, makes_dv ? columns : 8> dv{};

    __device__ int row() const { return 64 * warpgroup + 16 * warp; }

    // A turn: dv and dk of a tile, and scores and dP of the next.
    __device__ void run() {
        const Tiles& m = b.m;
        const float c = exponent_scale(b.call, Tiles::masked);
        const Mask mask = Mask::of_keys(b.call, b.s, b.first + 64 * warpgroup, 16 * warp + lane / 4);
        const bool multiplies = b.queries.begin < b.queries.end;
        if (multiplies) take_first_turn(warpgroup);
        int tile = 0;
        b.each_head([&](int head) {
            double sum[2] = {};
            float key_bias[2];  // times log2(e)
            bool hidden[2] = {};
            if constexpr (between == Between::shared_bias)
                for_rows([&](int half) {
                    key_bias[half] = bias_of_key(head, b.first + row() + lane / 4 + 8 * half);
                    hidden[half] = key_bias[half] == -INFINITY;  // though products are no numbers
                });
            const bool any_hidden = __any_sync(0xffffffffu, hidden[0] || hidden[1]);
            const Scores<T, M, N, between, true> scores(b.call, b.s, head, b.first, row(), lane);
            for (int at = b.queries.begin; at < b.queries.end; at += N, ++tile) {
                m.ring().wait_for_products(tile, b.boxes.given);
                Acc<64, N> p, ds;
                ptx::begin_products(p.x, ds.x);
                multiply_transposed(p, m.k(), 64 * warpgroup, m.q(tile));
                ptx::commit_products();
                if (makes_dk) {
                    multiply_transposed(ds, m.v(), 64 * warpgroup, m.d_o(tile));  // dP
                    ptx::commit_products();
                }
                give_turn(warpgroup);
                LoneBias<T, N, false> bias;
                if constexpr (between == Between::bias) bias.fetch_transposed(m.bias(tile), row(), lane);
                ptx::wait_for_products<makes_dk ? 1 : 0>(p.x);
                if (capped) keep_from_hiding(p);
                scores.take(m.bias(tile), m.bits(tile), at, p);
                const float* const terms = m.terms(tile) + own_column(lane);  // lse, D
                const auto two = [terms](int i) { return *reinterpret_cast<const float2*>(terms + i); };
                if constexpr (far) {
                    p.each_pair([&](float& e, float& next, int, int column) {
                        e = far_exponent(e, 1, 0, two(2 * N + column).x, two(column).x);
                        next = far_exponent(next, 1, 0, two(2 * N + column).y, two(column).y);
                    });
                } else if constexpr (!capped) {
                    p.each_pair([&](float& e, float& next, int half, int column) {
                        float2 from{-two(column).x, -two(column).y};
                        if constexpr (between == Between::bias) {
                            const float2 of = bias.at(half, column);
                            from = {fmaf(of.x, log2_e, from.x), fmaf(of.y, log2_e, from.y)};
                        } else if constexpr (between == Between::shared_bias) {
                            from = {key_bias[half] + from.x, key_bias[half] + from.y};
                            if (hidden[half]) e = next = 0;
                        }
                        e = fmaf(e, c, from.x);
                        next = fmaf(next, c, from.y);
                    });
                }
                Left<T, N> weights;
                const bool hides = mask.hides<N>(at);
                if constexpr (capped) {
                    if (hides) mask.hide(p, at, lane);
                    p.each_pair([&](float& e, float& next, int half, int column) {
                        const float first = take_capped<T>(e, b.call, two(column).x);
                        const float second = take_capped<T>(next, b.call, two(column).y);
                        weights.pair(half, column) = ptx::pack(first, second, T());
                    });
                } else {
                    p.each([](float& e, int, int) { e = ptx::exp2(e); });
                    // Afterwards: where code branches, the compiler leaves exponentials before the wait for dP.
                    if (hides) mask.hide(p, at, lane, 0);
                    p.pack(weights);
                }
                Left<T, N> d_weights;
                if constexpr (makes_dk) {
                    ptx::wait_for_products<0>(ds.x);
                    to_ds<T>(ds, p, Tiles::masked, [&](int, int column) { return two(N + column); });
                    if (between == Between::shared_bias && any_hidden)
                        ds.each([&](float& e, int half, int) {
                            if (hidden[half]) e = 0;  // though dP is no number
                        });
                    if (Tiles::biased && sums_queries(b.grad)) {
                        float part[2] = {};
                        ds.each_pair([&](float e, float next, int half, int) { part[half] += e + next; });
                        for_rows([&](int half) { sum[half] += static_cast<double>(ds_scale<T> * part[half]); });
                    }
                    ds.pack(d_weights);
                }
                take_turn(warpgroup);
                ptx::begin_products(dv.x, dk.x);
                if constexpr (makes_dv) add_product(dv, weights, m.d_o(tile));
                if constexpr (makes_dk) add_product(dk, d_weights, m.q(tile));
                ptx::commit_products();
                if (b.stores()) store_scores(tile, head, at, ds, d_weights);
                ptx::wait_for_products<0>(dv.x);
                ptx::keep_registers(dk.x);
                m.ring().release(tile, lane);
            }
            if (makes_dk && Tiles::biased && sums_queries(b.grad)) b.score_gradient().store_sum(head, row(), lane, sum);
        });
        if (multiplies) give_turn(warpgroup);
    }

    // A bias that all queries share, times log2(e).
    __device__ float bias_of_key(int head, Index key) const {
        const Index* stride = b.call.bias.stride;
        if (key >= b.s.k_count) return 0;
        return log2_e *
               load(b.call.bias, b.s.mask_batch * stride[0] + head / b.call.bias_group * stride[1] + key * stride[3]);
    }
    __device__ void store_scores(int tile, int head, int at, Acc<64, N>& ds, const Left<T, N>& scaled) const {
        const auto store = [&](const Left<T, N>& x) {
            b.score_gradient().store(b.m.bias(tile), b.m.ds_made(tile), head, at, warpgroup, warp, lane, x.x);
        };
        if constexpr (type_of<T> == DType::f16) {
            Left<T, N> of_ds;
            ds.scale(ds_scale<T>);
            ds.pack(of_ds);
            store(of_ds);
        } else {
            store(scaled);
        }
    }

    __device__ void finish() {
        bool nonfinite = false, used[2];
        for_rows([&](int half) {
            used[half] = b.first + row() + lane / 4 + 8 * half < b.s.k_count;
            if (makes_dk) nonfinite = nonfinite || (used[half] && !dk.row_is_finite(half));
            if (makes_dv) nonfinite = nonfinite || (used[half] && !dv.row_is_finite(half));
        });
        nonfinite = any_consumer(nonfinite);
        if (threadIdx.x == warpgroup_threads) {  // after dv comes dk
            int& redo = *b.grad.redo_keys.at(b.sequences.tile_of_block(b.sequences.of_keys, false),
                                             b.call.heads / b.call.group, b.key_head);
            redo = nonfinite || (made == Of::dk && redo != 0) ? 1 : 0;
        }
        // Rows of a cache that no sequence uses have no gradient.
        const Index first = b.first + row(), rows = b.sequences.of_keys ? b.s.k_count : b.call.keys;
        if (first >= rows) return;
        const auto store = [&](const View& to, const typename Tiles::Key& tile, auto& sum, int channels, float factor) {
            if (!to) return;
            store_rows(tile, row(), sum, to, key_row(to, b.s, first, b.key_head), rows - first, channels, lane,
                       [&](int half, float x) { return used[half] ? factor * x : 0.0F; });
        };
        if constexpr (makes_dk) store(b.grad.dk, b.m.k(), dk, b.call.channels, gradient_scale<T>(b.call));
        if constexpr (makes_dv) store(b.grad.dv, b.m.v(), dv, b.call.value_channels, weight_scale<T>);
    }
};

template <class T, int columns, Between between, Of made, bool keeps, bool far>
__global__ void __launch_bounds__(block_threads, 1)
    warpgroup_key_kernel(const __grid_constant__ AttentionPass pass, const __grid_constant__ Gradients grad,
                         const __grid_constant__ OperandBoxes boxes) {
    if constexpr (ptx::has_warpgroups) {
        const auto& [call, sequences] = pass;
        using Block = KeyBlock<T, columns, between, made, keeps, far>;
        using Tiles = typename Block::Tiles;
        ptx::follow_launch_before();
        const int key_head = grad.first_head / call.group + static_cast<int>(blockIdx.x);
        const RowTile at = sequences.tile_of_block(sequences.of_keys, false);
        if (!at) return grad.redo_keys.clear(at, call.heads / call.group, key_head);
        // Whether a row of the key head's queries is far says which of two kernels takes it.
        const int number = (sequences.first + at.i) * (call.heads / call.group) + key_head;
        if (between != Between::cap && (grad.redo_keys.any[number] != 0) != far) return;
        take_own_boxes(boxes.given, sequences, at.i);
        const AttentionSequence& s = share_sequence(sequences, at.i, Tiles::sequence_at);
        Block block(Tiles{ptx::shared_address(ptx::shared_memory())}, call, boxes, grad, sequences, s, key_head,
                    static_cast<int>(at.first));
        if (threadIdx.x == 0) {
            block.m.ring().start(boxes.given ? Tiles::N : 2 * warpgroup_threads,
                                 4 * consumers + (block.stores_boxes() ? 1 : 0));
            for (int i = 0; i < Tiles::stages; ++i) ptx::start_counter(block.m.ds_made(i), 4 * consumers);
        }
        block.queries = block.find_queries();
        __syncthreads();
        const auto produce = [&] {
            const int thread = static_cast<int>(threadIdx.x);
            const KeyProducer<Block> producer{block};
            if (!boxes.given) {
                producer.template run<false, T>(thread);
                producer.clear_unseen(thread, warpgroup_threads);
            } else if (thread >= Tiles::N + 32) {
                producer.clear_unseen(thread % 32, 32);
            } else if (thread >= Tiles::N) {
                if (thread == Tiles::N && block.stores_boxes()) producer.store_tiles();
            } else if constexpr (!Tiles::masked) {
                producer.template run<true, T>(thread);
            }
        };
        const auto consume = [&](int warpgroup, int warp, int lane) {
            KeyConsumer<T, columns, between, made, keeps, far> consumer{block, warpgroup, warp, lane};
            consumer.run();
            consumer.finish();
        };
        share_roles(produce, consume);
    }
}

template <class T, int columns, Between between, Of made, bool keeps = false, bool far = false>
void launch_one(const AttentionPass& pass, const Gradients& grad, cudaStream_t stream) {
    const Blocks blocks = pass.key_tiles(grad.heads / pass.call.group);
    using Tiles = KeyTiles<T, columns, between, made, keeps>;
    OperandBoxes boxes;
    if (columns <= 128 && !Tiles::masked) boxes = OperandBoxes::of(pass, grad.d_o, Tiles::N, M);
    if (Tiles::has_tiles) boxes.add_bias(pass, Tiles::N, 64);
    if (Tiles::biased && pass.sequences.table != nullptr) boxes.given = false;
    if (Tiles::holds_tiles && grad.ds && boxes.given) boxes.ds = score_boxes(grad.ds, Tiles::N);
    boxes.cut(pass, grad.d_o, stream);
    launch(warpgroup_key_kernel<T, columns, between, made, keeps, far>, {blocks, block_threads, Tiles::bytes, true},
           stream, "attention's gradients of k and v on warpgroups", pass, grad, boxes);
}

template <class T, int columns, Between between, bool far = false>
void launch_for(const AttentionPass& pass, const Gradients& grad, cudaStream_t stream) {
    if constexpr (columns > 128) {
        launch_one<T, columns, between, Of::dv, false, far>(pass, grad, stream);
        launch_one<T, columns, between, Of::dk, false, far>(pass, grad, stream);
    } else {
        if constexpr (type_of<T> == DType::bf16 && columns == 128 &&
                      (between == Between::nothing || between == Between::shared_bias)) {
            if (grad.ds) return launch_one<T, columns, between, Of::both, true>(pass, grad, stream);
        }
        launch_one<T, columns, between, Of::both, false, far>(pass, grad, stream);
    }
}

}  // namespace

void launch_warpgroup_by_key(const AttentionPass& pass, const Gradients& grad, cudaStream_t stream) {
    with_tiles<warpgroup_backward_channels>(pass.call, [&]<class T, int columns>() {
        const bool capped = pass.call.softcap != 0;
        with_between(capped ? Between::cap : between_of(pass.call, grad.ds.is_dbias),
                     [&]<Between between>() { launch_for<T, columns, between>(pass, grad, stream); });
        if (!capped) launch_for<T, columns, Between::added, true>(pass, grad, stream);
    });
}

}  // namespace softdelta::cuda

// The five products of a tile step, R query rows and L keys:
//     q [R,D]·kᵀ [D,L] → s [R,L]      do [R,Dv]·vᵀ [Dv,L] → dp [R,L]
//     p = e^(s − lse), ds = p∘(dp − delta) [R,L]
//     pᵀ [L,R]·do [R,Dv] → dv [L,Dv]  dsᵀ [L,R]·q [R,D] → dk [L,D]   ds [R,L]·k [L,D] → dq [R,D]
// A step adds to f32 sums of its rows and keys and keeps nothing. p and ds are 0 where a row does not see a key.
// One thought: the five products share the packed operands and the ranges of what sees what.
#include <algorithm>

#include "engines/cpu/kernels/isa_unit.h"

#include "engines/cpu/kernels/attention/backward/by_tiles.h"
#include "engines/cpu/kernels/attention/backward/memory.h"
#include "engines/cpu/kernels/attention/backward/rows.h"
#include "engines/cpu/kernels/attention/nonfinite.h"
#include "engines/cpu/kernels/attention/scores.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

namespace block = backward_blocks;
template <class P>
constexpr Index row_tiles = block::rows / row_tile<P>;
template <class P>
constexpr Index key_tiles = block::keys / row_tile<P>;

template <class P>
class TileStep {
  public:
    TileStep(const AttentionHead& head, const AttentionGradient& gradient, Index first, Index last, std::byte* scratch)
        : head_(head),
          out_(gradient),
          first_(first),
          keys_(last - first),
          at_(make(head, scratch)),
          mask_(head, {gradient.bound, gradient.last_tie, 0}),
          keeps_products_(keeps_products(head)),
          wants_ds_(gradient.dq != nullptr || gradient.dk != nullptr || gradient.dbias.data != nullptr),
          score_scale_(score_scale(head)) {
        for (Index i = 0; i < round_up(max(head.size, head.value_size), 2 * W); i += W)
            store(at_.zeros + i, splat(0.0F));
    }

    void run(Index begin, Index end) {
        all_ = {begin, end};
        for (Index r = begin; r < end; r += block::rows) rows(r, min(r + block::rows, end));
    }

  private:
    static BackwardMemory<P> make(const AttentionHead& head, std::byte* scratch) {
        Scratch memory(scratch);
        return BackwardMemory<P>::take(head, memory);
    }
    void rows(Index begin, Index end) {
        begin_ = begin;
        rows_ = end - begin;
        if (!find_ranges()) {
            if (out_.dbias.data != nullptr && out_.bias_mode == AttentionGradient::Bias::write) clear_bias();
            return;
        }
        pack_keys();
        pack_rows();
        for (Index r = 0, t = 0; r < rows_; r += row_tile<P>, ++t) tile(r, min(row_tile<P>, rows_ - r), seen_ + t);
        const Index D = head_.size, Dv = head_.value_size;
        const Index depth = depth_of<P>(rows_);
        if (out_.dv != nullptr) {
            product<P>(keys_, round_up(Dv, W), {at_.p_t, 1, block::score_row}, {at_.d_o_b, depth},
                       {out_.dv + first_ * round_up(Dv, W), round_up(Dv, W), Start::add}, nullptr, seeing_,
                       prefetch_rows(head_.q, end, D));
            add_nonfinite_rows(nonfinite_d_o_, at_.p_t, out_.d_o, Dv, out_.dv);
        }
        if (out_.dk != nullptr) {
            product<P>(keys_, round_up(D, W), {at_.ds_t, 1, block::score_row}, {at_.q_b, depth},
                       {out_.dk + first_ * round_up(D, W), round_up(D, W), Start::add}, nullptr, seeing_,
                       prefetch_rows(out_.d_o, end, Dv));
            add_nonfinite_rows(nonfinite_q_, at_.ds_t, head_.q, D, out_.dk);
        }
        if (out_.dq != nullptr) {
            product<P>(rows_, round_up(D, W), {at_.ds_a, ds_row<P>, 1}, {at_.keys, depth_of<P>(keys_)},
                       {out_.dq + begin_ * round_up(D, W), round_up(D, W), Start::add}, nullptr, seen_depth_);
            add_nonfinite_keys();
        }
    }

    // Fetches rows [r, r + block::rows) of q or do, those that are packed next.
    auto prefetch_rows(const QueryRows& t, Index r, Index n) const {
        return PrefetchRows(r, min(r + block::rows, all_.end),
                            [&head = head_, &t, n](Index row) { prefetch_row(query_row(head, t, row), n); });
    }

    bool dead(Index r) const { return out_.lse[begin_ + r] == infinity; }

    // seen_: for each tile of row_tile<P> rows the keys that it sees, in whole vectors. seeing_: for each tile of
    // row_tile<P> keys the rows that see it, in elements of the depth. False when no row sees a key.
    bool find_ranges() {
        for (Range& range : seeing_) range = {depth_of<P>(rows_), 0};
        bool found = false;
        for (Index r = 0, t = 0; r < rows_; r += row_tile<P>, ++t) {
            Range keys{keys_, 0};
            bool any = false;
            const Index last = min(r + row_tile<P>, rows_);
            for (Index i = r; i < last; ++i) {
                const Range row = mask_.key_range(begin_ + i);
                const Range here{max(row.begin - first_, 0), min(row.end - first_, keys_)};
                row_range_[i] = here;
                if (here.empty()) continue;
                keys = {min(keys.begin, here.begin), max(keys.end, here.end)};
                any = any || mask_.sees_any(begin_ + i, row, first_, first_ + keys_);
            }
            seen_[t] = any ? Range{keys.begin / W * W, round_up(keys.end, W)} : Range{0, 0};
            seen_depth_[t] = {seen_[t].begin / P::depth, min(seen_[t].end / P::depth, depth_of<P>(keys_))};
            found = found || any;
            if (!any) continue;
            for (Index k = seen_[t].begin / row_tile<P>; k * row_tile<P> < min(seen_[t].end, keys_); ++k)
                seeing_[k] = {min(seeing_[k].begin, r / P::depth), max(seeing_[k].end, depth_of<P>(last))};
        }
        return found;
    }

    Row zeros(DType dtype) const { return {at_.zeros, dtype, 1}; }

    // Keys are packed once, for all rows of the step.
    void pack_keys() {
        if (packed_) return;
        packed_ = true;
        const auto key = [&](const KeyRows& t) { return [&](Index j) { return key_row(t, first_ + j); }; };
        const Index D = head_.size, Dv = head_.value_size;
        pack_b_transposed<P>(keys_, D, key(head_.k), at_.staging, at_.keys_t);
        if (wants_ds_) pack_b_transposed<P>(keys_, Dv, key(head_.v), at_.staging, at_.values_t);
        if (out_.dq == nullptr) return;
        pack_b(keys_, D, key(head_.k), reinterpret_cast<Stored<P>*>(at_.staging), at_.keys, P{});
        nonfinite_keys_.template take_out<P>(keys_, D, key(head_.k), at_.keys);
    }

    bool sees(Index r, Index j) const {
        return mask_.sees_any(begin_ + r, mask_.key_range(begin_ + r), first_ + j, first_ + j + 1);
    }

    // sum += factor·row of n
    void add_row(float factor, Row row, Index n, float* sum) const {
        auto* x = reinterpret_cast<float*>(at_.staging);
        load_row(row, n, x);
        add_scaled(factor, x, n, sum);
    }

    // Rows of q or do that are not finite, to the keys that they see: gradient += factorsᵀ rows.
    void add_nonfinite_rows(const NonfiniteRows<block::rows>& nonfinite, const Element<P>* factors, const QueryRows& t,
                            Index n, float* gradient) const {
        for (Index a = 0; a < nonfinite.count; ++a)
            for (Index r = nonfinite.rows[a], j = 0; j < keys_; ++j) {
                if (!sees(r, j)) continue;
                const Element<P>* at = factors + r / P::depth * block::score_row + j;
                add_row(a_element(at, r % P::depth, P{}), query_row(head_, t, begin_ + r), n,
                        gradient + (first_ + j) * round_up(n, W));
            }
    }

    // Keys that are not finite, to the rows that see them: dq += ds k.
    void add_nonfinite_keys() const {
        const Index n = head_.size;
        for (Index a = 0; a < nonfinite_keys_.count; ++a)
            for (Index j = nonfinite_keys_.rows[a], r = 0; r < rows_; ++r)
                if (sees(r, j))
                    add_row(a_element(at_.ds_a + r * ds_row<P>, j, P{}), key_row(head_.k, first_ + j), n,
                            out_.dq + (begin_ + r) * round_up(n, W));
    }

    void pack_rows() {
        const auto query = [&](const QueryRows& t) {
            return [&](Index r) { return dead(r) ? zeros(t.dtype) : query_row(head_, t, begin_ + r); };
        };
        auto* staging = reinterpret_cast<Stored<P>*>(at_.staging);
        const Index D = head_.size, Dv = head_.value_size;
        pack_a<P>(rows_, D, query(head_.q), at_.q);
        if (wants_ds_) pack_a<P>(rows_, Dv, query(out_.d_o), at_.d_o);
        if (out_.dk != nullptr) {
            pack_b(rows_, D, query(head_.q), staging, at_.q_b, P{});
            nonfinite_q_.template take_out<P>(rows_, D, query(head_.q), at_.q_b);
        }
        if (out_.dv != nullptr) {
            pack_b(rows_, Dv, query(out_.d_o), staging, at_.d_o_b, P{});
            nonfinite_d_o_.template take_out<P>(rows_, Dv, query(out_.d_o), at_.d_o_b);
        }
    }

    // Rows [first, first + count): scores and dp become p and ds, packed for the products that follow; 0 where a row
    // does not see the key.
    void tile(Index first, Index count, const Range* seen) {
        const Range tile = *seen;
        const Index columns = round_up(keys_, W), D = a_row_length<P>(head_.size),
                    Dv = a_row_length<P>(head_.value_size);
        product<P>(count, columns, {at_.q + first * D, D, 1}, {at_.keys_t, depth_of<P>(head_.size)},
                   {at_.p + first * block::score_row, block::score_row}, seen, nullptr,
                   mask_.prefetch(begin_ + first, count, first_, keys_));
        if (wants_ds_)
            product<P>(count, columns, {at_.d_o + first * Dv, Dv, 1}, {at_.values_t, depth_of<P>(head_.value_size)},
                       {at_.ds + first * block::score_row, block::score_row}, seen, nullptr,
                       prefetch_planes(head_, out_.dbias, {}, begin_ + first, count, first_, keys_));
        for (Index r = first; r < first + count; r += P::depth) {
            const Index rows = min(P::depth, first + count - r);
            bool unmasked = keeps_products_ && rows == P::depth;
            for (Index i = 0; i < rows; ++i)
                unmasked = unmasked && row_range_[r + i].begin <= tile.begin && tile.end <= row_range_[r + i].end;
            clear_columns(r, {0, tile.begin});
            clear_columns(r, {tile.end, columns});
            if (!tile.empty()) {
                for (Index i = 0; i < rows && !unmasked; ++i)
                    mask_.addends(begin_ + r + i, mask_.key_range(begin_ + r + i), first_ + tile.begin,
                                  tile.end - tile.begin, at_.addends + i * block::keys);
                if (unmasked)
                    softmax<true>(r, rows, tile);
                else
                    softmax<false>(r, rows, tile);
            }
            for (Index i = 0; i < rows && out_.dbias.data != nullptr; ++i) bias_gradient(r + i, i, tile);
        }
    }

    // Row r, of pairs also r + 1, over the keys of the tile.
    template <bool unmasked>
    SOFTDELTA_INLINE void softmax(Index r, Index rows, Range tile) {
        const bool wants_ds = wants_ds_, wants_bias = out_.dbias.data != nullptr, caps = head_.softcap != 0;
        const F scale = splat(head_.scale), fall = splat(-score_scale_ * log2_e);
        const F kept_scale = splat(keeps_products_ ? 1.0F : head_.scale);
        const F cap = splat(head_.softcap), uncap = splat(caps ? head_.scale / head_.softcap : 0.0F);
        F maximum[P::depth];
        F lse[P::depth];
        F delta[P::depth];
        for (Index i = 0; i < P::depth; ++i) {
            maximum[i] = splat(i < rows ? out_.maximum[begin_ + r + i] : 0.0F);
            lse[i] = splat(i < rows ? out_.lse[begin_ + r + i] : infinity);
            delta[i] = splat(i < rows ? out_.delta[begin_ + r + i] : 0.0F);
        }
        float* scores = at_.p + r * block::score_row;
        const float* dp = at_.ds + r * block::score_row;
        const float* addends = at_.addends - tile.begin;
        for (Index j = tile.begin; j < tile.end; j += W) {
            F p[P::depth];
            F ds[P::depth];
#pragma GCC unroll 2
            for (Index i = 0; i < P::depth; ++i) {
                p[i] = ds[i] = splat(0.0F);
                if (!unmasked && i >= rows) continue;
                F x = load(scores + i * block::score_row + j);
                F derivative = scale;
                Mask hidden;
                if (!unmasked) {
                    const F addend = load(addends + i * block::keys + j);
                    hidden = addend == F(-infinity);
                    if (caps) {
                        const F y = tanh(x * uncap);
                        x = fma(y * cap, splat(1.0F), addend);  // the same bits as in the forward pass
                        derivative = scale * fma(-y, y, splat(1.0F));
                    } else {
                        x = fma(x, kept_scale, addend);
                    }
                }
                p[i] = exp2(fma(maximum[i] - x, fall, -lse[i]));
                if (!unmasked) p[i] = select(hidden, splat(0.0F), p[i]);
                if (!wants_ds) continue;
                F gradient = p[i] * (load(dp + i * block::score_row + j) - delta[i]);
                if (!unmasked) gradient = select(hidden, splat(0.0F), gradient);
                if (wants_bias) store(at_.bias_rows + i * block::keys + j, gradient);
                ds[i] = gradient * derivative;
                if (!unmasked && caps) ds[i] = select(hidden, splat(0.0F), ds[i]);
            }
            keep(r, j, p, at_.p_t);
            if (!wants_ds) continue;
            keep(r, j, ds, at_.ds_t);
            if constexpr (P::depth == 2)
                for (Index i = 0; i < rows; ++i) store_bf16(at_.ds_a + (r + i) * ds_row<P> + j / 2, ds[i]);
        }
    }

    SOFTDELTA_INLINE static void keep(Index r, Index j, const F (&x)[1], float* out) {
        store(out + r * block::score_row + j, x[0]);
    }
    SOFTDELTA_INLINE static void keep(Index r, Index j, const F (&x)[2], std::uint32_t* out) {
        store(out + r / 2 * block::score_row + j, bf16_pairs(x[0], x[1]));
    }

    void clear_columns(Index r, Range columns) {
        const F zeros[P::depth] = {};
        for (Index j = columns.begin; j < columns.end; j += W) {
            keep(r, j, zeros, at_.p_t);
            keep(r, j, zeros, at_.ds_t);
        }
    }

    // Writes ds of row r, which lies in bias row i, times the slope of its head to the gradient of the bias, or adds it
    // there.
    void bias_gradient(Index r, Index i, Range tile) {
        float* row = at_.bias_rows + i * block::keys;
        for (Index j = 0; j < tile.begin; j += W) store(row + j, splat(0.0F));
        for (Index j = tile.end; j < round_up(keys_, W); j += W) store(row + j, splat(0.0F));
        if (head_.bias_slope.data != nullptr) {
            const F slope = splat(head_value(head_, head_.bias_slope, begin_ + r));
            for (Index j = tile.begin; j < tile.end; j += W) store(row + j, slope * load(row + j));
        }
        const Plane& t = out_.dbias;
        void* data = element(t.data, t.dtype, plane_row(head_, t, begin_ + r) + first_ * t.column);
        if (out_.bias_mode == AttentionGradient::Bias::write) {
            store_row(row, keys_, data, t.dtype, t.column);
            return;
        }
        auto* sums = static_cast<float*>(data);
        for (Index j = tile.begin; j < min(tile.end, keys_); ++j) sums[j * t.column] += row[j];
    }

    // No row sees a key: the part of the gradient is written once, like any other.
    void clear_bias() {
        for (Index r = 0; r < rows_; ++r) bias_gradient(r, 0, {0, 0});
    }

    const AttentionHead& head_;
    const AttentionGradient& out_;
    Index begin_ = 0, rows_ = 0;  // of the current block of rows
    Index first_, keys_;
    BackwardMemory<P> at_;
    AttentionMask mask_;
    bool keeps_products_, wants_ds_, packed_ = false;  // keeps_products_: see scores.h
    float score_scale_;
    NonfiniteRows<block::keys> nonfinite_keys_;
    NonfiniteRows<block::rows> nonfinite_q_, nonfinite_d_o_;
    Range all_{};  // rows of the step
    Range seen_[row_tiles<P>], seen_depth_[row_tiles<P>], seeing_[key_tiles<P>];
    Range row_range_[block::rows];
};

std::size_t scratch(const AttentionHead& head) {
    Scratch memory(nullptr);
    std::size_t by_tiles = 0;
    with_product(head.bf16_products, [&](auto p) {
        BackwardMemory<decltype(p)>::take(head, memory);
        if constexpr (decltype(p)::Tiles::exist)
            by_tiles = fits_tiles(head) ? BackwardByTiles<decltype(p)>::scratch(head) : 0;
    });
    return std::max(memory.used(), by_tiles);
}

Index row_length(Index n) {
    return round_up(n, W);
}

void clear(float* sums, Range range, Index size) {
    if (sums != nullptr) std::fill(sums + range.begin * row_length(size), sums + range.end * row_length(size), 0.0F);
}

void tile(const AttentionHead& head, const AttentionGradient& gradient, Range rows, Range keys, bool fresh_rows,
          bool fresh_keys, std::byte* memory) {
    compute_with(head.bf16_products, [&](auto p) {
        const auto by_vectors = [&] {
            if (fresh_rows) clear(gradient.dq, rows, head.size);
            if (fresh_keys) clear(gradient.dk, keys, head.size);
            if (fresh_keys) clear(gradient.dv, keys, head.value_size);
            TileStep<decltype(p)>(head, gradient, keys.begin, keys.end, memory).run(rows.begin, rows.end);
        };
        if constexpr (decltype(p)::Tiles::exist) {
            if (packs(head, gradient)) {
                BackwardByTiles<decltype(p)> by_tiles(head, gradient, memory);
                if (by_tiles.takes(rows, keys)) return by_tiles.run(rows, keys, fresh_rows, fresh_keys);
                if (!fresh_rows) by_tiles.rows_as_rows(rows);
                if (!fresh_keys) by_tiles.keys_as_rows(keys);
                by_vectors();
                by_tiles.rows_as_tiles(rows);
                by_tiles.keys_as_tiles(keys);
                return;
            }
        }
        by_vectors();
    });
}

void finish_rows(const AttentionHead& head, const AttentionGradient& gradient, Range rows, std::byte* memory) {
    with_product(head.bf16_products, [&](auto p) {
        if constexpr (decltype(p)::Tiles::exist)
            if (packs(head, gradient)) BackwardByTiles<decltype(p)>(head, gradient, memory).rows_as_rows(rows);
    });
}

void finish_keys(const AttentionHead& head, const AttentionGradient& gradient, Range keys, std::byte* memory) {
    with_product(head.bf16_products, [&](auto p) {
        if constexpr (decltype(p)::Tiles::exist)
            if (packs(head, gradient)) BackwardByTiles<decltype(p)>(head, gradient, memory).keys_as_rows(keys);
    });
}

template <class Part>
Index packed(const AttentionHead& head) {
    return PairProduct::Tiles::exist ? packed_bytes<Part>(head) : 0;
}

void pack_rows(const AttentionHead& head, const AttentionGradient& gradient, Index begin, Index end) {
    with_product(head.bf16_products, [&](auto p) {
        if constexpr (decltype(p)::Tiles::exist)
            if (packs(head, gradient)) PackTiles<decltype(p)>::rows(head, gradient, begin / square, end / square);
    });
}

void pack_keys(const AttentionHead& head, const AttentionGradient& gradient, Index first, Index last) {
    with_product(head.bf16_products, [&](auto p) {
        if constexpr (decltype(p)::Tiles::exist)
            if (packs(head, gradient)) PackTiles<decltype(p)>::keys(head, gradient, first / square, last / square);
    });
}

}  // namespace

const AttentionBackward attention_backward = {
    .query_block = block::unit_rows,
    .key_block = block::keys,
    .row_length = row_length,
    .prepare_scratch = prepare_scratch,
    .scratch = scratch,
    .prepare = prepare,
    .packed_group = square,
    .packed_rows = packed<PackedRows>,
    .packed_keys = packed<PackedKeys>,
    .pack_rows = pack_rows,
    .pack_keys = pack_keys,
    .tile = tile,
    .finish_rows = finish_rows,
    .finish_keys = finish_keys,
    .row_gradient = row_gradient,
    .store = store_row,
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

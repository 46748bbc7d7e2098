// The five products of a tile of query rows and keys:
//     s = q kᵀ   dp = do vᵀ   dv += pᵀ do   dk += dsᵀ q   dq += ds k
// with p = 2^((s − maximum)·slope − lse) and ds = p∘(dp − delta). A tile adds to f32 sums of its rows and keys and
// keeps nothing. p and ds are 0 where a row does not see a key; what is not finite must not meet that 0 in a product.
#include "engines/cpu/kernels/attention/backward.h"

#include "engines/cpu/kernels/attention/backward_rows.h"
#include "engines/cpu/kernels/attention/scores.h"
#include "engines/cpu/kernels/gemm/pack.h"
#include "engines/cpu/kernels/scratch.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

constexpr Index query_block = prepared_rows;  // rows that meet a block of packed keys
constexpr Index row_block = 96;               // rows whose scores are kept at once
constexpr Index key_block = 384;
constexpr Index row_tiles = row_block / MR;
constexpr Index key_tiles = key_block / MR;
// Rows a vector longer than the block: tile rows do not compete for the same cache lines.
constexpr Index score_row = key_block + W;

template <class P>
constexpr Index pair_row = P::depth == 1 ? score_row : key_block / 2 + W;

template <class P>
struct Memory {
    Element<P>*q, *d_o;            // [row_block, a_row_length] left operands
    Element<P>*keys_t, *values_t;  // [D, key_block], [Dv, key_block] panels
    Element<P>* keys;              // [key_block, D] panels
    Element<P>*q_up, *d_o_up;      // [row_block, D], [row_block, Dv] panels
    float *p, *ds;                 // [row_block, score_row]: scores, then p; dp, then ds
    Element<P>* p_pairs;           // pairs of rows [row_block / 2, score_row]; of floats, p itself
    Element<P>* ds_pairs;          // the same of ds
    Element<P>* ds_left;           // [row_block, pair_row]; of floats, ds itself
    float* addends;                // [P::depth, key_block]
    float* bias_rows;              // [P::depth, key_block] ds without scale
    float* zeros;                  // [longest row]
    Element<P>* stage;

    static Memory take(const AttentionHead& head, Scratch& memory) {
        const Index D = head.size, Dv = head.value_size, longest = round_up(max(D, Dv), 2 * W);
        Memory m;
        m.q = memory.take<Element<P>>(row_block * a_row_length<P>(D));
        m.d_o = memory.take<Element<P>>(row_block * a_row_length<P>(Dv));
        m.keys_t = memory.take<Element<P>>(key_block * a_row_length<P>(D));
        m.values_t = memory.take<Element<P>>(key_block * a_row_length<P>(Dv));
        m.keys = memory.take<Element<P>>(key_block / P::depth * round_up(D, W));
        m.q_up = memory.take<Element<P>>(row_block / P::depth * round_up(D, W));
        m.d_o_up = memory.take<Element<P>>(row_block / P::depth * round_up(Dv, W));
        m.p = memory.take<float>(row_block * score_row);
        m.ds = memory.take<float>(row_block * score_row);
        if constexpr (P::depth == 1) {
            m.p_pairs = m.p;
            m.ds_pairs = m.ds_left = m.ds;
        } else {
            m.p_pairs = memory.take<Element<P>>(row_block / 2 * score_row);
            m.ds_pairs = memory.take<Element<P>>(row_block / 2 * score_row);
            m.ds_left = memory.take<Element<P>>(row_block * pair_row<P>);
        }
        m.addends = memory.take<float>(P::depth * key_block);
        m.bias_rows = memory.take<float>(P::depth * key_block);
        m.zeros = memory.take<float>(longest);
        m.stage = memory.take<Element<P>>((W + 2) * longest);
        return m;
    }
};

// Asks for rows [r, end) of q or do, two at a call: those that are packed next.
class RowsAhead {
  public:
    RowsAhead(const AttentionHead& head, const QueryRows& rows, Index r, Index end, Index n)
        : head_(head), rows_(rows), row_(r), end_(end), n_(n) {}
    void operator()() {
        for (Index i = 0; i < 2 && row_ < end_; ++i, ++row_) prefetch_row(query_row(head_, rows_, row_), n_);
    }

  private:
    const AttentionHead& head_;
    const QueryRows& rows_;
    Index row_, end_, n_;
};

template <class P>
class Tile {
  public:
    Tile(const AttentionHead& head, const AttentionGradient& gradient, Index first, Index last, std::byte* scratch)
        : head_(head),
          out_(gradient),
          first_(first),
          keys_(last - first),
          at_(make(head, scratch)),
          visibility_(head, {gradient.bound, gradient.last_tie, 0}),
          plain_(keeps_products(head)),
          wants_ds_(gradient.dq != nullptr || gradient.dk != nullptr || gradient.dbias.data != nullptr),
          score_unit_(score_unit(head)) {
        for (Index i = 0; i < round_up(max(head.size, head.value_size), 2 * W); i += W)
            store(at_.zeros + i, splat(0.0F));
    }

    void run(Index begin, Index end) {
        all_ = {begin, end};
        for (Index r = begin; r < end; r += row_block) rows(r, min(r + row_block, end));
    }

  private:
    // Rows of a right operand that are not finite.
    struct Apart {
        Index count = 0, rows[key_block];
    };

    static Memory<P> make(const AttentionHead& head, std::byte* scratch) {
        Scratch memory(scratch);
        return Memory<P>::take(head, memory);
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
        for (Index r = 0, t = 0; r < rows_; r += MR, ++t) tile(r, min(MR, rows_ - r), seen_ + t);
        const Index D = head_.size, Dv = head_.value_size;
        const Index depth = depth_of(rows_);
        if (out_.dv != nullptr) {
            product<P>(keys_, round_up(Dv, W), {at_.p_pairs, 1, score_row}, {at_.d_o_up, depth},
                       {out_.dv + first_ * round_up(Dv, W), round_up(Dv, W), Start::add}, nullptr, seeing_,
                       RowsAhead(head_, head_.q, end, min(end + row_block, all_.end), D));
            add_apart_rows(apart_d_o_, at_.p_pairs, out_.d_o, Dv, out_.dv);
        }
        if (out_.dk != nullptr) {
            product<P>(keys_, round_up(D, W), {at_.ds_pairs, 1, score_row}, {at_.q_up, depth},
                       {out_.dk + first_ * round_up(D, W), round_up(D, W), Start::add}, nullptr, seeing_,
                       RowsAhead(head_, out_.d_o, end, min(end + row_block, all_.end), Dv));
            add_apart_rows(apart_q_, at_.ds_pairs, head_.q, D, out_.dk);
        }
        if (out_.dq != nullptr) {
            product<P>(rows_, round_up(D, W), {at_.ds_left, pair_row<P>, 1}, {at_.keys, depth_of(keys_)},
                       {out_.dq + begin_ * round_up(D, W), round_up(D, W), Start::add}, nullptr, seen_depth_);
            add_apart_keys();
        }
    }

    static constexpr Index depth_of(Index n) { return (n + P::depth - 1) / P::depth; }
    bool dead(Index r) const { return out_.lse[begin_ + r] == infinity; }

    // seen_: for each row tile the keys that it sees, in whole vectors; seeing_: for each tile of keys the rows that
    // see it, in pairs. False when no row sees any.
    bool find_ranges() {
        for (Range& range : seeing_) range = {depth_of(rows_), 0};
        bool found = false;
        for (Index r = 0, t = 0; r < rows_; r += MR, ++t) {
            Range keys{keys_, 0};
            bool any = false;
            const Index last = min(r + MR, rows_);
            for (Index i = r; i < last; ++i) {
                const Range row = visibility_.range(begin_ + i);
                const Range here{max(row.begin - first_, 0), min(row.end - first_, keys_)};
                row_range_[i] = here;
                if (here.empty()) continue;
                keys = {min(keys.begin, here.begin), max(keys.end, here.end)};
                any = any || visibility_.any(begin_ + i, row, first_, first_ + keys_);
            }
            seen_[t] = any ? Range{keys.begin / W * W, round_up(keys.end, W)} : Range{0, 0};
            seen_depth_[t] = {seen_[t].begin / P::depth, min(seen_[t].end / P::depth, depth_of(keys_))};
            found = found || any;
            if (!any) continue;
            for (Index k = seen_[t].begin / MR; k * MR < min(seen_[t].end, keys_); ++k)
                seeing_[k] = {min(seeing_[k].begin, r / P::depth), max(seeing_[k].end, depth_of(last))};
        }
        return found;
    }

    Row zeros(DType dtype) const { return {at_.zeros, dtype, 1}; }

    // Keys stay packed for all rows of the tile.
    void pack_keys() {
        if (packed_) return;
        packed_ = true;
        const auto key = [&](const KeyRows& t) { return [&](Index j) { return key_row(t, first_ + j); }; };
        const Index D = head_.size, Dv = head_.value_size;
        pack_b_transposed<P>(keys_, D, key(head_.k), at_.stage, at_.keys_t);
        if (wants_ds_) pack_b_transposed<P>(keys_, Dv, key(head_.v), at_.stage, at_.values_t);
        if (out_.dq == nullptr) return;
        pack_b(keys_, D, key(head_.k), reinterpret_cast<Stored<P>*>(at_.stage), at_.keys, P{});
        set_apart(keys_, D, key(head_.k), at_.keys, apart_keys_);
    }

    // Rows of a right operand that are not finite leave it, and are added one by one where they are seen.
    template <class Rows>
    void set_apart(Index count, Index n, const Rows& rows, Element<P>* panels, Apart& apart) const {
        apart.count = 0;
        if (all_finite(panels, depth_of(count) * round_up(n, W))) return;
        for (Index i = 0; i < count; ++i) {
            if (is_finite(rows(i), n)) continue;
            clear_b_row<P>(i, count, n, panels);
            apart.rows[apart.count++] = i;
        }
    }

    bool sees(Index r, Index j) const {
        return visibility_.any(begin_ + r, visibility_.range(begin_ + r), first_ + j, first_ + j + 1);
    }

    // sum += factor·row of n
    void add_row(float factor, Row row, Index n, float* sum) const {
        auto* x = reinterpret_cast<float*>(at_.stage);
        load_row(row, n, x);
        for (Index i = 0; i < round_up(n, W); i += W) store(sum + i, fma(splat(factor), load(x + i), load(sum + i)));
    }

    // Rows of q or do that were set apart, to the keys that they see: gradient += factorsᵀ rows.
    void add_apart_rows(const Apart& apart, const Element<P>* factors, const QueryRows& t, Index n,
                        float* gradient) const {
        for (Index a = 0; a < apart.count; ++a)
            for (Index r = apart.rows[a], j = 0; j < keys_; ++j) {
                if (!sees(r, j)) continue;
                const Element<P>* at = factors + r / P::depth * score_row + j;
                add_row(a_element(at, r % P::depth, P{}), query_row(head_, t, begin_ + r), n,
                        gradient + (first_ + j) * round_up(n, W));
            }
    }

    // Keys that were set apart, to the rows that see them: dq += ds k.
    void add_apart_keys() const {
        const Index n = head_.size;
        for (Index a = 0; a < apart_keys_.count; ++a)
            for (Index j = apart_keys_.rows[a], r = 0; r < rows_; ++r)
                if (sees(r, j))
                    add_row(a_element(at_.ds_left + r * pair_row<P>, j, P{}), key_row(head_.k, first_ + j), n,
                            out_.dq + (begin_ + r) * round_up(n, W));
    }

    void pack_rows() {
        const auto query = [&](const QueryRows& t) {
            return [&](Index r) { return dead(r) ? zeros(t.dtype) : query_row(head_, t, begin_ + r); };
        };
        auto* stage = reinterpret_cast<Stored<P>*>(at_.stage);
        const Index D = head_.size, Dv = head_.value_size;
        pack_a<P>(rows_, D, query(head_.q), at_.q);
        if (wants_ds_) pack_a<P>(rows_, Dv, query(out_.d_o), at_.d_o);
        if (out_.dk != nullptr) {
            pack_b(rows_, D, query(head_.q), stage, at_.q_up, P{});
            set_apart(rows_, D, query(head_.q), at_.q_up, apart_q_);
        }
        if (out_.dv != nullptr) {
            pack_b(rows_, Dv, query(out_.d_o), stage, at_.d_o_up, P{});
            set_apart(rows_, Dv, query(out_.d_o), at_.d_o_up, apart_d_o_);
        }
    }

    // Rows [first, first + count): scores and dp become p and ds, as the operands of the products that follow; 0 where
    // nothing is seen.
    void tile(Index first, Index count, const Range* seen) {
        const Range tile = *seen;
        const Index columns = round_up(keys_, W), D = a_row_length<P>(head_.size),
                    Dv = a_row_length<P>(head_.value_size);
        product<P>(count, columns, {at_.q + first * D, D, 1}, {at_.keys_t, depth_of(head_.size)},
                   {at_.p + first * score_row, score_row}, seen, nullptr,
                   visibility_.ahead(begin_ + first, count, first_, keys_));
        if (wants_ds_)
            product<P>(count, columns, {at_.d_o + first * Dv, Dv, 1}, {at_.values_t, depth_of(head_.value_size)},
                       {at_.ds + first * score_row, score_row}, seen, nullptr,
                       Ahead(head_, out_.dbias, {}, begin_ + first, count, first_, keys_));
        for (Index r = first; r < first + count; r += P::depth) {
            const Index rows = min(P::depth, first + count - r);
            bool plain = plain_ && rows == P::depth;
            for (Index i = 0; i < rows; ++i)
                plain = plain && row_range_[r + i].begin <= tile.begin && tile.end <= row_range_[r + i].end;
            clear_columns(r, {0, tile.begin});
            clear_columns(r, {tile.end, columns});
            if (!tile.empty()) {
                for (Index i = 0; i < rows && !plain; ++i)
                    visibility_.addends(begin_ + r + i, visibility_.range(begin_ + r + i), first_ + tile.begin,
                                        tile.end - tile.begin, at_.addends + i * key_block);
                if (plain)
                    softmax<true>(r, rows, tile);
                else
                    softmax<false>(r, rows, tile);
            }
            for (Index i = 0; i < rows && out_.dbias.data != nullptr; ++i) bias_gradient(r + i, i, tile);
        }
    }

    // Row r, of pairs also r + 1, over the keys of the tile.
    template <bool plain>
    SOFTDELTA_INLINE void softmax(Index r, Index rows, Range tile) {
        const bool wants_ds = wants_ds_, wants_bias = out_.dbias.data != nullptr, caps = head_.softcap != 0;
        const F scale = splat(head_.scale), fall = splat(-score_unit_ * log2_e);
        const F kept_scale = splat(plain_ ? 1.0F : head_.scale);
        const F cap = splat(head_.softcap), uncap = splat(caps ? head_.scale / head_.softcap : 0.0F);
        F maximum[P::depth];
        F lse[P::depth];
        F delta[P::depth];
        for (Index i = 0; i < P::depth; ++i) {
            maximum[i] = splat(i < rows ? out_.maximum[begin_ + r + i] : 0.0F);
            lse[i] = splat(i < rows ? out_.lse[begin_ + r + i] : infinity);
            delta[i] = splat(i < rows ? out_.delta[begin_ + r + i] : 0.0F);
        }
        float* scores = at_.p + r * score_row;
        const float* dp = at_.ds + r * score_row;
        const float* addends = at_.addends - tile.begin;
        for (Index j = tile.begin; j < tile.end; j += W) {
            F p[P::depth];
            F ds[P::depth];
#pragma GCC unroll 2
            for (Index i = 0; i < P::depth; ++i) {
                p[i] = ds[i] = splat(0.0F);
                if (!plain && i >= rows) continue;
                F x = load(scores + i * score_row + j);
                F derivative = scale;
                Mask hidden;
                if (!plain) {
                    const F addend = load(addends + i * key_block + j);
                    hidden = addend == F(-infinity);
                    if (caps) {
                        const F y = tanh(x * uncap);
                        x = fma(y * cap, splat(1.0F), addend);  // to the bit what the forward pass has
                        derivative = scale * fma(-y, y, splat(1.0F));
                    } else {
                        x = fma(x, kept_scale, addend);
                    }
                }
                p[i] = exp2(fma(maximum[i] - x, fall, -lse[i]));
                if (!plain) p[i] = select(hidden, splat(0.0F), p[i]);
                if (!wants_ds) continue;
                F gradient = p[i] * (load(dp + i * score_row + j) - delta[i]);
                if (!plain) gradient = select(hidden, splat(0.0F), gradient);
                if (wants_bias) store(at_.bias_rows + i * key_block + j, gradient);
                ds[i] = gradient * derivative;
                if (!plain && caps) ds[i] = select(hidden, splat(0.0F), ds[i]);
            }
            keep(r, j, p, at_.p_pairs);
            if (!wants_ds) continue;
            keep(r, j, ds, at_.ds_pairs);
            if constexpr (P::depth == 2)
                for (Index i = 0; i < rows; ++i) store_bf16(at_.ds_left + (r + i) * pair_row<P> + j / 2, ds[i]);
        }
    }

    SOFTDELTA_INLINE static void keep(Index r, Index j, const F (&x)[1], float* out) {
        store(out + r * score_row + j, x[0]);
    }
    SOFTDELTA_INLINE static void keep(Index r, Index j, const F (&x)[2], std::uint32_t* out) {
        store(out + r / 2 * score_row + j, bf16_pairs(x[0], x[1]));
    }

    void clear_columns(Index r, Range columns) {
        const F zeros[P::depth] = {};
        for (Index j = columns.begin; j < columns.end; j += W) {
            keep(r, j, zeros, at_.p_pairs);
            keep(r, j, zeros, at_.ds_pairs);
        }
    }

    // ds of row r, as kept in bias row i, written to the gradient of the bias or added to it.
    void bias_gradient(Index r, Index i, Range tile) {
        float* row = at_.bias_rows + i * key_block;
        for (Index j = 0; j < tile.begin; j += W) store(row + j, splat(0.0F));
        for (Index j = tile.end; j < round_up(keys_, W); j += W) store(row + j, splat(0.0F));
        const Plane& t = out_.dbias;
        void* data = element(t.data, t.dtype, plane_row(head_, t, begin_ + r) + first_ * t.column);
        if (out_.bias_mode == AttentionGradient::Bias::write) {
            store_row(row, keys_, data, t.dtype, t.column);
            return;
        }
        auto* sums = static_cast<float*>(data);
        for (Index j = tile.begin; j < min(tile.end, keys_); ++j) sums[j * t.column] += row[j];
    }

    // A tile that nobody sees: its part of the gradient is written once, like any other.
    void clear_bias() {
        for (Index r = 0; r < rows_; ++r) bias_gradient(r, 0, {0, 0});
    }

    const AttentionHead& head_;
    const AttentionGradient& out_;
    Index begin_ = 0, rows_ = 0;  // of the rows at work
    Index first_, keys_;
    Memory<P> at_;
    Visibility visibility_;
    bool plain_, wants_ds_, packed_ = false;  // plain: scores are kept as products
    float score_unit_;
    Apart apart_keys_, apart_q_, apart_d_o_;
    Range all_{};  // rows of the tile
    Range seen_[row_tiles], seen_depth_[row_tiles], seeing_[key_tiles];
    Range row_range_[row_block];
};

std::size_t scratch(const AttentionHead& head) {
    Scratch memory(nullptr);
    with_product(head.bf16_products, [&](auto p) { Memory<decltype(p)>::take(head, memory); });
    return memory.used();
}

void tile(const AttentionHead& head, const AttentionGradient& gradient, Index begin, Index end, Index first, Index last,
          std::byte* memory) {
    with_product(head.bf16_products, [&](auto p) {
        [[maybe_unused]] const typename decltype(p)::Tiles tiles;
        Tile<decltype(p)>(head, gradient, first, last, memory).run(begin, end);
    });
}

Index row_length(Index n) {
    return round_up(n, W);
}

}  // namespace

extern const AttentionBackward attention_backward = {
    .query_block = query_block,
    .key_block = key_block,
    .row_length = row_length,
    .prepare_scratch = prepare_scratch,
    .scratch = scratch,
    .prepare = prepare,
    .tile = tile,
    .row_gradient = row_gradient,
    .store = store_row,
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

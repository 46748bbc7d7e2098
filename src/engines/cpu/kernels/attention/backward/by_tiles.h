// A tile step of the backward pass by matrix tiles, where position alone hides keys: 32 keys and 32 rows at a time,
// whose scores stay in the first-level cache. Scores lie as sᵀ = k qᵀ and dpᵀ = v doᵀ. So two neighbours of a row of
// pᵀ and dsᵀ are a pair for the products that sum over rows. Two neighbours of a column are one for the product that
// sums over keys:
//     dv += pᵀ do      dk += dsᵀ q      dqᵀ += kᵀ dsᵀ
// Sums of a head lie as tiles, too, until its last step is done:
//     dk, dv [group, D / 16, 2 tiles]: 16 keys of 16 columns      dq [group, D / 16, 2 tiles]: 16 columns of 16 rows
#pragma once

#include <algorithm>

#include "engines/cpu/kernels/attention/backward/packed.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// The scratch memory of a step.
struct BackwardTilesMemory {
    static constexpr Index groups = backward_blocks::unit_rows / square, key_groups = backward_blocks::keys / square;
    static constexpr Index ds_step = (key_groups * 2 + 1) * tile_words;  // groups lie in different cache sets
    std::uint32_t *p, *ds;  // [group, 2 tiles] of a group of keys, A: 16 keys of 32 rows
    std::uint32_t* ds_t;    // [group, ds_step] of which [key group, 2 tiles] B: 32 keys of 16 rows
    float *scores, *dp;     // [2][square, square] of one group of rows and the next
    float* sums;            // of a group
    float *first, *last;    // [rows] the keys that a row sees, as numbers

    static BackwardTilesMemory take(const AttentionHead& head, Scratch& memory) {
        BackwardTilesMemory m;
        m.p = memory.take<std::uint32_t>(groups * 2 * tile_words);
        m.ds = memory.take<std::uint32_t>(groups * 2 * tile_words);
        m.ds_t = memory.take<std::uint32_t>(groups * ds_step);
        for (float** x : {&m.scores, &m.dp}) *x = memory.take<float>(2 * square * square);
        m.sums = memory.take<float>(square * max(head.size, head.value_size));
        for (float** x : {&m.first, &m.last}) *x = memory.take<float>(groups * square);
        return m;
    }
};

template <class P>
class BackwardByTiles {
    using Tiles = typename P::Tiles;
    using Memory = BackwardTilesMemory;
    using Word = std::uint32_t;
    static constexpr Index groups = Memory::groups, key_groups = Memory::key_groups, ds_step = Memory::ds_step;

  public:
    static std::size_t scratch(const AttentionHead& head) {
        Scratch memory(nullptr);
        Memory::take(head, memory);
        return memory.used();
    }

    BackwardByTiles(const AttentionHead& head, const AttentionGradient& gradient, std::byte* scratch)
        : head_(head), out_(gradient), mask_(head), size_(head.size), value_size_(head.value_size) {
        Scratch memory(scratch), of_rows(gradient.packed_rows), of_keys(gradient.packed_keys);
        at_ = Memory::take(head, memory);
        row_ = PackedRows::take(head, of_rows);
        key_ = PackedKeys::take(head, of_keys);
        choose_gradients();
    }

    // Whether all groups of the step are there.
    bool takes(Range rows, Range keys) const {
        if ((rows.end - rows.begin) % square != 0 || (keys.end - keys.begin) % square != 0) return false;
        const auto has = [](const Packed* state, Range range) {
            for (Index g = range.begin / square; g < range.end / square; ++g)
                if (state[g] == Packed::left_out) return false;
            return true;
        };
        return has(row_.state, rows) && has(key_.state, keys);
    }

    // fresh: sums are set, not added to.
    void run(Range rows, Range keys, bool fresh_rows, bool fresh_keys) {
        adds_to_rows_ = !fresh_rows;
        adds_to_keys_ = !fresh_keys;
        begin_ = rows.begin;
        groups_ = (rows.end - rows.begin) / square;
        first_ = keys.begin;
        key_groups_ = (keys.end - keys.begin) / square;
        find_ranges();
        for (Index j = 0; j < key_groups_; ++j) of_keys(j);
        for (Index i = 0; i < groups_; ++i) of_rows(i);
    }

    // Sums of whole groups as rows, for what does not compute by tiles, and as tiles again.
    void rows_as_rows(Range rows) const { each_group(out_.dq, rows, head_.rows(), size_, transpose_sums<true>); }
    void rows_as_tiles(Range rows) const { each_group(out_.dq, rows, head_.rows(), size_, transpose_sums<false>); }
    void keys_as_rows(Range keys) const {
        each_group(out_.dk, keys, head_.keys, size_, copy_sums<true>);
        each_group(out_.dv, keys, head_.keys, value_size_, copy_sums<true>);
    }
    void keys_as_tiles(Range keys) const {
        each_group(out_.dk, keys, head_.keys, size_, copy_sums<false>);
        each_group(out_.dv, keys, head_.keys, value_size_, copy_sums<false>);
    }

  private:
    template <class Change>
    void each_group(float* sums, Range range, Index all, Index n, const Change& change) const {
        for (Index g = range.begin / square; g < min(range.end, all) / square; ++g) {
            float* group = sums + g * square * n;
            std::copy_n(group, square * n, at_.sums);
            change(at_.sums, group, n);
        }
    }
    // Of a group, from tiles to rows or back.
    template <bool to_rows>
    static void copy_sums(const float* from, float* to, Index n) {
        for (Index r = 0; r < square; ++r)
            for (Index c = 0; c < n / W; ++c) {
                const Index row = r * n + c * W, tile = (c * square + r) * W;
                store(to + (to_rows ? row : tile), load(from + (to_rows ? tile : row)));
            }
    }
    // Columns 4i … 4i + 3 of the left tile are rows 8i … 8i + 3, those of the right one 8i + 4 … 8i + 7.
    template <bool to_rows>
    static void transpose_sums(const float* from, float* to, Index n) {
        for (Index c = 0; c < n / W; ++c)
            for (Index half = 0; half < 2; ++half) {
                U block[W];
                const auto place = [&](bool in_rows, Index i) {
                    return in_rows ? (i / 4 * 8 + half * 4 + i % 4) * n + c * W : ((c * 2 + half) * W + i) * W;
                };
                for (Index i = 0; i < W; ++i) block[i] = as_words(load(from + place(!to_rows, i)));
                transpose(block);
                for (Index i = 0; i < W; ++i) store(to + place(to_rows, i), as_floats(block[i]));
            }
    }

    // Groups of all rows and keys.
    Index row_group(Index i) const { return begin_ / square + i; }
    Index key_group(Index j) const { return first_ / square + j; }

    // Keys of the step that row r sees by position.
    Range keys_of(Index r) const {
        const Range x = mask_.key_range(r);
        return {max(x.begin - first_, 0), min(x.end - first_, key_groups_ * square)};
    }

    // What rows see, and for each group of keys the groups of rows that see it.
    void find_ranges() {
        for (Range& range : seeing_) range = {groups_, 0};
        for (Index i = 0; i < groups_; ++i) {
            const Index r = begin_ + i * square;
            Range some{key_groups_ * square, 0};
            if (row_.state[row_group(i)] == Packed::whole && head_of(head_, r) == head_of(head_, r + square - 1)) {
                // Along the rows of a head a range only moves up.
                const Range low = keys_of(r), high = keys_of(r + square - 1);
                some = {low.begin, high.end};
                all_see_[i] = {high.begin, low.end};
            } else {
                all_see_[i] = {0, 0};
                for (Index l = r; l < r + square; ++l) {
                    const Range row = keys_of(l);
                    if (!row.empty()) some = {min(some.begin, row.begin), max(some.end, row.end)};
                }
            }
            seen_[i] = some.empty() ? Range{0, 0} : Range{some.begin / square, round_up(some.end, square) / square};
            for (Index j = seen_[i].begin; j < seen_[i].end; ++j) seeing_[j] = {min(seeing_[j].begin, i), i + 1};
            if (all_see_[i].begin <= 0 && all_see_[i].end >= key_groups_ * square) continue;
            for (Index l = 0; l < square; ++l) {
                Range row = keys_of(r + l);
                if (row.empty() || out_.lse[r + l] == infinity) row = {0, 0};
                at_.first[i * square + l] = static_cast<float>(row.begin);
                at_.last[i * square + l] = static_cast<float>(row.end);
            }
        }
    }

    // A group of keys and one of rows.
    struct Pair {
        Index j, i;
    };

    // The groups of rows that see one of keys follow each other.
    Pair next(Pair pair) const {
        if (pair.i + 1 < seeing_[pair.j].end) return {pair.j, pair.i + 1};
        for (Index j = pair.j + 1; j < key_groups_; ++j)
            if (!seeing_[j].empty()) return {j, seeing_[j].begin};
        return pair;
    }

    // dv and dk of a group of keys, and ds for dq. Scores are computed one pair ahead.
    void of_keys(Index j) {
        const Range rows = seeing_[j];
        for (Index i = rows.begin; i < rows.end; ++i) {
            if (pairs_ == 0) score({j, i}, 0);
            const bool masked = all_see_[i].begin > j * square || (j + 1) * square > all_see_[i].end;
            (this->*gradients_[masked])({j, i}, next({j, i}));
            ++pairs_;
            fetch_sums(out_.dv, value_size_, j, i - rows.begin, rows.end - rows.begin);
            fetch_sums(out_.dk, size_, j, i - rows.begin, rows.end - rows.begin);
        }
        sum_over_rows(j, rows, at_.p, row_.d_o, value_size_, out_.dv);
        sum_over_rows(j, rows, at_.ds, row_.queries, size_, out_.dk);
    }

    // Part i of n of the sums of a group of keys.
    void fetch_sums(const float* sums, Index size, Index j, Index i, Index n) const {
        const Index floats = (square * size / n + W) / W * W;
        const float* from = sums + key_group(j) * square * size + i * floats;
        for (Index x = 0; x < floats; x += W) prefetch_for_write(from + x);
    }

    // Operands of the products of a pair, and where those of pair number n go.
    struct Products {
        const Word *keys, *queries, *values, *d_o;
        float *scores, *dp;
    };
    Products products(Pair pair, Index n) const {
        return {key_.keys + key_group(pair.j) * size_ * W,
                row_.queries_t + row_group(pair.i) * size_ * W,
                key_.values + key_group(pair.j) * value_size_ * W,
                row_.d_o_t + row_group(pair.i) * value_size_ * W,
                at_.scores + n % 2 * square * square,
                at_.dp + n % 2 * square * square};
    }

    // Scores and dp of a pair.
    void score(Pair pair, Index n) const {
        const Products x = products(pair, n);
        multiply_columns<Tiles>(x.keys, x.queries, size_ / square * tile_words, size_ / square, x.scores, 2, false);
        multiply_columns<Tiles>(x.values, x.d_o, value_size_ / square * tile_words, value_size_ / square, x.dp, 2,
                                false);
    }

    // Scores and dp of a pair become p and ds; 0 where a row does not see the key. Beside it those of the next are
    // computed: K, V: steps of the depth of both, 0: any.
    template <bool masked, int K, int V>
    [[gnu::noinline]] void gradients(Pair pair, Pair ahead) {
        const Index j = pair.j, i = pair.i;
        const F slope = splat(score_scale(head_) * log2_e), scale = splat(head_.scale);
        F shift[2], delta[2], first[2], last[2];
        for (Index h = 0; h < 2; ++h) {
            shift[h] = load(row_.shift + row_group(i) * square + h * W);
            delta[h] = load(row_.delta + row_group(i) * square + h * W);
            first[h] = masked ? load(at_.first + i * square + h * W) : splat(0.0F);
            last[h] = masked ? load(at_.last + i * square + h * W) : splat(0.0F);
        }
        const Products now = products(pair, pairs_), then = products(ahead, pairs_ + 1);
        const float *scores = now.scores, *dp = now.dp;
        Word *p_out = at_.p + i * 2 * tile_words, *ds_out = at_.ds + i * 2 * tile_words;
        Word* ds_t = at_.ds_t + i * ds_step + j * 2 * tile_words;
        const auto step = [=](Index t) __attribute__((always_inline)) {
            const Index k = 2 * t;
            U words[2];
#pragma GCC unroll 2
            for (Index m = 0; m < 2; ++m) {
                F p[2], ds[2];
                const F key = splat(static_cast<float>(j * square + k + m));
#pragma GCC unroll 2
                for (Index h = 0; h < 2; ++h) {
                    const Index at = (h * square + k + m) * W;
                    p[h] = exp2_for_bf16(fma(load(scores + at), slope, shift[h]));
                    ds[h] = p[h] * fma(load(dp + at), scale, delta[h]);
                    if constexpr (masked) {
                        const Mask seen = (key >= first[h]) & (key < last[h]);
                        p[h] = select(seen, p[h], splat(0.0F));
                        ds[h] = select(seen, ds[h], splat(0.0F));
                    }
                }
                store(p_out + (k + m) * W, Tiles::neighbours(p[0], p[1]));
                words[m] = Tiles::neighbours(ds[0], ds[1]);
                store(ds_out + (k + m) * W, words[m]);
            }
            U low, high;
            Tiles::interleave(words[0], words[1], low, high);
            store(ds_t + t * W, low);
            store(ds_t + tile_words + t * W, high);
        };
        constexpr int steps = square / 2;
        if constexpr (K == 0) {
            score(ahead, pairs_ + 1);
            for (Index t = 0; t < steps; ++t) step(t);
        } else {
            constexpr int part = steps / 4 - 1;
            for (Index h = 0; h < 2; ++h)
                multiply_between<Tiles, K, part>(then.keys, then.queries + h * K * tile_words,
                                                 then.scores + h * 2 * tile_words, h * part, step);
            for (Index h = 0; h < 2; ++h)
                multiply_between<Tiles, V, part>(then.values, then.d_o + h * V * tile_words,
                                                 then.dp + h * 2 * tile_words, (h + 2) * part, step);
            for (Index t = 4 * part; t < steps; ++t) step(t);
        }
    }

    using Gradients = void (BackwardByTiles::*)(Pair, Pair);
    template <int K, int V>
    void choose() {
        gradients_[0] = &BackwardByTiles::gradients<false, K, V>;
        gradients_[1] = &BackwardByTiles::gradients<true, K, V>;
    }
    void choose_gradients() {
        const Index k = size_ / square, v = value_size_ / square;
        if (k == 2 && v == 2) return choose<2, 2>();
        if (k == 3 && v == 3) return choose<3, 3>();
        if (k == 4 && v == 4) return choose<4, 4>();
        if (k == 6 && v == 4) return choose<6, 4>();
        if (k == 8 && v == 8) return choose<8, 8>();
        choose<0, 0>();
    }

    // sums += xᵀ·y: x of a group of keys, y of n columns.
    void sum_over_rows(Index j, Range rows, const Word* x, const Word* y, Index n, float* sums) const {
        sums += key_group(j) * square * n;
        if (rows.empty() && adds_to_keys_) return;
        if (rows.empty()) rows = {0, 0};  // zeros
        multiply_columns<Tiles>(x + rows.begin * 2 * tile_words, y + row_group(rows.begin) * tile_words,
                                head_.rows() / square * tile_words, rows.end - rows.begin, sums, n / tile_size,
                                adds_to_keys_);
    }

    // dq of a group of rows.
    void of_rows(Index i) {
        const Range keys = seen_[i];
        if (keys.empty() && adds_to_rows_) return;
        for (Index c = 0; c < size_ / tile_size; ++c)
            multiply_row<Tiles>(key_.keys_t + (c * (head_.keys / square) + key_group(keys.begin)) * tile_words,
                                at_.ds_t + i * ds_step + keys.begin * 2 * tile_words, keys.end - keys.begin,
                                out_.dq + row_group(i) * square * size_ + c * 2 * tile_words, adds_to_rows_);
    }

    const AttentionHead& head_;
    const AttentionGradient& out_;
    AttentionMask mask_;
    Memory at_;
    PackedRows row_;
    PackedKeys key_;
    Index size_, value_size_;
    Index begin_ = 0, groups_ = 0;             // of the rows
    Index first_ = 0, key_groups_ = 0;         // of the keys
    Range seeing_[key_groups], seen_[groups];  // groups that see a group of keys, or that a group of rows sees
    Gradients gradients_[2];                   // of pairs of which all rows see all keys, and others
    Index pairs_ = 0;                          // that were computed
    bool adds_to_rows_ = true, adds_to_keys_ = true;
    Range all_see_[groups];  // keys that all rows of a group see
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

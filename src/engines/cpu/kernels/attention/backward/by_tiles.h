// A tile step of the backward pass by matrix tiles, where position alone hides keys: 32 keys and 32 rows at a time,
// whose scores stay in the first-level cache. Scores lie as sᵀ = k qᵀ and dpᵀ = v doᵀ. So two neighbours of a row of
// pᵀ and dsᵀ are a pair for the products that sum over rows. Two neighbours of a column are one for the product that
// sums over keys:
//     dv += pᵀ do      dk += dsᵀ q      dqᵀ = kᵀ dsᵀ
#pragma once

#include "engines/cpu/kernels/attention/backward/packed.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// The scratch memory of a step.
struct BackwardTilesMemory {
    static constexpr Index groups = backward_blocks::unit_rows / square, key_groups = backward_blocks::keys / square;
    std::uint32_t *p, *ds;  // [group, 2 tiles] of a group of keys, A: 16 keys of 32 rows
    std::uint32_t* ds_t;    // [group, key group, 2 tiles] B: 32 keys of 16 rows
    float *scores, *dp;     // [2][square, square] of one group of rows and the next
    float* result;          // [square, square]
    float *first, *last;    // [rows] the keys that a row sees, as numbers

    static BackwardTilesMemory take(Scratch& memory) {
        BackwardTilesMemory m;
        m.p = memory.take<std::uint32_t>(groups * 2 * tile_words);
        m.ds = memory.take<std::uint32_t>(groups * 2 * tile_words);
        m.ds_t = memory.take<std::uint32_t>(groups * key_groups * 2 * tile_words);
        for (float** x : {&m.scores, &m.dp}) *x = memory.take<float>(2 * square * square);
        m.result = memory.take<float>(square * square);
        for (float** x : {&m.first, &m.last}) *x = memory.take<float>(groups * square);
        return m;
    }
};

template <class P>
class BackwardByTiles {
    using Tiles = typename P::Tiles;
    using Memory = BackwardTilesMemory;
    using Word = std::uint32_t;
    static constexpr Index groups = Memory::groups, key_groups = Memory::key_groups;

  public:
    static std::size_t scratch() {
        Scratch memory(nullptr);
        Memory::take(memory);
        return memory.used();
    }

    // Whether all groups of the step are there.
    static bool takes(const AttentionHead& head, const AttentionGradient& gradient, Range rows, Range keys) {
        if (!packs(head, gradient) || (rows.end - rows.begin) % square != 0 || (keys.end - keys.begin) % square != 0)
            return false;
        const auto has = [](const Packed* state, Range range) {
            for (Index g = range.begin / square; g < range.end / square; ++g)
                if (state[g] == Packed::left_out) return false;
            return true;
        };
        Scratch of_rows(gradient.packed_rows), of_keys(gradient.packed_keys);
        return has(PackedRows::take(head, of_rows).state, rows) && has(PackedKeys::take(head, of_keys).state, keys);
    }

    BackwardByTiles(const AttentionHead& head, const AttentionGradient& gradient, std::byte* scratch)
        : head_(head), out_(gradient), mask_(head), size_(head.size), value_size_(head.value_size) {
        Scratch memory(scratch), of_rows(gradient.packed_rows), of_keys(gradient.packed_keys);
        at_ = Memory::take(memory);
        row_ = PackedRows::take(head, of_rows);
        key_ = PackedKeys::take(head, of_keys);
    }

    void run(Range rows, Range keys) {
        begin_ = rows.begin;
        groups_ = (rows.end - rows.begin) / square;
        first_ = keys.begin;
        key_groups_ = (keys.end - keys.begin) / square;
        find_ranges();
        for (Index j = 0; j < key_groups_; ++j) of_keys(j);
        for (Index i = 0; i < groups_; ++i) of_rows(i);
    }

  private:
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

    // dv and dk of a group of keys, and ds for dq.
    void of_keys(Index j) {
        const Range rows = seeing_[j];
        if (rows.empty()) return;
        score(j, rows.begin);
        for (Index i = rows.begin; i < rows.end; ++i) {
            if (i + 1 < rows.end) score(j, i + 1);  // its tiles are stored while exponentials begin
            const Range all = all_see_[i];
            if (all.begin <= j * square && (j + 1) * square <= all.end)
                gradients<false>(j, i);
            else
                gradients<true>(j, i);
        }
        sum_over_rows(j, rows, at_.p, row_.d_o, value_size_, out_.dv);
        sum_over_rows(j, rows, at_.ds, row_.queries, size_, out_.dk);
    }

    // Scores and dp of group j of keys and i of rows.
    void score(Index j, Index i) const {
        const Index step = 2 * tile_words;
        const auto multiply = [&](const Word* a, const Word* b, Index n, float* c) {
            n /= square;
            multiply_square<Tiles>(
                {a + key_group(j) * n * step, step, b + row_group(i) * n * step, step, n, c, square, false});
        };
        multiply(key_.keys, row_.queries_t, size_, at_.scores + i % 2 * square * square);
        multiply(key_.values, row_.d_o_t, value_size_, at_.dp + i % 2 * square * square);
    }

    // Scores and dp become p and ds; 0 where a row does not see the key.
    template <bool masked>
    [[gnu::noinline]] void gradients(Index j, Index i) {
        const F slope = splat(score_scale(head_) * log2_e), scale = splat(head_.scale);
        F shift[2], delta[2], first[2], last[2];
        for (Index h = 0; h < 2; ++h) {
            shift[h] = load(row_.shift + row_group(i) * square + h * W);
            delta[h] = load(row_.delta + row_group(i) * square + h * W);
            first[h] = masked ? load(at_.first + i * square + h * W) : splat(0.0F);
            last[h] = masked ? load(at_.last + i * square + h * W) : splat(0.0F);
        }
        const float *scores = at_.scores + i % 2 * square * square, *dp = at_.dp + i % 2 * square * square;
        Word *p_out = at_.p + i * 2 * tile_words, *ds_out = at_.ds + i * 2 * tile_words;
        Word* ds_t = at_.ds_t + (i * key_groups_ + j) * 2 * tile_words;
        for (Index k = 0; k < square; k += 2) {
            U words[2];
#pragma GCC unroll 2
            for (Index m = 0; m < 2; ++m) {
                F p[2], ds[2];
                const F key = splat(static_cast<float>(j * square + k + m));
#pragma GCC unroll 2
                for (Index h = 0; h < 2; ++h) {
                    const Index at = (k + m) * square + h * W;
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
            store(ds_t + k / 2 * W, low);
            store(ds_t + tile_words + k / 2 * W, high);
        }
    }

    // sums += xᵀ·y: x of a group of keys, y of n columns.
    void sum_over_rows(Index j, Range rows, const Word* x, const Word* y, Index n, float* sums) const {
        const Index step = n / tile_size * tile_words;
        for (Index c = 0; c < n; c += square)
            multiply_square<Tiles>({x + rows.begin * 2 * tile_words, 2 * tile_words,
                                    y + row_group(rows.begin) * step + c / tile_size * tile_words, step,
                                    rows.end - rows.begin, sums + (first_ + j * square) * n + c, n, true});
    }

    // dq of a group of rows.
    void of_rows(Index i) {
        const Index n = size_, step = n / tile_size * tile_words;
        const Range keys = seen_[i];
        if (keys.empty()) return;
        for (Index c = 0; c < n; c += square) {
            multiply_square<Tiles>({key_.keys_t + key_group(keys.begin) * step + c / tile_size * tile_words, step,
                                    at_.ds_t + (i * key_groups_ + keys.begin) * 2 * tile_words, 2 * tile_words,
                                    keys.end - keys.begin, at_.result, square, false});
            add_transposed(out_.dq + (begin_ + i * square) * n + c, n);
        }
    }

    // Columns 4i … 4i + 3 of the left half of `result` are rows 8i … 8i + 3, those of the right one 8i + 4 … 8i + 7.
    void add_transposed(float* sums, Index n) const {
        for (Index half = 0; half < 2; ++half)
            for (Index c = 0; c < square; c += W) {
                U block[W];
                for (Index d = 0; d < W; ++d) block[d] = as_words(load(at_.result + (c + d) * square + half * W));
                transpose(block);
                for (Index l = 0; l < W; ++l) {
                    float* row = sums + (l / 4 * 8 + half * 4 + l % 4) * n + c;
                    store(row, load(row) + as_floats(block[l]));
                }
            }
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
    Range all_see_[groups];                    // keys that all rows of a group see
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

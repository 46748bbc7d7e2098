// The forward pass of a unit by matrix tiles: groups of 32 query rows, and parts of 128 keys, whose scores and
// probabilities stay in the first-level cache.
//
// Parts whose keys all rows see go through a pipeline (tile_pipeline.h), one group after the other, where the sizes of
// rows allow it. The others, at the ends of what causal masks and windows leave, with masks and biases, are computed
// stage by stage.
#pragma once

#include "engines/cpu/kernels/attention/forward/combine.h"
#include "engines/cpu/kernels/attention/forward/tile_pipeline.h"
#include "engines/cpu/kernels/attention/forward/tile_rows.h"
#include "engines/cpu/kernels/attention/forward/unit.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

template <class P>
class ForwardByTiles : ForwardUnit<P> {
    using Unit = ForwardUnit<P>;
    using Unit::at_, Unit::begin_, Unit::biased_, Unit::flagged_, Unit::group_rows, Unit::head_, Unit::mask_,
        Unit::rows_, Unit::keeps_products_;
    using Tiles = typename P::Tiles;
    using Word = Element<P>;
    using Rows = TileRows<P>;

  public:
    // exact: whether logarithms of sums are wanted. packed: keys that are packed for all units; null: this one packs
    // them.
    ForwardByTiles(const AttentionHead& head, Index begin, Index end, bool exact, std::byte* packed, std::byte* scratch)
        : Unit(head, begin, end, scratch),
          operands_(at_.operands),
          shared_(packed != nullptr),
          softmax_(at_, at_.operands.columns, Unit::slope_, exact) {
        if (!shared_) return;
        Scratch memory(packed);
        operands_ = TileOperands::take(head_, head_.keys, memory);
    }

    void start() {
        Unit::start();
        pack_queries();
        softmax_.start(round_up(rows_, group_rows));
    }

    void keys(Index first, Index last) {
        origin_ = first;
        listed_ = 0;
        // Of all blocks: a pipeline fills once. With addends a part waits for those before it, which give rows a base.
        if (shared_ && pipeline_ && keeps_products_) {
            for (const Take take : {Take::others, Take::whole})
                Unit::each_block(first, last, [&](Index begin, Index count) { block(begin, count, take); });
        } else {
            Unit::each_block(first, last, [&](Index begin, Index count) {
                block(begin, count, Take::all);
                run_listed();
            });
        }
        run_listed();
    }

    void finish(const AttentionOutput& out) {
        for (Index r = 0; r < rows_; ++r) {
            if (out.o.data != nullptr && r + 8 < rows_)
                prefetch_row(query_row(head_, out.o, begin_ + r + 8), head_.value_size);
            const auto s = softmax_.sum_of_row(r);
            copy_row_of_o(r, at_.row_of_o);
            finish_row(head_, begin_ + r, at_.row_of_o, s.base, s.sum, out);
        }
    }

    void finish_partial(const PartialSoftmax& out) {
        for (Index r = 0; r < rows_; ++r) {
            const auto s = softmax_.sum_of_row(r);
            copy_row_of_o(r, out.o + r * columns() * W);
            out.maximum[r] = s.base;
            out.sum[r] = s.sum;
        }
    }

  private:
    static constexpr Index part_keys = TileOperands::part_keys, part_steps = TileOperands::part_steps,
                           part_size = part_steps * 2 * tile_words;  // of probabilities
    static_assert(group_rows == square && W == tile_size);

    // A group of rows and keys that lie in one part.
    struct Part {
        Index r, count, key, keys;
        bool all_see;  // by position
        Index steps() const { return round_up(keys, square) / square; }
    };

    Index chunks() const { return operands_.chunks; }
    Index columns() const { return operands_.columns; }
    const Word* queries(Index r) const { return at_.q + r * chunks() * W; }

    // Rows beyond the last are zeros.
    void pack_queries() {
        auto* staging = reinterpret_cast<std::uint16_t*>(at_.staging);
        for (Index r = 0; r < round_up(rows_, group_rows); ++r) {
            Word* out = at_.q + r / group_rows * group_rows * chunks() * W + Rows::row_of_group(r % group_rows);
            if (r + packing_distance < rows_)
                prefetch_row(query_row(head_, head_.q, begin_ + r + packing_distance), head_.size);
            const auto* from = r < rows_ ? reinterpret_cast<const Word*>(stored_row(
                                               query_row(head_, head_.q, begin_ + r), head_.size, staging, P{}))
                                         : nullptr;
            F squares = splat(0.0F);
            const Index own = (head_.size + square - 1) / square;
            for (Index c = 0; c < chunks(); ++c) {
                U words = from == nullptr ? U(0) : load(from + c % own * W);
                if (c >= own) words = finite_halves(words);  // ∞·0 would be NaN, of a key without low numbers
                store(out + c * 2 * tile_words, words);
                squares = P::multiply_add(as_floats(words), as_floats(words), squares);
            }
            at_.norms[r] = sum(squares);
        }
    }

    // Zeros where a bf16 is Inf or NaN.
    static U finite_halves(U words) {
        U bad = (((words & U(0x7f807f80U)) + U(0x00800080U)) >> 15) & U(0x00010001U);
        for (int n = 1; n < 16; n *= 2) bad = bad | (bad << n);
        return words - (words & bad);
    }

    void copy_row_of_o(Index r, float* out) const {
        const float* o = softmax_.sums(r);
        for (Index n = 0; n < columns(); ++n) store(out + n * W, load(o + n * 2 * tile_words));
    }

    // A key's place in the operands.
    Index place(Index key) const { return key - packed_; }

    // Which parts of a block are computed: those that all rows see whole are listed for the pipeline.
    enum class Take { all, others, whole };

    void block(Index first, Index count, Take take) {
        if (!Unit::find_groups(first, count)) return;
        packed_ = origin_;
        if (!shared_) pack(first, count);
        if (listed_ + round_up(rows_, group_rows) / group_rows * most_parts > most_listed) run_listed();
        for (Index r = 0, t = 0; r < rows_; r += group_rows, ++t) {
            Part part{r, min(group_rows, rows_ - r), 0, 0, false};
            Range all_see{first, first + count};
            for (Index i = r; i < r + part.count; ++i)
                all_see = {max(all_see.begin, at_.seen[i].begin), min(all_see.end, at_.seen[i].end)};
            const Index end = first + min(at_.tiles[t].end, count);
            for (Index key = first + at_.tiles[t].begin / square * square; key < end; key += part.keys) {
                part.key = key;
                part.keys = min(end, origin_ + (key - origin_) / part_keys * part_keys + part_keys) - key;
                part.all_see = all_see.begin <= key && key + part.keys <= all_see.end;
                const bool listed = pipeline_ && is_whole(part);
                if (take == (listed ? Take::others : Take::whole)) continue;
                if (listed) {
                    list_[listed_++] = part;
                } else {
                    if (!keeps_products_) run_listed();  // a row's parts are summed in their order
                    add(part);
                }
            }
        }
    }

    void run_listed() {
        if (listed_ > 0) (this->*pipeline_)();
        listed_ = 0;
    }

    bool is_whole(const Part& part) const {
        const float norm = operands_.norms[place(part.key) / part_keys];
        return part.all_see && part.keys == part_keys && part.count == group_rows &&
               (keeps_products_ ? softmax_.bounds(part.r, norm) : fuses(part, norm)) && !has_nonfinite(part);
    }
    bool has_nonfinite(const Part& part) const {
        const TileOperands::Taken* taken = operands_.taken + place(part.key) / part_keys * 2;
        return (taken[0] | taken[1]) != 0;
    }

    // Null where there is none.
    using RunPipeline = void (ForwardByTiles::*)();
    RunPipeline choose_pipeline() const {
        const Index c = chunks(), n = columns();
        if (operands_.low_values != nullptr) return nullptr;
        if (!keeps_products_) {
            if (!flagged_ && !(biased_ && head_.bias.dtype == core::DType::bf16)) return nullptr;
            if (c == 2 && n == 4) return choose_addend<2, 4>();
            if (c == 4 && n == 8) return choose_addend<4, 8>();
            return nullptr;
        }
        if (c == 2 && n == 4) return choose<2, 4, Products>();
        if (c == 3 && n == 6) return choose<3, 6, Products>();
        if (c == 4 && n == 8) return choose<4, 8, Products>();
        if (c == 6 && n == 8) return choose<6, 8, Products>();
        if (c == 8 && n == 16) return choose<8, 16, Products>();
        return nullptr;
    }
    template <int K, int V>
    RunPipeline choose_addend() const {
        return flagged_ ? choose<K, V, MaskedScores>() : choose<K, V, BiasedScores<core::bf16>>();
    }
    template <int K, int V, class Scores>
    RunPipeline choose() const {
        return softmax_.exact() ? &ForwardByTiles::run_pipeline<K, V, Scores, true>
                                : &ForwardByTiles::run_pipeline<K, V, Scores, false>;
    }

    // All listed parts: scores of a panel ahead, sums of a part behind. A panel adds to some columns of o, the panels
    // of a part to all.
    template <int K, int V, class Scores, bool exact>
    [[gnu::noinline]] void run_pipeline() {
        constexpr int panel_tiles = TilePanel<Tiles, K, 1>::key_tiles, panels = part_keys / tile_size / panel_tiles,
                      sums = V / panels;
        constexpr Index panel_keys = panel_tiles * tile_size, panel_size = panel_tiles * 2 * tile_words;
        float *scores = at_.scores, *next = at_.scores + panel_size;
        Word *p = at_.probabilities, *before = at_.probabilities + part_size;
        multiply(list_[0], 0, panel_keys, scores);
        for (Index n = 0; n < listed_; ++n) {
            const Part& part = list_[n];
            const Part& next_part = list_[min(n + 1, listed_ - 1)];
            softmax_.begin(part.r, part.count, scores, panel_keys / W, p);
            for (Index m = 0; m < panels; ++m) {
                const bool last = m == panels - 1;
                const Part& ahead = last ? next_part : part;
                const Index j = last ? 0 : (m + 1) * panel_keys;
                Word* to = p + m * (part_size / panels);
                if (n == 0) {
                    panel<panel_tiles / 2, Scores, exact>(part, m * panel_keys, scores, to);
                    multiply(ahead, j, panel_keys, next);
                } else {
                    const Part& old = list_[n - 1];
                    run_panel<Scores, exact>(
                        TilePanel<Tiles, K, sums>{queries(ahead.r), operands_.key_tile(place(ahead.key) + j), next,
                                                  before, operands_.value_tile(place(old.key), m * sums),
                                                  softmax_.sums(old.r) + m * sums * 2 * tile_words},
                        part, next_part, m * panel_keys, scores, to);
                }
                std::swap(scores, next);
            }
            softmax_.settle(part.count);
            std::swap(p, before);
        }
        sum_part(list_[listed_ - 1], before);
    }

    template <class Scores, bool exact, class Panel>
    [[gnu::noinline]] void run_panel(const Panel& of, const Part& part, const Part& next, Index j, const float* scores,
                                     Word* p) {
        const Panel products = of;
        const auto group = softmax_.group();
        products.run([&, group, scores, p ](Index l) __attribute__((always_inline)) {
            fetch<Scores>(begin_ + next.r + l, next.key + j, Panel::key_tiles * tile_size);
            softmax_.template exponentials<Panel::key_tiles / 2, exact>(group, l, scores_of<Scores>(part, l, j, scores),
                                                                        p);
        });
    }

    // Keys of a block, from the beginning of a part on.
    void pack(Index first, Index count) {
        packed_ += (first - origin_) / part_keys * part_keys;
        const PackOperands<P> operands(head_, operands_, at_.staging);
        for (Index j = packed_; j < first + count; j += part_keys)
            operands.part(j, min(j + part_keys, first + count), place(j));
    }

    void add(const Part& part) {
        if (keeps_products_) {
            multiply(part, 0, part.keys, at_.scores);
        } else {
            auto fetch = mask_.prefetch(begin_ + part.r, part.count, part.key, part.keys);
            for (Index s = 0; s < part.steps(); ++s) {
                multiply(part, s * square, square, at_.scores + s * 4 * tile_words);
                for (Index i = 0; i < part.count; i += part.steps()) fetch();
            }
        }
        const float norm = operands_.norms[place(part.key) / part_keys];
        const bool fused = fuses(part, norm);
        if (!fused) finish_scores(part);
        softmax_.begin(part.r, part.count, at_.scores, part.steps() * 2, at_.probabilities);
        exponentials(part, fused, norm);
        softmax_.settle(part.count);
        sum_part(part, at_.probabilities);
        add_nonfinite(part);
    }

    // Products of keys [j, j + keys) of the part.
    void multiply(const Part& part, Index j, Index keys, float* scores) const {
        multiply_columns<Tiles>(queries(part.r), operands_.key_tile(place(part.key) + j), chunks() * tile_words,
                                chunks(), scores, round_up(keys, square) / W, false);
    }

    void sum_part(const Part& part, const Word* p) const {
        const Word* values = operands_.value_tile(place(part.key));
        const auto sum = [&](const Word* of) {
            multiply_columns<Tiles>(p, of, part_steps * tile_words, part.steps(), softmax_.sums(part.r), columns(),
                                    true);
        };
        sum(values);
        if (operands_.low_values != nullptr) sum(operands_.low_tile(values));
    }

    // Whether scores need not be finished before their exponentials: they are products, or biases or flags of a mask
    // are read beside. Then all rows have a base, and products are finite, since −∞ in a bias would not hide others.
    bool fuses(const Part& part, float norm) const {
        if (!part.all_see || part.keys % square != 0) return false;
        if (keeps_products_) return true;
        bool fits = biased_ || flagged_;
        for (Index l = 0; l < part.count; ++l)
            fits = fits && at_.maximum[part.r + l] != -infinity && at_.norms[part.r + l] * norm < infinity;
        return fits;
    }

    // Scores of row l of the group from key j of the part on.
    template <class Scores>
    SOFTDELTA_INLINE Scores scores_of(const Part& part, Index l, Index j, const float* scores) const {
        const Products products{scores + Rows::row_of_group(l)};
        const Index r = begin_ + part.r + l, key = part.key + j;
        if constexpr (std::is_base_of_v<MaskedScores, Scores>) {
            return {products, splat(head_.scale), mask_.mask_row(r, key)};
        } else if constexpr (!std::is_same_v<Products, Scores> && !std::is_same_v<FinishedScores, Scores>) {
            const void* bias = mask_.bias_row(r, key).data;
            return {products, splat(head_.scale), static_cast<decltype(Scores::bias)>(bias)};
        } else {
            return {products};
        }
    }
    template <class Scores>
    SOFTDELTA_INLINE void fetch(Index r, Index key, Index keys) const {
        if constexpr (std::is_same_v<MaskedScores, Scores>)
            prefetch_bytes(mask_.mask_row(r, key), keys);
        else if constexpr (!std::is_same_v<Products, Scores>)
            prefetch_row(mask_.bias_row(r, key), keys);
    }

    void exponentials(const Part& part, bool fused, float norm) {
        if (keeps_products_ && softmax_.bounds(part.r, norm)) return exponentials<Products>(part);
        if (keeps_products_ || !fused) return exponentials<FinishedScores>(part);
        if (flagged_) return exponentials<MaskedScores>(part);
        if (head_.bias.dtype == core::DType::f32) return exponentials<BiasedScores<float>>(part);
        if (head_.bias.dtype == core::DType::bf16) return exponentials<BiasedScores<core::bf16>>(part);
        exponentials<BiasedScores<core::f16>>(part);
    }
    template <class Scores>
    void exponentials(const Part& part) {
        softmax_.exact() ? exponentials<Scores, true>(part) : exponentials<Scores, false>(part);
    }
    template <class Scores, bool exact>
    void exponentials(const Part& part) {
        for (Index j = 0; j < part.keys; j += 2 * square) {
            const float* scores = at_.scores + j / W * 2 * tile_words;
            Word* p = at_.probabilities + j / square * 2 * tile_words;
            part.keys - j > square ? panel<2, Scores, exact>(part, j, scores, p)
                                   : panel<1, Scores, exact>(part, j, scores, p);
        }
    }
    template <Index steps, class Scores, bool exact>
    [[gnu::noinline]] void panel(const Part& part, Index j, const float* scores, Word* p) {
        const auto group = softmax_.group();
        for (Index l = 0; l < part.count; ++l)
            softmax_.template exponentials<steps, exact>(group, l, scores_of<Scores>(part, l, j, scores), p);
    }

    // −∞ for what a row does not see, up to the end of the last step.
    void finish_scores(const Part& part) {
        for (Index l = 0; l < part.count; ++l) {
            float* scores = at_.scores + Rows::row_of_group(l);
            if (keeps_products_) {
                hide(at_.seen[part.r + l], part, scores);
                continue;
            }
            const Index keys = round_up(part.keys, W);
            Unit::row_maximum(part.r + l, scores, part.key, part.keys, {0, keys});
            if (keys % square != 0) store(scores + keys * Unit::key_step, splat(-infinity));
        }
    }
    static void hide(Range seen, const Part& part, float* scores) {
        const Index begin = seen.begin - part.key, end = min(seen.end - part.key, part.keys);
        for (Index j = 0; j < part.steps() * square; j += W) {
            if (begin <= j && j + W <= end) continue;
            float* some = scores + j * Unit::key_step;
            const F key = iota() + splat(static_cast<float>(j));
            const Mask sees = (key >= splat(static_cast<float>(begin))) & (key < splat(static_cast<float>(end)));
            store(some, select(sees, load(some), F(-infinity)));
        }
    }

    // Adds values that are not finite to a part's rows of o.
    void add_nonfinite(const Part& part) {
        if (!has_nonfinite(part)) return;
        const TileOperands::Taken* taken = operands_.taken + place(part.key) / part_keys * 2;
        for (Index k = 0; k < part.keys; ++k) {
            const Index j = part.key + k, bit = place(j) % part_keys;
            if ((taken[bit / 64] >> bit % 64 & 1) == 0) continue;
            load_row(key_row(head_.v, j), head_.value_size, at_.row_of_o);
            for (Index l = 0; l < part.count; ++l) {
                const Index r = part.r + l;
                if (!mask_.sees_any(begin_ + r, at_.seen[r], j, j + 1)) continue;
                const F factor = splat(softmax_.probability(l, k));
                float* o = softmax_.sums(r);
                for (Index n = 0; n < columns(); ++n, o += 2 * tile_words)
                    store(o, fma(factor, load(at_.row_of_o + n * W), load(o)));
            }
        }
    }

    // Parts of a group in a block; listed ones, at least as many as a block has.
    static constexpr Index most_parts = forward_blocks::keys_of<P> / part_keys,
                           most_listed = forward_blocks::unit_rows / square * most_parts;

    TileOperands operands_;
    bool shared_;
    Rows softmax_;
    Index origin_ = 0, packed_ = 0;  // where parts are counted from; the first packed key
    RunPipeline pipeline_ = choose_pipeline();
    Index listed_ = 0;
    Part list_[most_listed];
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

// The forward pass of a unit by matrix tiles: groups of 32 query rows, and parts of 128 keys, whose scores and
// probabilities stay in the first-level cache.
//
// An exponential is 2^((score − base)·slope − rise). The base is the largest score of the row's first panel. The rise,
// a whole number, follows only when a score lies 2^8 above: sums are then multiplied by a power of two, which is exact.
// When it would be large the base follows instead.
//
// A call that wants no logarithm of a row's sum gets exponentials of such parts in 16 bits (simd/sixteen_bits.h). Their
// sum is that of the rounded ones. Parts with larger scores or bases are computed in 32 bits.
//
// Parts whose keys all rows see go through a pipeline (tile_pipeline.h), one group after the other, where the sizes of
// rows allow it. The others, at the ends of what causal masks and windows leave, with masks and biases, are computed
// stage by stage.
#pragma once

#include <cmath>
#include <type_traits>

#include "engines/cpu/kernels/attention/forward/combine.h"
#include "engines/cpu/kernels/attention/forward/tile_pipeline.h"
#include "engines/cpu/kernels/attention/forward/unit.h"
#include "engines/cpu/kernels/simd/sixteen_bits.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

template <class P>
class ForwardByTiles : ForwardUnit<P> {
    using Unit = ForwardUnit<P>;
    using Unit::at_, Unit::begin_, Unit::group_rows, Unit::head_, Unit::mask_, Unit::rows_, Unit::slope_;
    using Tiles = typename P::Tiles;
    using Word = Element<P>;

  public:
    ForwardByTiles(const AttentionHead& head, Index begin, Index end, std::byte* scratch)
        : Unit(head, begin, end, scratch), operands_(at_.operands) {}

    // Keys that are packed for all units; null: this one packs them.
    void use(std::byte* packed) {
        if (packed == nullptr) return;
        Scratch memory(packed);
        operands_ = TileOperands::take(head_, head_.keys, memory);
        shared_ = true;
    }

    // Whether the sum of a row may err as its probabilities do.
    void round_sums(bool rounded) { rounds_sums_ = rounded; }

    void start() {
        Unit::start();
        pack_queries();
        const Index all = round_up(rows_, group_rows);
        for (Index i = 0; i < all * columns() * W; i += W) store(at_.o + i, splat(0.0F));
        for (Index i = 0; i < 2 * part_size; i += W) store(at_.probabilities + i, U(0));
        for (Index r = 0; r < all; ++r) {
            at_.maximum[r] = lowest;
            at_.rise[r] = 0;
            store(at_.lanes + r * W, splat(0.0F));
        }
    }

    void keys(Index first, Index last) {
        origin_ = first;
        listed_ = 0;
        // Of all blocks: a pipeline fills once. With addends a part waits for those before it, which give rows a base.
        if (shared_ && pipeline_ && Unit::keeps_products_) {
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
        add_lanes();
        for (Index r = 0; r < rows_; ++r) {
            if (out.o.data != nullptr && r + 8 < rows_)
                prefetch_row(query_row(head_, out.o, begin_ + r + 8), head_.value_size);
            const Sum s = sum_of_row(r);
            copy_row_of_o(r, 1, at_.row_of_o);
            finish_row(head_, begin_ + r, at_.row_of_o, s.maximum, s.sum, at_.sum[r], out);
        }
    }

    void finish_partial(const PartialSoftmax& out) {
        add_lanes();
        for (Index r = 0; r < rows_; ++r) {
            const Sum s = sum_of_row(r);
            copy_row_of_o(r, s.factor, out.o + r * columns() * W);
            out.maximum[r] = s.maximum;
            out.sum[r] = s.sum;
        }
    }

  private:
    static constexpr Index part_keys = TileOperands::part_keys, part_steps = TileOperands::part_steps,
                           part_size = part_steps * 2 * tile_words;                                // of probabilities
    static constexpr Index panel_keys = 64, panel_size = panel_keys / tile_size * 2 * tile_words;  // of scores
    static_assert(group_rows == square && W == tile_size);

    // A group of rows and keys that lie in one part; those that all rows see by position.
    struct Part {
        Index r, count;
        Index key, keys;
        Range all_see;
    };

    Index chunks() const { return operands_.chunks; }
    Index columns() const { return operands_.columns; }
    // Row r of tiles that lie in pairs, one above the other; `pairs` of them belong to a group.
    static Index row_in(Index r, Index pairs) {
        return r / group_rows * pairs * 2 * tile_words + row_of_group(r % group_rows);
    }
    static Index row_of_group(Index l) { return l * W; }  // the second tile follows the first

    const Word* queries(Index r) const { return at_.q + r * chunks() * W; }
    float* sums(Index r) const { return at_.o + r * columns() * W; }

    // Rows beyond the last are zeros.
    void pack_queries() {
        auto* staging = reinterpret_cast<std::uint16_t*>(at_.staging);
        for (Index r = 0; r < round_up(rows_, group_rows); ++r) {
            Word* out = at_.q + row_in(r, chunks());
            if (r + packing_distance < rows_)
                prefetch_row(query_row(head_, head_.q, begin_ + r + packing_distance), head_.size);
            const auto* from = r < rows_ ? reinterpret_cast<const Word*>(stored_row(
                                               query_row(head_, head_.q, begin_ + r), head_.size, staging, P{}))
                                         : nullptr;
            F squares = splat(0.0F);
            for (Index c = 0; c < chunks(); ++c) {
                const U words = from == nullptr ? U(0) : load(from + c * W);
                store(out + c * 2 * tile_words, words);
                squares = P::multiply_add(as_floats(words), as_floats(words), squares);
            }
            at_.norms[r] = ::softdelta::kernels::SOFTDELTA_ISA_NAMESPACE::sum(squares);
        }
    }

    void copy_row_of_o(Index r, float factor, float* out) const {
        const float* o = at_.o + row_in(r, columns());
        for (Index n = 0; n < columns(); ++n) store(out + n * W, load(o + n * 2 * tile_words) * splat(factor));
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
            Part part{r, min(group_rows, rows_ - r), 0, 0, {first, first + count}};
            for (Index i = r; i < r + part.count; ++i)
                part.all_see = {max(part.all_see.begin, at_.seen[i].begin), min(part.all_see.end, at_.seen[i].end)};
            const Index end = first + min(at_.tiles[t].end, count);
            Index key = first + at_.tiles[t].begin / square * square;
            while (key < end) {
                part.key = key;
                key = min(end, origin_ + (key - origin_) / part_keys * part_keys + part_keys);
                part.keys = key - part.key;
                const bool whole = is_whole(part) && (Unit::keeps_products_ || (pipeline_ && fuses(part)));
                if (take == (whole ? Take::others : Take::whole)) continue;
                if (whole && pipeline_) {
                    list_[listed_++] = part;
                } else {
                    if (!Unit::keeps_products_) run_listed();  // a row's parts are summed in their order
                    add(part, whole);
                }
            }
        }
    }

    void run_listed() {
        if (listed_ == 1) add(list_[0], Unit::keeps_products_);  // the same bits
        if (listed_ > 1) (this->*pipeline_)();
        listed_ = 0;
    }

    // Keys of a block, from the beginning of a part on.
    void pack(Index first, Index count) {
        packed_ += (first - origin_) / part_keys * part_keys;
        const PackOperands<P> operands(head_, operands_, at_.staging);
        for (Index j = packed_; j < first + count; j += part_keys)
            operands.part(j, min(j + part_keys, first + count), place(j));
    }

    bool is_whole(const Part& part) const {
        return part.keys == part_keys && part.count == group_rows && part.all_see.begin <= part.key &&
               part.key + part_keys <= part.all_see.end && !sees_nonfinite(part);
    }

    // Calls call(key) for the keys of the part whose values are not finite.
    template <class Call>
    void each_nonfinite(const Part& part, Call&& call) const {
        const TileOperands::Taken* taken = operands_.taken + place(part.key) / part_keys * 2;
        if ((taken[0] | taken[1]) == 0) return;
        for (Index j = part.key; j < part.key + part.keys; ++j) {
            const Index bit = place(j) % part_keys;
            if ((taken[bit / 64] >> bit % 64 & 1) != 0) call(j);
        }
    }

    // Those that no row of the group sees do not matter: a shorter unit may not have them.
    bool sees_nonfinite(const Part& part) const {
        bool found = false;
        each_nonfinite(part, [&](Index j) {
            for (Index l = 0; l < part.count; ++l) found = found || at_.seen[part.r + l].contains(j);
        });
        return found;
    }

    // Null where there is none.
    using RunPipeline = void (ForwardByTiles::*)();
    RunPipeline choose_pipeline() const {
        const Index c = chunks(), n = columns();
        if (!Unit::keeps_products_) {
            if (Unit::biased_ && head_.bias.dtype != core::DType::bf16) return nullptr;
            if (c == 2 && n == 4) return choose_addend<2, 2>();
            if (c == 4 && n == 8) return choose_addend<4, 4>();
            return nullptr;
        }
        if (c == 2 && n == 4) return &ForwardByTiles::run_pipeline<2, 2, Scores>;
        if (c == 3 && n == 6) return &ForwardByTiles::run_pipeline<3, 3, Scores>;
        if (c == 4 && n == 8) return &ForwardByTiles::run_pipeline<4, 4, Scores>;
        if (c == 6 && n == 8) return &ForwardByTiles::run_pipeline<6, 4, Scores>;
        if (c == 8 && n == 16) return &ForwardByTiles::run_pipeline<8, 8, Scores>;
        return nullptr;
    }
    template <int K, int U>
    RunPipeline choose_addend() const {
        if (Unit::flagged_) return &ForwardByTiles::run_pipeline<K, U, MaskedScores>;
        if (Unit::biased_) return &ForwardByTiles::run_pipeline<K, U, BiasedScores<core::bf16>>;
        return nullptr;
    }

    // All listed parts: scores of a panel ahead, sums of a part behind. The sums of two panels are those of a part.
    template <int K, int U, class RowScores>
    [[gnu::noinline]] void run_pipeline() {
        float *scores = at_.scores, *next = at_.scores + panel_size;
        Word *p = at_.probabilities, *before = at_.probabilities + part_size;
        score(list_[0], 0, panel_keys, scores);
        for (Index n = 0; n < listed_; ++n) {
            const Part& part = list_[n];
            begin_part(p);
            begin_rows(part, scores, panel_keys / W);
            const bool in_16_bits = begin_16_bits(part, RowScores::bounded);
            for (Index m = 0; m < 2; ++m) {
                const Part& next_part = list_[min(n + 1, listed_ - 1)];
                const Part& ahead = m == 0 ? part : next_part;
                const Index j = m == 0 ? panel_keys : 0;
                Word* to = p + m * (part_size / 2);
                if (n == 0) {
                    exponentials<RowScores>(part, m * panel_keys, panel_keys, in_16_bits, scores, to);
                    score(ahead, j, panel_keys, next);
                } else {
                    const Part& old = list_[n - 1];
                    const TilePanel<Tiles, K, U> products{queries(ahead.r),
                                                          operands_.key_tile(place(ahead.key) + j),
                                                          next,
                                                          before,
                                                          operands_.value_tile(place(old.key), m * U),
                                                          sums(old.r) + m * U * 2 * tile_words};
                    in_16_bits ? run_panel<true, RowScores>(products, part, next_part, m * panel_keys, scores, to)
                               : run_panel<false, RowScores>(products, part, next_part, m * panel_keys, scores, to);
                }
                std::swap(scores, next);
            }
            if (risen_) rescale(part);
            std::swap(p, before);
        }
        sum(list_[listed_ - 1], before);
    }

    template <bool in_16_bits, class RowScores, class Products>
    [[gnu::noinline]] void run_panel(const Products& of, const Part& part, const Part& next, Index j,
                                     const float* scores, Word* p) {
        const Products products = of;
        const auto rows = [&] {
            if constexpr (in_16_bits)
                return rows16_of(part);
            else
                return rows_of(part);
        }();
        products.run([&, rows, scores, p ](Index l) __attribute__((always_inline)) {
            RowScores::fetch(*this, begin_ + next.r + l, next.key + j);
            const RowScores row = RowScores::of(*this, begin_ + part.r + l, part.key + j, scores + row_of_group(l));
            exponentials<panel_keys / W>(part, rows, l, row, p);
        });
    }

    // whole: as a pipeline computes it.
    void add(const Part& part, bool whole) {
        begin_part(at_.probabilities);
        const Index vectors = round_up(part.keys, square) / W;
        if (Unit::keeps_products_) {
            score(part, 0, part.keys, at_.scores);
        } else {
            auto fetch = mask_.prefetch(begin_ + part.r, part.count, part.key, part.keys);
            for (Index j = 0; j < part.keys; j += square) {
                score(part, j, min(square, part.keys - j), at_.scores + j / W * 2 * tile_words);
                for (Index i = 0; i < part.count; i += 2 * part_steps) fetch();
            }
        }
        if (!whole && fuses(part)) {
            each_addend(part);
        } else {
            if (!whole) finish_scores(part);
            begin_rows(part, at_.scores, whole ? panel_keys / W : vectors);
            if (whole)
                exponentials<Scores>(part, 0, part.keys, begin_16_bits(part, true), at_.scores, at_.probabilities);
            else
                exponentials<AnyScores>(part, 0, part.keys, begin_16_bits(part, false), at_.scores, at_.probabilities);
        }
        if (risen_) rescale(part);
        sum(part, at_.probabilities);
        add_nonfinite(part);
    }

    // Whether biases or flags of a mask may be read beside the exponentials: all rows have a base, and products are
    // finite, since −∞ in a bias would not hide others.
    bool fuses(const Part& part) const {
        if (!(Unit::biased_ || Unit::flagged_) || part.keys % square != 0 || part.all_see.begin > part.key ||
            part.key + part.keys > part.all_see.end)
            return false;
        const float norm = operands_.norms[place(part.key) / part_keys];
        bool fits = true;
        for (Index l = 0; l < part.count; ++l)
            fits = fits && at_.maximum[part.r + l] != lowest && at_.norms[part.r + l] * norm < infinity;
        return fits;
    }

    void each_addend(const Part& part) {
        const auto add = [&]<class RowScores>(std::type_identity<RowScores> /*type*/) {
            exponentials<RowScores>(part, 0, part.keys, begin_16_bits(part, false), at_.scores, at_.probabilities);
        };
        if (Unit::flagged_) return add(std::type_identity<MaskedScores>{});
        if (head_.bias.dtype == core::DType::f32) return add(std::type_identity<BiasedScores<float>>{});
        if (head_.bias.dtype == core::DType::bf16) return add(std::type_identity<BiasedScores<core::bf16>>{});
        add(std::type_identity<BiasedScores<core::f16>>{});
    }

    // Products of keys [j, j + keys) of the part.
    void score(const Part& part, Index j, Index keys, float* scores) const {
        multiply_columns<Tiles>(queries(part.r), operands_.key_tile(place(part.key) + j), chunks() * tile_words,
                                chunks(), scores, round_up(keys, square) / W, false);
    }

    // Sums of the part's keys.
    void sum(const Part& part, const Word* p) const {
        multiply_columns<Tiles>(p, operands_.value_tile(place(part.key)), part_steps * tile_words,
                                round_up(part.keys, square) / square, sums(part.r), columns(), true);
    }

    // −∞ up to the end of the last step.
    void finish_scores(const Part& part) {
        const Index keys = round_up(part.keys, W);
        for (Index l = 0; l < part.count; ++l) {
            float* scores = at_.scores + row_of_group(l);
            Unit::row_maximum(part.r + l, scores, part.key, part.keys, {0, keys});
            if (keys % square != 0) store(scores + keys * Unit::key_step, splat(-infinity));
        }
    }

    void begin_part(Word* p) {
        part_start_ = p;
        risen_ = false;
        for (Index l = 0; l < group_rows; l += W) store(at_.factor + l, splat(1.0F));
    }

    // Rows that have seen no key take the largest of these scores as their base. Those that have seen nothing but the
    // lowest number, as masks of finfo.min leave it, have a sum, which raise() scales.
    void begin_rows(const Part& part, const float* scores, Index vectors) {
        for (Index i = 0; i < part.count; i += W) {
            const F before = load(at_.maximum + part.r + i);
            if (!any(before == F(lowest))) continue;
            const Mask begins = (before == F(lowest)) & (sums_of_lanes(part.r + i) == F(0.0F));
            F highs[W];
            for (Index l = 0; l < W; ++l) {
                highs[l] = splat(lowest);
                for (Index v = 0; v < vectors && i + l < part.count; ++v)
                    highs[l] = max(highs[l], load(scores + row_of_group(i + l) + v * 2 * tile_words));
            }
            const F high = max(row_maxima(highs), splat(lowest));
            store(at_.maximum + part.r + i, select(begins, high, before));
            for (Index l = 0; rounds_sums_ && l < W; ++l)
                if (float& base = at_.maximum[part.r + i + l]; base != lowest) base = in_units(base);
        }
    }

    // Of keys [j, j + keys) of the part, in whole steps.
    template <class RowScores>
    [[gnu::noinline]] void exponentials(const Part& part, Index j, Index keys, bool in_16_bits, const float* scores,
                                        Word* p) {
        const Rows rows = rows_of(part);
        const Rows16 rows16 = rows16_of(part);
        for (Index l = 0; l < part.count; ++l) {
            const float* products = scores + row_of_group(l);
            Word* to = p;
            for (Index i = 0; i < keys; i += panel_keys, products += panel_size, to += part_size / 2) {
                const RowScores row = RowScores::of(*this, begin_ + part.r + l, part.key + j + i, products);
                if (keys - i <= square)
                    exponentials<2>(part, rows, l, row, to);
                else if (in_16_bits)
                    exponentials<4>(part, rows16, l, row, to);
                else
                    exponentials<4>(part, rows, l, row, to);
            }
        }
    }

    // Scores of a row from a key on, vector by vector.
    struct Scores {
        static constexpr bool bounded = true;  // by the norms of q and k
        const float* products;
        static Scores of(const ForwardByTiles& /*unit*/, Index /*row*/, Index /*key*/, const float* products) {
            return {products};
        }
        static void fetch(const ForwardByTiles& /*unit*/, Index /*row*/, Index /*key*/) {}
        SOFTDELTA_INLINE F operator()(Index v) const { return load(products + v * 2 * tile_words); }
    };
    struct AnyScores : Scores {
        static constexpr bool bounded = false;
        static AnyScores of(const ForwardByTiles& /*unit*/, Index /*row*/, Index /*key*/, const float* products) {
            return {{products}};
        }
    };
    template <class T>
    struct BiasedScores : Scores {
        static constexpr bool bounded = false;
        F scale;
        const T* bias;
        SOFTDELTA_INLINE static BiasedScores of(const ForwardByTiles& unit, Index r, Index key, const float* products) {
            const void* bias = unit.mask_.bias_row(r, key).data;
            return {{products}, splat(unit.head_.scale), static_cast<const T*>(bias)};
        }
        SOFTDELTA_INLINE static void fetch(const ForwardByTiles& unit, Index r, Index key) {
            prefetch_row(unit.mask_.bias_row(r, key), panel_keys);
        }
        SOFTDELTA_INLINE F operator()(Index v) const { return fma(Scores::operator()(v), scale, load(bias + v * W)); }
    };
    struct MaskedScores : Scores {
        static constexpr bool bounded = false;
        F scale;
        const std::uint8_t* flags;
        SOFTDELTA_INLINE static MaskedScores of(const ForwardByTiles& unit, Index r, Index key, const float* products) {
            return {{products}, splat(unit.head_.scale), unit.mask_.mask_row(r, key)};
        }
        SOFTDELTA_INLINE static void fetch(const ForwardByTiles& unit, Index r, Index key) {
            prefetch_bytes(unit.mask_.mask_row(r, key), panel_keys);
        }
        SOFTDELTA_INLINE F operator()(Index v) const {
            return select(nonzero_bytes(flags + v * W), Scores::operator()(v) * scale, F(-infinity));
        }
    };

    // What exponentials read and write of each row of a group.
    struct Rows {
        const float *base, *rise;
        float* lanes;
        F fall;
    };
    Rows rows_of(const Part& part) const {
        return {at_.maximum + part.r, at_.rise + part.r, at_.lanes + part.r * W, splat(-slope_)};
    }
    struct Rows16 {
        const float* offset;
        float* lanes;
        typename Tiles::Exponentials in_16_bits;
    };
    Rows16 rows16_of(const Part& part) const {
        return {at_.offset, at_.lanes + part.r * W, typename Tiles::Exponentials(splat(slope_ * sixteen_bits::one))};
    }

    // Of row l of the group and some vectors of keys. What a row that rises needs stands apart: a pipeline has a copy
    // of the rest for each of its rows.
    template <Index vectors, class RowScores>
    SOFTDELTA_INLINE void exponentials(const Part& part, const Rows& at, Index l, const RowScores& scores, Word* p) {
        F x[vectors];
        const F total = take<vectors>(at, l, scores, x);
        if (__builtin_expect(any(total > F(forward_blocks::most_total)), 0))
            in_32_bits<vectors>(part, l, scores, p);
        else
            put<vectors>(at, l, x, total, p);
    }
    template <Index vectors, class RowScores>
    [[gnu::noinline]] void in_32_bits(const Part& part, Index l, RowScores scores, Word* p) {
        const Rows at = rows_of(part);
        F x[vectors], total;
        do total = take<vectors>(at, l, scores, x);
        while (any(total > F(forward_blocks::most_total)) && raise(part.r + l, l, highest<vectors>(scores), p));
        put<vectors>(at, l, x, total, p);
    }
    template <Index vectors, class RowScores>
    SOFTDELTA_INLINE static F take(const Rows& at, Index l, const RowScores& scores, F (&x)[vectors]) {
        const F base = splat(at.base[l]), rise = splat(at.rise[l]);
#pragma GCC unroll 4
        for (Index i = 0; i < vectors; ++i) {
            const F below = base - scores(i);  // loaded as its operand
            x[i] = exp2_for_bf16(fma(below, at.fall, rise));
        }
        F total = x[0] + x[1];
        if constexpr (vectors == 4) total = total + (x[2] + x[3]);
        return total;
    }
    template <Index vectors>
    SOFTDELTA_INLINE static void put(const Rows& at, Index l, const F (&x)[vectors], F total, Word* p) {
        float* lanes = at.lanes + l * W;
        store(lanes, load(lanes) + total);
#pragma GCC unroll 2
        for (Index i = 0; i < vectors; i += 2) store_bf16(p + row_of_group(l) + i * tile_words, x[i], x[i + 1]);
    }

    // As above, in 16 bits.
    template <Index vectors, class RowScores>
    SOFTDELTA_INLINE void exponentials(const Part& part, const Rows16& at, Index l, const RowScores& scores, Word* p) {
        static_assert(vectors == 4);
        U x[2];
        const F total = take(at, l, scores, x);
        if (__builtin_expect(all(total <= F(forward_blocks::most_total)), 1))  // NaN, of the largest, is not
            put(at, l, x, total, p);
        else
            raise_in_16_bits<vectors>(part, l, scores, p);
    }
    template <Index vectors, class RowScores>
    [[gnu::noinline]] void raise_in_16_bits(const Part& part, Index l, RowScores scores, Word* p) {
        const Rows16 at = rows16_of(part);
        U x[2];
        F total;
        for (;;) {
            total = take(at, l, scores, x);
            if (all(total <= F(forward_blocks::most_total))) break;
            if (!raise(part.r + l, l, highest<vectors>(scores), p)) break;
            find_offsets(l / W * W, part.r + l / W * W);
            if (!(std::abs(at_.maximum[part.r + l] * slope_) * sixteen_bits::one < sixteen_bits::largest))
                return in_32_bits<vectors>(part, l, scores, p);
        }
        put(at, l, x, total, p);
    }
    template <class RowScores>
    SOFTDELTA_INLINE static F take(const Rows16& at, Index l, const RowScores& scores, U (&x)[2]) {
        const F offset = splat(at.offset[l]);
        F total = splat(0.0F);
#pragma GCC unroll 2
        for (Index i = 0; i < 2; ++i) {
            x[i] = at.in_16_bits.template of<RowScores::bounded>(scores(2 * i), scores(2 * i + 1), offset);
            total = at.in_16_bits.add(x[i], total);
        }
        return total;
    }
    SOFTDELTA_INLINE static void put(const Rows16& at, Index l, const U (&x)[2], F total, Word* p) {
        float* lanes = at.lanes + l * W;
        store(lanes, load(lanes) + total);
#pragma GCC unroll 2
        for (Index i = 0; i < 2; ++i) store(p + row_of_group(l) + i * 2 * tile_words, x[i]);
    }

    template <Index vectors, class RowScores>
    [[gnu::noinline]] static float highest(RowScores scores) {
        F highs = splat(lowest);
        for (Index i = 0; i < vectors; ++i) highs = max(highs, scores(i));
        return maximum(highs);
    }

    // A base that is a whole number of the units of 16 bits, as near as it can be.
    float in_units(float base) const {
        const float unit = slope_ * sixteen_bits::one, units = base * unit;
        return std::abs(units) < sixteen_bits::largest ? std::rint(units) / unit : base;
    }

    // Whether bases of the part fit, and scores, where they are products; at_.offset of its rows.
    bool begin_16_bits(const Part& part, bool products) {
        if (!rounds_sums_) return false;
        const F slope = splat(slope_ * sixteen_bits::one), largest = splat(sixteen_bits::largest);
        const F norm = splat(operands_.norms[place(part.key) / part_keys] * 1.01F);
        for (Index l = 0; l < group_rows; l += W) {
            const Index r = part.r + l;
            const F base = load(at_.maximum + r) * slope, rise = load(at_.rise + r) * splat(-sixteen_bits::one);
            // |q·k|² ≤ |q|²·|k|². Comparisons with NaN are false.
            const Mask there = iota() + splat(static_cast<float>(l)) < splat(static_cast<float>(part.count));
            const F bound = products ? load(at_.norms + r) * norm * (slope * slope) : splat(0.0F);
            const Mask fits = (bound < largest * largest) & (abs(base) < largest) & (rise < largest);
            if (any(there & !fits)) return false;
            find_offsets(l, r);
        }
        return true;
    }
    void find_offsets(Index l, Index r) {
        const F magic = splat(sixteen_bits::magic), unit = splat(sixteen_bits::one);
        const F base = (fma(load(at_.maximum + r), splat(slope_) * unit, magic)) - magic;
        store(at_.offset + l, magic + (load(at_.rise + r) * unit - base));
    }

    // Row r, l of its group, may have a score `high` that is much larger than those before. False when it has none.
    [[gnu::noinline]] bool raise(Index r, Index l, float high, Word* p) {
        float &base = at_.maximum[r], &rise = at_.rise[r];
        const float above = (high - base) * slope_;
        if (!(above + rise > forward_blocks::kept_rise)) return false;
        float factor = 0;
        if (above <= forward_blocks::most_rise) {
            const float whole = std::ceil(above);
            factor = std::ldexp(1.0F, static_cast<int>(-rise - whole));
            rise = -whole;
        } else {  // far from the base, differences to it would be rounded
            const float before = base;
            base = rounds_sums_ ? in_units(high) : high;
            factor = std::exp2((before - base) * slope_ - rise);
            rise = 0;
        }
        store(at_.lanes + r * W, load(at_.lanes + r * W) * splat(factor));
        while (p > part_start_) {
            p -= 2 * tile_words;
            Word* words = p + row_of_group(l);
            const U pairs = load(words);
            store(words, bf16_pairs(as_floats(pairs << 16) * splat(factor),
                                    as_floats(pairs & U(0xffff0000U)) * splat(factor)));
        }
        at_.factor[l] *= factor;
        return risen_ = true;
    }

    void rescale(const Part& part) {
        for (Index l = 0; l < part.count; ++l) {
            if (at_.factor[l] == 1.0F) continue;
            const F factor = splat(at_.factor[l]);
            float* o = sums(part.r) + row_of_group(l);
            for (Index n = 0; n < columns(); ++n) store(o + n * 2 * tile_words, factor * load(o + n * 2 * tile_words));
        }
    }

    // Adds values that are not finite to a part's rows of o.
    void add_nonfinite(const Part& part) {
        each_nonfinite(part, [&](Index j) {
            load_row(key_row(head_.v, j), head_.value_size, at_.row_of_o);
            const Index k = j - part.key;
            for (Index l = 0; l < part.count; ++l) {
                const Index r = part.r + l;
                if (!mask_.sees_any(begin_ + r, at_.seen[r], j, j + 1)) continue;
                const Word* p = at_.probabilities + k / square * 2 * tile_words + row_of_group(l);
                const F factor = splat(half_of(p[k % square / 2], k % 2));
                float* o = sums(part.r) + row_of_group(l);
                for (Index n = 0; n < columns(); ++n, o += 2 * tile_words)
                    store(o, fma(factor, load(at_.row_of_o + n * W), load(o)));
            }
        });
    }

    // at_.sum of W rows at a time.
    void add_lanes() {
        for (Index r = 0; r < rows_; r += W) store(at_.sum + r, sums_of_lanes(r));
    }
    F sums_of_lanes(Index r) const {
        F lanes[W];
        for (Index i = 0; i < W; ++i) lanes[i] = load(at_.lanes + (r + i) * W);
        return row_sums(lanes);
    }

    struct Sum {
        float maximum, sum, factor;  // factor: of the sums before the rise was a part of the maximum
    };
    Sum sum_of_row(Index r) const {
        if (at_.rise[r] == 0) return {at_.maximum[r], at_.sum[r], 1};
        const double base = at_.maximum[r], slope = slope_, rise = -at_.rise[r];
        const auto maximum = static_cast<float>(base + rise / slope);
        const auto factor = static_cast<float>(std::exp2(rise - (maximum - base) * slope));
        return {maximum, at_.sum[r] * factor, factor};
    }

    // Parts of a group in a block; listed ones, at least as many as a block has.
    static constexpr Index most_parts = forward_blocks::keys_of<P> / part_keys,
                           most_listed = forward_blocks::unit_rows / square * most_parts;

    TileOperands operands_;
    bool shared_ = false, rounds_sums_ = false;
    Index origin_ = 0, packed_ = 0;  // where parts are counted from; the first packed key
    Word* part_start_ = nullptr;     // probabilities of the part that is computed
    bool risen_ = false;             // some factor of the part is not 1
    RunPipeline pipeline_ = choose_pipeline();
    Index listed_ = 0;
    Part list_[most_listed];
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

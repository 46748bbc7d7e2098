#include "support/random_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>

#include "support/decisions.h"

namespace softdelta::test {

namespace {

class Draw : Decisions {
  public:
    Draw(std::uint64_t seed, const AttentionRanges& ranges)
        : Decisions(seed, call_.features),
          ranges_(ranges),
          slopes_random_(seed + 0x51097e5),
          quantised_random_(seed + 0x5ca1e5),
          repeat_random_(seed + 0x4e9ea7) {
        call_.seed = seed;
    }

    RandomAttention run() {
        dtype_ = draw_dtype();
        draw_sizes();
        draw_quantised();
        draw_lengths();
        draw_tensors();
        draw_options();
        draw_mask();
        draw_bias();
        draw_sink();
        draw_gradients();
        draw_slopes();
        call_.score_shape = {batch_, H_, longest_q_, longest_k_};
        const auto view = [](const Array& a) { return a.view(); };
        call_.inputs = {view(call_.q),
                        call_.inputs.k,
                        call_.inputs.v,
                        view(call_.mask),
                        view(call_.bias),
                        view(call_.sink),
                        view(call_.cu_seqlens_q),
                        view(call_.cu_seqlens_k),
                        view(call_.cache_seqlens),
                        view(call_.block_table),
                        view(call_.alibi_slopes),
                        view(call_.bias_slopes),
                        view(call_.k_scale),
                        view(call_.v_scale)};
        return std::move(call_);
    }

  private:
    double pick(const std::vector<double>& of) {
        return of[static_cast<std::size_t>(between(0, static_cast<Index>(of.size()) - 1))];
    }

    void draw_sizes() {
        batch_ = between(1, ranges_.batch);
        Hk_ = between(1, ranges_.key_heads);
        H_ = Hk_ * between(1, ranges_.group);
        const Index unit = ranges_.units ? 8 : 1;
        D_ = unit * between(1, ranges_.channels / unit);
        Dv_ = unit * between(1, ranges_.channels / unit);
        if (ranges_.units && note(chance(0.7), "keys in units")) key_unit_ = unit;
        note(H_ > Hk_ && Hk_ > 1, "grouped heads");
        note(H_ > Hk_ && Hk_ == 1, "multi-query");
        note(D_ != Dv_, "Dv other than D");
    }

    // From a stream of their own, as slopes.
    void draw_quantised() {
        if (!ranges_.quantised) return;
        std::swap(random_, quantised_random_);
        if (note(chance(0.25), "quantised keys")) k_quantised_ = static_cast<Quantised>(between(1, 4));
        if (note(chance(0.25), "quantised values")) v_quantised_ = static_cast<Quantised>(between(1, 4));
        const auto in_blocks = [&](Index size) { return std::max<Index>(32, size / 32 * 32); };
        if (k_quantised_ >= Quantised::blocks) D_ = in_blocks(D_);
        if (v_quantised_ >= Quantised::blocks) Dv_ = in_blocks(Dv_);
        std::swap(random_, quantised_random_);
    }

    // rows: one scale for each, or for its blocks; else for a head or all.
    enum class Quantised { none, i8, f8, blocks, halves };

    // Numbers of [.., size] that stand for about 1, and their scales; returns what they stand for.
    Array quantise(Quantised kind, const Shape& rows, Index size, Array& numbers, Array& scale) {
        std::swap(random_, quantised_random_);
        const bool blocks = kind >= Quantised::blocks;
        const Index count = blocks ? size / 32 : 1, bytes = kind == Quantised::halves ? 16 : 32;
        const DType type = kind == Quantised::halves                          ? DType::u8
                           : kind == Quantised::f8 || (blocks && chance(0.2)) ? DType::f8
                                                                              : DType::i8;
        const auto make = [&](DType dtype, const Shape& shape) {
            return chance(0.5) ? Array(dtype, shape, random_) : Array(dtype, shape);
        };
        numbers = make(
            type, blocks ? Shape{rows[0], rows[1], rows[2], count, bytes} : Shape{rows[0], rows[1], rows[2], size});
        maybe_repeat(numbers, false);
        for (Index i = 0; i < numbers.count(); ++i)
            numbers.set(i, type == DType::f8
                               ? real(-4, 4)
                               : static_cast<double>(type == DType::u8 ? between(0, 255) : between(-127, 127)));
        Shape shape{rows[0], rows[1], rows[2], count};
        if (note(chance(0.3), "shared scale"))
            for (std::size_t dim = 0; dim < 4; ++dim)
                if (chance(0.6)) shape[dim] = 1;
        if (kind == Quantised::f8) shape[0] = shape[1] = 1;  // of a head, or of all
        const DType types[] = {DType::f16, DType::f16, DType::f32, DType::bf16};
        scale = make(types[between(0, 3)], shape);
        const double unit = type == DType::f8 ? 0.5 : type == DType::u8 ? 0.2 : 0.015;
        maybe_repeat(scale);
        for (Index i = 0; i < scale.count(); ++i) scale.set(i, (chance(0.1) ? -1 : 1) * unit * real(0.5, 2));

        Array meant(DType::f64, {rows[0], rows[1], rows[2], size});
        for (Index i = 0; i < meant.count(); ++i) {
            const Index c = i % size, row = i / size;
            const Index h = row % rows[2], r = row / rows[2] % rows[1], b = row / rows[2] / rows[1];
            double x = 0;
            if (kind == Quantised::halves) {
                const auto byte = static_cast<int>(numbers.get({b, r, h, c / 32, c % 16}));
                x = (c % 32 < 16 ? byte % 16 : byte / 16) - 8;
            } else {
                x = blocks ? numbers.get({b, r, h, c / 32, c % 32}) : numbers.get({b, r, h, c});
            }
            const auto at = [&](std::size_t dim, Index index) { return shape[dim] == 1 ? 0 : index; };
            meant.set(i, x * scale.get({at(0, b), at(1, r), at(2, h), at(3, blocks ? c / 32 : 0)}));
        }
        std::swap(random_, quantised_random_);
        return meant;
    }

    Index in_key_units(Index length) const { return (length + key_unit_ - 1) / key_unit_ * key_unit_; }
    Index length(Index largest) { return chance(0.04) ? ranges_.shortest : between(ranges_.shortest, largest); }

    // few: some sequences have no more than two rows, as in a batch of prefill and decode.
    Array cumulative(Index largest, bool few, Index unit, Index& longest, Index& total) {
        Array sums(chance(0.5) ? DType::i32 : DType::i64, {batch_ + 1});
        longest = total = 0;
        for (Index n = 0; n < batch_; ++n) {
            const Index drawn = between(ranges_.shortest, few && chance(0.5) ? std::min<Index>(largest, 2) : largest);
            const Index length = (drawn + unit - 1) / unit * unit;
            longest = std::max(longest, length);
            sums.set(n + 1, static_cast<double>(total += length));
        }
        return sums;
    }

    void draw_lengths() {
        const bool packed = note(chance(0.35), "packed");
        if (packed && !note(chance(0.4), "packed with caches")) {
            call_.cu_seqlens_q = cumulative(ranges_.queries, chance(0.5), 1, longest_q_, Lq_);
            call_.cu_seqlens_k = cumulative(ranges_.keys, false, key_unit_, longest_k_, Lk_);
            return;
        }
        if (packed) {
            call_.cu_seqlens_q = cumulative(ranges_.queries, true, 1, longest_q_, Lq_);
        } else {
            longest_q_ = Lq_ = length(ranges_.queries);
            note(Lq_ == 0, "Lq = 0");
        }
        longest_k_ = Lk_ = in_key_units(length(ranges_.keys));
        note(Lk_ == 0, "Lk = 0");
        const bool paged = ranges_.pages && Lk_ > 0 && note(chance(packed ? 0.6 : 0.3), "paged");
        if (paged) draw_pages();
        note(paged && packed, "packed with pages");
        if (!packed && !paged && (Lk_ == 0 || !note(chance(0.25), "cache_seqlens"))) return;
        longest_k_ = Lk_ = std::max(Lk_, in_key_units(1));
        call_.cache_seqlens = Array(chance(0.5) ? DType::i32 : DType::i64, {batch_});
        maybe_repeat(call_.cache_seqlens);
        if (paged) maybe_repeat(call_.block_table);
        for (Index n = 0; n < batch_; ++n) call_.cache_seqlens.set(n, static_cast<double>(between(0, Lk_)));
    }

    // Each query sees a key: causal from the bottom right, as many keys are in use as there are queries.
    void fill_caches() {
        if (!call_.cache_seqlens.view()) return;
        const auto queries = [&](Index n) {
            if (!call_.cu_seqlens_q.view()) return Lq_;
            return static_cast<Index>(call_.cu_seqlens_q.get(n + 1) - call_.cu_seqlens_q.get(n));
        };
        if (longest_q_ > Lk_ && call_.options.causal == Causal::bottom_right) call_.options.causal = Causal::top_left;
        const auto repeats = [](const Array& a, std::size_t dim) { return a.view().stride()[dim] == 0; };
        const bool own = pages_ > 0 && !repeats(call_.cache_seqlens, 0) && !repeats(call_.block_table, 0) &&
                         !repeats(call_.block_table, 1);  // entries of each sequence, and of each length
        for (Index n = 0; n < batch_; ++n) {
            const bool all = call_.options.causal == Causal::bottom_right;
            const Index least = all ? queries(n) : std::min<Index>(queries(n), 1);
            const Index used = std::max(static_cast<Index>(call_.cache_seqlens.get(n)), least);
            call_.cache_seqlens.set(n, static_cast<double>(used));
            for (Index i = 0; own && i < Lk_ / page_rows_; ++i)  // what is not used may be anything
                if (i * page_rows_ >= used) call_.block_table.set({n, i}, -7);
        }
    }

    // A table of blocks in any order; batch rows may share some.
    void draw_pages() {
        page_rows_ = between(1, 20);
        const Index pages = (Lk_ + page_rows_ - 1) / page_rows_;
        longest_k_ = Lk_ = pages * page_rows_;
        pages_ = batch_ * pages + between(0, 2);
        call_.block_table = Array(chance(0.5) ? DType::i32 : DType::i64, {batch_, pages}, random_);
        for (Index i = 0; i < batch_ * pages; ++i)
            call_.block_table.set(i, static_cast<double>(between(0, pages_ - 1)));
    }

    DType draw_dtype() {
        const auto& all = ranges_.dtypes;
        return all.size() == 1 ? all[0] : all[static_cast<std::size_t>(between(0, static_cast<Index>(all.size()) - 1))];
    }

    enum class Type { of_call, that_or_finer, any };

    // What enters products is of the call's type, which q has, or of a finer one where that is bf16.
    Array array(const Shape& shape, Type type = Type::any) {
        const bool may_differ = type == Type::any || (type == Type::that_or_finer && dtype_ == DType::bf16);
        const bool other = may_differ && ranges_.dtypes.size() > 1 && note(chance(0.1), "another type");
        const DType dtype = other ? draw_dtype() : dtype_;
        Array a = !ranges_.units && note(chance(0.5), "strided") ? Array(dtype, shape, random_) : Array(dtype, shape);
        fill_normal(a, random_);
        return a;
    }

    // Of an input: along some dimensions there may be a single element in memory. From a stream of their own.
    void maybe_repeat(Array& a, bool channels = true) {
        if (!ranges_.repeats || !a.view()) return;
        std::swap(random_, repeat_random_);
        const bool rarely_last = ranges_.units && a.view().rank() == 4;  // kernels of units want it dense
        if (note(chance(0.12), "repeated"))
            repeat_some(a, a.view().rank() - (channels && !(rarely_last && chance(0.7)) ? 0 : 1), random_);
        std::swap(random_, repeat_random_);
    }
    static bool has_repeated_channels(const Array& a) { return a.view() && a.view().stride()[3] == 0; }

    void draw_tensors() {
        call_.q = array({call_.cu_seqlens_q.view() ? 1 : batch_, Lq_, H_, D_}, Type::of_call);
        const Index k_outer = pages_ > 0 ? pages_ : call_.cu_seqlens_k.view() ? 1 : batch_;
        const Index k_rows = pages_ > 0 ? page_rows_ : Lk_;
        if (k_quantised_ != Quantised::none)
            call_.k = quantise(k_quantised_, {k_outer, k_rows, Hk_}, D_, call_.k_numbers, call_.k_scale);
        else
            call_.k = array({k_outer, k_rows, Hk_, D_}, Type::that_or_finer);
        if (k_quantised_ == Quantised::none) maybe_repeat(call_.k);
        maybe_repeat(call_.q, !has_repeated_channels(call_.k));  // else all products are of all channels, and far
        call_.inputs.k = k_quantised_ == Quantised::none ? call_.k.view() : call_.k_numbers.view();
        if (v_quantised_ != Quantised::none) {
            call_.v = quantise(v_quantised_, {k_outer, k_rows, Hk_}, Dv_, call_.v_numbers, call_.v_scale);
            call_.inputs.v = call_.v_numbers.view();
            return;
        }
        call_.v_in_k = k_quantised_ == Quantised::none && note(Dv_ <= D_ && chance(0.3), "v in k");
        if (call_.v_in_k) {
            const Shape shape{k_outer, k_rows, Hk_, Dv_};
            const Tensor& k = call_.k.view();
            call_.inputs.v = Tensor(k.data(), k.dtype(), shape, k.stride());
        } else {
            call_.v = array({k_outer, k_rows, Hk_, Dv_}, Type::that_or_finer);
            maybe_repeat(call_.v);
            call_.inputs.v = call_.v.view();
        }
    }

    void draw_options() {
        AttentionOptions& o = call_.options;
        if (note(chance(0.3), "scale")) o.scale = real(-1, 1);
        if (!ranges_.extremes || !note(chance(0.1), "far scale")) return draw_visibility();
        const auto is_f16 = [](const Tensor& t) { return t.dtype() == DType::f16; };  // which holds no such gradients
        const bool narrow = is_f16(call_.q.view()) || is_f16(call_.k.view()) || is_f16(call_.inputs.v);
        o.scale = pick({0, 1e-30, 1e-42, narrow ? 0 : 1e8});
        draw_visibility();
    }

    void draw_visibility() {
        AttentionOptions& o = call_.options;
        o.causal = static_cast<Causal>(between(0, 2));
        fill_caches();
        note(o.causal == Causal::top_left, "causal top-left");
        note(o.causal == Causal::bottom_right, "causal bottom-right");
        const auto window = [&] {
            constexpr Index farthest = std::numeric_limits<Index>::max();
            return note(chance(0.1), "window beyond all keys") ? farthest : between(0, longest_k_ / 2);
        };
        if (!ranges_.plain && note(chance(0.3), "window left")) o.window_left = window();
        if (!ranges_.plain && note(chance(0.3), "window right")) o.window_right = window();
        if (note(chance(0.3), "softcap")) o.softcap = real(0.7, 3);
        o.empty_row = static_cast<EmptyRow>(between(0, 2));
    }

    // [N|1, H|Hk|1, Lq|1, Lk|1]
    Shape broadcast(const std::string& name) {
        Shape shape{batch_, H_, longest_q_, longest_k_};
        const char* dims[] = {"batch", "heads", "queries", "keys"};
        for (std::size_t dim = 0; dim < 4; ++dim) {
            const bool shared = chance(0.4) && shape[dim] > 1;
            note(shape[dim] > 1, name + (shared ? " shared " : " own ") + dims[dim]);
            if (shared) shape[dim] = 1;
        }
        if (shape[1] > 1 && Hk_ > 1 && Hk_ < H_ && note(chance(0.5), name + " heads Hk")) shape[1] = Hk_;
        return shape;
    }

    void draw_mask() {
        if (ranges_.plain || !note(chance(0.5), "mask")) return;
        const Shape shape = broadcast("mask");
        call_.mask =
            !ranges_.units && chance(0.5) ? Array(DType::boolean, shape, random_) : Array(DType::boolean, shape);
        maybe_repeat(call_.mask);
        const double kept = real(0.4, 0.95);
        for (Index i = 0; i < call_.mask.count(); ++i) call_.mask.set(i, chance(kept) ? 1 : 0);
    }

    void draw_bias() {
        if (ranges_.plain || !note(chance(0.65), "bias")) return;
        note(static_cast<bool>(call_.mask.view()), "mask and bias");
        call_.bias = array(broadcast("bias"));
        maybe_repeat(call_.bias);
        if (note(chance(0.3), "top_w")) {
            call_.options.top_w = between(1, longest_k_ + 1);
            spread_bias();
        }
        if (note(chance(0.3), "bias of -inf"))
            for (Index i = 0; i < call_.bias.count(); ++i)
                if (chance(0.2)) call_.bias.set(i, -std::numeric_limits<double>::infinity());
        if (ranges_.extremes && call_.options.top_w < 0 && note(chance(0.4), "far bias")) draw_far_bias();
    }

    // What programs add for "no": some keys of a row, or all of them by one number. Scores are so small beside it that
    // what f32 keeps of them does not hang on the last bit of a product.
    void draw_far_bias() {
        call_.far_bias = true;
        call_.options.scale = pick({NAN, NAN, NAN, 0, 1e-30});
        const DType dtype = call_.bias.view().dtype();
        const double largest = dtype == DType::f16    ? 65504
                               : dtype == DType::bf16 ? 0x1.fep127
                                                      : static_cast<double>(std::numeric_limits<float>::max());
        const auto far = [&] {
            const double x = pick({0, 1e4, 1e9, 1e10, 1e20, largest}), y = std::min(x, largest);
            return chance(0.75) ? -y : y;
        };
        const Index keys = call_.bias.view().shape(3);
        double all = 0;
        bool whole = false;
        for (Index i = 0; i < call_.bias.count(); ++i) {
            if (i % keys == 0 && (whole = chance(0.3))) all = far();
            if (whole)
                call_.bias.set(i, all);
            else if (chance(0.2))
                call_.bias.set(i, chance(0.2) ? -std::numeric_limits<double>::infinity() : far());
        }
        if (!note(chance(0.3), "far bias of padding")) return;
        // The first keys of all rows, as in batches that are padded on the left.
        const Index padding = between(1, keys);
        const double no = -pick({1e4, 1e9, largest});
        for (Index i = 0; i < call_.bias.count(); ++i)
            if (i % keys < padding) call_.bias.set(i, no);
    }

    // Numbers of a row keep a distance, so that small changes of bias select the same keys.
    void spread_bias() {
        const Index keys = call_.bias.view().shape(3);
        std::vector<Index> rank(static_cast<std::size_t>(keys));
        std::iota(rank.begin(), rank.end(), 0);
        for (Index i = 0; i < call_.bias.count(); ++i) {
            if (i % keys == 0) std::shuffle(rank.begin(), rank.end(), random_);
            call_.bias.set(i, 0.1 * static_cast<double>(rank[static_cast<std::size_t>(i % keys)]));
        }
    }

    void draw_sink() {
        if (ranges_.plain || !note(chance(0.4), "sink")) return;
        call_.sink = array({H_});
        maybe_repeat(call_.sink);
        if (!ranges_.extremes || !note(chance(0.3), "sink of inf")) return;
        constexpr double infinity = std::numeric_limits<double>::infinity();
        for (Index h = 0; h < H_; ++h)
            if (chance(0.6)) call_.sink.set(h, chance(0.5) ? infinity : -infinity);
    }

    void draw_gradients() {
        call_.d_o = array(call_.o_shape(), Type::that_or_finer);  // o is of its type where values have scales
        maybe_repeat(call_.d_o, !has_repeated_channels(call_.v_in_k ? call_.k : call_.v));
        if (note(chance(0.6), "dlse")) call_.dlse = array(call_.lse_shape());
        maybe_repeat(call_.dlse);
    }

    // From a stream of their own. Not ALiBi's with top_w: its numbers bring biases together that spread_bias() parted.
    void draw_slopes() {
        if (ranges_.plain) return;
        std::swap(random_, slopes_random_);
        if (call_.bias.view() && note(chance(0.3), "bias_slopes")) call_.bias_slopes = array({H_});
        if (call_.options.top_w < 0 && note(chance(0.25), "alibi_slopes")) {
            call_.alibi_slopes = array({H_});
            for (Index h = 0; h < H_; ++h)
                if (chance(0.7)) call_.alibi_slopes.set(h, std::exp2(-real(0, 8)));
        }
        std::swap(random_, slopes_random_);
        maybe_repeat(call_.bias_slopes);
        maybe_repeat(call_.alibi_slopes);
    }

    AttentionRanges ranges_;
    Random slopes_random_, quantised_random_, repeat_random_;
    Quantised k_quantised_ = Quantised::none, v_quantised_ = Quantised::none;
    RandomAttention call_;
    DType dtype_ = DType::f64;
    Index key_unit_ = 1;
    Index pages_ = 0, page_rows_ = 0;  // 0: not paged
    Index batch_ = 0, Lq_ = 0, Lk_ = 0, longest_q_ = 0, longest_k_ = 0, H_ = 0, Hk_ = 0, D_ = 0, Dv_ = 0;
};

}  // namespace

Shape RandomAttention::o_shape() const {
    const Tensor& values = v_numbers.view() ? v.view() : inputs.v;
    return {q.view().shape(0), q.view().shape(1), q.view().shape(2), values.shape(3)};
}
Shape RandomAttention::lse_shape() const {
    return {q.view().shape(0), q.view().shape(2), q.view().shape(1)};
}

std::string RandomAttention::describe() const {
    std::ostringstream text;
    text << "SOFTDELTA_SEED=" << seed << ": q";
    for (const Index size : q.view().shape()) text << ' ' << size;
    text << ", v";
    for (const Index size : inputs.v.shape()) text << ' ' << size;
    for (const std::string& feature : features) text << ", " << feature;
    return text.str();
}

RandomAttention draw_attention(std::uint64_t seed, const AttentionRanges& ranges) {
    return Draw(seed, ranges).run();
}

}  // namespace softdelta::test

// Attention over parts of the keys, merged, against attention over all of them.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "support/array.h"
#include "support/teams.h"

namespace softdelta::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

TEST(AttentionMerge, OfPartsIsTheWhole) {
    Random random(first_seed());
    Execution reference;
    reference.engine = "reference";
    reference.threads = 1;
    for (int draw = 0; draw < 40; ++draw) {
        const auto between = [&](Index low, Index high) {
            return std::uniform_int_distribution<Index>(low, high)(random);
        };
        const Index B = between(1, 2), Lq = between(0, 5), Lk = between(0, 12), H = 2 * between(1, 2), D = 3,
                    Dv = between(1, 5);
        const Array q(DType::f64, {B, Lq, H, D}, random), k(DType::f64, {B, Lk, 2, D}, random),
            v(DType::f64, {B, Lk, 2, Dv}, random), mask(DType::boolean, {B, 1, Lq, Lk}), sink(DType::f64, {H});
        for (const Array* a : {&q, &k, &v, &sink}) fill_normal(*a, random);
        for (Index i = 0; i < mask.count(); ++i) mask.set(i, between(0, 3) == 0);  // some rows see no key
        AttentionInputs in{.q = q.view(), .k = k.view(), .v = v.view(), .mask = mask.view()};
        if (draw % 2 == 1) in.sink = sink.view();
        const Array o(DType::f64, {B, Lq, H, Dv}), lse(DType::f64, {B, H, Lq});
        attention_forward(in, {o.view(), lse.view()}, {}, reference);

        // parts: key j belongs to part owner[j]
        const Index parts = between(1, 4);
        std::vector<Index> owner(static_cast<std::size_t>(Lk));
        for (Index& x : owner) x = between(0, parts - 1);
        std::vector<Array> memory;
        std::vector<AttentionOutputs> part(static_cast<std::size_t>(parts));
        for (Index r = 0; r < parts; ++r) {
            const Array seen(DType::boolean, {B, 1, Lq, Lk});
            for (Index i = 0; i < seen.count(); ++i)
                seen.set(i, mask.get(i) != 0 && owner[static_cast<std::size_t>(i % Lk)] == r);
            const Tensor part_o = memory.emplace_back(Array(DType::f64, {B, Lq, H, Dv}, random)).view();
            const DType lse_type = draw % 3 == 0 ? DType::f32 : DType::f64;
            const Tensor part_lse = memory.emplace_back(Array(lse_type, {B, H, Lq}, random)).view();
            part[static_cast<std::size_t>(r)] = {part_o, part_lse};
            AttentionInputs of_part = in;
            of_part.mask = seen.view();
            if (r != parts / 2) of_part.sink = {};
            attention_forward(of_part, part[static_cast<std::size_t>(r)], {}, reference);
        }
        const Array merged(DType::f64, {B, Lq, H, Dv}, random), merged_lse(DType::f64, {B, H, Lq}, random);
        attention_merge(part, {merged.view(), merged_lse.view()});
        const double limit = draw % 3 == 0 ? 1e-6 : 1e-14;
        for (Index i = 0; i < o.count(); ++i) ASSERT_NEAR(merged.get(i), o.get(i), limit * (1 + std::abs(o.get(i))));
        for (Index i = 0; i < lse.count(); ++i) {
            if (lse.get(i) == -infinity)
                ASSERT_EQ(merged_lse.get(i), -infinity);
            else
                ASSERT_NEAR(merged_lse.get(i), lse.get(i), limit * (1 + std::abs(lse.get(i))));
        }
    }
}

// f32, an lse that f32 exponents cannot hold, parts without a key that hold NaN in o.
TEST(AttentionMerge, ScalesBeforeItExponentiates) {
    const Array a(DType::bf16, {1, 1, 1, 2}), b(DType::f32, {1, 1, 1, 2}), none(DType::f32, {1, 1, 1, 2});
    const Array la(DType::f32, {1, 1, 1}), lb(DType::f32, {1, 1, 1}), ln(DType::f32, {1, 1, 1});
    a.set(0, 2), a.set(1, -4), b.set(0, 6), b.set(1, 8);
    none.set(0, std::nan("")), none.set(1, infinity);
    la.set(0, 500), lb.set(0, 500), ln.set(0, -infinity);
    const Array o(DType::f32, {1, 1, 1, 2}), lse(DType::f32, {1, 1, 1});
    const AttentionOutputs parts[] = {{none.view(), ln.view()}, {a.view(), la.view()}, {b.view(), lb.view()}};
    attention_merge(parts, {o.view(), lse.view()});
    EXPECT_EQ(o.get(0), 4);
    EXPECT_EQ(o.get(1), 2);
    EXPECT_FLOAT_EQ(static_cast<float>(lse.get(0)), static_cast<float>(500 + std::log(2.0)));
    la.set(0, -500), lb.set(0, -std::numeric_limits<float>::max());
    attention_merge(parts, {o.view(), {}});
    EXPECT_EQ(o.get(0), 2);
    attention_merge(std::span(parts, 1), {o.view(), lse.view()});  // nobody has a key
    EXPECT_EQ(o.get(0), 0);
    EXPECT_EQ(lse.get(0), -infinity);
    la.set(0, infinity);  // a sink of +∞ has all
    a.set(0, 0), a.set(1, 0);
    attention_merge(parts, {o.view(), lse.view()});
    EXPECT_EQ(o.get(1), 0);
    EXPECT_EQ(lse.get(0), infinity);
}

// Every storage type, rows that units share, layouts; the same bits for any number of threads.
TEST(AttentionMerge, KeepsSumsInFloat) {
    Random random(first_seed());
    for (int draw = 0; draw < 40; ++draw) {
        const auto between = [&](Index low, Index high) {
            return std::uniform_int_distribution<Index>(low, high)(random);
        };
        const DType types[] = {DType::f32, DType::bf16, DType::f16};
        const Index B = between(1, 2), Lq = between(0, 60), H = between(1, 3), Dv = between(1, 40),
                    parts = between(1, 4);
        const auto layout = [&](DType type, const Shape& shape) {
            return draw % 2 == 0 ? Array(type, shape) : Array(type, shape, random);
        };
        std::vector<Array> memory;
        std::vector<AttentionOutputs> part;
        for (Index r = 0; r < parts; ++r) {
            const Array& o = memory.emplace_back(layout(types[between(0, 2)], {B, Lq, H, Dv}));
            fill_normal(o, random);
            const Tensor part_o = o.view();
            const Array& lse = memory.emplace_back(layout(DType::f32, {B, H, Lq}));
            for (Index i = 0; i < lse.count(); ++i)
                lse.set(i, between(0, 4) == 0 ? -infinity : static_cast<double>(between(-9000, 9000)) / 1000);
            part.push_back({part_o, lse.view()});
        }
        const DType type = types[between(0, 2)];
        const Array merged = layout(type, {B, Lq, H, Dv}), merged_lse = layout(DType::f32, {B, H, Lq});
        Execution one;
        one.threads = 1;
        attention_merge(part, {merged.view(), merged_lse.view()}, one);
        const double unit = type == DType::bf16 ? 0x1p-8 : type == DType::f16 ? 0x1p-11 : 0x1p-22;
        for (Index b = 0; b < B; ++b)
            for (Index h = 0; h < H; ++h)
                for (Index i = 0; i < Lq; ++i) {
                    double all = 0;
                    const auto share = [&](Index r) {
                        return std::exp(memory[static_cast<std::size_t>(2 * r + 1)].get({b, h, i}));
                    };
                    for (Index r = 0; r < parts; ++r) all += share(r);
                    if (all == 0)
                        ASSERT_EQ(merged_lse.get({b, h, i}), -infinity);
                    else
                        ASSERT_NEAR(merged_lse.get({b, h, i}), std::log(all), 1e-6 * (1 + std::abs(std::log(all))));
                    for (Index c = 0; c < Dv; ++c) {
                        double o = 0, sizes = 0;
                        for (Index r = 0; r < parts && all > 0; ++r) {
                            const double x = share(r) / all * memory[static_cast<std::size_t>(2 * r)].get({b, i, h, c});
                            o += x;
                            sizes += std::abs(x);
                        }
                        ASSERT_NEAR(merged.get({b, i, h, c}), o, 0x1p-22 * sizes + unit * std::abs(o) + 0x1p-25);
                    }
                }
        Execution some;
        some.threads = 3;
        const Array again(type, {B, Lq, H, Dv}), again_lse(DType::f32, {B, H, Lq});
        attention_merge(part, {again.view(), again_lse.view()}, some);
        for (Index i = 0; i < again.count(); ++i) ASSERT_EQ(again.get(i), merged.get(i));
        for (Index i = 0; i < again_lse.count(); ++i) ASSERT_EQ(again_lse.get(i), merged_lse.get(i));
    }
}

}  // namespace
}  // namespace softdelta::test

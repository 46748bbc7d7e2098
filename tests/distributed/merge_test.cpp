// Attention over parts of the keys, merged, against attention over all of them.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "support/array.h"

namespace softdelta::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

TEST(AttentionMerge, OfPartsIsTheWhole) {
    Random random(first_seed());
    Execution reference;
    reference.engine = Engine::reference;
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

}  // namespace
}  // namespace softdelta::test

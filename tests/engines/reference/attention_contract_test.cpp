// What the reference's attention promises beyond its formula: which keys and rows may matter, and how much.
#include <gtest/gtest.h>

#include <cmath>

#include "support/attention_example.h"

namespace softdelta::test {
namespace {

void expect_finite(const Array& a) {
    for (Index i = 0; i < a.count(); ++i) ASSERT_TRUE(std::isfinite(a.get(i))) << i;
}

TEST(AttentionContract, ARowWithoutKeysHasNoGradient) {
    Example e;
    for (Index j = 0; j < 7; ++j) e.mask.set({0, 0, 2, j}, 0);
    const Results clean = e.run(false);
    for (Index h = 0; h < 4; ++h) {
        e.dlse.set({0, h, 2}, nan);
        for (Index c = 0; c < 3; ++c) e.q.set({0, 2, h, c}, nan);
        for (Index c = 0; c < 4; ++c) e.d_o.set({0, 2, h, c}, nan);
    }
    const double conventions[] = {-infinity, infinity, 0};
    for (const EmptyRow empty : {EmptyRow::minus_infinity, EmptyRow::plus_infinity, EmptyRow::zero}) {
        e.options.empty_row = empty;
        Results r = e.run(false);
        for (Index h = 0; h < 4; ++h) {
            EXPECT_EQ(r.lse.get({0, h, 2}), conventions[static_cast<int>(empty)]);
            for (Index c = 0; c < 4; ++c) EXPECT_EQ(r.o.get({0, 2, h, c}), 0);
            for (Index c = 0; c < 3; ++c) EXPECT_EQ(r.dq.get({0, 2, h, c}), 0);
            for (Index j = 0; j < 7; ++j) EXPECT_EQ(r.dbias.get({0, h, 2, j}), 0);
            r.lse.set({0, h, 2}, -infinity);
        }
        expect_equal(clean, r);
    }
}

// Its lse is the sink, so that dlse reaches the sink and nothing else.
TEST(AttentionContract, ARowWithASinkAndNoKeysHasTheSinkAsLse) {
    Example e;
    e.mask = filled({1, 1, 1, 1}, 0, DType::boolean);
    const Results r = e.run();
    for (Index h = 0; h < 4; ++h) {
        double dsink = 0;
        for (Index b = 0; b < 2; ++b)
            for (Index i = 0; i < 5; ++i) {
                EXPECT_EQ(r.lse.get({b, h, i}), e.sink.get(h));
                dsink += e.dlse.get({b, h, i});
            }
        EXPECT_NEAR(r.dsink.get(h), dsink, 1e-14);
    }
    for (const Array* zero : {&r.o, &r.dq, &r.dk, &r.dv, &r.dbias})
        for (Index i = 0; i < zero->count(); ++i) ASSERT_EQ(zero->get(i), 0);
}

TEST(AttentionContract, NumbersInUnseenKeysDoNotMatter) {
    const auto hide = [](Example& e, int how) {
        if (how == 0)
            for (Index r = 0; r < 10; ++r) e.mask.set(r * 7 + 6, 0);
        if (how == 1)
            for (Index r = 0; r < 40; ++r) e.bias.set(r * 7 + 6, -infinity);
        if (how == 2) e.options.causal = Causal::top_left;
        if (how == 3) e.options.window_left = 3, e.options.window_right = -1, e.options.causal = Causal::top_left;
    };
    for (int how = 0; how < 4; ++how) {
        Example e;
        hide(e, how);
        const Results clean = e.run();
        for (const double bad : {nan, infinity, -infinity})
            for (Index b = 0; b < 2; ++b)
                for (Index h = 0; h < 2; ++h) {
                    for (Index c = 0; c < 3; ++c) e.k.set({b, 6, h, c}, bad);
                    for (Index c = 0; c < 4; ++c) e.v.set({b, 6, h, c}, bad);
                    expect_equal(clean, e.run());
                }
        for (Index c = 0; c < 3; ++c) EXPECT_EQ(clean.dk.get({0, 6, 0, c}), 0) << how;
        for (Index c = 0; c < 4; ++c) EXPECT_EQ(clean.dv.get({0, 6, 0, c}), 0) << how;
    }
}

TEST(AttentionContract, ABadKeyStaysWithTheRowsThatSeeIt) {
    Example e;
    e.options.causal = Causal::top_left;
    const Results clean = e.run();
    e.k.set({0, 3, 0, 1}, nan);
    const Results r = e.run();
    for (Index i = 0; i < 5; ++i)
        for (Index h = 0; h < 4; ++h) {
            const bool sees = i >= 3 && h < 2;
            EXPECT_EQ(std::isnan(r.lse.get({0, h, i})), sees);
            EXPECT_EQ(std::isnan(r.dq.get({0, i, h, 0})), sees);
            EXPECT_EQ(std::isnan(r.o.get({0, i, h, 3})), sees);
        }
    for (Index c = 0; c < 3; ++c) EXPECT_EQ(clean.dk.get({0, 4, 1, c}), r.dk.get({0, 4, 1, c}));
}

TEST(AttentionContract, BiasOfMinusInfinityIsAMask) {
    Example masked, biased;
    Random random(8);
    for (Index b = 0; b < 2; ++b)
        for (Index i = 0; i < 5; ++i)
            for (Index j = 0; j < 7; ++j) {
                if (random() % 2 == 0) continue;
                masked.mask.set({b, 0, i, j}, 0);
                for (Index h = 0; h < 4; ++h) biased.bias.set({b, h, i, j}, -infinity);
            }
    expect_equal(masked.run(), biased.run());
}

// The same sums in the bias itself.
TEST(AttentionContract, SlopesArePartOfTheBias) {
    for (const Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
        Example plain, sloped;
        const Array alibi = normal({4}, 9), slopes = normal({4}, 10);
        plain.options.causal = sloped.options.causal = causal;
        for (Index b = 0; b < 2; ++b)
            for (Index h = 0; h < 4; ++h)
                for (Index i = 0; i < 5; ++i)
                    for (Index j = 0; j < 7; ++j) {
                        const auto distance = static_cast<double>(std::abs(i + 7 - 5 - j));
                        const double sum = slopes.get(h) * sloped.bias.get({b, h, i, j}) - alibi.get(h) * distance;
                        plain.bias.set({b, h, i, j}, sum);
                    }
        AttentionInputs in = sloped.inputs();
        in.alibi_slopes = alibi.view(), in.bias_slopes = slopes.view();
        const Results a = plain.run(), b = compute(in, sloped.options, sloped.d_o.view(), sloped.dlse.view());
        for (Index i = 0; i < a.o.count(); ++i) EXPECT_NEAR(b.o.get(i), a.o.get(i), 1e-13);
        for (Index i = 0; i < a.dq.count(); ++i) EXPECT_NEAR(b.dq.get(i), a.dq.get(i), 1e-13);
        for (Index h = 0; h < 4; ++h)
            for (Index j = 0; j < 7; ++j)
                EXPECT_NEAR(b.dbias.get({1, h, 3, j}), slopes.get(h) * a.dbias.get({1, h, 3, j}), 1e-13);
    }
}

TEST(AttentionContract, BiasOfMinusInfinityMasksWhateverTheSlope) {
    Example masked, biased;
    const Array slopes = filled({4}, 0);
    slopes.set(1, -2), slopes.set(3, 2);
    for (Index i = 0; i < 280; ++i) masked.bias.set(i, 0), biased.bias.set(i, 0);
    for (Index b = 0; b < 2; ++b)
        for (Index i = 0; i < 5; ++i) {
            masked.mask.set({b, 0, i, 2}, 0);
            for (Index h = 0; h < 4; ++h) biased.bias.set({b, h, i, 2}, -infinity);
        }
    AttentionInputs in = biased.inputs();
    in.bias_slopes = slopes.view();
    const Results a = masked.run(), b = compute(in, biased.options, biased.d_o.view(), biased.dlse.view());
    expect_equal("o", a.o, b.o);
    expect_equal("lse", a.lse, b.lse);
    expect_equal("dk", a.dk, b.dk);
}

// bias 0 1 2 … of keys, less the distance to key i + 2 times a slope: far keys lose what their bias gives.
TEST(AttentionContract, TopWSelectsByTheBiasWithItsSlopes) {
    Example e, masked;
    const Array alibi = filled({4}, 2);
    for (Index i = 0; i < 280; ++i)
        e.bias.set(i, static_cast<double>(i % 7)), masked.bias.set(i, static_cast<double>(i % 7));
    e.options.top_w = 2;
    AttentionInputs kept = masked.inputs(), in = e.inputs();
    kept.alibi_slopes = in.alibi_slopes = alibi.view();
    for (Index b = 0; b < 2; ++b)
        for (Index i = 0; i < 5; ++i)
            for (Index j = 0; j < 7; ++j) masked.mask.set({b, 0, i, j}, 0);
    for (Index b = 0; b < 2; ++b)
        for (Index i = 0; i < 5; ++i) {
            const Index last = i + 2 < 6 ? i + 3 : i + 1;  // above the diagonal a key loses 1, below it 3
            masked.mask.set({b, 0, i, i + 2}, 1), masked.mask.set({b, 0, i, last}, 1);
        }
    expect_equal(compute(kept, masked.options, masked.d_o.view(), masked.dlse.view()),
                 compute(in, e.options, e.d_o.view(), e.dlse.view()));
}

TEST(AttentionContract, TopWPrefersTheLowerIndex) {
    Example e, masked;
    const double row[] = {1, 2, 2, 0, 2, 1, 2};
    const bool kept[][7] = {{false, true, false, false, false, false, false},
                            {false, true, true, false, true, false, false},
                            {true, true, true, false, true, false, true},
                            {true, true, true, true, true, true, true}};
    const Index budget[] = {1, 3, 5, 7};
    for (Index i = 0; i < 280; ++i) e.bias.set(i, row[i % 7]), masked.bias.set(i, row[i % 7]);
    for (std::size_t n = 0; n < 4; ++n) {
        e.options.top_w = budget[n];
        for (Index i = 0; i < 70; ++i) masked.mask.set(i, kept[n][i % 7] ? 1 : 0);
        expect_equal(masked.run(), e.run());
    }
}

TEST(AttentionContract, TopWSelectsAmongTheKeysLeft) {
    Example e, masked;
    e.options.top_w = 2;
    for (Index i = 0; i < 280; ++i)
        e.bias.set(i, static_cast<double>(i % 7)), masked.bias.set(i, static_cast<double>(i % 7));
    for (Index r = 0; r < 10; ++r) {
        e.mask.set(r * 7 + 6, 0);
        for (Index j = 0; j < 7; ++j) masked.mask.set(r * 7 + j, j == 4 || j == 5 ? 1 : 0);
    }
    expect_equal(masked.run(), e.run());
}

TEST(AttentionContract, LargeScoresDoNotOverflow) {
    Example e;
    for (const double scale : {1e5, -1e5}) {
        e.options.scale = scale;
        const Results r = e.run();
        for (const Array* a : {&r.o, &r.lse, &r.dq, &r.dk, &r.dv, &r.dbias, &r.dsink}) expect_finite(*a);
    }
}

// 1 − tanh² would have no digit left here.
TEST(AttentionContract, ASaturatedSoftcapKeepsItsSlope) {
    const Array q = filled({1, 1, 1, 1}, 1), k = filled({1, 2, 1, 1}, 0), v = filled({1, 2, 1, 1}, 0);
    const Array d_o = filled({1, 1, 1, 1}, 1), dk = filled({1, 2, 1, 1}, nan);
    k.set(0, 50);
    v.set(0, 1);
    AttentionInputs in;
    in.q = q.view(), in.k = k.view(), in.v = v.view();
    AttentionOptions options;
    options.softcap = 2;
    AttentionGradients g;
    g.d_o = d_o.view(), g.dk = dk.view();
    Execution execution;
    execution.engine = "reference";
    attention_backward(in, g, options, execution);
    const double p = 1 / (1 + std::exp(-2.0)), slope = 4 * std::exp(-50.0);
    EXPECT_NEAR(dk.get(0), p * (1 - p) * slope, 1e-12 * slope);
    EXPECT_NEAR(dk.get(1), -p * (1 - p), 1e-14);
}

}  // namespace
}  // namespace softdelta::test

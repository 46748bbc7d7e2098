// The same call in another form gives the same bits: packed, cached, paged, strided, in parts, on more threads.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "support/attention_example.h"
#include "support/teams.h"

namespace softdelta::test {
namespace {

Array integers(const std::vector<Index>& values) {
    Array a(DType::i32, {static_cast<Index>(values.size())});
    for (Index i = 0; i < a.count(); ++i) a.set(i, static_cast<double>(values[static_cast<std::size_t>(i)]));
    return a;
}

// Elements [begin, end) of dimension 1.
Tensor slice(const Tensor& t, Index begin, Index end) {
    Shape shape = shape_of(t);
    shape[1] = end - begin;
    return {static_cast<double*>(t.data()) + begin * t.stride()[1], t.dtype(), shape, t.stride()};
}

// Row n of dimension 0.
Tensor slice_of_batch(const Tensor& t, Index n) {
    Shape shape = shape_of(t);
    shape[0] = 1;
    return {static_cast<double*>(t.data()) + n * t.stride()[0], t.dtype(), shape, t.stride()};
}

void expect_finite(const Array& a) {
    for (Index i = 0; i < a.count(); ++i) ASSERT_TRUE(std::isfinite(a.get(i))) << i;
}

TEST(AttentionLayout, APackedCallIsItsSequences) {
    const std::vector<Index> q_ends{0, 4, 4, 7, 10}, k_ends{0, 6, 8, 8, 13};
    const Array q = normal({1, 10, 4, 3}, 1), k = normal({1, 13, 2, 3}, 2), v = normal({1, 13, 2, 4}, 3);
    const Array d_o = normal({1, 10, 4, 4}, 4), bias = normal({4, 2, 4, 6}, 5),
                mask = filled({4, 1, 4, 1}, 1, DType::boolean);
    mask.set({0, 0, 1, 0}, 0);
    const Array cu_q = integers(q_ends), cu_k = integers(k_ends);
    AttentionInputs in;
    in.q = q.view(), in.k = k.view(), in.v = v.view(), in.bias = bias.view(), in.mask = mask.view();
    in.cu_seqlens_q = cu_q.view(), in.cu_seqlens_k = cu_k.view();
    AttentionOptions options;
    options.causal = Causal::bottom_right;
    options.window_left = 2;
    const Results packed = compute(in, options, d_o.view(), {});

    for (std::size_t n = 0; n < 4; ++n) {
        const Index q0 = q_ends[n], q1 = q_ends[n + 1], k0 = k_ends[n], k1 = k_ends[n + 1];
        const auto part_of = [n](const Array& a, Index Lq, Index Lk) {
            const Tensor& t = a.view();
            const auto bytes = static_cast<Index>(t.dtype() == DType::f64 ? 8 : 1);
            const Shape shape{1, t.shape(1), t.shape(2) == 1 ? 1 : Lq, t.shape(3) == 1 ? 1 : Lk};
            return Tensor(static_cast<char*>(t.data()) + static_cast<Index>(n) * t.stride()[0] * bytes, t.dtype(),
                          shape, t.stride());
        };
        AttentionInputs one;
        one.q = slice(q.view(), q0, q1), one.k = slice(k.view(), k0, k1), one.v = slice(v.view(), k0, k1);
        one.bias = part_of(bias, q1 - q0, k1 - k0), one.mask = part_of(mask, q1 - q0, k1 - k0);
        const Results r = compute(one, options, slice(d_o.view(), q0, q1), {});
        const auto expect_rows = [](const Array& all, const Array& some, Index begin) {
            const Index row = all.count() / all.view().shape(1);
            for (Index i = 0; i < some.count(); ++i) ASSERT_EQ(all.get(begin * row + i), some.get(i));
        };
        expect_rows(packed.o, r.o, q0);
        expect_rows(packed.dq, r.dq, q0);
        expect_rows(packed.dk, r.dk, k0);
        expect_rows(packed.dv, r.dv, k0);
        for (Index h = 0; h < 2; ++h)
            for (Index i = 0; i < 4; ++i)
                for (Index j = 0; j < 6; ++j)
                    ASSERT_EQ(packed.dbias.get({static_cast<Index>(n), h, i, j}),
                              i < q1 - q0 && j < k1 - k0 ? r.dbias.get({0, h, i, j}) : 0);
    }
}

TEST(AttentionLayout, ACacheEndsAtItsLength) {
    Example e;
    e.options.causal = Causal::bottom_right;
    const Array used = integers({5, 6});
    AttentionInputs in = e.inputs(), first = e.inputs();
    in.cache_seqlens = used.view();
    const Results r = compute(in, e.options, e.d_o.view(), e.dlse.view());
    for (Index c = 0; c < 6; ++c) EXPECT_EQ(r.dk.get((5 * 2) * 3 + c), 0);
    for (Index c = 0; c < 8; ++c) EXPECT_EQ(r.dv.get((5 * 2) * 4 + c), 0);
    expect_finite(r.dk);

    Shape shape = shape_of(e.bias.view());
    shape[3] = 5;
    first.k = slice(e.k.view(), 0, 5), first.v = slice(e.v.view(), 0, 5);
    first.bias = Tensor(e.bias.view().data(), DType::f64, shape, e.bias.view().stride());
    first.mask = {};
    const Results cut = compute(first, e.options, e.d_o.view(), e.dlse.view());
    for (Index i = 0; i < 80; ++i) ASSERT_EQ(r.o.get(i), cut.o.get(i));
    for (Index i = 0; i < 60; ++i) ASSERT_EQ(r.dq.get(i), cut.dq.get(i));
}

TEST(AttentionLayout, APagedCacheIsAContiguousOne) {
    Example e;
    const Index rows = 2, blocks = 9;
    const Index table[2][4] = {{7, 2, 5, 0}, {3, 8, 1, 6}};
    const Array k = filled({blocks, rows, 2, 3}, nan), v = filled({blocks, rows, 2, 4}, nan);
    const Array block_table = integers({7, 2, 5, 0, 3, 8, 1, 6}), used = integers({7, 5});
    for (Index b = 0; b < 2; ++b)
        for (Index j = 0; j < 7; ++j)
            for (Index h = 0; h < 2; ++h) {
                for (Index c = 0; c < 3; ++c) k.set({table[b][j / rows], j % rows, h, c}, e.k.get({b, j, h, c}));
                for (Index c = 0; c < 4; ++c) v.set({table[b][j / rows], j % rows, h, c}, e.v.get({b, j, h, c}));
            }
    e.mask = filled({1, 1, 1, 1}, 1, DType::boolean);
    e.bias = normal({2, 1, 5, 1}, 9);
    AttentionInputs contiguous = e.inputs(), paged = e.inputs();
    contiguous.cache_seqlens = paged.cache_seqlens = used.view();
    paged.k = k.view(), paged.v = v.view();
    paged.block_table = Tensor(block_table.view().data(), DType::i32, {2, 4});
    const Results a = compute(contiguous, e.options, e.d_o.view(), {}), b = compute(paged, e.options, e.d_o.view(), {});
    expect_equal("o", a.o, b.o);
    expect_equal("lse", a.lse, b.lse);
}

// Prefill and decode in one batch, in blocks, and in caches of their own: each sequence is as it is alone.
TEST(AttentionLayout, PackedQueriesOverCachesAreTheirSequences) {
    const std::vector<Index> ends{0, 4, 4, 5, 6}, lengths{6, 3, 1, 5};
    constexpr Index N = 4, rows = 2, pages = 3, blocks = 12;
    const Array q = normal({1, 6, 4, 3}, 1), k = normal({N, pages * rows, 2, 3}, 2),
                v = normal({N, pages * rows, 2, 4}, 3);
    const Array paged_k = filled({blocks, rows, 2, 3}, nan), paged_v = filled({blocks, rows, 2, 4}, nan);
    const Array cu_q = integers(ends), used = integers(lengths),
                table = integers({7, 2, 5, 0, 3, 8, 1, 6, 11, 4, 9, 10});
    const Array bias = normal({N, 2, 4, pages * rows}, 4), d_o = normal({1, 6, 4, 4}, 5);
    for (Index n = 0; n < N; ++n)
        for (Index j = 0; j < lengths[static_cast<std::size_t>(n)]; ++j)
            for (Index h = 0; h < 2; ++h) {
                const auto block = static_cast<Index>(table.get(n * pages + j / rows));
                for (Index c = 0; c < 3; ++c) paged_k.set({block, j % rows, h, c}, k.get({n, j, h, c}));
                for (Index c = 0; c < 4; ++c) paged_v.set({block, j % rows, h, c}, v.get({n, j, h, c}));
            }
    AttentionOptions options;
    options.causal = Causal::bottom_right;
    options.window_left = 3;
    AttentionInputs in{.q = q.view(),
                       .k = k.view(),
                       .v = v.view(),
                       .bias = bias.view(),
                       .cu_seqlens_q = cu_q.view(),
                       .cache_seqlens = used.view()};
    const Results caches = compute(in, options, d_o.view(), {});
    in.k = paged_k.view(), in.v = paged_v.view();
    in.block_table = Tensor(table.view().data(), DType::i32, {N, pages});
    const Results paged = compute(in, options, d_o.view(), {});
    expect_equal("o", paged.o, caches.o);
    expect_equal("lse", paged.lse, caches.lse);

    for (Index n = 0; n < N; ++n) {
        const Index first = ends[static_cast<std::size_t>(n)], last = ends[static_cast<std::size_t>(n) + 1];
        const Index length = lengths[static_cast<std::size_t>(n)];
        const auto row = [n](const Array& a) { return slice_of_batch(a.view(), n); };
        const Tensor row_bias(row(bias).data(), DType::f64, Shape{1, 2, last - first, length}, row(bias).stride());
        const AttentionInputs one{.q = slice(q.view(), first, last),
                                  .k = slice(row(k), 0, length),
                                  .v = slice(row(v), 0, length),
                                  .bias = row_bias};
        const Results r = compute(one, options, slice(d_o.view(), first, last), {});
        for (Index i = 0; i < r.o.count(); ++i) ASSERT_EQ(caches.o.get(first * 16 + i), r.o.get(i));
        for (Index i = 0; i < r.dq.count(); ++i) ASSERT_EQ(caches.dq.get(first * 12 + i), r.dq.get(i));
        for (Index i = 0; i < pages * rows * 2 * 3; ++i)
            ASSERT_EQ(caches.dk.get(n * pages * rows * 2 * 3 + i), i < r.dk.count() ? r.dk.get(i) : 0);
    }
}

TEST(AttentionLayout, ZeroStridesBroadcast) {
    Example e;
    const Array one_head = normal({2, 7, 1, 3}, 10), column = normal({2, 4, 1, 7}, 11);
    for (Index b = 0; b < 2; ++b)
        for (Index j = 0; j < 7; ++j)
            for (Index h = 0; h < 4; ++h) {
                for (Index c = 0; c < 3; ++c) e.k.set({b, j, h / 2, c}, one_head.get({b, j, 0, c}));
                for (Index i = 0; i < 5; ++i) e.bias.set({b, h, i, j}, column.get({b, h, 0, j}));
            }
    AttentionInputs in = e.inputs();
    in.k = Tensor(one_head.view().data(), DType::f64, {2, 7, 2, 3}, {21, 3, 0, 1});
    in.bias = Tensor(column.view().data(), DType::f64, {2, 4, 5, 7}, {28, 7, 0, 1});
    expect_equal(e.run(), compute(in, e.options, e.d_o.view(), e.dlse.view()));
}

TEST(AttentionLayout, StorageTypesAreReadExactlyAndRoundedOnce) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
        Example e;
        AttentionInputs exact = e.inputs(), stored = e.inputs();
        const Array q = normal({2, 5, 4, 3}, 1, type), k = normal({2, 7, 2, 3}, 2, type),
                    d_o = normal({2, 5, 4, 4}, 6, type);
        const Array v = normal({2, 7, 2, 4}, 3, type), bias = normal({2, 4, 5, 7}, 4, type),
                    sink = normal({4}, 5, type);
        stored.q = q.view(), stored.k = k.view(), stored.v = v.view(), stored.bias = bias.view(),
        stored.sink = sink.view();
        for (const auto& [from, to] :
             {std::pair{&q, &e.q}, {&k, &e.k}, {&v, &e.v}, {&bias, &e.bias}, {&sink, &e.sink}, {&d_o, &e.d_o}})
            for (Index i = 0; i < to->count(); ++i) to->set(i, from->get(i));
        const Results r = compute(stored, e.options, d_o.view(), e.dlse.view(), 0, true);
        Results want = compute(exact, e.options, e.d_o.view(), e.dlse.view());
        for (Array* a : {&want.o, &want.dq, &want.dk, &want.dv, &want.dbias, &want.dsink}) {
            Array rounded(type, shape_of(a->view()));
            for (Index i = 0; i < a->count(); ++i) rounded.set(i, a->get(i));
            *a = std::move(rounded);
        }
        expect_equal(want, r);
    }
}

// Several waves of rows and tiles of keys; bias shared over everything but keys.
TEST(AttentionLayout, ThreadsDoNotChangeABit) {
    const Array q = normal({2, 300, 4, 5}, 1), k = normal({2, 200, 1, 5}, 2), v = normal({2, 200, 1, 6}, 3);
    const Array bias = normal({1, 1, 1, 200}, 4), sink = normal({4}, 5), d_o = normal({2, 300, 4, 6}, 6);
    AttentionInputs in;
    in.q = q.view(), in.k = k.view(), in.v = v.view(), in.bias = bias.view(), in.sink = sink.view();
    const Results one = compute(in, {}, d_o.view(), {}, 1);
    for (const int threads : {2, 3, 7}) expect_equal(one, compute(in, {}, d_o.view(), {}, threads));
}

TEST(AttentionLayout, EveryGradientIsTheSameAlone) {
    const Example e;
    const AttentionInputs in = e.inputs();
    const Results all = e.run();
    Execution execution;
    execution.engine = "reference";
    const std::pair<const Array*, Tensor AttentionGradients::*> gradients[] = {
        {&all.dq, &AttentionGradients::dq},
        {&all.dk, &AttentionGradients::dk},
        {&all.dv, &AttentionGradients::dv},
        {&all.dbias, &AttentionGradients::dbias},
        {&all.dsink, &AttentionGradients::dsink}};
    for (const auto& [want, member] : gradients) {
        const Array alone = filled(shape_of(want->view()), nan);
        AttentionGradients g;
        g.d_o = e.d_o.view(), g.dlse = e.dlse.view();
        g.*member = alone.view();
        attention_backward(in, g, e.options, execution);
        expect_equal("alone", *want, alone);
    }
}

}  // namespace
}  // namespace softdelta::test

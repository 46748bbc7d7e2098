// A small attention call with every input, its results, and their comparison bit by bit.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "support/random_attention.h"

namespace softdelta::test {

inline constexpr double infinity = std::numeric_limits<double>::infinity();
inline constexpr double nan = std::numeric_limits<double>::quiet_NaN();

inline Shape shape_of(const Tensor& t) {
    return {t.shape().begin(), t.shape().end()};
}

inline Array filled(const Shape& shape, double value, DType dtype = DType::f64) {
    Array a(dtype, shape);
    for (Index i = 0; i < a.count(); ++i) a.set(i, value);
    return a;
}

inline Array normal(const Shape& shape, std::uint64_t seed, DType dtype = DType::f64) {
    Array a(dtype, shape);
    Random random(seed);
    fill_normal(a, random);
    return a;
}

struct Results {
    Array o, lse, dq, dk, dv, dbias, dsink;
};

// All results in f64, or in the types of the inputs; NaN where nothing is written.
inline Results compute(const AttentionInputs& in, const AttentionOptions& options, const Tensor& d_o,
                       const Tensor& dlse, int threads = 0, bool in_input_types = false) {
    const auto like = [&](const Tensor& t) {
        return t ? filled(shape_of(t), nan, in_input_types ? t.dtype() : DType::f64) : Array();
    };
    Results r{like(d_o),    filled({in.q.shape(0), in.q.shape(2), in.q.shape(1)}, nan),
              like(in.q),   like(in.k),
              like(in.v),   like(in.bias),
              like(in.sink)};
    Execution execution;
    execution.engine = "reference";
    execution.threads = threads;
    attention_forward(in, {r.o.view(), r.lse.view()}, options, execution);
    if (in.block_table) return r;
    AttentionGradients g;
    g.d_o = d_o, g.dlse = dlse;
    g.dq = r.dq.view(), g.dk = r.dk.view(), g.dv = r.dv.view(), g.dbias = r.dbias.view(), g.dsink = r.dsink.view();
    attention_backward(in, g, options, execution);
    return r;
}

inline void expect_equal(const char* name, const Array& a, const Array& b) {
    ASSERT_EQ(a.count(), b.count()) << name;
    for (Index i = 0; i < a.count(); ++i)
        ASSERT_EQ(std::bit_cast<std::uint64_t>(a.get(i)), std::bit_cast<std::uint64_t>(b.get(i)))
            << name << '[' << i << "]: " << a.get(i) << " and " << b.get(i);
}

inline void expect_equal(const Results& a, const Results& b) {
    expect_equal("o", a.o, b.o);
    expect_equal("lse", a.lse, b.lse);
    expect_equal("dq", a.dq, b.dq);
    expect_equal("dk", a.dk, b.dk);
    expect_equal("dv", a.dv, b.dv);
    expect_equal("dbias", a.dbias, b.dbias);
    expect_equal("dsink", a.dsink, b.dsink);
}

// B 2, Lq 5, Lk 7, H 4, Hk 2, D 3, Dv 4, every input there is.
struct Example {
    Array q = normal({2, 5, 4, 3}, 1), k = normal({2, 7, 2, 3}, 2), v = normal({2, 7, 2, 4}, 3);
    Array mask = filled({2, 1, 5, 7}, 1, DType::boolean), bias = normal({2, 4, 5, 7}, 4), sink = normal({4}, 5);
    Array d_o = normal({2, 5, 4, 4}, 6), dlse = normal({2, 4, 5}, 7);
    AttentionOptions options;

    AttentionInputs inputs(bool with_sink = true) const {
        AttentionInputs in;
        in.q = q.view(), in.k = k.view(), in.v = v.view(), in.mask = mask.view(), in.bias = bias.view();
        if (with_sink) in.sink = sink.view();
        return in;
    }
    Results run(bool with_sink = true) const { return compute(inputs(with_sink), options, d_o.view(), dlse.view()); }
};

}  // namespace softdelta::test

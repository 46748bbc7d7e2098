// What must not change a result of the reference's delta rules: threads, layouts, storage types, packing, the order of
// the state's dimensions. Equal means bit by bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engines/reference/reference_calls.h"
#include "support/random_delta.h"
#include "support/teams.h"

namespace softdelta::test {
namespace {

Execution reference_engine(int threads = 1) {
    Execution e;
    e.engine = "reference";
    e.threads = threads;
    return e;
}

Shape shape_of(const Array& a) {
    return {a.view().shape().begin(), a.view().shape().end()};
}

void expect_same(const Array& actual, const Array& expected, const std::string& name) {
    ASSERT_EQ(actual.count(), expected.count()) << name;
    for (Index i = 0; i < expected.count(); ++i) {
        const double a = actual.get(i), e = expected.get(i);
        ASSERT_EQ(std::memcmp(&a, &e, sizeof a), 0) << name << '[' << i << "]: " << a << ", expected " << e;
    }
}

void expect_same(const Results& actual, const Results& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (const auto& [name, e] : expected) expect_same(actual.at(name), e, name);
}

TEST(DeltaInvariance, DoesNotDependOnThreads) {
    for (std::uint64_t n = 0; n < 40; ++n) {
        const RandomDelta call = draw_any(first_seed() + n);
        SCOPED_TRACE(call.describe());
        for (const int threads : {2, 5}) {
            expect_same(forward_results(call, reference_engine(threads)), forward_results(call, reference_engine()));
            expect_same(backward_results(call, reference_engine(threads)), backward_results(call, reference_engine()));
        }
    }
}

TEST(DeltaInvariance, DoesNotDependOnTheCallersRounding) {
    for (std::uint64_t n = 0; n < 10; ++n) {
        const RandomDelta call = draw_any(first_seed() + n);
        SCOPED_TRACE(call.describe());
        const Results outputs = forward_results(call, reference_engine()),
                      gradients = backward_results(call, reference_engine());
        ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
        const Results upward = forward_results(call, reference_engine(2)),
                      dupward = backward_results(call, reference_engine(2));
        EXPECT_EQ(std::fegetround(), FE_UPWARD) << "the caller's environment is put back";
        std::fesetround(FE_TONEAREST);
        expect_same(upward, outputs);
        expect_same(dupward, gradients);
    }
}

TEST(DeltaInvariance, DoesNotDependOnLayoutAndTypeOfInputs) {
    for (std::uint64_t n = 0; n < 60; ++n) {
        const RandomDelta call = draw_any(first_seed() + n, {DType::f64, DType::f32, DType::bf16, DType::f16});
        SCOPED_TRACE(call.describe());
        const RandomDelta copy = dense_copy(call);
        expect_same(forward_results(call, reference_engine()), forward_results(copy, reference_engine()));
        expect_same(backward_results(call, reference_engine()), backward_results(copy, reference_engine()));
    }
}

// Outputs of every type and layout are the f64 result, rounded once.
TEST(DeltaInvariance, RoundsResultsOnce) {
    Random random(first_seed());
    for (std::uint64_t n = 0; n < 30; ++n) {
        const RandomDelta call = draw_any(first_seed() + n);
        SCOPED_TRACE(call.describe());
        const Results exact = forward_results(call, reference_engine());
        const Results gradients = backward_results(call, reference_engine());
        for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
            const auto rounded = [&](const Array& a) {
                Array b(dtype, shape_of(a), random);
                for (Index i = 0; i < a.count(); ++i) b.set(i, a.get(i));
                return b;
            };
            const auto blank = [&](const Array& a) { return Array(dtype, shape_of(a), random); };
            const Array o = blank(exact.at("o")), final_state = blank(exact.at("final_state"));
            delta_forward(call.inputs(), {.o = o.view(), .final_state = final_state.view()}, call.options,
                          reference_engine());
            expect_same(o, rounded(exact.at("o")), "o");
            expect_same(final_state, rounded(exact.at("final_state")), "final_state");

            // One gradient alone: any subset may be asked for.
            for (const DeltaOperand& operand : delta_operands()) {
                const std::string name = std::string("d") + operand.name;
                if (!gradients.count(name)) continue;
                const Array gradient = blank(gradients.at(name));
                DeltaGradients grad;
                grad.d_o = call.d_o.view(), grad.dfinal_state = call.dfinal_state.view();
                grad.*operand.gradient = gradient.view();
                delta_backward(call.inputs(), grad, call.options, reference_engine());
                expect_same(gradient, rounded(gradients.at(name)), name);
            }
        }
    }
}

Tensor without_strides_along_tokens(const Array& a) {
    std::vector<std::int64_t> stride(a.view().stride().begin(), a.view().stride().end());
    stride[1] = 0;
    return Tensor(a.view().data(), a.view().dtype(), a.view().shape(), stride);
}

TEST(DeltaInvariance, ReadsRepeatedRows) {
    for (std::uint64_t n = 0; n < 20; ++n) {
        const RandomDelta call = draw_any(first_seed() + n);
        if (call.v.count() == 0) continue;
        SCOPED_TRACE(call.describe());
        DeltaInputs repeated = call.inputs();
        for (const auto& [array, input] : {std::pair{&RandomDelta::k, &DeltaInputs::k},
                                           {&RandomDelta::v, &DeltaInputs::v},
                                           {&RandomDelta::g, &DeltaInputs::g}}) {
            const Array& a = call.*array;
            if (!a.view()) continue;
            repeated.*input = without_strides_along_tokens(a);
            const Index batches = a.view().shape(0), rest = a.count() / batches / a.view().shape(1);
            for (Index i = 0; i < a.count(); ++i)
                a.set(i, a.get(i / (a.count() / batches) * (a.count() / batches) + i % rest));
        }
        const Array o(DType::f64, call.o_shape()), dq(DType::f64, shape_of(call.q));
        delta_forward(repeated, {.o = o.view()}, call.options, reference_engine());
        delta_backward(repeated, {.d_o = call.d_o.view(), .dq = dq.view()}, call.options, reference_engine());
        RandomDelta plain = dense_copy(call);
        plain.dfinal_state = {};
        expect_same(o, forward_results(plain, reference_engine()).at("o"), "o");
        expect_same(dq, backward_results(plain, reference_engine()).at("dq"), "dq");
    }
}

// Swaps K and V in memory; the results are the same states.
TEST(DeltaInvariance, DoesNotDependOnTheOrderOfStateDimensions) {
    for (std::uint64_t n = 0; n < 40; ++n) {
        const RandomDelta call = draw_any(first_seed() + n);
        SCOPED_TRACE(call.describe());
        RandomDelta other = dense_copy(call);
        other.options.state_v_first = !call.options.state_v_first;
        const auto transposed = [](const Array& a) {
            if (!a.view()) return Array();
            Shape shape = shape_of(a);
            const std::size_t last = shape.size() - 1;
            std::swap(shape[last - 1], shape[last]);
            Array b(DType::f64, shape);
            const Index rows = shape[last - 1], columns = shape[last], size = rows * columns;
            for (Index i = 0; i < a.count(); ++i)
                b.set(i, a.get(i / size * size + i % columns * rows + i % size / columns));
            return b;
        };
        other.initial_state = transposed(call.initial_state);
        other.dfinal_state = transposed(call.dfinal_state);
        const Results expected = forward_results(call, reference_engine());
        const Results actual = forward_results(other, reference_engine());
        expect_same(actual.at("o"), expected.at("o"), "o");
        expect_same(actual.at("final_state"), transposed(expected.at("final_state")), "final_state");
        expect_same(actual.at("states"), transposed(expected.at("states")), "states");
        Results gradients = backward_results(call, reference_engine());
        gradients["dinitial_state"] = transposed(gradients.at("dinitial_state"));
        expect_same(backward_results(other, reference_engine()), gradients);
    }
}

// Tokens of sequence n alone, from a packed call.
Array rows_of(const RandomDelta& call, const Array& a, Index n) {
    if (!a.view()) return {};
    Shape shape = shape_of(a);
    const Index row = a.count() / std::max<Index>(shape[1], 1);
    shape[1] = call.length(n);
    Array rows(DType::f64, shape);
    for (Index i = 0; i < rows.count(); ++i) rows.set(i, a.get(call.begin(n) * row + i));
    return rows;
}

// Entry n of a tensor whose first dimension counts sequences.
Array entry_of(const Array& a, Index n) {
    if (!a.view()) return {};
    Shape shape = shape_of(a);
    shape[0] = 1;
    Array entry(DType::f64, shape);
    for (Index i = 0; i < entry.count(); ++i) entry.set(i, a.get(n * entry.count() + i));
    return entry;
}

RandomDelta sequence_of(const RandomDelta& call, Index n) {
    RandomDelta one = dense_copy(call);
    one.sequences = 1;
    one.cu_seqlens = {};
    for (Array RandomDelta::*operand : {&RandomDelta::q, &RandomDelta::k, &RandomDelta::p, &RandomDelta::v,
                                        &RandomDelta::g, &RandomDelta::beta, &RandomDelta::d_o})
        one.*operand = rows_of(call, call.*operand, n);
    one.initial_state = entry_of(call.initial_state, n);
    one.dfinal_state = entry_of(call.dfinal_state, n);
    return one;
}

TEST(DeltaInvariance, PackedSequencesEqualSeparateCalls) {
    int empty = 0, single = 0;
    for (std::uint64_t n = 0; n < 100; ++n) {
        const RandomDelta call = draw_any(first_seed() + n);
        if (!call.cu_seqlens.view()) continue;
        SCOPED_TRACE(call.describe());
        const Results packed = forward_results(call, reference_engine());
        const Results gradients = backward_results(call, reference_engine());
        std::map<std::string, std::vector<double>> sums;  // over the sequences, in order
        Index chunk = 0;
        for (Index i = 0; i < call.sequences; ++i) {
            empty += call.length(i) == 0;
            single += call.length(i) == 1;
            const RandomDelta one = sequence_of(call, i);
            const Results alone = forward_results(one, reference_engine());
            expect_same(rows_of(call, packed.at("o"), i), alone.at("o"), "o");
            expect_same(entry_of(packed.at("final_state"), i), alone.at("final_state"), "final_state");
            for (Index j = 0, first = chunk; j < alone.at("states").count(); ++j, chunk = first + j)
                ASSERT_EQ(packed.at("states").get(first + j), alone.at("states").get(j));
            for (const auto& [name, gradient] : backward_results(one, reference_engine())) {
                if (name == "dA_log" || name == "ddt_bias" || name == "dg_gamma") {
                    sums[name].resize(static_cast<std::size_t>(gradient.count()));
                    for (Index j = 0; j < gradient.count(); ++j)
                        sums[name][static_cast<std::size_t>(j)] += gradient.get(j);
                } else {
                    const Array& all = gradients.at(name);
                    expect_same(name == "dinitial_state" ? entry_of(all, i) : rows_of(call, all, i), gradient, name);
                }
            }
        }
        EXPECT_EQ(chunk, packed.at("states").count());
        for (const auto& [name, sum] : sums) EXPECT_EQ(gradients.at(name).values(), sum) << name;
    }
    EXPECT_GE(empty, 5);
    EXPECT_GE(single, 5);
}

}  // namespace
}  // namespace softdelta::test

// Summaries of ranges of tokens: what they say of a range against the recurrence over the whole, in f64 to rounding,
// and of the fast engine within the limits of a right kernel (docs/math.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "support/fast_delta.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

Execution reference_engine() {
    Execution e;
    e.engine = "reference";
    e.threads = 1;
    return e;
}

// Tokens [begin, end) of a tensor [B, T, ..].
Tensor tokens(const Tensor& t, Index begin, Index end) {
    if (!t) return {};
    std::vector<Index> shape(t.shape().begin(), t.shape().end());
    shape[1] = end - begin;
    const auto item = static_cast<Index>(t.dtype() == DType::f64 ? 8 : t.dtype() == DType::f32 ? 4 : 2);
    return {static_cast<char*>(t.data()) + begin * t.stride()[1] * item, t.dtype(), shape, t.stride()};
}

DeltaInputs range_of(DeltaInputs in, Index begin, Index end) {
    for (Tensor* t : {&in.q, &in.k, &in.p, &in.v, &in.g, &in.beta}) *t = tokens(*t, begin, end);
    in.initial_state = {};
    return in;
}

// Entry r of a tensor with ranges in front.
Tensor entry(const Array& a, Index r) {
    const Tensor& t = a.view();
    const std::vector<Index> shape(t.shape().begin() + 1, t.shape().end());
    const Index size = t.dtype() == DType::f64 ? 8 : 4;
    return {static_cast<char*>(t.data()) + r * t.stride()[0] * size, t.dtype(), shape, t.stride().subspan(1)};
}

Shape with_ranges(Index ranges, Shape shape) {
    shape.insert(shape.begin(), ranges);
    return shape;
}

// The states between ranges that `bounds` cut a call into, by summaries and folds.
struct Folded {
    Array states, final_state;   // [P, ..], [..]
    Array gradients, d_initial;  // the same backward
    Folded(const DeltaInputs& in, const Tensor& d_o, const Tensor& dfinal_state, const Shape& state,
           const DeltaOptions& options, const std::vector<Index>& bounds, DType dtype, const Execution& execution) {
        const Index ranges = static_cast<Index>(bounds.size()) - 1, K = in.q.shape(3);
        const Shape map =
            options.rule == Rule::simple_gla ? Shape{state[0], state[1]} : Shape{state[0], state[1], K, K};
        const Array M(dtype, with_ranges(ranges, map)), E(dtype, with_ranges(ranges, state)),
            R(dtype, with_ranges(ranges, state));
        for (Index r = 0; r < ranges; ++r) {
            const auto at = static_cast<std::size_t>(r);
            const bool whole = ranges == 1;  // packed sequences are not cut
            DeltaInputs range = whole ? in : range_of(in, bounds[at], bounds[at + 1]);
            range.initial_state = {};
            delta_summary(range, {entry(M, r), entry(E, r)}, options, execution);
            delta_summary_backward(range, {whole ? d_o : tokens(d_o, bounds[at], bounds[at + 1]), entry(R, r)}, options,
                                   execution);
        }
        states = Array(dtype, with_ranges(ranges, state)), final_state = Array(dtype, state);
        delta_fold({M.view(), E.view(), in.initial_state}, {states.view(), final_state.view()}, options);
        gradients = Array(dtype, with_ranges(ranges, state)), d_initial = Array(dtype, state);
        delta_fold_backward({M.view(), R.view(), dfinal_state}, {gradients.view(), d_initial.view()}, options);
    }
};

// A few cuts, some of them at the same place or at the ends.
std::vector<Index> draw_bounds(const RandomDelta& call, Index most) {
    const Index T = call.q.view().shape(1);
    if (call.cu_seqlens.view()) return {0, T};
    Random random(call.seed + 77);
    std::vector<Index> bounds{0, T};
    for (Index cuts = std::uniform_int_distribution<Index>(0, most)(random); cuts > 0; --cuts)
        bounds.push_back(std::uniform_int_distribution<Index>(0, T)(random));
    std::sort(bounds.begin(), bounds.end());
    return bounds;
}

// Relative to the largest number: gates above 0 let it grow.
void expect_close(const Array& x, const Array& truth, const char* name) {
    double largest = 1;
    for (Index i = 0; i < truth.count(); ++i) largest = std::max(largest, std::abs(truth.get(i)));
    for (Index i = 0; i < truth.count(); ++i)
        ASSERT_NEAR(x.get(i), truth.get(i), 1e-11 * largest) << name << '[' << i << ']';
}

TEST(DeltaSummary, ComposesToTheWholeSequence) {
    std::map<std::string, int> drawn;
    const std::uint64_t seed = first_seed();
    for (std::uint64_t n = 0; n < 150; ++n) {
        DeltaRanges ranges;
        ranges.tokens = n % 5 == 0 ? 150 : 12;
        const RandomDelta call = draw_delta(seed + n, ranges);
        SCOPED_TRACE(call.describe());
        const std::vector<Index> bounds = draw_bounds(call, 4);
        const Results forward = forward_results(call, reference_engine()),
                      backward = backward_results(call, reference_engine());
        const Folded folded(call.inputs(), call.d_o.view(), call.dfinal_state.view(), call.state_shape(), call.options,
                            bounds, DType::f64, reference_engine());
        expect_close(folded.final_state, forward.at("final_state"), "final_state");
        expect_close(folded.d_initial, backward.at("dinitial_state"), "dinitial_state");
        if (HasFatalFailure()) return;
        // with the state that enters it, and the gradient of the one that leaves it, a range is that part of the whole
        for (std::size_t r = 0; r + 1 < bounds.size() && bounds.size() > 2; ++r) {
            DeltaInputs in = range_of(call.inputs(), bounds[r], bounds[r + 1]);
            in.initial_state = entry(folded.states, static_cast<Index>(r));
            const auto& v = in.v.shape();
            const Array o(DType::f64, {v.begin(), v.end()}), dv(DType::f64, {v.begin(), v.end()});
            delta_forward(in, {.o = o.view()}, call.options, reference_engine());
            DeltaGradients grad;
            grad.d_o = tokens(call.d_o.view(), bounds[r], bounds[r + 1]), grad.dv = dv.view();
            grad.dfinal_state = entry(folded.gradients, static_cast<Index>(r));
            delta_backward(in, grad, call.options, reference_engine());
            const Index row = v[2] * v[3];
            for (Index i = 0; i < o.count(); ++i) {
                const Index b = i / std::max<Index>(1, v[1] * row);
                const Index at = i + (b * (call.v.view().shape(1) - v[1]) + bounds[r]) * row;
                const double scale = 1 + std::abs(forward.at("o").get(at)) + std::abs(backward.at("dv").get(at));
                ASSERT_NEAR(o.get(i), forward.at("o").get(at), 1e-10 * scale) << "o of range " << r;
                ASSERT_NEAR(dv.get(i), backward.at("dv").get(at), 1e-10 * scale) << "dv of range " << r;
            }
            ++drawn[bounds[r] == bounds[r + 1] ? "empty range" : "range"];
        }
        for (const std::string& feature : call.features) ++drawn[call.features.front() + " with " + feature];
    }
    for (const char* what : {"range", "empty range", "kda with packed", "comba with grouped heads",
                             "simple_gla with state_v_first", "delta_rule with l2norm", "gated_delta_rule with packed"})
        EXPECT_GT(drawn[what], 0) << what;
}

io::OwnedTensor owned(const Array& a) {
    io::OwnedTensor copy(DType::f32, {a.view().shape().begin(), a.view().shape().end()});
    std::copy_n(static_cast<const float*>(a.view().data()), a.count(), static_cast<float*>(copy.view().data()));
    return copy;
}

std::string check_fold(const FastDelta& call, std::uint64_t seed) {
    if (call.has("surging gate") || call.has("first gate surges") || call.has("steps")) return "";
    const RandomDelta& drawn = call.drawn();
    const Folded folded(call.call().delta, call.call().d_o, call.call().dfinal_state, drawn.state_shape(),
                        drawn.options, draw_bounds(drawn, 3), DType::f32, fast(seed));
    FastDelta::Results results;
    results.emplace("final_state", owned(folded.final_state));
    results.emplace("dinitial_state", owned(folded.d_initial));
    return judge_results(call, results);
}

TEST(DeltaSummary, OfTheFastEngineIsRight) {
    check_calls(call_count(60), draw_delta_for_gradients, check_fold);
}

}  // namespace
}  // namespace softdelta::test

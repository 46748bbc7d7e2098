#include "support/fast_attention.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>
#include <utility>

#include "io/file/core_view.h"
#include "judge/verdicts.h"
#include "support/attention_seen.h"
#include "support/attention_terms.h"

namespace softdelta::test {

namespace {

const AttentionRanges kinds[] = {
    {.batch = 3, .queries = 30, .keys = 80, .key_heads = 2, .group = 3, .channels = 70},
    {.batch = 1, .queries = 420, .keys = 560, .key_heads = 1, .group = 2, .channels = 40},
    {.batch = 2, .queries = 14, .keys = 40, .key_heads = 2, .group = 4, .channels = 576},
    {.batch = 2, .queries = 5, .keys = 1800, .key_heads = 2, .group = 4, .channels = 24},
    {.batch = 4, .queries = 90, .keys = 1300, .key_heads = 2, .group = 2, .channels = 20},
};

// Gradients ds of f16 that lie between its small numbers, or beyond its largest.
void scale(Array& a, double factor) {
    const std::vector<double> before = a.values();  // elements may lie in one place
    for (Index i = 0; i < a.count(); ++i) a.set(i, factor * before[static_cast<std::size_t>(i)]);
}

}  // namespace

FastAttention::FastAttention(RandomAttention&& drawn)
    : drawn_(std::move(drawn)),
      side_(drawn_.seed % 2 == 0 ? Side::end : Side::begin),
      q_(own(drawn_.q.view())),
      k_(own(drawn_.inputs.k)),
      v_(own(drawn_.v_in_k ? Tensor() : drawn_.inputs.v)),
      mask_(own(drawn_.mask.view())),
      bias_(own(drawn_.bias.view())),
      sink_(own(drawn_.sink.view())),
      cu_seqlens_q_(own(drawn_.cu_seqlens_q.view())),
      cu_seqlens_k_(own(drawn_.cu_seqlens_k.view())),
      cache_seqlens_(own(drawn_.cache_seqlens.view())),
      block_table_(own(drawn_.block_table.view())),
      alibi_slopes_(own(drawn_.alibi_slopes.view())),
      bias_slopes_(own(drawn_.bias_slopes.view())),
      k_scale_(own(drawn_.k_scale.view())),
      v_scale_(own(drawn_.v_scale.view())),
      d_o_(own(drawn_.d_o.view())),
      dlse_(own(drawn_.dlse.view())) {
    const Tensor& v = drawn_.inputs.v;
    call_.op = "attention";
    call_.is_attention = true;
    call_.attention = {.q = q_.view(),
                       .k = k_.view(),
                       .v = drawn_.v_in_k ? Tensor(k_.view().data(), v.dtype(), v.shape(), v.stride()) : v_.view(),
                       .mask = mask_.view(),
                       .bias = bias_.view(),
                       .sink = sink_.view(),
                       .cu_seqlens_q = cu_seqlens_q_.view(),
                       .cu_seqlens_k = cu_seqlens_k_.view(),
                       .cache_seqlens = cache_seqlens_.view(),
                       .block_table = block_table_.view(),
                       .alibi_slopes = alibi_slopes_.view(),
                       .bias_slopes = bias_slopes_.view(),
                       .k_scale = k_scale_.view(),
                       .v_scale = v_scale_.view()};
    call_.attention_options = drawn_.options;
    call_.d_o = d_o_.view();
    call_.dlse = dlse_.view();
    judged_call_ = call_;
    kept_bias_ = kept_bias(drawn_);
    if (!kept_bias_.view()) return;
    judged_call_.attention.bias = kept_bias_.view();  // with the slopes in it
    judged_call_.attention.alibi_slopes = judged_call_.attention.bias_slopes = {};
}

Names FastAttention::forward_names() const {
    return {"o", "lse"};
}

Names FastAttention::gradient_names() const {
    Names names = io::output_names(call_);
    std::erase_if(names, [](const std::string& name) { return name == "o" || name == "lse"; });
    return names;
}

Names FastAttention::some(const Names& all) const {
    Random random(drawn_.seed);
    Names some;
    for (const std::string& name : all)
        if (random() % 2 == 0) some.push_back(name);
    if (some.empty() && !all.empty()) some.push_back(all[random() % all.size()]);
    return some;
}

Results FastAttention::forward(const Names& names, const Execution& execution, Memory memory) const {
    std::map<std::string, Guarded> results = make_results(call_, names, drawn_.seed, side_);
    const AttentionOutputs outputs{.o = results["o"].view(), .lse = results["lse"].view()};
    const AttentionOptions& options = call_.attention_options;
    tell_on_bad_access("forward, " + describe());
    run_in(memory, attention_forward_workspace(call_.attention, outputs, options, execution), side_, execution,
           [&](const Execution& e) { attention_forward(call_.attention, outputs, options, e); });
    return dense(call_, results);
}

Results FastAttention::backward(const Names& names, const Results& saved, const Execution& execution,
                                Memory memory) const {
    std::map<std::string, Guarded> results = make_results(call_, names, drawn_.seed, side_), given;
    for (const auto& [name, tensor] : saved) given.emplace(name, Guarded::input(tensor.view(), side_));
    const AttentionGradients gradients{.o = given["o"].view(),
                                       .lse = given["lse"].view(),
                                       .d_o = call_.d_o,
                                       .dlse = call_.dlse,
                                       .dq = results["dq"].view(),
                                       .dk = results["dk"].view(),
                                       .dv = results["dv"].view(),
                                       .dbias = results["dbias"].view(),
                                       .dsink = results["dsink"].view()};
    const AttentionOptions& options = call_.attention_options;
    tell_on_bad_access("backward, " + describe());
    run_in(memory, attention_backward_workspace(call_.attention, gradients, options, execution), side_, execution,
           [&](const Execution& e) { attention_backward(call_.attention, gradients, options, e); });
    return dense(call_, results);
}

io::OwnedTensor FastAttention::truth(const std::string& name) const {
    io::OwnedTensor result(DType::f64, io::output_shape(judged_call_, name));
    Execution execution;
    execution.engine = "reference";
    execution.threads = 1;
    io::execute(judged_call_, {{name, result.view()}}, execution);
    return result;
}

FastAttention draw_fast_attention(std::uint64_t seed) {
    constexpr double junk[] = {NAN, INFINITY, -INFINITY};
    AttentionRanges ranges = kinds[seed % std::size(kinds)];
    ranges.dtypes = {DType::f32, DType::bf16, DType::f16};
    ranges.pages = ranges.repeats = ranges.extremes = ranges.quantised = true;
    RandomAttention call = draw_attention(seed, ranges);
    fill_unseen(call, junk[seed / std::size(kinds) % 3]);
    return FastAttention(std::move(call));
}

FastAttention draw_unit_attention(std::uint64_t seed) {
    const AttentionRanges wide{.batch = 1, .queries = 150, .keys = 300, .key_heads = 2, .group = 2, .channels = 128};
    const AttentionRanges narrow{.batch = 3, .queries = 200, .keys = 200, .key_heads = 2, .group = 2, .channels = 64};
    const AttentionRanges step{
        .batch = 3, .queries = 1, .keys = 300, .key_heads = 3, .group = 4, .channels = 128, .plain = true};
    const AttentionRanges widest{.batch = 1, .queries = 150, .keys = 200, .key_heads = 2, .group = 2, .channels = 256};
    AttentionRanges ranges = seed % 5 == 4 ? step : seed % 10 == 6 ? widest : seed % 2 == 0 ? wide : narrow;
    ranges.dtypes = {seed % 3 == 1 ? DType::f16 : DType::bf16};
    ranges.units = ranges.pages = ranges.repeats = ranges.extremes = true;
    RandomAttention call = draw_attention(seed, ranges);
    const bool is_f16 = call.q.view().dtype() == DType::f16;
    if (is_f16 && seed / 3 % 3 == 1) scale(call.d_o, 0x1p-9);
    if (is_f16 && seed / 3 % 3 == 2 && !call.v_in_k) scale(call.v, 0x1p12), scale(call.d_o, 0x1p-8);
    if (seed / 2 % 2 == 0) fill_unseen(call, NAN);
    return FastAttention(std::move(call));
}

FastAttention draw_biased_attention(std::uint64_t seed) {
    constexpr Index channels[] = {128, 64, 256};
    AttentionRanges ranges{.batch = 2, .queries = 200, .keys = 300, .key_heads = 2, .group = 2};
    ranges.channels = channels[seed % std::size(channels)];
    ranges.dtypes = {seed % 4 == 1 ? DType::f16 : DType::bf16};
    ranges.units = ranges.repeats = true;
    for (std::uint64_t drawn = 1000 * seed;; ++drawn) {
        RandomAttention call = draw_attention(drawn, ranges);
        if (!call.bias.view() || call.options.top_w >= 0) continue;
        call.inputs.mask = call.inputs.alibi_slopes = call.inputs.bias_slopes = {};
        for (Array* t : {&call.mask, &call.alibi_slopes, &call.bias_slopes}) *t = {};
        call.options.softcap = 0, call.options.scale = NAN;
        if (seed / 2 % 2 == 0) fill_unseen(call, NAN);
        return FastAttention(std::move(call));
    }
}

FastAttention draw_quantised_attention(std::uint64_t seed) {
    constexpr Index channels[] = {64, 128, 300};
    AttentionRanges ranges{.batch = 2, .queries = 150, .keys = 300, .key_heads = 2, .group = 2};
    ranges.channels = channels[seed % std::size(channels)];
    ranges.dtypes = {DType::bf16};
    ranges.pages = ranges.extremes = ranges.quantised = true;
    ranges.plain = seed % 4 == 0;
    for (std::uint64_t drawn = 1000 * seed;; ++drawn) {
        RandomAttention call = draw_attention(drawn, ranges);
        if (!call.k_scale.view() && !call.v_scale.view()) continue;
        if (seed / 2 % 2 == 0) fill_unseen(call, NAN);
        return FastAttention(std::move(call));
    }
}

FastAttention draw_packed_attention(std::uint64_t seed) {
    constexpr Index sequences[] = {300, 4, 30}, rows[] = {3, 500, 140};
    AttentionRanges ranges{.batch = sequences[seed % 3], .queries = rows[seed % 3], .keys = rows[seed % 3]};
    ranges.key_heads = 1, ranges.group = 2, ranges.channels = seed / 3 % 2 == 0 ? 64 : 128;
    ranges.dtypes = {seed % 4 == 1 ? DType::f16 : DType::bf16};
    ranges.units = ranges.repeats = true;
    ranges.plain = seed % 5 < 3;
    for (std::uint64_t drawn = 1000 * seed;; ++drawn) {
        RandomAttention call = draw_attention(drawn, ranges);
        if (!call.cu_seqlens_k.view()) continue;
        if (seed / 2 % 2 == 0) fill_unseen(call, NAN);
        return FastAttention(std::move(call));
    }
}

FastAttention draw_padded_attention(std::uint64_t seed) {
    AttentionRanges ranges{.batch = 2, .queries = 200, .keys = 200, .key_heads = 1, .group = 2, .channels = 64};
    ranges.dtypes = {seed % 4 == 1 ? DType::f16 : DType::bf16};
    ranges.units = ranges.repeats = ranges.extremes = true;
    for (std::uint64_t drawn = 1000 * seed;; ++drawn) {
        RandomAttention call = draw_attention(drawn, ranges);
        if (!call.far_bias || call.options.softcap != 0) continue;
        if (seed / 2 % 2 == 0) fill_unseen(call, NAN);
        return FastAttention(std::move(call));
    }
}

FastAttention draw_f32_attention(std::uint64_t seed) {
    constexpr Index channels[] = {128, 64};
    AttentionRanges ranges{.batch = 2, .queries = 200, .keys = 300, .key_heads = 2, .group = 2};
    ranges.channels = channels[seed % 2];
    ranges.dtypes = {DType::f32};
    ranges.repeats = true, ranges.extremes = seed % 4 < 2, ranges.plain = seed / 2 % 2 == 0;
    for (std::uint64_t drawn = 1000 * seed;; ++drawn) {
        RandomAttention call = draw_attention(drawn, ranges);
        if (call.options.top_w >= 0) continue;
        if (seed % 3 == 1) {
            scale(call.q, 0x1p-30), scale(call.k, 0x1p30), scale(call.d_o, 0x1p-20);
            if (!call.v_in_k) scale(call.v, 0x1p-40);
        } else if (seed % 9 == 2) {  // rows that lose their bits beside others
            const Index row = call.v.view().shape(3);
            for (Index i = 0; i < call.v.count(); ++i)
                if (i / row % 40 == 5) call.v.set(i, 0x1p-20 * call.v.get(i));
        }
        if (seed / 2 % 2 == 0) fill_unseen(call, NAN);
        return FastAttention(std::move(call));
    }
}

FastAttention draw_long_step_attention(std::uint64_t seed) {
    AttentionRanges ranges{.batch = 1, .queries = 1, .keys = 200000, .key_heads = 1, .group = 2, .channels = 64};
    ranges.shortest = 1;
    ranges.dtypes = {DType::bf16};
    ranges.units = ranges.plain = true;
    return FastAttention(draw_attention(seed, ranges));
}

FastAttention draw_step_attention(std::uint64_t seed) {
    constexpr Index channels[] = {128, 64, 256, 128, 576};
    AttentionRanges ranges{.batch = 2, .queries = seed % 2 == 0 ? 1 : 9, .keys = 1100, .key_heads = 2, .group = 5};
    ranges.channels = channels[seed % std::size(channels)];
    ranges.shortest = 1;
    ranges.dtypes = {seed % 3 == 1 ? DType::f16 : DType::bf16};
    ranges.units = ranges.pages = ranges.repeats = ranges.extremes = true;
    ranges.plain = seed % 4 < 2;
    RandomAttention call = draw_attention(seed, ranges);
    if (seed / 2 % 2 == 0) fill_unseen(call, NAN);
    return FastAttention(std::move(call));
}

FastAttention draw_wide_attention(std::uint64_t seed) {
    const bool many = seed % 8 == 3;
    AttentionRanges ranges{.batch = 2, .queries = 90, .keys = 300, .key_heads = 2, .group = 5, .channels = 576};
    if (many) ranges.batch = ranges.key_heads = ranges.group = 1, ranges.queries = ranges.keys = 1200;
    ranges.shortest = many ? 1030 : 1;
    ranges.dtypes = {seed % 3 == 1 ? DType::f16 : DType::bf16};
    ranges.units = ranges.pages = ranges.repeats = ranges.extremes = true;
    ranges.plain = seed % 2 == 1;
    RandomAttention call = draw_attention(seed, ranges);
    if (seed / 2 % 2 == 0) fill_unseen(call, NAN);
    return FastAttention(std::move(call));
}

std::vector<double> values(const io::OwnedTensor& t) {
    std::vector<double> all(static_cast<std::size_t>(t.count()));
    core::load_row(io::core_view(t.view()), 0, static_cast<int>(t.shape().size()) - 1, t.count(), all.data());
    return all;
}

void set(const io::OwnedTensor& t, std::size_t element, double value) {
    core::store(io::core_view(t.view()), static_cast<Index>(element), value);
}

namespace {

// The results with the truth in place of every element whose error is rounding of f32: few ulp of its
// terms. The limits know nothing of that where terms cancel or few elements stand for a right kernel's luck: the
// gradient of a row that sees one key is 0, and a right kernel may say so exactly.
Results without_f32_rounding(const FastAttention& fast_call, const Results& results) {
    const auto terms = attention_terms(fast_call.drawn());
    Results rest;
    for (const auto& [name, result] : results) {
        const std::vector<double> actual = values(result), truth = values(fast_call.truth(name));
        io::OwnedTensor copy(result.dtype(), result.shape());
        for (std::size_t i = 0; i < truth.size(); ++i) {
            const bool rounding = std::abs(actual[i] - truth[i]) <= 4 * 0x1p-23 * terms.at(name)[i];
            set(copy, i, rounding ? truth[i] : actual[i]);
        }
        rest.emplace(name, copy);
    }
    return rest;
}

}  // namespace

std::string judge_results(const FastAttention& fast_call, const Results& results) {
    if (!any_wrong(test::judge_results(fast_call.judged_call(), results))) return "";
    const Results rest = without_f32_rounding(fast_call, results);
    const std::vector<judge::Finding> findings = test::judge_results(fast_call.judged_call(), rest);
    std::ostringstream text;
    if (any_wrong(findings)) text << fast_call.describe() << "\n" << Table{findings};
    return text.str();
}

std::string judge_gradients(const FastAttention& fast_call, Results gradients) {
    const auto dbias = gradients.find("dbias");
    const bool other = fast_call.call().attention.bias_slopes && !fast_call.judged_call().attention.bias_slopes;
    if (dbias != gradients.end() &&
        (other || dbias->second.shape() != io::output_shape(fast_call.judged_call(), "dbias"))) {
        for (const double x : values(dbias->second))  // the judged call has a bias of its own for every score
            if (!std::isfinite(x)) return fast_call.describe() + "\ndbias is not finite";
        gradients.erase(dbias);
    }
    return judge_results(fast_call, gradients);
}

}  // namespace softdelta::test

#include "support/fast_delta.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "judge/verify.h"
#include "support/takes.h"

namespace softdelta::test {

namespace {

const DeltaRanges kinds[] = {
    {.batch = 2, .tokens = 150, .heads = 2, .group = 2, .key_channels = 40, .value_channels = 70},
    {.batch = 1, .tokens = 70, .heads = 1, .group = 2, .key_channels = 260, .value_channels = 140},
    {.batch = 4, .tokens = 24, .heads = 3, .group = 3, .key_channels = 20, .value_channels = 20},
    {.batch = 1, .tokens = 330, .heads = 2, .group = 1, .key_channels = 24, .value_channels = 36},
    {.batch = 1, .tokens = 140, .heads = 2, .group = 2, .key_channels = 256, .value_channels = 256, .channel_step = 32},
    {.batch = 1, .tokens = 1100, .heads = 2, .group = 2, .key_channels = 12, .value_channels = 50},
};
const std::vector<DType> types[] = {{DType::f32}, {DType::bf16}, {DType::f16}, {DType::f32, DType::bf16, DType::f16}};

// Chunks of any length that kernels may take, one token less and more; and primes.
const std::vector<Index> lengths = {0,  1,  2,  3,  15, 16, 17, 31, 32,  33,  47,  48,  49,  53,  59,
                                    61, 63, 64, 65, 67, 95, 96, 97, 113, 127, 128, 129, 257, 509, 1031};

}  // namespace

FastDelta::FastDelta(RandomDelta&& drawn)
    : drawn_(std::move(drawn)), side_(drawn_.seed % 2 == 0 ? Side::end : Side::begin) {
    const auto own = [&](const char* name, const Tensor& t) {
        return given_.emplace(name, Guarded::input(t, side_)).first->second.view();
    };
    call_.op = drawn_.rule().name;
    for (const DeltaOperand& operand : delta_operands())
        call_.delta.*operand.input = own(operand.name, (drawn_.*operand.array).view());
    call_.delta.cu_seqlens = own("cu_seqlens", drawn_.cu_seqlens.view());
    call_.delta_options = drawn_.options;
    call_.d_o = own("d_o", drawn_.d_o.view());
    call_.dfinal_state = own("dfinal_state", drawn_.dfinal_state.view());
}

bool FastDelta::has(std::string_view feature) const {
    return std::find(drawn_.features.begin(), drawn_.features.end(), feature) != drawn_.features.end();
}

FastDelta::Names FastDelta::gradient_names() const {
    Names names = io::output_names(call_);
    std::erase_if(names, [](const std::string& name) { return name == "o" || name == "final_state"; });
    return names;
}

FastDelta::Names FastDelta::some(const Names& all) const {
    Random random(drawn_.seed);
    Names some;
    for (const std::string& name : all)
        if (random() % 4 != 0) some.push_back(name);
    if (some.empty()) some.push_back(all[random() % all.size()]);
    return some;
}

FastDelta::Results FastDelta::forward(const Names& names, const Execution& execution, Memory memory) const {
    std::map<std::string, Guarded> results = make_results(call_, names, drawn_.seed, side_);
    tell_on_bad_access("forward, " + describe());
    const DeltaOutputs outputs{.o = results["o"].view(), .final_state = results["final_state"].view()};
    run_in(memory, delta_forward_workspace(call_.delta, outputs, call_.delta_options, execution), side_, execution,
           [&](const Execution& e) { delta_forward(call_.delta, outputs, call_.delta_options, e); });
    return dense(call_, results);
}

FastDelta::Kept FastDelta::kept(const Keep& keep, const Execution& execution) const {
    Random layout(drawn_.seed + 1);
    const auto result = [&](DType dtype, const Shape& shape) {
        const Array like = layout() % 2 == 0 ? Array(dtype, shape, layout) : Array(dtype, shape);
        return Guarded::result(like.view(), side_);
    };
    Kept kept{result(DType::f32, drawn_.states_shape(keep.interval)), result(keep.u, drawn_.u_shape())};
    DeltaOptions options = call_.delta_options;
    options.state_interval = keep.interval;
    const DeltaOutputs outputs{.states = kept.states.view(), .u = kept.u.view()};
    tell_on_bad_access("states and u, " + describe());
    delta_forward(call_.delta, outputs, options, execution);
    if (!kept.states.gaps_are_intact() || !kept.u.gaps_are_intact())
        throw std::runtime_error("states or u: memory outside of the tensor was written");
    return kept;
}

Keep FastDelta::drawn_keep() const {
    constexpr Index intervals[] = {0, 384, 0, 48, 100, 512, 0, 37, 513};
    const auto is_bf16 = [](const Array& t) { return !t.view() || t.view().dtype() == DType::bf16; };
    const bool narrow =
        drawn_.seed / 2 % 2 == 0 && is_bf16(drawn_.q) && is_bf16(drawn_.k) && is_bf16(drawn_.p) && is_bf16(drawn_.v);
    return {intervals[drawn_.seed % std::size(intervals)], narrow ? DType::bf16 : DType::f32};
}

FastDelta::Results FastDelta::backward(const Names& names, const Execution& execution, Memory memory,
                                       const Keep& keep) const {
    std::map<std::string, Guarded> results = make_results(call_, names, drawn_.seed, side_);
    DeltaGradients gradients;
    gradients.d_o = call_.d_o;
    gradients.dfinal_state = call_.dfinal_state;
    for (const DeltaOperand& operand : delta_operands())
        gradients.*operand.gradient = results[std::string("d") + operand.name].view();
    DeltaOptions options = call_.delta_options;
    Guarded states, u;
    if (keep.interval > 0) {
        const Kept given = kept(keep, execution);
        states = Guarded::input(given.states.view(), side_), u = Guarded::input(given.u.view(), side_);
        gradients.states = states.view(), gradients.u = u.view();
        options.state_interval = keep.interval;
    }
    tell_on_bad_access("backward, " + describe());
    run_in(memory, delta_backward_workspace(call_.delta, gradients, options, execution), side_, execution,
           [&](const Execution& e) { delta_backward(call_.delta, gradients, options, e); });
    return dense(call_, results);
}

RandomDelta draw_fast_delta_call(std::uint64_t seed, const std::vector<DType>& only) {
    DeltaRanges ranges = kinds[seed % std::size(kinds)];
    ranges.tiled = ranges.repeats = ranges.steps = true;
    ranges.dtypes = only.empty() ? types[seed / std::size(kinds) % std::size(types)] : only;
    ranges.lengths = lengths;
    ranges.hard = seed % 3 != 0;
    return draw_delta(seed, ranges);
}

FastDelta draw_fast_delta(std::uint64_t seed, const std::vector<DType>& only) {
    return FastDelta(draw_fast_delta_call(seed, only));
}

FastDelta draw_delta_for_gradients(std::uint64_t seed) {
    FastDelta call = draw_fast_delta(seed);
    const bool grows = call.has("positive gate") || takes(call.drawn().rule(), "p") ||
                       call.has("large initial_state") || call.has("extreme raw gate") ||
                       (call.has("l2norm") && call.has("zero and tiny keys"));
    return grows ? draw_fast_delta(seed, {DType::f32, DType::bf16}) : std::move(call);
}

FastDelta draw_rule_of_facts(std::uint64_t seed) {
    const bool by_tiles = seed % 2 == 0;
    DeltaRanges ranges = by_tiles ? kinds[4] : kinds[0];
    if (by_tiles) ranges.tokens = 100, ranges.key_channels = 64, ranges.value_channels = 64;
    ranges.dtypes = seed % 4 < 3 ? std::vector<DType>{DType::bf16} : std::vector<DType>{DType::f32};
    ranges.lengths = lengths;
    ranges.dense = by_tiles;
    ranges.facts = ranges.steps = ranges.tiled = true;
    ranges.hard = seed % 3 != 0;
    return FastDelta(draw_delta(seed, ranges));
}

FastDelta draw_own_keys_by_tiles(std::uint64_t seed) {
    DeltaRanges ranges = kinds[4];
    ranges.tokens = 100, ranges.key_channels = 96, ranges.value_channels = 64;
    ranges.dtypes = {DType::bf16};
    ranges.lengths = lengths;
    ranges.dense = ranges.steps = ranges.tiled = true;
    ranges.hard = seed % 3 != 0;
    for (std::uint64_t draw = 1000 * seed;; ++draw)
        if (RandomDelta call = draw_delta(draw, ranges); takes(call.rule(), "p") && call.rule().has_channel_gate())
            return FastDelta(std::move(call));
}

FastDelta draw_long_sequence_by_tiles(std::uint64_t seed) {
    DeltaRanges ranges = kinds[4];
    ranges.tokens = 700, ranges.shortest = 512;
    ranges.key_channels = 32, ranges.value_channels = 96;
    ranges.dtypes = {DType::bf16};
    ranges.dense = ranges.steps = ranges.tiled = true;
    for (std::uint64_t draw = 1000 * seed;; ++draw)
        if (RandomDelta call = draw_delta(draw, ranges); call.v.view().shape(2) > 1) return FastDelta(std::move(call));
}

FastDelta draw_shrinking_states(std::uint64_t seed) {
    DeltaRanges ranges;
    ranges.batch = 1, ranges.tokens = 400, ranges.shortest = 200;
    ranges.key_channels = 4;
    ranges.dtypes = {DType::f32};
    for (std::uint64_t draw = 1000 * seed;; ++draw) {
        RandomDelta call = draw_delta(draw, ranges);
        if (call.options.rule != Rule::delta_rule || call.options.use_qk_l2norm_in_kernel || !call.initial_state.view())
            continue;
        for (Index i = 0; i < call.initial_state.count(); ++i)
            call.initial_state.set(i, call.initial_state.get(i) * 1e10);
        return FastDelta(std::move(call));
    }
}

Execution fast(std::uint64_t seed) {
    Execution execution;
    execution.engine = "fast";
    execution.threads = 1;
    if (seed / 3 % 4 < 2) execution.bf16_products = seed / 3 % 4 == 0 ? Bf16Products::f32 : Bf16Products::bf16;
    return execution;
}

std::string judge_results(const FastDelta& call, const FastDelta::Results& results) {
    judge::Options options;
    options.threads = 1;
    std::map<std::string, Tensor> views;
    for (const auto& [name, tensor] : results) views[name] = tensor.view();
    std::ostringstream text;
    for (const judge::Finding& f : judge::verify(call.call(), views, options))
        if (f.verdict == judge::Verdict::wrong)
            text << call.describe() << "\n  " << f.name << ": ratio " << f.ratio << ", limit " << f.limit << "; "
                 << f.note << "\n";
    return text.str();
}

}  // namespace softdelta::test

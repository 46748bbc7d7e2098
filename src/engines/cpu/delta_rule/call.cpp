#include "engines/cpu/delta_rule/call.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "engines/cpu/machine/isa.h"
#include "engines/cpu/machine/thresholds.h"

namespace softdelta::cpu {

namespace {

void* at(const Tensor& t, Index offset) {
    return static_cast<std::byte*>(t.data) + offset * static_cast<Index>(core::size_of(t.dtype));
}

}  // namespace

DeltaCall::DeltaCall(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                     const kernels::Table& table)
    : in_(in), options_(options) {
    const auto bf16 = [](const Tensor& t) { return !t || t.dtype == core::DType::bf16; };
    bf16_products_ = bf16(in.q) && bf16(in.k) && bf16(in.p) && bf16(in.v) && use_bf16_products(execution, table);
    for (Index n = 0; n < sequences(); ++n) longest_ = std::max(longest_, core::sequence(in, n).count);
}

kernels::DeltaRows DeltaCall::rows(const Tensor& t, const core::DeltaSequence& s, Index h) const {
    if (!t) return {};
    return {at(t, s.batch * t.stride[0] + s.begin * t.stride[1] + h * t.stride[2]), t.dtype, t.stride[2], t.stride[1],
            t.rank > 3 ? t.stride[3] : 0};
}

kernels::DeltaRows DeltaCall::value_rows(const Tensor& t, const core::DeltaSequence& s, Index h) const {
    kernels::DeltaRows all = rows(t, s, first_value_head(h));
    all.head *= value_head_step();
    return all;
}

kernels::DeltaRows DeltaCall::parameters(const Tensor& t, Index h, Index channels) const {
    if (!t) return {};
    const Index head = channels * t.stride[0];
    return {at(t, first_value_head(h) * head), t.dtype, value_head_step() * head, 0, t.stride[0]};
}

kernels::DeltaStates DeltaCall::states(const Tensor& t, Index first, Index h) const {
    if (!t) return {};
    const std::size_t key = options_.state_v_first ? 1 : 0;
    const auto rank = static_cast<std::size_t>(t.rank);
    return {at(t, first + first_value_head(h) * t.stride[rank - 3]),
            t.dtype,
            value_head_step() * t.stride[rank - 3],
            t.stride[rank - 2 + key],
            t.stride[rank - 1 - key],
            t.stride[rank - 4]};
}

Index DeltaCall::unit_key_heads() const {
    return key_heads_of_unit(thresholds::delta_unit_key_heads, thresholds::delta_units);
}

Index DeltaCall::unit_key_heads(int threads) const {
    const Index units = thresholds::delta_units_of_thread * threads;
    if (in_.cu_seqlens || longest_ < thresholds::delta_long_sequence || units > thresholds::delta_units)
        return unit_key_heads();
    return key_heads_of_unit(thresholds::delta_long_key_heads, units);
}

Index DeltaCall::key_heads_of_unit(Index most, Index units) const {
    const kernels::DeltaHeads one = largest(1);
    const Index states = one.heads() * one.key_size * one.value_size * static_cast<Index>(sizeof(float));
    Index count = 1;
    for (Index n = 2; !tiled() && n <= most; n *= 2)
        if (key_heads() % n == 0 && sequences() * key_heads() / n >= units &&
            n * states <= thresholds::delta_unit_states)
            count = n;
    return count;
}

Index DeltaCall::most_unit_key_heads() const {
    Index count = 1;
    for (Index n = 2; !tiled() && n <= std::max(thresholds::delta_unit_key_heads, thresholds::delta_long_key_heads);
         n *= 2)
        if (key_heads() % n == 0) count = n;
    return count;
}

DeltaCall::Shares DeltaCall::shares(Index threads) const {
    std::array<Index, 256> busy{};  // no memory is taken; more threads count as so many
    const auto end = busy.begin() + std::clamp<Index>(threads, 1, 256);
    Shares of{0, longest_, 0};
    for (Index unit = 0; unit < sequences() * key_heads(); ++unit) {
        if (is_padding(unit / key_heads())) continue;
        const Index count = tokens(unit / key_heads());
        *std::min_element(busy.begin(), end) += count;
        of.all += count;
    }
    of.busiest = *std::max_element(busy.begin(), end);
    return of;
}

kernels::DeltaHeads DeltaCall::heads(const core::DeltaSequence& s, Index h, Index count) const {
    kernels::DeltaHeads heads = largest(count);
    heads.tokens = s.count;
    heads.q = rows(in_.q, s, h);
    heads.k = rows(in_.k, s, h);
    heads.p = rows(in_.p, s, h);
    heads.v = value_rows(in_.v, s, h);
    heads.g = value_rows(in_.g, s, h);
    heads.beta = value_rows(in_.beta, s, h);
    heads.g_gamma = parameters(in_.g_gamma, h, 1);
    heads.A_log = parameters(in_.A_log, h, 1);
    heads.dt_bias = parameters(in_.dt_bias, h, heads.has_channel_gate() ? heads.key_size : 1);
    if (s.state >= 0) heads.initial_state = states(in_.initial_state, in_.initial_state.offset({s.state}), h);
    return heads;
}

kernels::DeltaOutput DeltaCall::output(const core::DeltaOutputs& out, Index sequence, Index h) const {
    const core::DeltaSequence s = core::sequence(in_, sequence);
    kernels::DeltaOutput output;
    output.o = value_rows(out.o, s, h);
    if (s.final_state >= 0) output.final_state = states(out.final_state, out.final_state.offset({s.final_state}), h);
    output.u = value_rows(out.u, s, h);
    output.state_interval = options_.state_interval;
    if (const Tensor& entries = in_.snapshot_indices) {
        output.states = states(out.final_state, 0, h);
        output.entries = {at(entries, entries.offset({s.batch, intervals_before(sequence)})), entries.stride[1],
                          entries.dtype == core::DType::i64};
    }
    if (!out.states) return output;
    output.states = states(out.states, out.states.offset({s.batch, intervals_before(sequence)}), h);
    return output;
}

bool DeltaCall::is_step(const kernels::DeltaStep& kernel, const core::DeltaOutputs& out, Index sequence) const {
    const core::DeltaSequence s = core::sequence(in_, sequence);
    if (wants_states(out) || s.is_padding) return false;
    kernels::DeltaHeads heads = largest(1);
    heads.tokens = s.count;
    kernels::DeltaOutput output;
    output.u = value_rows(out.u, s, 0);
    if (s.state >= 0) heads.initial_state = states(in_.initial_state, 0, 0);
    if (s.final_state >= 0) output.final_state = states(out.final_state, 0, 0);
    return kernel.fits(heads, output);
}

DeltaCall::Steps DeltaCall::steps(const kernels::DeltaStep& kernel, const core::DeltaOutputs& out) const {
    Steps steps;
    for (Index n = 0; n < sequences(); ++n) {
        if (is_padding(n)) continue;
        if (is_step(kernel, out, n))
            steps.most_tokens = std::max(steps.most_tokens, tokens(n));
        else
            steps.all = false;
    }
    return steps;
}

std::size_t DeltaCall::step_scratch(const kernels::DeltaStep& kernel, Index most_tokens, Index count) const {
    kernels::DeltaHeads heads = largest(count);
    heads.tokens = most_tokens;
    return most_tokens == 0 ? 0 : kernel.scratch(heads);
}

Index DeltaCall::intervals_before(Index sequence) const {
    Index intervals = 0;
    for (Index n = 0; in_.cu_seqlens && n < sequence; ++n)
        intervals += (core::sequence(in_, n).count + options_.state_interval - 1) / options_.state_interval;
    return intervals;
}

void DeltaCall::clear(const core::DeltaOutputs& out, Index sequence, Index h, Index count) const {
    const core::DeltaSequence s = core::sequence(in_, sequence);
    const auto clear_columns = [](const Tensor& t, Index offset) {
        const auto last = static_cast<std::size_t>(t.rank - 1);
        for (Index c = 0; c < t.shape[last]; ++c) core::store(t, offset + c * t.stride[last], 0);
    };
    for (Index place = h * group(); place < (h + count) * group(); ++place) {
        const Index hv = core::value_head_of(in_, options_, place / group(), place % group());
        for (const Tensor* rows : {&out.o, &out.u})
            for (Index i = 0; *rows && i < s.count; ++i) clear_columns(*rows, rows->offset({s.batch, s.begin + i, hv}));
        const Index first = intervals_before(sequence);
        for (Index i = 0; out.states && i * options_.state_interval < s.count; ++i)
            for (Index row = 0; row < out.states.shape[3]; ++row)
                clear_columns(out.states, out.states.offset({s.batch, first + i, hv, row}));
    }
}

kernels::DeltaGradients DeltaCall::gradients(const core::DeltaGradients& grad, Index sequence, Index h) const {
    const core::DeltaSequence s = core::sequence(in_, sequence);
    kernels::DeltaGradients g;
    g.d_o = value_rows(grad.d_o, s, h);
    g.dfinal_state = states(grad.dfinal_state, grad.dfinal_state.offset({s.state}), h);
    g.dq = rows(grad.dq, s, h);
    g.dk = rows(grad.dk, s, h);
    g.dp = rows(grad.dp, s, h);
    g.dv = value_rows(grad.dv, s, h);
    g.dg = value_rows(grad.dg, s, h);
    g.dbeta = value_rows(grad.dbeta, s, h);
    g.dinitial_state = states(grad.dinitial_state, grad.dinitial_state.offset({s.state}), h);
    if (!keeps(grad)) return g;
    g.states = states(grad.states, grad.states.offset({s.batch, intervals_before(sequence)}), h);
    g.u = value_rows(grad.u, s, h);
    g.state_interval = options_.state_interval;
    return g;
}

kernels::DeltaHeads DeltaCall::largest(Index count) const {
    kernels::DeltaHeads heads;
    heads.rule = options_.rule;
    heads.tokens = longest_;
    heads.key_heads = count;
    heads.group = group();
    heads.key_size = in_.k.shape[3];
    heads.value_size = in_.v.shape[3];
    heads.scale = static_cast<float>(options_.scale);
    heads.lower_bound = options_.lower_bound;
    heads.raw_gate = options_.raw_gate;
    heads.raw_beta = options_.raw_beta;
    heads.l2norm = options_.l2norm;
    heads.bf16_products = bf16_products_;
    return heads;
}

}  // namespace softdelta::cpu

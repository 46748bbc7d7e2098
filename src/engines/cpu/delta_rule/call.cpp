#include "engines/cpu/delta_rule/call.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "core/parallel.h"
#include "engines/cpu/machine/isa.h"
#include "engines/cpu/machine/thresholds.h"

namespace softdelta::cpu {

namespace {

void* at(const Tensor& t, Index offset) {
    return static_cast<std::byte*>(t.data) + offset * static_cast<Index>(core::size_of(t.dtype));
}

}  // namespace

kernels::DeltaRows DeltaCall::rows_like(const Tensor& t, Index step, Of of) const {
    kernels::DeltaRows rows;
    if (of != Of::steps) rows.steps = options_.steps;
    if (of == Of::last_steps) rows.step = options_.steps - 1;
    if (!t) return rows;
    rows.dtype = t.dtype;
    rows.head = step * t.stride[2], rows.row = t.stride[1], rows.column = t.rank > 3 ? t.stride[3] : 0;
    return rows;
}

DeltaCall::Place::Place(const Tensor& t, Index steps) : first(static_cast<std::byte*>(t.data)) {
    if (!t) return;
    const auto size = static_cast<Index>(core::size_of(t.dtype));
    batch = t.stride[0] * size, token = t.stride[1] * steps * size, head = t.stride[2] * size;
}

DeltaCall::Place DeltaCall::place_of(const Tensor& t, const kernels::DeltaRows& rows) const {
    return {t, rows.steps > 1 ? 1 : options_.steps};
}

DeltaCall::DeltaCall(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                     const kernels::Table& table)
    : in_(in), options_(options) {
    const auto bf16 = [](const Tensor& t) { return !t || t.dtype == core::DType::bf16; };
    common_.bf16_products = bf16(in.q) && bf16(in.k) && bf16(in.p) && bf16(in.v) && use_bf16_products(execution, table);
    const Index lengths = in.cu_seqlens ? sequences() : std::min<Index>(sequences(), 1);
    for (Index n = 0; n < lengths; ++n) common_.tokens = std::max(common_.tokens, tokens(n));
    common_.rule = options.rule;
    common_.group = group();
    common_.key_size = in.k.shape[3];
    common_.value_size = in.v.shape[3];
    common_.scale = static_cast<float>(options.scale);
    common_.lower_bound = options.lower_bound;
    common_.raw_gate = options.raw_gate;
    common_.raw_beta = options.raw_beta;
    common_.l2norm = options.l2norm;
    common_.q = rows_like(in.q, 1, Of::last_steps);
    common_.k = rows_like(in.k, 1, Of::steps);
    common_.p = rows_like(in.p, 1, Of::steps);
    common_.v = rows_like(in.v, value_head_step(), Of::steps);
    common_.g = rows_like(in.g, value_head_step(), Of::first_steps);
    common_.beta = rows_like(in.beta, value_head_step(), Of::steps);
    common_.initial_state = states(in.initial_state, 0, 0);
    common_.initial_state.data = nullptr;
    q_ = place_of(in.q, common_.q), k_ = place_of(in.k, common_.k), p_ = place_of(in.p, common_.p);
    v_ = place_of(in.v, common_.v), g_ = place_of(in.g, common_.g), beta_ = place_of(in.beta, common_.beta);
}

kernels::DeltaRows DeltaCall::rows(const Tensor& t, const core::DeltaSequence& s, Index h, Of of) const {
    kernels::DeltaRows rows = rows_like(t, 1, of);
    rows.data = place_of(t, rows).at(s, h / parts_);
    return rows;
}

kernels::DeltaRows DeltaCall::value_rows(const Tensor& t, const core::DeltaSequence& s, Index h, Of of) const {
    kernels::DeltaRows rows = rows_like(t, value_head_step(), of);
    rows.data = place_of(t, rows).at(s, first_value_head(h));
    return rows;
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

void DeltaCall::place(kernels::DeltaStates& states, const Tensor& t, Index entry, Index h) const {
    if (t) states.data = entry < 0 ? nullptr : at(t, t.offset({entry}) + first_value_head(h) * t.stride[1]);
}

Index DeltaCall::unit_key_heads() const {
    return key_heads_of_unit(thresholds::delta_unit_key_heads, thresholds::delta_units);
}

Index DeltaCall::unit_key_heads(int threads, bool all_are_steps) const {
    if (all_are_steps && threads == 1) return key_heads_of_unit(thresholds::delta_unit_key_heads, 1);
    const Index units = thresholds::delta_units_of_thread * threads;
    if (in_.cu_seqlens || common_.tokens < thresholds::delta_long_sequence || units > thresholds::delta_units)
        return unit_key_heads();
    return key_heads_of_unit(thresholds::delta_long_key_heads, units);
}

DeltaCall DeltaCall::in_parts(int threads) const {
    const Index units = sequences() * key_heads(), heads = group(), most = core::all_threads(threads);
    DeltaCall call = *this;
    if (heads == 1 || units >= most) return call;
    // what the busiest thread does, in halves of a value head: keys are as much as one of them
    const auto time = [&](Index parts) { return (units * parts + most - 1) / most * (2 * heads / parts + 1); };
    for (Index parts = 2; parts <= heads; ++parts)
        if (heads % parts == 0 && time(parts) < time(call.parts_)) call.parts_ = parts;
    call.common_.group = call.group();
    return call;
}

Index DeltaCall::key_heads_of_unit(Index most, Index units) const {
    if (parts_ > 1) return 1;
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
    Shares of{0, common_.tokens, 0};
    for (Index unit = 0; unit < sequences() * key_heads(); ++unit) {
        if (is_padding(unit / key_heads())) continue;
        const Index count = tokens(unit / key_heads());
        *std::min_element(busy.begin(), end) += count;
        of.all += count;
    }
    of.busiest = *std::max_element(busy.begin(), end);
    return of;
}

void DeltaCall::place(kernels::DeltaHeads& heads, const core::DeltaSequence& s, Index h) const {
    heads.tokens = s.count * options_.steps;
    const Index hv = first_value_head(h);
    const Index key_head = h / parts_;
    heads.q.data = q_.at(s, key_head), heads.k.data = k_.at(s, key_head), heads.p.data = p_.at(s, key_head);
    heads.v.data = v_.at(s, hv), heads.g.data = g_.at(s, hv), heads.beta.data = beta_.at(s, hv);
    if (in_.g_gamma) heads.g_gamma = parameters(in_.g_gamma, h, 1);
    const auto [A_log, bias] = core::gate_parameters(in_);
    if (A_log) heads.A_log = parameters(A_log, h, 1);
    if (bias) heads.gate_bias = parameters(bias, h, heads.channels());
    place(heads.initial_state, in_.initial_state, s.state, h);
}

kernels::DeltaOutput DeltaCall::step_output(const core::DeltaOutputs& out) const {
    kernels::DeltaOutput output;
    output.o = rows_like(out.o, value_head_step(), Of::last_steps);
    output.final_state = states(out.final_state, 0, 0);
    return output;
}

void DeltaCall::place(kernels::DeltaOutput& output, const core::DeltaOutputs& out, const core::DeltaSequence& s,
                      Index h) const {
    output.o.data = place_of(out.o, output.o).at(s, first_value_head(h));
    place(output.final_state, out.final_state, s.final_state, h);
}

kernels::DeltaOutput DeltaCall::output(const core::DeltaOutputs& out, Index sequence, Index h) const {
    const core::DeltaSequence s = core::sequence(in_, sequence);
    kernels::DeltaOutput output;
    output.o = value_rows(out.o, s, h, Of::last_steps);
    if (s.final_state >= 0) output.final_state = states(out.final_state, out.final_state.offset({s.final_state}), h);
    output.u = value_rows(out.u, s, h);
    output.state_interval = state_interval();
    if (const Tensor& entries = in_.snapshot_indices) {
        output.states = states(out.final_state, 0, h);
        output.entries = {at(entries, entries.offset({s.batch, intervals_before(sequence)})), entries.stride[1],
                          entries.dtype == core::DType::i64};
    }
    if (!out.states) return output;
    output.states = states(out.states, out.states.offset({s.batch, intervals_before(sequence)}), h);
    return output;
}

DeltaCall::StepForm DeltaCall::step_form(const core::DeltaOutputs& out) const {
    StepForm form{largest(1), step_output(out), states(in_.initial_state, 0, 0).data,
                  states(out.final_state, 0, 0).data};
    form.output.u = value_rows(out.u, {}, 0);
    return form;
}

bool DeltaCall::is_step(const kernels::DeltaStep& kernel, const core::DeltaOutputs& out, StepForm& form,
                        const core::DeltaSequence& s) const {
    if (wants_states(out) || s.is_padding) return false;
    form.heads.tokens = s.count * options_.steps;
    form.heads.initial_state.data = s.state < 0 ? nullptr : form.initial_state;
    form.output.final_state.data = s.final_state < 0 ? nullptr : form.final_state;
    return kernel.fits(form.heads, form.output);
}

bool DeltaCall::is_step(const kernels::DeltaStep& kernel, const core::DeltaOutputs& out,
                        const core::DeltaSequence& s) const {
    StepForm form = step_form(out);
    return is_step(kernel, out, form, s);
}

DeltaCall::Steps DeltaCall::steps(const kernels::DeltaStep& kernel, const core::DeltaOutputs& out) const {
    Steps steps;
    StepForm form = step_form(out);
    core::DeltaSequence before{};
    bool fits = false;
    const bool are_alike = !in_.cu_seqlens && !in_.final_state_indices && !in_.has_initial_state;
    for (Index n = 0; n < sequences(); ++n) {
        const core::DeltaSequence s = core::sequence(in_, n);
        if (s.is_padding) continue;
        const bool alike = s.count == before.count && (s.state < 0) == (before.state < 0) &&
                           (s.final_state < 0) == (before.final_state < 0);
        if (!alike) fits = is_step(kernel, out, form, s);
        before = s;
        if (fits)
            steps.most_tokens = std::max(steps.most_tokens, s.count * options_.steps);
        else
            steps.all = false;
        if (are_alike) break;
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
    const Index all = group() * parts_;
    for (Index place = h * group(); place < (h + count) * group(); ++place) {
        const Index hv = core::value_head_of(in_, options_, place / all, place % all);
        for (const Tensor* rows : {&out.o, &out.u}) {
            const Index steps = rows == &out.u ? options_.steps : 1;
            for (Index i = s.begin * steps; *rows && i < (s.begin + s.count) * steps; ++i)
                clear_columns(*rows, rows->offset({s.batch, i, hv}));
        }
        const Index first = intervals_before(sequence);
        for (Index i = 0; out.states && i * options_.state_interval < s.count; ++i)
            for (Index row = 0; row < out.states.shape[3]; ++row)
                clear_columns(out.states, out.states.offset({s.batch, first + i, hv, row}));
    }
}

kernels::DeltaGradients DeltaCall::gradients(const core::DeltaGradients& grad, Index sequence, Index h) const {
    const core::DeltaSequence s = core::sequence(in_, sequence);
    kernels::DeltaGradients g;
    g.d_o = value_rows(grad.d_o, s, h, Of::last_steps);
    g.dfinal_state = states(grad.dfinal_state, grad.dfinal_state.offset({s.state}), h);
    g.dq = rows(grad.dq, s, h, Of::last_steps);
    g.dk = rows(grad.dk, s, h);
    g.dp = rows(grad.dp, s, h);
    g.dv = value_rows(grad.dv, s, h);
    g.dg = value_rows(grad.dg, s, h, Of::first_steps);
    g.dbeta = value_rows(grad.dbeta, s, h);
    g.dinitial_state = states(grad.dinitial_state, grad.dinitial_state.offset({s.state}), h);
    if (!keeps(grad)) return g;
    g.states = states(grad.states, grad.states.offset({s.batch, intervals_before(sequence)}), h);
    g.u = value_rows(grad.u, s, h);
    g.state_interval = state_interval();
    return g;
}

kernels::DeltaHeads DeltaCall::largest(Index count) const {
    kernels::DeltaHeads heads = common_;
    heads.key_heads = count;
    return heads;
}

}  // namespace softdelta::cpu

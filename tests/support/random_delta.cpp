#include "support/random_delta.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "support/decisions.h"
#include "support/takes.h"

namespace softdelta::test {

namespace {

constexpr std::array<DeltaOperand, 10> operands{{
    {"q", &RandomDelta::q, &DeltaInputs::q, &DeltaGradients::dq},
    {"k", &RandomDelta::k, &DeltaInputs::k, &DeltaGradients::dk},
    {"p", &RandomDelta::p, &DeltaInputs::p, &DeltaGradients::dp},
    {"v", &RandomDelta::v, &DeltaInputs::v, &DeltaGradients::dv},
    {"g", &RandomDelta::g, &DeltaInputs::g, &DeltaGradients::dg},
    {"g_gamma", &RandomDelta::g_gamma, &DeltaInputs::g_gamma, &DeltaGradients::dg_gamma},
    {"beta", &RandomDelta::beta, &DeltaInputs::beta, &DeltaGradients::dbeta},
    {"initial_state", &RandomDelta::initial_state, &DeltaInputs::initial_state, &DeltaGradients::dinitial_state},
    {"A_log", &RandomDelta::A_log, &DeltaInputs::A_log, &DeltaGradients::dA_log},
    {"dt_bias", &RandomDelta::dt_bias, &DeltaInputs::dt_bias, &DeltaGradients::ddt_bias},
}};

Shape shape_of(const Array& a) {
    return {a.view().shape().begin(), a.view().shape().end()};
}

class Draw : Decisions {
  public:
    Draw(std::uint64_t seed, const DeltaRanges& ranges) : Decisions(seed, call_.features), ranges_(ranges) {
        call_.seed = seed;
    }

    RandomDelta run() {
        draw_options();
        draw_sizes();
        draw_lengths();
        draw_rows();
        draw_gate();
        draw_beta();
        draw_states();
        if (ranges_.hard) draw_hard_cases();
        call_.d_o = normal(call_.o_shape());
        if (note(chance(0.7), "dfinal_state")) call_.dfinal_state = normal(call_.state_shape());
        draw_row_sizes();
        if (ranges_.repeats) draw_repeats();
        return std::move(call_);
    }

  private:
    Index steps() const { return call_.options.steps; }

    Array array(const Shape& shape) {
        const DType dtype =
            ranges_.dtypes[static_cast<std::size_t>(between(0, static_cast<Index>(ranges_.dtypes.size()) - 1))];
        return note(!ranges_.dense && chance(0.5), "strided") ? Array(dtype, shape, random_) : Array(dtype, shape);
    }
    template <class Number>
    Array filled(const Shape& shape, Number&& number) {
        Array a = array(shape);
        for (Index i = 0; i < a.count(); ++i) a.set(i, number());
        return a;
    }
    Array normal(const Shape& shape) {
        Normal number;
        return filled(shape, [&] { return number(random_); });
    }

    void draw_options() {
        DeltaOptions& o = call_.options;
        o.rule = static_cast<Rule>(between(0, 4));
        Random newer(call_.seed + 0x2e1e5);  // a stream of its own
        if (newer() % 3 == 0) o.rule = static_cast<Rule>(5 + newer() % (core::rules.size() - 5));
        if (ranges_.facts)
            o.rule = static_cast<Rule>(core::number_of(core::rules_of_facts[call_.seed % core::rules_of_facts.size()]));
        note(true, std::string(call_.rule().name));
        const std::uint64_t of_steps = ranges_.facts ? 2 : call_.options.rule >= Rule::gated_delta_product ? 1 : 6;
        const bool has_steps = newer() % of_steps == 0;
        if (ranges_.steps && note(has_steps, "steps")) o.steps = static_cast<std::int32_t>(2 + newer() % 2);
        if (note(chance(0.3), "scale")) o.scale = real(0.5, 2);
        o.use_qk_l2norm_in_kernel = note(chance(0.4), "l2norm");
        o.state_v_first = note(chance(0.4), "state_v_first");
        o.state_interval = between(1, 5);
    }

    void draw_sizes() {
        batch_ = between(1, ranges_.batch);
        H_ = between(1, ranges_.heads);
        HV_ = H_ * between(1, ranges_.group);
        const Index step = ranges_.channel_step;
        K_ = between(1, ranges_.key_channels / step) * step;
        V_ = between(1, ranges_.value_channels / step) * step;
        note(HV_ > H_, "grouped heads");
        note(K_ != V_, "V other than K");
        Random order(call_.seed + 0x7113d);  // a stream of its own
        if (ranges_.tiled && HV_ > H_ && note(order() % 2 == 0, "tiled heads"))
            call_.options.head_order = HeadOrder::tiled;
    }

    Index length(Index most) {
        if (!ranges_.lengths.empty() && chance(0.5)) {
            const Index n =
                ranges_.lengths[static_cast<std::size_t>(between(0, static_cast<Index>(ranges_.lengths.size()) - 1))];
            if (n <= most) return n;
        }
        return between(ranges_.shortest, most);
    }

    void draw_lengths() {
        tokens_ = length(ranges_.tokens);
        call_.sequences = batch_;
        if (!note(chance(0.4) || ranges_.packed, "packed")) {
            note(tokens_ == 0, "T = 0");
            note(tokens_ == 1, "T = 1");
            return;
        }
        batch_ = 1;
        call_.sequences = between(1, ranges_.batch + 2);
        call_.cu_seqlens = Array(chance(0.5) ? DType::i32 : DType::i64, {call_.sequences + 1});
        tokens_ = 0;
        for (Index n = 0; n < call_.sequences; ++n) {
            const Index own = chance(0.2) ? ranges_.shortest : length(ranges_.tokens / call_.sequences);
            note(own == 0, "empty sequence");
            note(own == 1, "sequence of one token");
            call_.cu_seqlens.set(n + 1, static_cast<double>(tokens_ += own));
        }
    }

    // Keys of norm about 1, away from 0, where the l2 norm bends sharply.
    void draw_rows() {
        const double size = call_.options.use_qk_l2norm_in_kernel ? 1 : 1 / std::sqrt(static_cast<double>(K_));
        const auto number = [&] { return size * real(0.5, 1.3) * (chance(0.5) ? 1 : -1); };
        const Shape shape{batch_, tokens_ * steps(), H_, K_};
        call_.q = filled({batch_, tokens_, H_, K_}, number);
        call_.k = filled(shape, number);
        if (takes(call_.rule(), "p")) call_.p = filled(shape, number);
        if (call_.p.view() && steps() > 1 && !call_.options.use_qk_l2norm_in_kernel &&
            note(call_.seed % 2 == 0, "steps that erase nothing"))
            for (Index i = 0; i < call_.p.count(); ++i)
                if (i / (H_ * K_) % steps() > 0) call_.p.set(i, 0);
        call_.v = normal({batch_, tokens_ * steps(), HV_, V_});
    }

    void draw_gate() {
        if (call_.rule().gate == core::Gate::none) return;
        if (call_.rule().maps_by_number()) {
            if (note(chance(0.2), "no gate")) return;
            if (note(chance(0.3), "g_gamma")) {
                call_.g_gamma = filled({HV_}, [&] { return real(-1, 0); });
                return;
            }
        }
        const bool channel = call_.rule().has_channel_gate();
        const Shape shape = channel ? Shape{batch_, tokens_, HV_, K_} : Shape{batch_, tokens_, HV_};
        if (chance(0.5)) {
            draw_raw_gate(shape, channel ? HV_ * K_ : HV_);
            return;
        }
        constexpr const char* styles[] = {"mild gate", "zero gate", "positive gate", "steep gate", "wiping gate"};
        constexpr double low[] = {-1, 0, -0.1, -12, -2}, high[] = {0, 0, 0.2, -4, 0};
        const auto style = static_cast<std::size_t>(between(0, 4));
        note(true, styles[style]);
        call_.g = filled(shape, [&] {
            constexpr double wipe[] = {-1000, -1e30, -std::numeric_limits<double>::infinity()};
            return style == 4 && chance(0.3) ? wipe[between(0, 2)] : real(low[style], high[style]);
        });
    }

    void draw_raw_gate(const Shape& shape, Index biases) {
        DeltaOptions& o = call_.options;
        o.use_gate_in_kernel = true;
        const bool bounded = chance(0.5);
        note(bounded, "lower bound");
        note(!bounded, "softplus");
        if (bounded) o.lower_bound = real(-5, -0.1);
        const bool saturated = note(chance(0.2), "saturated gate");
        call_.g = filled(shape, [&] { return real(-3, 3) * (saturated ? 20 : 1); });
        if (!bounded || note(chance(0.5), "A_log with lower bound"))
            call_.A_log = filled({HV_}, [&] { return real(-1.5, 0.5); });
        if (note(chance(0.6), "dt_bias")) call_.dt_bias = normal({biases});
    }

    void draw_beta() {
        if (!call_.rule().erases() || note(chance(0.15), "no beta")) return;
        DeltaOptions& o = call_.options;
        const Shape shape{batch_, tokens_ * steps(), HV_};
        if ((o.use_beta_sigmoid_in_kernel = note(chance(0.5), "beta logits"))) {
            o.allow_neg_eigval = note(chance(0.5), "doubled beta");
            const double size = note(chance(0.2), "saturated beta") ? 40 : 2;
            call_.beta = filled(shape, [&] { return real(-size, size); });
            return;
        }
        const bool zero = note(chance(0.25), "beta = 0");
        call_.beta = filled(shape, [&] { return zero ? 0 : real(0, 1.5); });
    }

    void draw_states() {
        if (note(chance(0.6), "initial_state")) call_.initial_state = normal(call_.state_shape());
    }

    // What models seldom have, and contract and arithmetic do.
    void draw_hard_cases() {
        if (note(chance(0.25), "zero and tiny keys"))
            for (Index row = 0; row < call_.k.count() / K_; ++row)
                if (const Index kind = between(0, 5); kind < 2)
                    for (Index m = 0; m < K_; ++m) call_.k.set(row * K_ + m, kind == 0 ? 0 : real(-1, 1) * 1e-40);
        if (call_.beta.view() && !call_.options.use_beta_sigmoid_in_kernel &&
            note(chance(0.25), "zero and tiny beta")) {
            // Beside β = 0 alone all that is written would be below 2^-126, and engines may take results below for 0.
            const double tiny = has("beta = 0") ? 1e-8 : 1e-40;
            for (Index i = 0; i < call_.beta.count(); ++i)
                if (const Index kind = between(0, 5); kind < 2) call_.beta.set(i, kind == 0 ? 0 : tiny);
        }
        if (call_.initial_state.view() && note(chance(0.15), "large initial_state"))
            for (Index i = 0; i < call_.initial_state.count(); ++i)
                call_.initial_state.set(
                    i, call_.initial_state.get(i) * (call_.initial_state.view().dtype() == DType::f16 ? 100 : 1e10));
        if (!call_.g.view()) return;
        if (call_.options.use_gate_in_kernel) {
            if (note(chance(0.3), "extreme raw gate")) draw_extreme_raw_gate();
        } else if (note(chance(0.4), "surging gate")) {
            draw_surges();
        }
    }

    // Rows of any magnitude, which l2norm takes to norm 1, or below that from far below its 1e-6; or a few that are
    // huge. From streams of their own.
    void draw_row_sizes() {
        if (!call_.options.use_qk_l2norm_in_kernel) return;
        Random all(call_.seed + 0x512e5), few(call_.seed + 0xfa4);
        if (ranges_.hard && note(all() % 3 == 0, "huge and tiny rows"))
            scale_rows(all, 1, {1, 1e19, 1e25, 3e37, 1e-6, 1e-10, 1e-20, 1e-30});
        else if (ranges_.far && note(few() % 3 == 0, "far rows"))
            scale_rows(few, 16, {1e17, 1e19, 1e20, 1e30, 1e37});
    }

    // One row of so many. Only types with f32's exponents hold such rows.
    void scale_rows(Random& random, std::uint64_t of, const std::vector<double>& sizes) {
        for (Array* rows : {&call_.q, &call_.k, &call_.p}) {
            if (!rows->view() || rows->view().dtype() == DType::f16) continue;
            for (Index row = 0; row < rows->count() / K_; ++row) {
                if (random() % of != 0) continue;
                const double size = sizes[random() % sizes.size()];
                for (Index m = 0; m < K_; ++m) rows->set(row * K_ + m, rows->get(row * K_ + m) * size);
            }
        }
    }

    // Gates that wipe the state or leave it; rates at which a gate is a step.
    void draw_extreme_raw_gate() {
        const double most = call_.g.view().dtype() == DType::f16 ? 6e4 : 1e9;
        for (Index i = 0; i < call_.g.count(); ++i)
            if (chance(0.3)) call_.g.set(i, (chance(0.5) ? 1 : -1) * most * (chance(0.5) ? 1 : real(1e-6, 1)));
        for (Index i = 0; i < call_.A_log.count(); ++i)
            if (chance(0.5)) call_.A_log.set(i, chance(0.5) ? 25 : real(0, 25));
    }

    // Gates to +200 where the state before is 0: it was wiped and nothing was written, or nothing came before. Any
    // other state would leave f32. Neither token of such a pair is the first of a sequence unless it begins with 0.
    void draw_surges() {
        const Index channels = call_.g.count() / std::max<Index>(1, batch_ * tokens_ * HV_);
        const auto set_gates = [&](Index row, double low, double high) {
            for (Index i = 0; i < HV_ * channels; ++i) call_.g.set(row * HV_ * channels + i, real(low, high));
        };
        std::vector<bool> first(static_cast<std::size_t>(batch_ * tokens_ + 1), false);
        for (Index b = 0; b < batch_; ++b) first[static_cast<std::size_t>(b * tokens_)] = true;
        for (Index n = 0; call_.cu_seqlens.view() && n < call_.sequences; ++n)
            first[static_cast<std::size_t>(call_.begin(n))] = true;
        const bool logits = call_.options.use_beta_sigmoid_in_kernel;
        for (Index row = 0; row < batch_ * tokens_; ++row) {
            if (first[static_cast<std::size_t>(row)]) {
                if (!call_.initial_state.view() && chance(0.5)) {
                    set_gates(row, 0, 200);
                    note(true, "first gate surges");  // dinitial_state is beyond f32
                }
                continue;
            }
            if (row + 1 >= batch_ * tokens_ || first[static_cast<std::size_t>(row + 1)] || !chance(0.1)) continue;
            constexpr double wipe[] = {-1e4, -1e30, -std::numeric_limits<double>::infinity()};
            const bool f16 = call_.g.view().dtype() == DType::f16;
            for (Index i = 0; i < HV_ * channels; ++i)
                call_.g.set(row * HV_ * channels + i, wipe[f16 ? 2 * between(0, 1) : between(0, 2)]);
            const auto clear = [&](const Array& a, Index size, double x) {  // in all steps of the token
                for (Index i = 0; a.view() && i < steps() * size; ++i) a.set(row * steps() * size + i, x);
            };
            for (const Array* a : {&call_.k, &call_.p}) clear(*a, H_ * K_, 0);
            clear(call_.v, HV_ * V_, 0);
            clear(call_.beta, HV_, logits ? -1e4 : 0);
            set_gates(++row, 0, 200);
        }
    }

    bool has(const char* feature) const {
        return std::find(call_.features.begin(), call_.features.end(), feature) != call_.features.end();
    }

    bool keys_are_equal() const { return call_.k.view().stride()[1] == 0; }

    // Strides of zero, but for those that leave f32 in many tokens: gates that rise again and again (or, where nothing
    // is written and a state is its decay alone, are rounded the same way), keys along which a state grows, surges. Nor
    // values of equal keys where β is 1: what these then find to erase is rounding alone.
    void draw_repeats() {
        Random random(call_.seed + 0x4e9ea7);
        const bool long_ones = tokens_ * steps() > 16;
        const bool keys_grow =
            long_ones && call_.rule().erases() && (takes(call_.rule(), "p") || !call_.options.use_qk_l2norm_in_kernel);
        const auto maybe_repeat = [&](Array& a, bool whole_tokens) {
            if (!a.view() || random() % 8 != 0) return;
            const Array* const of_tokens[] = {&call_.q, &call_.k, &call_.p, &call_.v, &call_.g, &call_.beta};
            const bool surges = (has("surging gate") || has("first gate surges")) &&
                                std::find(std::begin(of_tokens), std::end(of_tokens), &a) != std::end(of_tokens);
            note(true, "repeated");
            const std::size_t rank = a.view().rank();
            for (std::size_t dim = random() % rank, left = 1 + random() % rank; left > 0;
                 --left, dim = (dim + 1) % rank)
                if (!(surges && dim < 2) && !(whole_tokens && dim == 1)) a.repeat(dim);
        };
        for (const DeltaOperand& operand : operands) {
            const auto array = operand.array;
            const bool is_key = array == &RandomDelta::k || array == &RandomDelta::p;
            const bool rises = long_ones && array == &RandomDelta::g && (has("positive gate") || has("beta = 0"));
            const bool erased = long_ones && array == &RandomDelta::v && has("saturated beta") && keys_are_equal();
            maybe_repeat(call_.*array, rises || erased || (is_key && keys_grow));
        }
        maybe_repeat(call_.d_o, false);
        maybe_repeat(call_.dfinal_state, false);
    }

    const DeltaRanges& ranges_;
    RandomDelta call_;
    Index batch_ = 0, tokens_ = 0, H_ = 0, HV_ = 0, K_ = 0, V_ = 0;
};

}  // namespace

std::span<const DeltaOperand> delta_operands() {
    return operands;
}

DeltaInputs RandomDelta::inputs() const {
    DeltaInputs in;
    for (const DeltaOperand& operand : operands) in.*operand.input = (this->*operand.array).view();
    in.cu_seqlens = cu_seqlens.view();
    return in;
}

Shape RandomDelta::o_shape() const {
    return {q.view().shape(0), q.view().shape(1), v.view().shape(2), v.view().shape(3)};
}

Shape RandomDelta::u_shape() const {
    return shape_of(v);
}

Shape RandomDelta::state_shape() const {
    const Index HV = v.view().shape(2), K = q.view().shape(3), V = v.view().shape(3);
    return options.state_v_first ? Shape{sequences, HV, V, K} : Shape{sequences, HV, K, V};
}

Shape RandomDelta::states_shape() const {
    return states_shape(options.state_interval);
}

Shape RandomDelta::states_shape(Index interval) const {
    const auto chunks = [interval](Index tokens) { return (tokens + interval - 1) / interval; };
    Index total = 0;
    for (Index n = 0; n < (cu_seqlens.view() ? sequences : 1); ++n) total += chunks(length(n));
    const Shape state = state_shape();
    return {v.view().shape(0), total, state[1], state[2], state[3]};
}

Index RandomDelta::begin(Index n) const {
    return cu_seqlens.view() ? static_cast<Index>(cu_seqlens.get(n)) : 0;
}

Index RandomDelta::length(Index n) const {
    return cu_seqlens.view() ? static_cast<Index>(cu_seqlens.get(n + 1)) - begin(n) : q.view().shape(1);
}

Index RandomDelta::batch(Index n) const {
    return cu_seqlens.view() ? 0 : n;
}

std::string RandomDelta::describe() const {
    std::ostringstream text;
    text << "SOFTDELTA_SEED=" << seed << ": q";
    for (const Index size : q.view().shape()) text << ' ' << size;
    text << ", v";
    for (const Index size : v.view().shape()) text << ' ' << size;
    for (const std::string& feature : features) text << ", " << feature;
    return text.str();
}

RandomDelta draw_delta(std::uint64_t seed, const DeltaRanges& ranges) {
    return Draw(seed, ranges).run();
}

Array dense_copy(const Array& a) {
    if (!a.view()) return {};
    const bool index = a.view().dtype() == DType::i32 || a.view().dtype() == DType::i64;
    Array copy(index ? DType::i64 : DType::f64, shape_of(a));
    for (Index i = 0; i < a.count(); ++i) copy.set(i, a.get(i));
    return copy;
}

RandomDelta dense_copy(const RandomDelta& call) {
    RandomDelta copy;
    copy.seed = call.seed, copy.sequences = call.sequences, copy.options = call.options;
    for (const DeltaOperand& operand : operands) copy.*operand.array = dense_copy(call.*operand.array);
    copy.cu_seqlens = dense_copy(call.cu_seqlens);
    copy.d_o = dense_copy(call.d_o);
    copy.dfinal_state = dense_copy(call.dfinal_state);
    return copy;
}

Results forward_results(const RandomDelta& call, const Execution& execution) {
    Results results;
    results["o"] = Array(DType::f64, call.o_shape());
    results["final_state"] = Array(DType::f64, call.state_shape());
    results["states"] = Array(DType::f64, call.states_shape());
    delta_forward(call.inputs(), {results["o"].view(), results["final_state"].view(), results["states"].view()},
                  call.options, execution);
    return results;
}

Results backward_results(const RandomDelta& call, const Execution& execution) {
    Results results;
    DeltaGradients grad;
    grad.d_o = call.d_o.view();
    grad.dfinal_state = call.dfinal_state.view();
    for (const DeltaOperand& operand : operands) {
        const Array& input = call.*operand.array;
        const bool state = operand.array == &RandomDelta::initial_state;  // has a gradient even when it is not given
        if (!input.view() && !state) continue;
        Array& gradient = results[std::string("d") + operand.name];
        gradient = Array(DType::f64, state ? call.state_shape() : shape_of(input));
        grad.*operand.gradient = gradient.view();
    }
    delta_backward(call.inputs(), grad, call.options, execution);
    return results;
}

}  // namespace softdelta::test

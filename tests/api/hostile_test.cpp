// Drawn nonsense for the C interface: whatever it is given, a call computes or returns an error that says why, and an
// error leaves the results as they were. Built with sanitizers this is also what shows reads outside and overflows.
// One thought: attention and the delta rules are spoiled in the same ways, and every way needs the call that it spoils.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "softdelta/judge.hpp"

namespace {

constexpr std::int64_t least = std::numeric_limits<std::int64_t>::min(),
                       most = std::numeric_limits<std::int64_t>::max();

class Draw {
  public:
    explicit Draw(std::uint64_t seed) : random_(seed) {}

    std::int64_t number(std::int64_t from, std::int64_t to) {
        return std::uniform_int_distribution<std::int64_t>(from, to)(random_);
    }
    bool once_in(int n) { return number(1, n) == 1; }
    template <class T>
    T one_of(std::initializer_list<T> all) {
        return all.begin()[number(0, static_cast<std::int64_t>(all.size()) - 1)];
    }

  private:
    std::mt19937_64 random_;
};

// Memory for every tensor of a call, with room around it for shapes that are wrong but small.
struct Slot {
    static constexpr std::size_t bytes = 8192, start = 2048;
    alignas(64) std::array<unsigned char, bytes> memory{};
    std::array<std::int64_t, 128> shape{}, stride{};
    DLTensor tensor{};

    DLTensor* make(std::initializer_list<std::int64_t> sizes, DLDataType type = {kDLFloat, 32, 1}) {
        tensor = {memory.data() + start, {kDLCPU, 0}, static_cast<int>(sizes.size()), type, shape.data(), nullptr, 0};
        std::copy(sizes.begin(), sizes.end(), shape.begin());
        return &tensor;
    }
    void fill_floats() {
        for (std::size_t i = 0; i < bytes; i += 4) {
            const float x = 0.125F * static_cast<float>(i / 4 % 7) - 0.25F;
            std::memcpy(memory.data() + i, &x, 4);
        }
    }
    void fill_integers(Draw& draw, std::initializer_list<std::int32_t> values) {
        std::size_t at = start;
        for (const std::int32_t x : values) {
            std::memcpy(memory.data() + at, &x, 4);
            at += 4;
        }
        if (draw.once_in(6)) {
            const std::int32_t x = draw.one_of<std::int32_t>({-1, 1, 3, 7, 1 << 30, INT32_MIN, INT32_MAX});
            std::memcpy(memory.data() + start + 4 * static_cast<std::size_t>(draw.number(0, 3)), &x, 4);
        }
    }
};

void spoil(Draw& draw, Slot& slot, const Slot& other) {
    DLTensor& t = slot.tensor;
    const std::int64_t huge[] = {least,        least + 1, -(most / 2 + 1),       -(std::int64_t{1} << 57),
                                 most / 2 + 1, most,      std::int64_t{1} << 57, std::int64_t{1} << 61};
    const auto dim = static_cast<std::size_t>(draw.number(0, 5));
    switch (draw.number(0, 11)) {
        case 0:
            t.data = nullptr;
            break;
        case 1:
            t.byte_offset =
                static_cast<std::uint64_t>(draw.one_of<std::int64_t>({1, 2, 3, 4, 6, 8, 1024, most, -1, least}));
            break;
        case 2:
        case 3: {  // strides: those of a dense tensor, one of them replaced
            std::int64_t count = 1;
            for (std::size_t i = 6; i-- > 0;) {
                slot.stride[i] = count;
                if (static_cast<int>(i) < t.ndim && slot.shape[i] > 0 && slot.shape[i] < 64) count *= slot.shape[i];
            }
            slot.stride[dim] = draw.once_in(3) ? draw.number(-3, 3) : huge[draw.number(0, 7)];
            t.strides = slot.stride.data();
            break;
        }
        case 4:
            slot.shape[dim] = draw.one_of<std::int64_t>({-1, -4, least, most, most / 2, std::int64_t{1} << 32, 0});
            break;
        case 5:
            for (std::size_t i = 0; i < 6; ++i) slot.shape[i] = std::int64_t{1} << draw.one_of({16, 31, 32, 48});
            break;
        case 6:
            slot.shape[dim] = draw.number(0, 5);
            break;
        case 7:
            t.ndim =
                static_cast<int>(draw.one_of<std::int64_t>({-1, 0, 1, 2, 3, 4, 5, 6, 7, 100, INT32_MAX, INT32_MIN}));
            break;
        case 8:
            t.shape = nullptr;
            break;
        case 9:
            t.dtype = {static_cast<std::uint8_t>(draw.number(0, 8)),
                       static_cast<std::uint8_t>(draw.one_of({0, 1, 8, 16, 32, 64, 128, 255})),
                       static_cast<std::uint16_t>(draw.one_of({0, 1, 1, 1, 2, 65535}))};
            break;
        case 10:
            t.device.device_type = static_cast<DLDeviceType>(draw.number(0, 14));
            break;
        default:
            t.data = other.tensor.data;
    }
}

// A structure of the interface in more memory than it needs, so that any size it claims can be read.
template <class T>
class Claimed {
  public:
    explicit Claimed(const T& value) { std::memcpy(bytes_.data(), &value, sizeof value); }

    void spoil_size(Draw& draw) {
        const auto size = static_cast<std::size_t>(
            draw.one_of<std::int64_t>({0, 1, 8, sizeof(T) - 8, sizeof(T) + 8, 4096, 4097, most, -1}));
        std::memcpy(bytes_.data(), &size, sizeof size);
        if (draw.once_in(2)) bytes_[sizeof(T) + static_cast<std::size_t>(draw.number(0, 40))] = 1;
    }
    const T* get() const { return reinterpret_cast<const T*>(bytes_.data()); }

  private:
    alignas(16) std::array<unsigned char, 8192> bytes_{};
};

double draw_double(Draw& draw) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    return draw.one_of<double>({0.0, 0.5, -1.0, 1e300, -1e300, 1e-320, NAN, infinity, -infinity});
}

std::int64_t draw_length(Draw& draw) {
    return draw.one_of<std::int64_t>({-2, -1, 0, 1, 3, 64, most, most - 1, most / 2, least, std::int64_t{1} << 32});
}

std::int32_t draw_small(Draw& draw) {
    return static_cast<std::int32_t>(draw.one_of<std::int64_t>({-1, 0, 1, 2, 3, 4, 5, 99, INT32_MAX, INT32_MIN}));
}

class HostileCall {
  public:
    explicit HostileCall(std::uint64_t seed) : draw_(seed), slots_(28) {
        for (Slot& slot : slots_) slot.fill_floats();
    }

    // Makes the call; an error of ours, or nothing.
    std::string run() {
        execution_ = draw_execution();
        const std::int64_t family = draw_.number(0, 5);
        if (family == 0) {
            Claimed in(convolution_inputs());
            Claimed options(softdelta_causal_convolution_options{sizeof(softdelta_causal_convolution_options),
                                                                 draw_.once_in(4) ? draw_small(draw_) : 1,
                                                                 draw_.once_in(30) ? 1 : 0});
            Claimed out(softdelta_causal_convolution_outputs{sizeof(softdelta_causal_convolution_outputs),
                                                             wanted({1, 4, 5}), maybe({2, 5, 3})});
            Claimed grad(convolution_gradients());
            if (draw_.once_in(3))
                return call(in, options, out, grad, softdelta_causal_convolution_step,
                            softdelta_causal_convolution_forward_workspace, softdelta_causal_convolution_backward,
                            softdelta_causal_convolution_backward_workspace);
            return call(in, options, out, grad, softdelta_causal_convolution_forward,
                        softdelta_causal_convolution_forward_workspace, softdelta_causal_convolution_backward,
                        softdelta_causal_convolution_backward_workspace);
        }
        if (family == 1) {
            Claimed in(norm_inputs());
            const softdelta_gated_norm_options drawn{sizeof drawn, draw_.once_in(8) ? draw_small(draw_) : 2,
                                                     draw_.once_in(8) ? draw_double(draw_) : 1e-6};
            expect_refusal_of(drawn.epsilon);
            Claimed options(drawn);
            Claimed out(softdelta_gated_norm_outputs{sizeof(softdelta_gated_norm_outputs), wanted({1, 4, 2, 3})});
            Claimed grad(softdelta_gated_norm_gradients{sizeof(softdelta_gated_norm_gradients), wanted({1, 4, 2, 3}),
                                                        wanted({1, 4, 2, 3}), maybe({1, 4, 2, 3}), maybe({3})});
            return call(in, options, out, grad, softdelta_gated_norm_forward, softdelta_gated_norm_forward_workspace,
                        softdelta_gated_norm_backward, softdelta_gated_norm_backward_workspace);
        }
        if (family < 4) {
            Claimed in(attention_inputs());
            Claimed options(attention_options());
            Claimed out(softdelta_attention_outputs{sizeof(softdelta_attention_outputs), wanted({1, 4, 4, 3}),
                                                    wanted({1, 4, 4})});
            Claimed grad(attention_gradients());
            return call(in, options, out, grad, softdelta_attention_forward, softdelta_attention_forward_workspace,
                        softdelta_attention_backward, softdelta_attention_backward_workspace);
        }
        Claimed in(delta_inputs());
        Claimed options(delta_options());
        Claimed out(softdelta_delta_outputs{sizeof(softdelta_delta_outputs), wanted({1, 4, 4, 3}), wanted({2, 4, 2, 3}),
                                            draw_.once_in(4) ? wanted({1, 2, 4, 2, 3}) : nullptr, nullptr});
        Claimed grad(delta_gradients());
        return call(in, options, out, grad, softdelta_delta_forward, softdelta_delta_forward_workspace,
                    softdelta_delta_backward, softdelta_delta_backward_workspace);
    }
    softdelta_status status() const { return status_; }

  private:
    // One of the four functions of a family.
    template <class In, class Options, class Out, class Grad, class Forward, class ForwardSize, class Backward,
              class BackwardSize>
    std::string call(In& in, Options& options, Out& out, Grad& grad, Forward forward, ForwardSize forward_size,
                     Backward backward, BackwardSize backward_size) {
        finish(in, options, out, grad);
        const std::vector<Slot> kept = slots_;
        const auto* e = execution();
        std::size_t bytes = 0;
        const bool back = draw_.once_in(2), sizes = draw_.once_in(8);
        softdelta_status status{};
        if (sizes)
            status = back ? backward_size(in.get(), grad.get(), options.get(), e, &bytes)
                          : forward_size(in.get(), out.get(), options.get(), e, &bytes);
        else
            status = back ? backward(in.get(), grad.get(), options.get(), e)
                          : forward(in.get(), out.get(), options.get(), e);
        if (status == SOFTDELTA_OK && (wrong_options_ || (wrong_execution_ && e != nullptr)))
            return "computed, whatever scale, softcap, epsilon, lower_bound, workspace, kept or events are";
        return verdict(status, sizes, kept);
    }

    std::string verdict(softdelta_status status, bool sizes, const std::vector<Slot>& kept) {
        status_ = status;
        const std::string message = softdelta_last_error();
        if (status == SOFTDELTA_INTERNAL || status < 0 || status > 4)
            return "status " + std::to_string(status) + ": " + message;
        if ((status == SOFTDELTA_OK) != message.empty())
            return "message '" + message + "' with status " + std::to_string(status);
        for (std::size_t i = status == SOFTDELTA_OK && !sizes ? kept.size() : 0; i < kept.size(); ++i)
            if (std::memcmp(slots_[i].memory.data(), kept[i].memory.data(), Slot::bytes) != 0)
                return "written before the error: " + message;
        return "";
    }

    DLTensor* wanted(std::initializer_list<std::int64_t> shape, DLDataType type = {kDLFloat, 32, 1}) {
        return slots_[used_++].make(shape, type);
    }
    DLTensor* maybe(std::initializer_list<std::int64_t> shape, DLDataType type = {kDLFloat, 32, 1}) {
        return draw_.once_in(4) ? wanted(shape, type) : nullptr;
    }
    DLTensor* integers(std::initializer_list<std::int64_t> shape, std::initializer_list<std::int32_t> values) {
        slots_[used_].fill_integers(draw_, values);
        return wanted(shape, {kDLInt, 32, 1});
    }

    template <class Inputs>
    void draw_pool(Inputs& in) {
        const std::int64_t sequences = in.cu_seqlens != nullptr ? 2 : 1;
        pooled_ = draw_.once_in(4);
        if (!pooled_) return;
        if (!draw_.once_in(4)) in.state_indices = integers({sequences}, {1, 0});
        if (draw_.once_in(3)) in.final_state_indices = integers({sequences}, {0, 1});
        if (draw_.once_in(3)) in.has_initial_state = wanted({sequences}, {6, 8, 1});
    }

    // Lq 4, H 4, Hk 2, D 2, Dv 3; Lk 5 in one row, packed, in use or in blocks of 2.
    softdelta_attention_inputs attention_inputs() {
        auto in = softdelta_attention_inputs_default();
        const std::int64_t layout = draw_.number(0, 5);
        in.q = wanted({1, 4, 4, 2});
        in.k = layout == 3 ? wanted({3, 2, 2, 2}) : wanted({1, 5, 2, 2});
        in.v = layout == 3 ? wanted({3, 2, 2, 3}) : wanted({1, 5, 2, 3});
        if (layout < 2) {
            in.mask = maybe({1, 1, 4, 5}, {6, 8, 1});
            in.bias = maybe({1, 4, 4, 5});
        }
        in.sink = maybe({4});
        if (layout == 4) {
            in.cu_seqlens_q = integers({3}, {0, 1, 4});
            in.cu_seqlens_k = integers({3}, {0, 3, 5});
        }
        if (layout == 3) in.block_table = integers({1, 3}, {2, 0, 1});
        if (layout == 3 || layout == 5) in.cache_seqlens = integers({1}, {5});
        return in;
    }
    softdelta_attention_options attention_options() {
        auto o = softdelta_attention_options_default();
        if (draw_.once_in(4)) o.causal = static_cast<std::int32_t>(draw_.number(0, 2));
        if (draw_.once_in(8)) o.scale = draw_double(draw_);
        if (draw_.once_in(8)) o.causal = draw_small(draw_);
        if (draw_.once_in(8)) o.window_left = draw_length(draw_);
        if (draw_.once_in(8)) o.window_right = draw_length(draw_);
        if (draw_.once_in(8)) o.softcap = draw_double(draw_);
        if (draw_.once_in(8)) o.empty_row = draw_small(draw_);
        if (draw_.once_in(8)) o.top_w = draw_length(draw_);
        expect_refusal_of(o.scale);
        expect_refusal_of(o.softcap);
        return o;
    }
    softdelta_attention_gradients attention_gradients() {
        return {sizeof(softdelta_attention_gradients),
                maybe({1, 4, 4, 3}),
                maybe({1, 4, 4}),
                wanted({1, 4, 4, 3}),
                maybe({1, 4, 4}),
                wanted({1, 4, 4, 2}),
                maybe({1, 5, 2, 2}),
                wanted({1, 5, 2, 3}),
                maybe({1, 4, 4, 5}),
                maybe({4})};
    }

    // T 4, H 2, HV 4, K 2, V 3, one sequence or two.
    softdelta_delta_inputs delta_inputs() {
        auto in = softdelta_delta_inputs_default();
        rule_ = static_cast<std::int32_t>(draw_.number(0, 4));
        in.q = wanted({1, 4, 2, 2});
        in.k = wanted({1, 4, 2, 2});
        in.v = wanted({1, 4, 4, 3});
        if (rule_ == SOFTDELTA_RULE_KDA) in.g = wanted({1, 4, 4, 2});
        if (rule_ == SOFTDELTA_RULE_GATED_DELTA || rule_ == SOFTDELTA_RULE_COMBA) in.g = wanted({1, 4, 4});
        if (rule_ == SOFTDELTA_RULE_SIMPLE_GLA) in.g_gamma = maybe({4});
        if (rule_ != SOFTDELTA_RULE_SIMPLE_GLA) in.beta = maybe({1, 4, 4});
        if (rule_ == SOFTDELTA_RULE_COMBA) in.p = wanted({1, 4, 2, 2});
        if (draw_.once_in(2)) in.cu_seqlens = integers({3}, {0, 1, 4});
        in.initial_state = maybe({in.cu_seqlens != nullptr ? 2 : 1, 4, 2, 3});
        draw_pool(in);
        if (in.final_state_indices != nullptr && draw_.once_in(2))
            in.snapshot_indices = integers({1, in.cu_seqlens != nullptr ? 2 : 1}, {-1, -1});
        if (draw_.once_in(4)) in.A_log = wanted({4});
        if (draw_.once_in(8)) in.dt_bias = wanted({rule_ == SOFTDELTA_RULE_KDA ? 8 : 4});
        return in;
    }
    softdelta_delta_options delta_options() {
        auto o = softdelta_delta_options_default(static_cast<softdelta_rule>(rule_));
        if (draw_.once_in(16)) o.rule = draw_small(draw_);
        if (draw_.once_in(8)) o.scale = draw_double(draw_);
        if (draw_.once_in(4)) o.use_gate_in_kernel = 1;
        if (draw_.once_in(8)) o.use_qk_l2norm_in_kernel = draw_small(draw_);
        if (draw_.once_in(8)) o.lower_bound = draw_double(draw_);
        if (draw_.once_in(8)) o.use_beta_sigmoid_in_kernel = draw_small(draw_);
        if (draw_.once_in(8)) o.allow_neg_eigval = draw_small(draw_);
        if (draw_.once_in(8)) o.state_v_first = draw_small(draw_);
        if (draw_.once_in(8)) o.state_interval = draw_length(draw_);
        expect_refusal_of(o.scale);
        expect_refusal_of(o.lower_bound);
        wrong_options_ |= o.lower_bound > 0;
        return o;
    }
    softdelta_delta_gradients delta_gradients() {
        auto g = softdelta_delta_gradients{};
        g.size = sizeof g;
        g.d_o = wanted({1, 4, 4, 3});
        g.dfinal_state = maybe({2, 4, 2, 3});
        g.dq = wanted({1, 4, 2, 2});
        g.dv = maybe({1, 4, 4, 3});
        g.dg = maybe({1, 4, 4});
        g.dinitial_state = maybe({2, 4, 2, 3});
        g.dA_log = maybe({4});
        return g;
    }

    // T 4, C 5, W 4, one sequence or two.
    softdelta_causal_convolution_inputs convolution_inputs() {
        auto in = softdelta_causal_convolution_inputs_default();
        in.x = wanted({1, 4, 5});
        in.weight = wanted({5, 4});
        in.bias = maybe({5});
        if (draw_.once_in(2)) in.cu_seqlens = integers({3}, {0, 1, 4});
        in.initial_state = maybe({in.cu_seqlens != nullptr ? 2 : 1, 5, 3});
        draw_pool(in);
        return in;
    }
    softdelta_causal_convolution_gradients convolution_gradients() {
        return {sizeof(softdelta_causal_convolution_gradients),
                wanted({1, 4, 5}),
                maybe({2, 5, 3}),
                wanted({1, 4, 5}),
                maybe({5, 4}),
                maybe({5}),
                maybe({2, 5, 3})};
    }
    softdelta_gated_norm_inputs norm_inputs() {
        return {sizeof(softdelta_gated_norm_inputs), wanted({1, 4, 2, 3}), wanted({1, 4, 2, 3}), maybe({3})};
    }

    Claimed<softdelta_execution> draw_execution() {
        auto e = softdelta_execution_default();
        e.threads = draw_.once_in(20) ? draw_small(draw_) : static_cast<std::int32_t>(draw_.number(0, 2));
        if (e.threads > 4) e.threads = draw_.once_in(20) ? INT32_MAX : 4;
        e.engine = draw_.one_of<const char*>({nullptr, "fast", "reference", "stages_f64", "stages_f32"});
        if (draw_.once_in(16)) e.engine = draw_.one_of<const char*>({"automatic", "cpu", "", "nonsense"});
        if (draw_.once_in(8)) e.bf16_products = draw_small(draw_);
        stages_ = softdelta_stages_default();
        rounding_ = softdelta_rounding_default();
        gpu_ = softdelta_gpu_default();
        e.stages = draw_.once_in(2) ? nullptr : &stages_;
        e.rounding = draw_.once_in(2) ? nullptr : &rounding_;
        e.gpu = draw_.once_in(2) ? nullptr : &gpu_;
        if (draw_.once_in(64)) stages_.size = rounding_.size = gpu_.size = draw_.once_in(2) ? 8 : std::size_t{1} << 40;
        if (draw_.once_in(8)) stages_.chunk_size = draw_length(draw_);
        if (draw_.once_in(8)) rounding_.seed = static_cast<std::uint64_t>(draw_length(draw_));
        if (draw_.once_in(8)) rounding_.shortcuts = draw_small(draw_);
        if (draw_.once_in(32)) gpu_.kept = workspace_.data();
        if (draw_.once_in(32)) gpu_.kept_size = static_cast<std::size_t>(draw_length(draw_));
        if (draw_.once_in(32)) gpu_.state_ready = workspace_.data();
        if (draw_.once_in(32)) gpu_.state_done = workspace_.data();
        if (draw_.once_in(64)) e.workspace_size = static_cast<std::size_t>(draw_length(draw_));
        if (draw_.once_in(8)) {
            e.workspace = workspace_.data() + draw_.number(0, 64);
            e.workspace_size =
                static_cast<std::size_t>(draw_.one_of<std::int64_t>({0, 1, 1000, 65000, most, -1, least}));
            if (e.workspace_size > 65000) e.workspace_size |= std::size_t{1} << 58;  // never believed
        }
        if (draw_.once_in(8)) {
            stage_.name = draw_.one_of<const char*>({"lse", "A", "p", "nonsense", "", nullptr});
            stage_.tensor = maybe({1, 4, 4, 3});
            stage_.size = draw_.once_in(8) ? static_cast<std::size_t>(draw_.number(0, 24)) : sizeof stage_;
            stages_.wanted = draw_.once_in(8) ? nullptr : &stage_;
            stages_.count = draw_.once_in(8) && stages_.wanted == nullptr ? std::size_t{1} << 62 : 1;
        }
        const bool hands_over =
            gpu_.kept != nullptr || gpu_.kept_size != 0 || gpu_.state_ready != nullptr || gpu_.state_done != nullptr;
        wrong_execution_ = (e.gpu != nullptr && hands_over) || (e.workspace == nullptr && e.workspace_size != 0);
        return Claimed(e);
    }
    // What no f32 can hold.
    void expect_refusal_of(double option) {
        wrong_options_ |= std::abs(option) > static_cast<double>(std::numeric_limits<float>::max());
    }
    const softdelta_execution* execution() { return draw_.once_in(4) ? nullptr : execution_.get(); }

    // Spoils a few of the tensors in use, and rarely a structure's size.
    template <class In, class Options, class Out, class Grad>
    void finish(In& in, Options& options, Out& out, Grad& grad) {
        const std::int64_t faults = draw_.number(0, 3);
        const auto any = [&]() -> Slot& {
            return slots_[static_cast<std::size_t>(draw_.number(0, static_cast<std::int64_t>(used_) - 1))];
        };
        for (std::int64_t i = 0; i < faults; ++i) spoil(draw_, any(), any());
        // A pool has as many entries as its shape claims: no call can know where its memory ends.
        for (std::size_t i = 0; pooled_ && i < used_; ++i)
            slots_[i].shape[0] = std::min<std::int64_t>(slots_[i].shape[0], 64);
        if (draw_.once_in(30)) in.spoil_size(draw_);
        if (draw_.once_in(30)) options.spoil_size(draw_);
        if (draw_.once_in(30)) out.spoil_size(draw_);
        if (draw_.once_in(30)) grad.spoil_size(draw_);
        if (!wrong_execution_ && draw_.once_in(30)) execution_.spoil_size(draw_);
    }

    Draw draw_;
    std::vector<Slot> slots_;
    std::size_t used_ = 0;
    std::int32_t rule_ = 0;
    softdelta_stage stage_{};
    softdelta_stages stages_{};
    softdelta_rounding rounding_{};
    softdelta_gpu gpu_{};
    std::vector<unsigned char> workspace_ = std::vector<unsigned char>(1 << 17);
    Claimed<softdelta_execution> execution_{softdelta_execution_default()};
    softdelta_status status_{};
    bool wrong_execution_ = false, wrong_options_ = false, pooled_ = false;
};

std::int64_t given(const char* name, std::int64_t otherwise) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::atoll(text) : otherwise;
}

TEST(HostileCalls, ComputeOrSayWhyNot) {
    const std::int64_t first = given("SOFTDELTA_SEED", 0), calls = given("SOFTDELTA_CALLS", 20000);
    std::array<std::int64_t, 5> counts{};
    for (std::int64_t seed = first; seed < first + calls; ++seed) {
        SCOPED_TRACE("SOFTDELTA_SEED=" + std::to_string(seed));
        HostileCall call(static_cast<std::uint64_t>(seed));
        ASSERT_EQ(call.run(), "");
        ++counts[call.status()];
    }
    if (calls < 1000) return;
    EXPECT_GT(counts[SOFTDELTA_OK], calls / 20) << "too few calls are sound enough to reach a kernel";
    EXPECT_GT(counts[SOFTDELTA_INVALID_ARGUMENT], calls / 5);
    EXPECT_GT(counts[SOFTDELTA_UNSUPPORTED], 0);
}

}  // namespace

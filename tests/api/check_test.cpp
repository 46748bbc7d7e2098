// Nonsense given to the C interface: one error that names argument, actual and expected, before anything is touched.
// One thought: each line spoils one argument of a right call.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "softdelta/softdelta.hpp"

namespace softdelta {
namespace {

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();

// A small call of each family whose operands a test spoils.
struct DeltaCall {
    std::vector<float> data = std::vector<float>(256, 0.5f), result = std::vector<float>(1024, -7.0f);
    std::vector<std::int32_t> index{0, 2, 4};
    DeltaInputs in{};
    DeltaOutputs out{};
    DeltaOptions options{};
    Execution execution{};

    DeltaCall() {
        const Tensor rows(data.data(), DType::f32, {1, 4, 2, 3});
        in.q = in.k = in.v = rows;
        in.g = in.beta = Tensor(data.data(), DType::f32, {1, 4, 2});
        out.o = Tensor(result.data(), DType::f32, {1, 4, 2, 3});
    }
    std::string error() const {
        try {
            delta_forward(in, out, options, execution);
        } catch (const std::exception& e) {
            for (const float x : result) EXPECT_EQ(x, -7.0f) << "written before the error: " << e.what();
            return e.what();
        }
        return "";
    }
    Tensor floats(std::initializer_list<std::int64_t> shape) { return {data.data(), DType::f32, shape}; }
    Tensor integers(std::initializer_list<std::int64_t> shape) { return {index.data(), DType::i32, shape}; }
};

// ", cpu, reference, …"
std::string engine_names() {
    std::string names;
    for (const EngineInfo& engine : list_engines()) names.append(", ").append(engine.name);
    return names;
}

TEST(DeltaArguments, AreNamedWithActualAndExpected) {
    using Spoil = std::function<void(DeltaCall&)>;
    const std::vector<std::pair<Spoil, std::string>> cases{
        {[](DeltaCall&) {}, ""},
        {[](DeltaCall& c) { c.in.q = {}; }, "q is missing, expected a tensor: [B, T, H, K]"},
        {[](DeltaCall& c) {
             c.in.q = c.floats({1, 4, 6});
         },
         "q: shape is [1, 4, 6], expected 4 dimensions [B, T, H, K]"},
        {[](DeltaCall& c) {
             c.in.k = c.floats({1, 4, 2, 4});
         },
         "k: dimension 3 is 4, expected 3 (as q)"},
        {[](DeltaCall& c) {
             c.in.v = c.floats({1, 4, 3, 3});
         },
         "v: dimension 2 is 3, expected a multiple of 2 (heads)"},
        {[](DeltaCall& c) {
             c.in.q = c.floats({1, 4, 0, 3});
         },
         "q: dimension 2 is 0, expected 1 or more (heads)"},
        {[](DeltaCall& c) { c.in.g = {}; }, "g is missing, expected a tensor: gated_delta_rule has a gate"},
        {[](DeltaCall& c) { c.in.p = c.in.k; }, "p is given, expected none: gated_delta_rule erases along k"},
        {[](DeltaCall& c) { c.execution.gpu.kept = std::as_writable_bytes(std::span(c.data)); },
         "execution.gpu.kept is memory, expected null: tensors lie on the CPU"},
        {[](DeltaCall& c) {
             c.in.beta = Tensor(c.index.data(), DType::i32, {1, 1, 2});
         },
         "beta: type is i32, expected f64, f32, bf16 or f16"},
        {[](DeltaCall& c) { c.in.A_log = c.floats({2}); }, "A_log is given, expected none: use_gate_in_kernel is off"},
        {[](DeltaCall& c) { c.in.cu_seqlens = c.integers({3}), c.index[1] = 5; },
         "cu_seqlens[2] is 4, expected at least 5, the entry before"},
        {[](DeltaCall& c) { c.in.cu_seqlens = c.integers({3}), c.index[2] = 3; },
         "cu_seqlens[2] is 3, expected 4 (tokens)"},
        {[](DeltaCall& c) {
             c.in.initial_state = c.floats({2, 2, 3, 3});
         },
         "initial_state: dimension 0 is 2, expected 1 (batch)"},
        {[](DeltaCall& c) {
             c.in.v = c.floats({1, 4, 2, 5});
             c.in.initial_state = c.floats({1, 2, 5, 3});
         },
         "initial_state: dimensions [2, 3] is [5, 3], expected [3, 5] ([K, V]): it looks transposed; set "
         "state_v_first"},
        {[](DeltaCall& c) {
             c.in.v = c.floats({1, 4, 2, 5});
             c.in.initial_state = c.floats({1, 2, 3, 5});
             c.options.state_v_first = true;
         },
         "initial_state: dimensions [2, 3] is [3, 5], expected [5, 3] ([V, K], for state_v_first is set): it looks "
         "transposed"},
        {[](DeltaCall& c) {
             c.in.q = Tensor(static_cast<void*>(nullptr), DType::f32, {1, 4, 2, 3});
         },
         "q: data is null, expected memory of its [1, 4, 2, 3]"},
        {[](DeltaCall& c) {
             c.in.q = c.floats({1, -4, 2, 3});
         },
         "q: dimension 1 is -4, expected a size that memory can hold"},
        {[](DeltaCall& c) {
             c.in.q = c.floats({most, most, 2, 3});
         },
         "q: dimension 1 is 9223372036854775807, expected a size that memory can hold"},
        {[](DeltaCall& c) {
             c.in.q = c.floats({most >> 20, 0, 1, 1});
         },
         "q: shape is [8796093022207, 0, 1, 1], expected sizes that are not huge beside a 0"},
        {[](DeltaCall& c) {
             c.out.o = Tensor(c.result.data(), DType::f32, {1, 4, 2, 3}, {24, 6, 2, 1});
         },
         "o: a stride is 2, expected more than 2: elements of a result must not overlap"},
        {[](DeltaCall& c) {
             c.in.q = Tensor(c.data.data(), DType::f32, {1, 4, 2, 3}, {most, 6, 3, 1});
         },
         ""},  // nobody steps along a dimension of size 1
        {[](DeltaCall& c) {
             c.in.q = Tensor(c.data.data(), DType::f32, {1, 4, 2, 3}, {24, most / 2, 3, 1});
         },
         "q: stride of dimension 1 is 4611686018427387903, expected one that stays within memory"},
        {[](DeltaCall& c) {
             c.out.o = Tensor(c.result.data(), DType::f32, {1, 4, 2, 3}, {24, 6, -most - 1, 1});
         },
         "o: stride of dimension 2 is -9223372036854775808, expected one that stays within memory"},
        {[](DeltaCall& c) {
             c.in.q = Tensor(reinterpret_cast<char*>(c.data.data()) + 2, DType::f32, {1, 4, 2, 3});
         },
         "q: data + byte_offset is 2 bytes past a multiple of 4, expected elements aligned to their size"},
        {[](DeltaCall& c) {
             c.in.q = c.in.k = Tensor(c.data.data(), DType::f32, {1, 4, 2, most >> 32}, {0, 0, 0, 0});
             c.in.v = c.in.q;
         },
         "q, v: a state [HV, K, V] is too large, expected what memory can hold"},
        {[](DeltaCall& c) { c.options.state_interval = 0; }, "state_interval is 0, expected 1 or more"},
        {[](DeltaCall& c) { c.options.scale = std::numeric_limits<double>::infinity(); },
         "scale is inf, expected a finite number that f32 can hold"},
        {[](DeltaCall& c) { c.options.scale = -1e300; },
         "scale is -1e+300, expected a finite number that f32 can hold"},
        {[](DeltaCall& c) { c.options.use_gate_in_kernel = true, c.options.lower_bound = 0.5; },
         "lower_bound is 0.5, expected 0 or a negative number that f32 can hold"},
        {[](DeltaCall& c) { c.options.use_gate_in_kernel = true, c.options.lower_bound = -1e39; },
         "lower_bound is -1e+39, expected 0 or a negative number that f32 can hold"},
        {[](DeltaCall& c) { c.options.use_gate_in_kernel = true, c.options.lower_bound = 0; }, ""},
        {[](DeltaCall& c) { c.out = {}; }, "outputs is empty, expected one or more of o, final_state, states, u"},
        {[](DeltaCall& c) {
             c.execution.engine = "stages_f64", c.out = {};  // an intermediate is a result
             c.execution.stages.wanted = {{"v_new", Tensor(c.result.data(), DType::f32, {1, 4, 2, 3})}};
         },
         ""},
        {[](DeltaCall& c) {
             c.in.initial_state = Tensor(c.data.data(), DType::f32, {6, 2, 3, 3});
             c.out.final_state = Tensor(c.result.data() + 512, DType::f32, {3, 2, 3, 3});
             c.in.state_indices = c.integers({1}), c.index[0] = 4;
         },
         "final_state: dimension 0 is 3, expected 6, a pool as initial_state: state_indices[0] is 4"},
        {[](DeltaCall& c) {
             c.in.initial_state = Tensor(c.data.data(), DType::f32, {2, 2, 3, 3});
             c.out.final_state = Tensor(c.result.data() + 512, DType::f32, {6, 2, 3, 3});
             c.in.state_indices = c.integers({1}), c.index[0] = 4;
         },
         "state_indices[0] is 4, expected 0 to 1, or -1 where there is no sequence"},
        {[](DeltaCall& c) { c.execution.gpu.kept = std::span(static_cast<std::byte*>(nullptr), 8); },
         "execution.gpu.kept is null, expected memory of its size, 8"},
        {[](DeltaCall& c) { c.execution.workspace = std::span(static_cast<std::byte*>(nullptr), 8); },
         "execution.workspace is null, expected memory of its size, 8"},
        {[](DeltaCall& c) { c.execution.threads = -1; }, "execution.threads is -1, expected 0 or more"},
        {[](DeltaCall& c) { c.execution.stages.chunk_size = 48; },
         "execution.stages.chunk_size is 48, expected 1, 16, 32, 64, 96 or 128"},
        {[](DeltaCall& c) { c.execution.bf16_products = static_cast<Bf16Products>(3); },
         "execution.bf16_products is 3, expected 0 to 2"},
        {[](DeltaCall& c) { c.options.head_order = static_cast<HeadOrder>(2); }, "head_order is 2, expected 0 or 1"},
        {[](DeltaCall& c) { c.execution.engine = "quick"; },
         "execution.engine is 'quick', expected one of automatic, fast" + engine_names()},
        {[](DeltaCall& c) {
             c.in.k = c.in.k.on({kDLCUDA, 1});
         },
         "k: device is cuda:1, expected cpu, where q is"},
        {[](DeltaCall& c) {
             c.in.k = c.in.k.on({kDLMetal, 0});
         },
         "k: device is DLPack type 8, expected CPU (1) or CUDA (2)"},
        {[](DeltaCall& c) {
             c.execution.engine = "cpu";
             c.in.v = Tensor(c.data.data(), DType::f64, {1, 4, 2, 3});
         },
         "v is f64, expected f32, bf16 or f16: convert it, or name the engine reference"},
        {[](DeltaCall& c) { c.options.rule = static_cast<Rule>(-1); },
         "rule is -1, expected 0 to 8, or what softdelta_rule_of_facts gives"},
        {[](DeltaCall& c) { c.options.rule = rule_of({.gate = static_cast<RuleGate>(4)}); },
         "rule is -1, expected 0 to 8, or what softdelta_rule_of_facts gives"},
        {[](DeltaCall& c) { c.options.rule = rule_of({.erases = static_cast<RuleErases>(4)}); },
         "rule is -1, expected 0 to 8, or what softdelta_rule_of_facts gives"},
        {[](DeltaCall& c) { c.options.rule = rule_of({.erases = RuleErases::nothing, .own_p = true}); },
         "rule is one by facts that erases nothing along p, expected own_p 0 where nothing is erased"},
        {[](DeltaCall& c) { c.options.rule = rule_of({.gate = RuleGate::head, .own_p = true}); },
         "p is missing, expected a tensor: rule:head:decayed:p erases along it"},
        {[](DeltaCall& c) {
             c.execution.engine = "fast";
             c.in.v = Tensor(c.data.data(), DType::f64, {1, 4, 2, 3});
         },
         "v is f64, expected f32, bf16 or f16: convert it, or name the engine reference"},
        {[](DeltaCall& c) {
             c.execution.engine = "stages_f64";
             c.execution.stages.wanted = {{"A", c.floats({1, 4, 2, 64})}, {"A", c.floats({1, 4, 2, 64})}};
         },
         "A is wanted twice, expected one tensor for a stage"},
    };
    for (const auto& [spoil, expected] : cases) {
        DeltaCall call;
        spoil(call);
        EXPECT_EQ(call.error(), expected);
    }
}

TEST(DeltaArguments, WhatIsKeptComesTogether) {
    DeltaCall call;
    const auto error = [&](const Tensor& states, const Tensor& u) -> std::string {
        try {
            delta_backward(call.in, {.d_o = call.in.v, .dv = call.out.o, .states = states, .u = u}, call.options,
                           call.execution);
        } catch (const std::exception& e) {
            return e.what();
        }
        return "";
    };
    const Tensor states = call.floats({1, 1, 2, 3, 3}), u = call.floats({1, 4, 2, 3});
    EXPECT_EQ(error(states, {}), "u is missing, expected a tensor: states is given");
    EXPECT_EQ(error({}, u), "states is missing, expected a tensor: u is given");
    EXPECT_EQ(error(call.floats({1, 2, 2, 3, 3}), u), "states: dimension 1 is 2, expected 1 (chunks)");
    EXPECT_EQ(error(states, call.floats({1, 4, 2, 2})), "u: dimension 3 is 2, expected 3 (as v)");
    for (const float x : call.result) EXPECT_EQ(x, -7.0f);
    EXPECT_EQ(error(states, u), "");
    call.execution.engine = "stages_f64";
    EXPECT_EQ(error(states, u), "") << "it makes its own";
    call.out.u = Tensor(call.result.data() + 512, DType::f32, {1, 4, 2, 3});
    std::fill(call.result.begin(), call.result.end(), -7.0f);
    EXPECT_EQ(call.error(), "u: the stages engines return it as the intermediate v_new");
}

TEST(DeltaArguments, AnyStateIntervalIsLegal) {
    DeltaCall call;
    call.options.state_interval = most;
    call.out.states = Tensor(call.result.data() + 512, DType::f32, {1, 1, 2, 3, 3});
    EXPECT_EQ(call.error(), "");
    for (int i = 0; i < 18; ++i) EXPECT_EQ(call.result[static_cast<std::size_t>(512 + i)], 0.0f);
}

// A structure as a caller of another version has it: so many bytes, of which the library knows the first.
template <class T>
class OfSize {
  public:
    OfSize(T value, std::size_t size) : bytes_(size > 4096 ? sizeof value : std::max(size, sizeof value)) {
        value.size = size;
        std::memcpy(bytes_.data(), &value, sizeof value);
    }
    T* get() { return reinterpret_cast<T*>(bytes_.data()); }
    std::vector<unsigned char>& bytes() { return bytes_; }

  private:
    std::vector<unsigned char> bytes_;
};

softdelta_status run_of_size(const char* which, std::size_t size, bool set_last = false) {
    DeltaCall call;
    detail::Views view;
    const std::string name = which;
    const softdelta_stages stages = softdelta_stages_default();
    const softdelta_rounding rounding = softdelta_rounding_default();
    const softdelta_gpu gpu = softdelta_gpu_default();
    const auto sized = [&](auto value, const char* of) {
        OfSize result(value, name == of ? size : sizeof value);
        if (name == of && set_last) result.bytes().back() = 1;
        return result;
    };
    auto in = sized(detail::to_c(call.in, view), "inputs");
    auto options = sized(detail::to_c(call.options), "options");
    auto out = sized(detail::to_c(call.out, view), "outputs");
    auto own_stages = sized(stages, "stages");
    auto own_rounding = sized(rounding, "rounding");
    auto own_gpu = sized(gpu, "gpu");
    softdelta_execution how = softdelta_execution_default();
    how.stages = own_stages.get();
    how.rounding = own_rounding.get();
    how.gpu = own_gpu.get();
    auto execution = sized(how, "execution");
    return softdelta_delta_forward(in.get(), out.get(), options.get(), execution.get());
}

// An older client gives a shorter structure, and what it lacks has its default; a newer one a longer one, of which what
// the library does not know must be 0.
TEST(Structures, AreThoseOfOlderAndNewerClients) {
    const std::pair<const char*, std::size_t> structures[] = {
        {"inputs", sizeof(softdelta_delta_inputs)},   {"options", sizeof(softdelta_delta_options)},
        {"outputs", sizeof(softdelta_delta_outputs)}, {"stages", sizeof(softdelta_stages)},
        {"rounding", sizeof(softdelta_rounding)},     {"gpu", sizeof(softdelta_gpu)},
        {"execution", sizeof(softdelta_execution)}};
    for (const auto& [name, size] : structures) {
        EXPECT_EQ(run_of_size(name, size), SOFTDELTA_OK) << name << ": " << softdelta_last_error();
        EXPECT_EQ(run_of_size(name, size + 24), SOFTDELTA_OK) << name << ": " << softdelta_last_error();
        EXPECT_EQ(run_of_size(name, size + 24, true), SOFTDELTA_UNSUPPORTED) << name;
        EXPECT_NE(std::string(softdelta_last_error()).find(std::string(name) + ": byte "), std::string::npos)
            << softdelta_last_error();
        EXPECT_EQ(run_of_size(name, 8), SOFTDELTA_INVALID_ARGUMENT) << name << " shorter than the first release's";
        EXPECT_EQ(run_of_size(name, std::size_t{1} << 40), SOFTDELTA_INVALID_ARGUMENT) << name << ", never set";
    }
    EXPECT_EQ(softdelta_delta_forward(nullptr, nullptr, nullptr, nullptr), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_STREQ(softdelta_last_error(), "inputs is null, expected a structure");
}

// As much is written as both know: behind an older client's structure lies its own memory.
TEST(Structures, AreWrittenByTheirSize) {
    for (const std::size_t more : {0, 24}) {
        OfSize info(softdelta_engine_info_default(), sizeof(softdelta_engine_info) + more);
        OfSize level(softdelta_isa_level_default(), sizeof(softdelta_isa_level) + more);
        for (auto* bytes : {&info.bytes(), &level.bytes()}) bytes->resize(bytes->size() + 8, 0xa5);
        ASSERT_EQ(softdelta_get_engine(0, info.get()), SOFTDELTA_OK) << softdelta_last_error();
        EXPECT_STREQ(info.get()->name, "cpu");
        EXPECT_EQ(info.get()->size, sizeof(softdelta_engine_info) + more);
        ASSERT_EQ(softdelta_get_isa_level(0, level.get()), SOFTDELTA_OK) << softdelta_last_error();
        EXPECT_STREQ(level.get()->name, isa_levels().front().name.c_str());
        for (auto* bytes : {&info.bytes(), &level.bytes()})
            for (std::size_t i = bytes->size() - 8; i < bytes->size(); ++i) EXPECT_EQ(bytes->at(i), 0xa5);
    }
}

// Stages are an array: its step is the client's size of a stage.
TEST(Structures, StandInArraysOfTheClientsSize) {
    struct Newer {
        softdelta_stage stage;
        std::uint64_t unknown = 0;
    };
    DeltaCall call;
    detail::Views view;
    std::vector<double> u(64), w(64);
    const auto in = detail::to_c(call.in, view);
    const auto options = detail::to_c(call.options);
    const auto out = detail::to_c(call.out, view);
    const Tensor first(u.data(), DType::f64, {1, 4, 2, 3}), second(w.data(), DType::f64, {1, 4, 2, 3});
    Newer wanted[] = {{{sizeof(Newer), "v_new", view(first)}}, {{sizeof(Newer), "w", view(second)}}};
    softdelta_stages stages = softdelta_stages_default();
    stages.wanted = &wanted[0].stage;
    stages.count = 2;
    softdelta_execution how = softdelta_execution_default();
    how.engine = "stages_f64";
    how.stages = &stages;
    EXPECT_EQ(softdelta_delta_forward(&in, &out, &options, &how), SOFTDELTA_OK) << softdelta_last_error();
    EXPECT_NE(u.front(), 0);
    EXPECT_NE(w.front(), 0);
    wanted[1].unknown = 1;
    EXPECT_EQ(softdelta_delta_forward(&in, &out, &options, &how), SOFTDELTA_UNSUPPORTED);
    EXPECT_STREQ(softdelta_last_error(),
                 "execution.stages.wanted[1]: byte 24 is set, expected 0: this softdelta knows 24 bytes");
    wanted[1] = {{sizeof(softdelta_stage), "w", view(second)}};
    EXPECT_EQ(softdelta_delta_forward(&in, &out, &options, &how), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_STREQ(softdelta_last_error(), "execution.stages.wanted[1].size is 24, expected 32, as the first");
}

TEST(Tensors, OfConstMemoryAreRead) {
    const std::vector<float> x(8, 1.0F);
    std::vector<float> y(8);
    const Tensor in(x.data(), DType::f32, {1, 4, 1, 2});
    const NormOptions plain{.gate = Activation::none};
    gated_norm_forward({.x = in}, {.y = Tensor(y.data(), DType::f32, {1, 4, 1, 2})}, plain);
    EXPECT_NEAR(y[0], 1, 1e-3);
    try {
        gated_norm_forward({.x = in}, {.y = in}, plain);
        FAIL() << "const memory is written";
    } catch (const std::invalid_argument& e) {
        EXPECT_STREQ(e.what(), "y is const memory, expected memory to write");
    }
}

TEST(Structures, RefuseWhatNoEngineKnows) {
    DeltaCall call;
    call.execution.rounding.shortcuts = true;
    EXPECT_EQ(call.error(), "execution.rounding.shortcuts is 1, expected 0: only stages_f32 takes shortcuts");
    call.execution.rounding = {.float_scores = true};
    EXPECT_EQ(call.error(), "execution.rounding.float_scores is 1, expected 0: only the reference rounds scores");
    call.execution.rounding = {.seed = 3};
    EXPECT_EQ(call.error(), "execution.rounding.seed is 3, expected 0: only stages_f32 rounds");
    detail::Views view;
    const auto in = detail::to_c(call.in, view);
    auto options = detail::to_c(call.options);
    options.steps = 65;
    const auto out = detail::to_c(call.out, view);
    EXPECT_EQ(softdelta_delta_forward(&in, &out, &options, nullptr), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_STREQ(softdelta_last_error(), "steps is 65, expected 1 to 64");
}

TEST(AttentionArguments, AreNamedWithActualAndExpected) {
    std::vector<float> data(512, 0.5f), result(64, -7.0f);
    const auto floats = [&](std::initializer_list<std::int64_t> shape) {
        return Tensor(data.data(), DType::f32, shape);
    };
    const AttentionInputs sound{.q = floats({1, 4, 8, 2}), .k = floats({1, 5, 2, 2}), .v = floats({1, 5, 2, 1})};
    const AttentionOutputs out{.o = Tensor(result.data(), DType::f32, {1, 4, 8, 1})};
    const auto error = [&](const std::function<void(AttentionInputs&, AttentionOptions&)>& spoil) -> std::string {
        AttentionInputs in = sound;
        AttentionOptions options;
        spoil(in, options);
        try {
            attention_forward(in, out, options);
        } catch (const std::exception& e) {
            for (const float x : result) EXPECT_EQ(x, -7.0f) << e.what();
            return e.what();
        }
        return "";
    };
    using In = AttentionInputs;
    using Opt = AttentionOptions;
    std::vector<std::int32_t> lengths{7};
    EXPECT_EQ(error([&](In& in, Opt&) {
                  in.bias = floats({1, 3, 1, 5});
              }),
              "bias: dimension 1 is 3, expected 1, 2 (key heads) or 8 (query heads)");
    EXPECT_EQ(error([&](In& in, Opt&) { in.mask = floats({1, 1, 1, 5}); }), "mask: type is f32, expected bool");
    EXPECT_EQ(error([&](In& in, Opt&) { in.alibi_slopes = floats({2}); }),
              "alibi_slopes: dimension 0 is 2, expected 8 (query heads)");
    EXPECT_EQ(error([&](In& in, Opt&) {
                  in.alibi_slopes = floats({1, 8});
              }),
              "alibi_slopes: shape is [1, 8], expected 1 dimensions [H]");
    EXPECT_EQ(error([&](In& in, Opt&) { in.bias_slopes = floats({8}); }),
              "bias is missing, expected a tensor: bias_slopes multiplies it");
    EXPECT_EQ(error([&](In& in, Opt&) { in.k = floats({1, 5, 4, 2}); }), "v: dimension 2 is 2, expected 4 (as k)");
    EXPECT_EQ(error([&](In& in, Opt&) { in.cache_seqlens = Tensor(lengths.data(), DType::i32, {1}); }),
              "cache_seqlens[0] is 7, expected 0 to 5");
    EXPECT_EQ(error([&](In& in, Opt&) {
                  in.k_scale = floats({1, 5, 2, 1});
              }),
              "k_scale is given, expected none: k is f32");
    const Tensor bytes(data.data(), DType::i8, {1, 5, 2, 2}), scale = floats({1, 5, 2, 1});
    EXPECT_EQ(error([&](In& in, Opt&) { in.k = bytes; }), "k_scale is missing, expected a tensor: k is i8");
    EXPECT_EQ(error([&](In& in, Opt&) {
                  in.k = bytes, in.k_scale = floats({1, 5, 2, 2});
              }),
              "k_scale: dimension 3 is 2, expected 1");
    EXPECT_EQ(error([&](In& in, Opt&) {
                  in.k = bytes, in.k_scale = floats({1, 4, 1, 1});
              }),
              "k_scale: dimension 1 is 4, expected 5 (as k) or 1");
    EXPECT_EQ(error([&](In& in, Opt&) {
                  in.k = Tensor(data.data(), DType::u8, {1, 5, 2, 2}), in.k_scale = scale;
              }),
              "k: shape is [1, 5, 2, 2], expected blocks of 32 elements of u8: 5 dimensions, the last 16");
    EXPECT_EQ(error([&](In& in, Opt&) {
                  in.k = Tensor(data.data(), DType::i8, {1, 5, 2, 1, 32}), in.k_scale = scale;
              }),
              "k: dimension 3 is 32, expected 2 (as q)");
    EXPECT_EQ(error([&](In& in, Opt&) {
                  in.q = Tensor(data.data(), DType::i8, {1, 4, 8, 2});
              }),
              "q: type is i8, expected f64, f32, bf16 or f16");
    EXPECT_EQ(error([&](In&, Opt& o) { o.top_w = 3; }), "bias is missing, expected a tensor: top_w selects by it");
    EXPECT_EQ(error([&](In&, Opt& o) { o.window_left = -2; }), "window_left is -2, expected -1 (unbounded) or more");
    EXPECT_EQ(error([&](In&, Opt& o) { o.causal = static_cast<Causal>(5); }), "causal is 5, expected 0 to 2");
    EXPECT_EQ(error([&](In&, Opt& o) { o.scale = 1e300; }),
              "scale is 1e+300, expected a finite number that f32 can hold");
    for (const auto& [softcap, text] : {std::pair{1e300, "1e+300"}, {1e-42, "1e-42"}, {-1.0, "-1"}})
        EXPECT_EQ(error([&, cap = softcap](In&, Opt& o) { o.softcap = cap; }),
                  std::string("softcap is ") + text +
                      ", expected 0 (off), or a positive number of which f32 can hold scale / softcap");
    EXPECT_EQ(error([&](In& in, Opt&) { lengths[0] = 0, in.cache_seqlens = Tensor(lengths.data(), DType::i32, {1}); }),
              "cache_seqlens[0] is 0, expected 1 or more: it counts the keys of the 4 queries too");
    const auto bottom_right = [&](std::int32_t used, std::int64_t offset) {
        return error([&](In& in, Opt& o) {
            lengths[0] = used, in.cache_seqlens = Tensor(lengths.data(), DType::i32, {1});
            o.causal = Causal::bottom_right, o.query_offset = offset;
        });
    };
    EXPECT_EQ(bottom_right(3, 0), "cache_seqlens[0] is 3, expected 4 or more: it counts the keys of the 4 queries too");
    for (const auto& [used, offset] : {std::pair{4, 0}, {0, 2}, {3, 2}}) {  // with an offset: a shard of the keys
        EXPECT_EQ(bottom_right(used, offset), "");
        std::fill(result.begin(), result.end(), -7.0f);
    }
    EXPECT_EQ(error([&](In&, Opt&) {}), "");
    std::fill(result.begin(), result.end(), -7.0f);
    EXPECT_EQ(error([&](In& in, Opt&) { in.k = bytes, in.k_scale = scale; }), "");
}

// What a call names of execution that is for others.
TEST(AttentionArguments, OfExecutionAreNamed) {
    std::vector<float> data(512, 0.5f), result(64, -7.0f);
    const Tensor rows(data.data(), DType::f32, {1, 4, 2, 4}), o(result.data(), DType::f32, {1, 4, 2, 4});
    const auto error = [&](const std::function<void(Execution&)>& spoil) -> std::string {
        Execution execution;
        spoil(execution);
        std::string text, other;
        const auto message_of = [](const auto& call) -> std::string {
            try {
                call();
            } catch (const std::exception& e) {
                return e.what();
            }
            return "";
        };
        text = message_of([&] { attention_forward({.q = rows, .k = rows, .v = rows}, {.o = o}, {}, execution); });
        other = message_of([&] { gated_norm_forward({.x = rows, .z = rows}, {.y = o}, {}, execution); });
        for (const float x : result) EXPECT_EQ(x, -7.0f) << text;
        EXPECT_EQ(other, text);
        return text;
    };
    EXPECT_EQ(error([&](Execution& e) { e.gpu.state_ready = data.data(); }),
              "execution.gpu.state_ready is given, expected null: it is for calls of delta rules");
    EXPECT_EQ(error([&](Execution& e) { e.gpu.state_done = data.data(); }),
              "execution.gpu.state_done is given, expected null: it is for calls of delta rules");
    EXPECT_EQ(error([&](Execution& e) { e.gpu.kept = std::as_writable_bytes(std::span(data)); }),
              "execution.gpu.kept is given, expected null: it is for calls of delta rules");
    EXPECT_EQ(error([&](Execution& e) { e.gpu.kept = std::span(static_cast<std::byte*>(nullptr), 8); }),
              "execution.gpu.kept is null, expected memory of its size, 8");
    EXPECT_EQ(error([&](Execution& e) { e.workspace = std::span(static_cast<std::byte*>(nullptr), 64); }),
              "execution.workspace is null, expected memory of its size, 64");
    EXPECT_EQ(error([&](Execution& e) { e.engine = "qu\xe9\n"; }),
              "execution.engine is 'qu\\xe9\\x0a', expected one of automatic, fast" + engine_names());
}

// An operand of f64 never sends a call of f32 to the reference in silence; it is named.
template <class Inputs, class Results, class Run>
void expect_odd_operands_named(Inputs in, Results out, const Run& run) {
    const auto error = [&]() -> std::string {
        try {
            run(in, out);
        } catch (const Unsupported& e) {
            return e.what();
        }
        return "";
    };
    std::vector<double> wide(4096, 0.5);
    const auto spoil = [&](auto& tensors) {
        for (const auto& field : fields_of<std::remove_reference_t<decltype(tensors)>>) {
            Tensor& t = tensors.*field.tensor;
            if (!t || t.dtype() != DType::f32 || std::string(field.name) == "x") continue;  // x of f64: the reference's
            const Tensor given = t;
            t = Tensor(wide.data() + 128 * (&field - fields_of<std::remove_reference_t<decltype(tensors)>>.data()) +
                           (field.wanted != nullptr ? 2048 : 0),
                       DType::f64, given.shape());
            EXPECT_EQ(error(), std::string(field.name) +
                                   " is f64, expected f32, bf16 or f16: convert it, or name the engine reference");
            t = given;
        }
    };
    EXPECT_EQ(error(), "");
    spoil(in);
    spoil(out);
}

TEST(OddOperands, AreNamedAndNotComputedByTheReference) {
    std::vector<float> data(1024, 0.25f), results(4096);
    float* next = results.data();
    const auto read = [&](std::initializer_list<std::int64_t> shape) { return Tensor(data.data(), DType::f32, shape); };
    const auto write = [&](std::initializer_list<std::int64_t> shape) {
        return Tensor(std::exchange(next, next + 128), DType::f32, shape);
    };
    const auto rows = {std::int64_t{1}, std::int64_t{4}, std::int64_t{2}, std::int64_t{3}};
    const AttentionInputs attention{.q = read(rows),
                                    .k = read(rows),
                                    .v = read(rows),
                                    .bias = read({1, 2, 4, 4}),
                                    .sink = read({2}),
                                    .alibi_slopes = read({2}),
                                    .bias_slopes = read({2})};
    expect_odd_operands_named(attention, AttentionOutputs{.o = write(rows), .lse = write({1, 2, 4})},
                              [](const auto& in, const auto& out) { attention_forward(in, out); });
    expect_odd_operands_named(attention,
                              AttentionGradients{.d_o = read(rows), .dq = write(rows), .dbias = write({1, 2, 4, 4})},
                              [](const auto& in, const auto& out) { attention_backward(in, out); });
    const DeltaInputs delta{.q = read(rows),
                            .k = read(rows),
                            .v = read(rows),
                            .g = read({1, 4, 2}),
                            .beta = read({1, 4, 2}),
                            .initial_state = read({1, 2, 3, 3}),
                            .A_log = read({2}),
                            .dt_bias = read({2})};
    DeltaOptions options;
    options.use_gate_in_kernel = true;
    expect_odd_operands_named(delta, DeltaOutputs{.o = write(rows), .final_state = write({1, 2, 3, 3})},
                              [&](const auto& in, const auto& out) { delta_forward(in, out, options); });
    expect_odd_operands_named(delta, DeltaGradients{.d_o = read(rows), .dq = write(rows), .dA_log = write({2})},
                              [&](const auto& in, const auto& out) { delta_backward(in, out, options); });
    expect_odd_operands_named(ConvolutionInputs{.x = read({1, 4, 3}), .weight = read({3, 4}), .bias = read({3})},
                              ConvolutionOutputs{.y = write({1, 4, 3}), .final_state = write({1, 3, 3})},
                              [](const auto& in, const auto& out) { causal_convolution_forward(in, out); });
    expect_odd_operands_named(NormInputs{.x = read(rows), .z = read(rows), .weight = read({3})},
                              NormOutputs{.y = write(rows)},
                              [](const auto& in, const auto& out) { gated_norm_forward(in, out); });
}

TEST(OddOperands, ACallOfF64IsTheReferences) {
    const std::vector<double> wide(64, 0.5);
    const std::vector<float> narrow(64, 0.5F);
    std::vector<double> automatic(24), named(24);
    const Tensor rows(wide.data(), DType::f64, {1, 4, 2, 3}), bias(narrow.data(), DType::f32, {1, 1, 4, 4});
    const AttentionInputs in{.q = rows, .k = rows, .v = rows, .bias = bias};
    attention_forward(in, {.o = Tensor(automatic.data(), DType::f64, {1, 4, 2, 3})});
    attention_forward(in, {.o = Tensor(named.data(), DType::f64, {1, 4, 2, 3})}, {}, {.engine = "reference"});
    EXPECT_EQ(automatic, named);
    const ConvolutionInputs wider{.x = Tensor(wide.data(), DType::f64, {1, 4, 2}),
                                  .weight = Tensor(narrow.data(), DType::f32, {2, 9})};
    EXPECT_NO_THROW(causal_convolution_forward(wider, {.y = Tensor(named.data(), DType::f64, {1, 4, 2})}));
}

// A wrong block is found wherever it stands in a table, in any type and with any strides.
template <class T>
void expect_wrong_blocks_found(DType type, std::int64_t step) {
    constexpr std::int64_t blocks = 21, highest = std::numeric_limits<T>::max();
    const std::vector<float> data(64, 0.5F);
    std::vector<float> result(2);
    std::vector<T> table(static_cast<std::size_t>(2 * blocks * step), T{-1});
    const std::vector<std::int32_t> used{blocks, blocks};
    const auto error = [&] {
        try {
            attention_forward({.q = Tensor(data.data(), DType::f32, {2, 1, 1, 1}),
                               .k = Tensor(data.data(), DType::f32, {4, 1, 1, 1}),
                               .v = Tensor(data.data(), DType::f32, {4, 1, 1, 1}),
                               .cache_seqlens = Tensor(used.data(), DType::i32, {2}),
                               .block_table = Tensor(table.data(), type, {2, blocks}, {blocks * step, step})},
                              {.o = Tensor(result.data(), DType::f32, {2, 1, 1, 1})});
        } catch (const std::exception& e) {
            return std::string(e.what());
        }
        return std::string();
    };
    for (std::int64_t i = 0; i < 2 * blocks; ++i) table[static_cast<std::size_t>(i * step)] = static_cast<T>(i % 4);
    EXPECT_EQ(error(), "");
    for (std::int64_t i = 0; i < 2 * blocks; ++i)
        for (const std::int64_t wrong : {std::int64_t{4}, std::int64_t{-1}, highest, -highest - 1}) {
            T& entry = table[static_cast<std::size_t>(i * step)];
            const T right = std::exchange(entry, static_cast<T>(wrong));
            EXPECT_EQ(error(), "block_table[" + std::to_string(i / blocks) + ", " + std::to_string(i % blocks) +
                                   "] is " + std::to_string(wrong) + ", expected 0 to 3 (blocks of k)");
            entry = right;
        }
}
TEST(AttentionArguments, WrongBlocksAreFoundAnywhere) {
    for (const std::int64_t step : {1, 3}) {
        expect_wrong_blocks_found<std::int32_t>(DType::i32, step);
        expect_wrong_blocks_found<std::int64_t>(DType::i64, step);
    }
}

// Three sequences of 4, 1 and 1 packed queries, whose keys are in a cache of blocks or in caches of their own.
struct MixedBatch {
    std::vector<float> data = std::vector<float>(512, 0.5f), result = std::vector<float>(64, -7.0f);
    std::vector<std::int32_t> sums{0, 4, 5, 6}, used{5, 3, 1}, table{2, 0, 3, -1, 1, -1};
    AttentionInputs in{.q = floats({1, 6, 8, 2}),
                       .k = floats({4, 3, 2, 2}),
                       .v = floats({4, 3, 2, 1}),
                       .cu_seqlens_q = integers(sums, {4}),
                       .cache_seqlens = integers(used, {3}),
                       .block_table = integers(table, {3, 2})};

    Tensor floats(std::initializer_list<std::int64_t> shape) { return Tensor(data.data(), DType::f32, shape); }
    Tensor integers(std::vector<std::int32_t>& numbers, std::initializer_list<std::int64_t> shape) {
        return Tensor(numbers.data(), DType::i32, shape);
    }
    void lay_out_caches() { in.k = floats({3, 6, 2, 2}), in.v = floats({3, 6, 2, 1}), in.block_table = {}; }
};

std::string error_of(const std::function<void(MixedBatch&)>& spoil, bool backward = false) {
    MixedBatch batch;
    spoil(batch);
    const Tensor o(batch.result.data(), DType::f32, {1, 6, 8, 1});
    try {
        if (backward)
            attention_backward(batch.in, {.d_o = batch.floats({1, 6, 8, 1}), .dq = batch.floats({1, 6, 8, 2})});
        else
            attention_forward(batch.in, {.o = o});
    } catch (const std::exception& e) {
        for (const float x : batch.result) EXPECT_EQ(x, -7.0f) << e.what();
        return e.what();
    }
    return "";
}

TEST(AttentionArguments, OfPackedQueriesWithCachesAreNamed) {
    using M = MixedBatch;
    EXPECT_EQ(error_of([](M&) {}), "");
    EXPECT_EQ(error_of([](M& m) { m.lay_out_caches(); }), "");
    EXPECT_EQ(error_of([](M& m) { m.sums[2] = 3; }), "cu_seqlens_q[2] is 3, expected at least 4, the entry before");
    EXPECT_EQ(error_of([](M& m) { m.sums[3] = 5; }), "cu_seqlens_q[3] is 5, expected 6 (rows of q)");
    EXPECT_EQ(error_of([](M& m) { m.used[0] = 7; }), "cache_seqlens[0] is 7, expected 0 to 6");
    EXPECT_EQ(error_of([](M& m) { m.used[1] = -1; }), "cache_seqlens[1] is -1, expected 0 to 6");
    EXPECT_EQ(error_of([](M& m) { m.used[2] = 0; }),
              "cache_seqlens[2] is 0, expected 1 or more: it counts the keys of the 1 queries too");
    EXPECT_EQ(error_of([](M& m) { m.used[1] = 4; }), "block_table[1, 1] is -1, expected 0 to 3 (blocks of k)");
    EXPECT_EQ(error_of([](M& m) { m.table[1] = 4; }), "block_table[0, 1] is 4, expected 0 to 3 (blocks of k)");
    EXPECT_EQ(error_of([](M& m) { m.in.cache_seqlens = {}; }),
              "cache_seqlens is missing, expected a tensor: block_table needs it");
    EXPECT_EQ(error_of([](M& m) { m.in.cu_seqlens_k = m.integers(m.sums, {4}); }),
              "cu_seqlens_k is given, expected none: cache_seqlens is given");
    EXPECT_EQ(error_of([](M& m) { m.in.cache_seqlens = m.integers(m.used, {2}); }),
              "cache_seqlens: dimension 0 is 2, expected 3 (sequences)");
    EXPECT_EQ(error_of([](M& m) {
                  m.in.block_table = m.integers(m.table, {2, 3});
              }),
              "block_table: dimension 0 is 2, expected 3 (sequences)");
    EXPECT_EQ(error_of([](M& m) {
                  m.in.q = m.floats({2, 6, 8, 2});
              }),
              "q: dimension 0 is 2, expected 1 (packed sequences)");
    EXPECT_EQ(error_of([](M& m) {
                  m.lay_out_caches(), m.in.k = m.floats({2, 6, 2, 2}), m.in.v = m.floats({2, 6, 2, 1});
              }),
              "k: dimension 0 is 2, expected 3 (sequences)");
    EXPECT_EQ(error_of([](M& m) { m.lay_out_caches(), m.used[2] = 7; }), "cache_seqlens[2] is 7, expected 0 to 6");
    EXPECT_EQ(error_of([](M& m) {
                  m.in.mask = Tensor(m.data.data(), DType::boolean, {3, 1, 4, 5});
              }),
              "mask: dimension 3 is 5, expected 1 or 6 (keys)");
    EXPECT_EQ(error_of(
                  [](M& m) {
                      m.in.v = Tensor(m.data.data(), DType::f8, {4, 3, 2, 1}), m.in.v_scale = m.floats({1, 1, 2, 1});
                  },
                  true),
              "v is f8_e4m3, expected f64, f32, bf16 or f16: there are no gradients of numbers with scales");
    EXPECT_EQ(error_of([](M&) {}, true), "block_table: there are no gradients through a paged cache");
}

}  // namespace
}  // namespace softdelta

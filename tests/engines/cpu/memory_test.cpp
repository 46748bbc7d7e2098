// What a long call needs above its tensors: a constant for each thread, nothing that grows with Lq·Lk or with T.
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "softdelta/softdelta.hpp"

namespace {

using namespace softdelta;
using std::int64_t;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool sanitized = true;
#elif defined(__has_feature)
constexpr bool sanitized = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
constexpr bool sanitized = false;
#endif

// kB of a line of /proc/self/status.
double status_kb(const std::string& name) {
    std::ifstream file("/proc/self/status");
    for (std::string line; std::getline(file, line);)
        if (line.rfind(name, 0) == 0) return std::stod(line.substr(name.size() + 1));
    return 0;
}

// MiB that the process needed for a moment while `call` ran, above what it held before.
template <class Call>
double peak_mib(const char* name, const Call& call) {
    malloc_trim(0);
    std::ofstream("/proc/self/clear_refs") << 5;  // the peak starts anew
    const double before = status_kb("VmRSS");
    call();
    const double peak = (status_kb("VmHWM") - before) / 1024;
    std::printf("%s: %.1f MiB above the tensors\n", name, peak);
    return peak;
}

// Memory that is there: every page was written.
struct Buffer {
    std::vector<float> data;
    Tensor view;

    explicit Buffer(std::vector<int64_t> shape) {
        int64_t count = 1;
        for (const int64_t size : shape) count *= size;
        data.resize(static_cast<std::size_t>(count));
        for (std::size_t i = 0; i < data.size(); ++i)
            data[i] = static_cast<float>(i * 2654435761u % 1000) * 0.002f - 1.0f;
        view = Tensor(data.data(), DType::f32, shape);
    }
};

Execution two_threads() {
    Execution execution;
    execution.engine = "fast";
    execution.threads = 2;
    return execution;
}

TEST(Memory, AttentionOfAVeryLongSequence) {
    if (sanitized) GTEST_SKIP() << "a sanitizer's own memory counts";
    constexpr int64_t S = 65536, D = 64;
    constexpr double limit = 64;  // MiB
    const Buffer q({1, S, 1, D}), k({1, S, 1, D}), v({1, S, 1, D}), bias({1, 1, 1, S}), d_o({1, S, 1, D});
    const Buffer o({1, S, 1, D}), lse({1, 1, S}), dq({1, S, 1, D}), dk({1, S, 1, D}), dv({1, S, 1, D}),
        dbias({1, 1, 1, S});
    const AttentionInputs inputs{.q = q.view, .k = k.view, .v = v.view, .bias = bias.view};
    const AttentionGradients gradients{.o = o.view,
                                       .lse = lse.view,
                                       .d_o = d_o.view,
                                       .dq = dq.view,
                                       .dk = dk.view,
                                       .dv = dv.view,
                                       .dbias = dbias.view};
    const AttentionOutputs outputs{.o = o.view, .lse = lse.view};
    // Half of the pairs, in as much memory as all of them. A call allocates what its workspace function says: that of
    // all pairs is held to the limit, too.
    AttentionOptions causal;
    causal.causal = Causal::top_left;
    const auto forward = [&] { attention_forward(inputs, outputs, causal, two_threads()); };
    const auto backward = [&] { attention_backward(inputs, gradients, causal, two_threads()); };
    constexpr double mib = 1 << 20;
    try {
        for (const AttentionOptions& options : {causal, AttentionOptions()}) {
            const auto most = static_cast<std::size_t>(limit * mib);
            EXPECT_LE(attention_forward_workspace(inputs, outputs, options, two_threads()), most);
            EXPECT_LE(attention_backward_workspace(inputs, gradients, options, two_threads()), most);
        }
        EXPECT_LE(peak_mib("attention forward", forward), limit);
        EXPECT_LE(peak_mib("attention backward", backward), limit);
    } catch (const Unsupported& e) {
        GTEST_SKIP() << e.what();
    }
}

TEST(Memory, DeltaRulesOfAVeryLongSequence) {
    if (sanitized) GTEST_SKIP() << "a sanitizer's own memory counts";
    constexpr int64_t T = 65536, D = 128;
    const Buffer q({1, T, 1, D}), k({1, T, 1, D}), v({1, T, 1, D}), o({1, T, 1, D}), state({1, 1, D, D});
    std::vector<float> gates(static_cast<std::size_t>(T * D), -0.05f);
    for (const Rule rule : {Rule::delta_rule, Rule::gated_delta_rule, Rule::kda, Rule::simple_gla}) {
        DeltaInputs inputs{.q = q.view, .k = k.view, .v = v.view};
        if (rule == Rule::kda) inputs.g = Tensor(gates.data(), DType::f32, {1, T, 1, D});
        if (rule == Rule::gated_delta_rule || rule == Rule::simple_gla)
            inputs.g = Tensor(gates.data(), DType::f32, {1, T, 1});
        DeltaOptions options;
        options.rule = rule;
        options.use_qk_l2norm_in_kernel = true;
        const auto forward = [&] {
            delta_forward(inputs, {.o = o.view, .final_state = state.view}, options, two_threads());
        };
        try {
            EXPECT_LE(peak_mib("delta rule forward", forward), 8) << "rule " << static_cast<int>(rule);
        } catch (const Unsupported&) {  // not a rule of the fast engine
        }
    }
}

}  // namespace

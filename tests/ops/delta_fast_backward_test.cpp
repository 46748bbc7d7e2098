// Gradients of the fast delta rules against the f64 recurrence: random calls with every option of the contract, on
// every instruction set, in every storage type, judged by the limits that an honest kernel of that precision sets
// (docs/math.md). Memory that is not written holds NaN; buffers end at unreadable pages.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "core/parallel.h"
#include "judge/verify.h"
#include "support/fast_delta.h"

namespace softdelta::test {
namespace {

// Gradients may grow beyond f16 where states do.
FastDelta draw(std::uint64_t seed) {
    FastDelta call = draw_fast_delta(seed);
    const std::vector<std::string>& features = call.drawn().features;
    const auto has = [&](const char* feature) {
        return std::find(features.begin(), features.end(), feature) != features.end();
    };
    const bool f16 = has("positive gate") || has("comba");
    return f16 ? draw_fast_delta(seed, {DType::f32, DType::bf16}) : std::move(call);
}

Execution fast(std::uint64_t seed) {
    Execution execution;
    execution.engine = Engine::fast;
    execution.threads = 1;
    execution.float_products = seed / 3 % 4 == 0;
    execution.bf16_products = seed / 3 % 4 == 1;
    return execution;
}

// What is wrong with the results; nothing: an empty text.
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

std::string check_backward(const FastDelta& call, std::uint64_t seed) {
    return judge_results(call, call.backward(call.some(call.gradient_names()), fast(seed)));
}

template <class Check>
void check_calls(Index count, const Check& check) {
    std::uint64_t seed = first_seed();
    for_each_level([&](const std::string& level) {
        std::vector<std::string> faults(static_cast<std::size_t>(count));
        core::parallel_units(0, count, [&] {
            return [&](Index i) {
                const std::uint64_t own = seed + static_cast<std::uint64_t>(i);
                try {
                    faults[static_cast<std::size_t>(i)] = check(draw(own), own);
                } catch (const std::exception& e) {
                    faults[static_cast<std::size_t>(i)] = "SOFTDELTA_SEED=" + std::to_string(own) + ": " + e.what();
                }
            };
        });
        for (const std::string& fault : faults)
            if (!fault.empty()) ADD_FAILURE() << level << ": " << fault;
        seed += static_cast<std::uint64_t>(count);
    });
}

TEST(DeltaFast, BackwardIsRight) {
    check_calls(call_count(200), check_backward);
}

}  // namespace
}  // namespace softdelta::test

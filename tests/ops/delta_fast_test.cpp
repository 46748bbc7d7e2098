// The fast delta rules against the f64 recurrence: random calls with every option of the contract, on every instruction
// set, in every storage type, judged by the limits that an honest kernel of that precision sets (docs/math.md). Memory
// that is not written holds NaN; buffers end at unreadable pages.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "core/parallel.h"
#include "judge/verify.h"
#include "support/fast_delta.h"

namespace softdelta::test {
namespace {

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

// Some rules make states grow; f16 ends at 65504.
bool exceeds_f16(const FastDelta& call) {
    if (call.drawn().v.view().dtype() != DType::f16) return false;
    Execution reference;
    reference.engine = Engine::reference;
    const std::vector<double> o = forward_results(call.drawn(), reference).at("o").values();
    return std::any_of(o.begin(), o.end(), [](double x) { return std::abs(x) > 60000; });
}

std::string check_forward(const FastDelta& call, std::uint64_t seed) {
    if (exceeds_f16(call)) return "";
    return judge_results(call, call.forward(call.some(call.forward_names()), fast(seed)));
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
                    faults[static_cast<std::size_t>(i)] = check(draw_fast_delta(own), own);
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

TEST(DeltaFast, ForwardIsRight) {
    check_calls(call_count(200), check_forward);
}

}  // namespace
}  // namespace softdelta::test

// Dumps of right kernels, none accused: calls drawn at random, computed by kernels with other seeds, chunk sizes and
// orders of summation than the judge's own.
//
// SOFTDELTA_RIGHT_DUMPS: how many (default 1000); SOFTDELTA_RIGHT_DUMPS_FIRST: the number of the first (default 0).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "core/parallel.h"
#include "judge/draw_case.h"
#include "judge/small_attention.h"
#include "judge/small_delta.h"
#include "judge/verdicts.h"

namespace softdelta::test {

namespace {

std::int64_t setting(const char* name, std::int64_t otherwise) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::atoll(text) : otherwise;
}

// Whatever an engine makes of the call.
Results run_engine(const io::Call& call, const std::string& engine, std::int64_t chunk_size, std::uint64_t seed) {
    Results results;
    for (const std::string& name : io::output_names(call))
        results.emplace(name, io::OwnedTensor(io::output_dtype(call, name), io::output_shape(call, name)));
    Execution execution;
    execution.engine = engine;
    execution.threads = 1;
    execution.stages.chunk_size = chunk_size;
    execution.rounding.seed = seed;
    io::execute(call, views(results), execution);
    return results;
}

struct Dump {
    std::string kernel;
    io::CaseFile file;
    io::Call call;
    Results results;
};

Dump draw_dump(std::int64_t number) {
    Draw draw(static_cast<std::uint64_t>(number));
    const io::MakeOptions options = draw_case(draw);
    Dump dump{"", io::make_case(options), {}, {}};
    dump.call = io::call_of(dump.file);
    const std::int64_t chunk_size = draw.of({16, 32, 64});
    const std::string chunks = ", chunks of " + std::to_string(chunk_size);
    if (draw.one_in(6)) {
        dump.kernel = "the truth, rounded";
        dump.results = run_engine(dump.call, "reference", chunk_size, 0);
    } else if (draw.one_in(2)) {
        dump.kernel = "small kernel" + chunks;
        dump.results = dump.call.is_attention ? run_small_attention(dump.call)
                                              : run_small_delta(dump.call, DeltaMistake::none, chunk_size);
    } else {
        const bool plain = options.dtype == DType::f32 && draw.one_in(2);
        const std::uint64_t seed = plain ? 0 : static_cast<std::uint64_t>(draw.between(1000, 1 << 30));
        dump.kernel = "stages, seed " + std::to_string(seed) + chunks;
        dump.results = run_engine(dump.call, "stages_f32", chunk_size, seed);
    }
    return dump;
}

// What went into a dump, for the report of an accusation.
std::string describe(const Dump& dump) {
    std::ostringstream text;
    text << dump.kernel;
    for (const auto& [key, value] : dump.file.metadata) text << ", " << key << " " << value;
    for (const auto& [name, tensor] : dump.file.tensors) {
        text << ", " << name << " " << core::name_of(static_cast<core::DType>(tensor.dtype())) << "[";
        for (const std::int64_t size : tensor.shape()) text << " " << size;
        text << " ]";
    }
    return text.str();
}

TEST(RightDumps, NoneIsAccused) {
    const std::int64_t first = setting("SOFTDELTA_RIGHT_DUMPS_FIRST", 0);
    const std::int64_t count = setting("SOFTDELTA_RIGHT_DUMPS", 1000);
    std::vector<std::string> accused(static_cast<std::size_t>(count));
    std::vector<char> unjudged(static_cast<std::size_t>(count));
    core::parallel_units(0, count, [&] {
        return [&](std::int64_t i) {
            const Dump dump = draw_dump(first + i);
            const std::vector<judge::Finding> findings = judge_results(dump.call, dump.results);
            unjudged[static_cast<std::size_t>(i)] = judge::summarise(findings) == judge::Verdict::cannot_be_judged;
            if (!any_wrong(findings)) return;
            std::ostringstream text;
            text << "dump " << first + i << ": " << describe(dump) << "\n" << Table{findings};
            accused[static_cast<std::size_t>(i)] = text.str();
        };
    });
    for (const std::string& report : accused)
        if (!report.empty()) ADD_FAILURE() << report;
    // Results below the smallest numbers of f16, and small differences of large terms.
    const auto few = std::count(unjudged.begin(), unjudged.end(), 1);
    std::printf("%lld dumps, %lld cannot be judged\n", static_cast<long long>(count), static_cast<long long>(few));
    EXPECT_LE(20 * few, count + 20);
}

}  // namespace

}  // namespace softdelta::test

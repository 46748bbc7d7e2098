// Right kernels are not accused, neither by the verdict nor by the catalogue: kernels that sum their gates in f32, and
// kernels that make no mistake but more noise than allowed.
//
// SOFTDELTA_RIGHT_KERNELS: how many that sum gates in f32 (default 90); SOFTDELTA_NOISY: how many noisy ones (default
// 24); SOFTDELTA_SEED: where the drawing starts (default 0).
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <sstream>

#include "core/parallel.h"
#include "diagnose/diagnose.h"
#include "diagnose/diagnosed.h"
#include "diagnose/drawn_inputs.h"
#include "judge/small_attention.h"
#include "judge/small_delta.h"
#include "judge/verdicts.h"

namespace softdelta::test {

namespace {

std::int64_t setting(const char* name, std::int64_t otherwise) {
    const char* value = std::getenv(name);
    return value != nullptr ? std::atoll(value) : otherwise;
}

// A call with gates down to −10 a token.
io::MakeOptions draw_gates(Draw& draw) {
    io::MakeOptions o;
    o.op = draw.of({"gated_delta_rule", "kda", "comba", "simple_gla"});
    o.dtype = draw.of({DType::f32, DType::f32, DType::bf16, DType::f16});
    if ((o.op == "comba" || o.op == "gdn2") && o.dtype == DType::f16) o.dtype = DType::bf16;  // results outgrow f16
    o.seed = static_cast<std::uint64_t>(draw.between(1, 1 << 30));
    o.batch = draw.between(1, 2);
    o.heads = draw.between(1, 2);
    o.value_heads = o.heads * draw.of({1, 1, 2});
    o.key_size = draw.of({5, 16, 32, 64});
    o.value_size = draw.of({7, 16, 32, 48});
    o.tokens = draw.between(2, 200);
    if (draw.one_in(4)) {
        o.lengths.resize(static_cast<std::size_t>(draw.between(2, 4)));
        for (std::int64_t& length : o.lengths) length = draw.one_in(5) ? 0 : draw.between(1, 150);
    }
    o.gate = draw.of({"spread", "spread", "uniform"});
    o.gate_value = static_cast<double>(draw.of({-1, -3, -7, -10})) * (o.gate == "uniform" ? 0.97 : 1);
    o.l2norm = o.op == "comba" || o.op == "gdn2" || !draw.one_in(4);
    o.initial_state = !draw.one_in(3);
    o.beta_logits = o.op != "simple_gla" && o.op != "gla" && draw.one_in(3);
    if (draw.one_in(5) && o.op != "simple_gla") {
        o.gate = "mild";
        o.raw_gate = draw.of({"softplus", "lower_bound"});
        o.lower_bound = -10;
    }
    return o;
}

struct Report {
    std::string accused;
    bool lost_digits = false, unjudged = false;
};

Report try_kernel(std::int64_t number) {
    Draw draw(static_cast<std::uint64_t>(number));
    const io::MakeOptions options = draw_gates(draw);
    const io::CaseFile file = io::make_case(options);
    const io::Call call = io::call_of(file);
    const std::int64_t chunk = draw.of({16, 32, 64, 64});
    const GateSums sums = draw.of({GateSums::f32, GateSums::f32_scan, GateSums::f32_rounded, GateSums::f32_log2});
    const Results results = run_small_delta(call, DeltaMistake::none, chunk, DeltaMistake::none, sums);
    diagnose::Options quiet;
    quiet.threads = 1;
    const diagnose::Diagnosis diagnosis = diagnose::diagnose(call, views(results), {}, quiet);
    Report report;
    for (const judge::Finding& f : diagnosis.findings) {
        const bool lost = f.verdict == judge::Verdict::digits_lost;
        report.lost_digits = report.lost_digits || (lost && f.note.find("gates summed in f32") != std::string::npos);
    }
    report.unjudged = judge::summarise(diagnosis.findings) == judge::Verdict::cannot_be_judged;
    if (!any_wrong(diagnosis.findings) && diagnosis.conclusion.empty()) return report;
    std::ostringstream text;
    text << "kernel " << number << ", " << options.op << " " << static_cast<int>(options.dtype) << ", gate "
         << options.gate << " " << options.gate_value << " " << options.raw_gate << ", sums " << static_cast<int>(sums)
         << ", chunks of " << chunk << ", T " << options.tokens << ", K " << options.key_size << ", V "
         << options.value_size << "\n"
         << Table{diagnosis.findings};
    report.accused = text.str();
    return report;
}

TEST(Innocent, KernelsThatSumGatesInFloat) {
    const std::int64_t count = setting("SOFTDELTA_RIGHT_KERNELS", 90), first = setting("SOFTDELTA_SEED", 0);
    std::vector<Report> reports(static_cast<std::size_t>(count));
    core::parallel_units(0, count, [&] {
        return [&](std::int64_t i) { reports[static_cast<std::size_t>(i)] = try_kernel(first + i); };
    });
    std::int64_t lost = 0, unjudged = 0;
    for (const Report& report : reports) {
        if (!report.accused.empty()) ADD_FAILURE() << report.accused;
        lost += report.lost_digits, unjudged += report.unjudged;
    }
    std::printf("%lld kernels, of %lld it is said that they sum gates in f32, %lld cannot be judged\n",
                static_cast<long long>(count), static_cast<long long>(lost), static_cast<long long>(unjudged));
    EXPECT_LE(50 * unjudged, count);
    EXPECT_GT(lost, 0) << "no call needs the limits of f32 sums: it tests nothing";
}

// Its sums are not divided by log 2: the difference of the last two is rounded by 0.4 digits, that of a kernel with 2^x
// by hardly any, whatever is drawn.
TEST(Innocent, AUnitOfSumsMayBeExact) {
    const Report report = try_kernel(5671);
    EXPECT_EQ(report.accused, "");
    EXPECT_TRUE(report.lost_digits) << "it needs no limit of f32 sums: it tests nothing";
}

// A right dump with normal noise added to the last block of one result, so that its error is `times` the limit.
std::string add_noise(const io::Call& call, Draw& draw, Results& results) {
    judge::Options options;
    options.threads = 1;
    std::vector<judge::Evidence> evidence = judge::examine(call, views(results), options);
    std::vector<const judge::Evidence*> blocks;  // that have some elements
    for (const judge::Evidence& e : evidence)
        if (e.finding.shape.size() > 2 && e.blocks.count() > 0 && e.blocks.elements(e.blocks.count() - 1) >= 8)
            blocks.push_back(&e);
    if (blocks.empty()) return "";
    const judge::Evidence& e =
        *blocks[static_cast<std::size_t>(draw.between(0, static_cast<std::int64_t>(blocks.size()) - 1))];
    const std::string& name = e.finding.name;
    const double times = 1.05 + 0.1 * static_cast<double>(draw.between(0, 6));
    const std::int64_t last = e.blocks.count() - 1;
    const double size = times * e.allowed[static_cast<std::size_t>(last)];
    std::mt19937_64 random(static_cast<std::uint64_t>(draw.between(0, 1 << 30)));
    std::normal_distribution<double> normal;
    const Floats noisy(results.at(name).view());
    const auto* truth = static_cast<const double*>(e.truth.data());
    e.blocks.for_each_run(e.blocks.outer - 1, e.blocks.range_count() - 1,
                          [&](std::int64_t block, std::int64_t first, std::int64_t n) {
                              for (std::int64_t i = first; block == last && i < first + n; ++i)
                                  noisy[i] = static_cast<float>(truth[i] + size * normal(random));
                          });
    results.at(name) = noisy.stored(DType::f32);
    return name;
}

TEST(Innocent, MoreNoiseThanAllowed) {
    const std::int64_t count = setting("SOFTDELTA_NOISY", 24), first = setting("SOFTDELTA_SEED", 0);
    const std::vector<Mistake> delta = delta_mistakes(), attention = attention_mistakes();
    std::vector<std::string> convicted(static_cast<std::size_t>(count));
    std::vector<int> wrong(static_cast<std::size_t>(count));
    core::parallel_units(0, count, [&] {
        return [&](std::int64_t i) {
            Draw draw(static_cast<std::uint64_t>(first + i));
            const std::vector<Mistake>& some = draw.one_in(3) ? attention : delta;
            const Mistake& m =
                some[static_cast<std::size_t>(draw.between(0, static_cast<std::int64_t>(some.size()) - 1))];
            io::MakeOptions inputs = vary(draw, m.inputs);
            inputs.dtype = DType::f32;
            const io::CaseFile file = io::make_case(inputs);
            const io::Call call = io::call_of(file);
            Results results = m.right(call);
            const std::string name = add_noise(call, draw, results);
            if (name.empty()) return;
            diagnose::Options quiet;
            quiet.threads = 1;
            const diagnose::Diagnosis d = diagnose::diagnose(call, views(results), {}, quiet);
            if (!d.wrong()) return;
            wrong[static_cast<std::size_t>(i)] = 1;
            if (!d.ranking.noise || d.conclusion.front() != "no mistake, only more noise than allowed")
                convicted[static_cast<std::size_t>(i)] = std::to_string(first + i) + ", " + inputs.op + ", noise in " +
                                                         name + ": " + d.conclusion.front() + "\n" +
                                                         table(d.ranking.singles);
            for (const std::string& sentence : d.where)
                if (sentence.find(": 0 of ") != std::string::npos || sentence.find("heads  of") != std::string::npos)
                    convicted[static_cast<std::size_t>(i)] += sentence;
        };
    });
    std::int64_t tried = 0;
    for (std::size_t i = 0; i < convicted.size(); ++i) {
        tried += wrong[i];
        if (!convicted[i].empty()) ADD_FAILURE() << convicted[i];
    }
    std::printf("%lld noisy dumps\n", static_cast<long long>(tried));
    EXPECT_GT(2 * tried, count);
}

}  // namespace

}  // namespace softdelta::test

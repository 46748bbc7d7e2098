#include "diagnose/evidence/stage_check.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <sstream>

#include "diagnose/replay/dense.h"

namespace softdelta::diagnose {

namespace {

constexpr const char* data_flow[] = {"delta",    "ds",       "dbias_tiles",  // attention, backward
                                     "qg",       "kg",       "Aqk",         "L",
                                     "A",        "w",        "u",  // delta rules, forward
                                     "h",        "v_new",          //
                                     "dv_local", "dAqk",     "dh",          "du",
                                     "dw",       "dA",       "dL",  // delta rules, backward
                                     "dL_solve", "dq_state", "dq_intra",    "dk_state",
                                     "dk_intra", "dg_q",     "dg_k",  //
                                     "dg_p",     "dg_terms", "dg_local",    "dg_difference",
                                     "dg_spans"};

// A tensor as blocks of 64 rows of its second dimension.
struct BlockSums {
    std::vector<double> errors, squares, counts;
};

BlockSums subtract(const Dense& a, const Dense& b) {
    constexpr Index rows = 64;
    const auto& shape = a.shape();
    const Index middle = shape.size() > 1 ? shape[1] : 1, blocks = (middle + rows - 1) / rows;
    const Index inner = middle > 0 && shape[0] > 0 ? a.count() / (shape[0] * middle) : 0;
    BlockSums sums;
    for (Index o = 0; o < shape[0]; ++o)
        for (Index block = 0; block < blocks; ++block) {
            const Index begin = (o * middle + block * rows) * inner;
            const Index end = (o * middle + std::min((block + 1) * rows, middle)) * inner;
            double error = 0, square = 0;
            for (Index i = begin; i < end; ++i) {
                error += (a[i] - b[i]) * (a[i] - b[i]);
                square += b[i] * b[i];
            }
            sums.errors.push_back(error);
            sums.squares.push_back(square);
            sums.counts.push_back(static_cast<double>(end - begin));
        }
    return sums;
}

// One stage as an engine computes it.
Dense run_stage(const io::Call& call, const std::string& name, const Tensor& like, const std::string& engine,
                std::uint64_t seed, int threads) {
    io::OwnedTensor stage(DType::f64, std::vector<std::int64_t>(like.shape().begin(), like.shape().end()));
    Execution execution;
    execution.engine = engine;
    execution.threads = threads;
    execution.stages.chunk_size = call.chunk_size;
    execution.rounding.seed = seed;
    execution.stages.wanted.push_back({name, stage.view()});
    for (const char* result : {"o", "dq"}) {
        const std::vector<std::string> known = io::output_names(call);
        if (std::find(known.begin(), known.end(), result) == known.end()) continue;
        const io::OwnedTensor memory(DType::f64, io::output_shape(call, result));
        io::execute(call, {{result, memory.view()}}, execution);
    }
    return Dense(stage.view());
}

// An ulp of numbers near x.
double ulp(DType type, double x) {
    return x * (type == DType::bf16 ? 0x1p-8 : type == DType::f16 ? 0x1p-11 : 0x1p-23);
}

StageFinding check(const io::Call& call, const std::string& name, const Tensor& tensor, int threads) {
    constexpr std::uint64_t seeds = 3;
    constexpr double factor = 4;
    StageFinding finding{name, 0, 0, false, ""};
    try {
        const Dense truth = run_stage(call, name, tensor, "stages_f64", 0, threads);
        const BlockSums actual = subtract(Dense(tensor), truth);
        std::vector<double> baseline(actual.errors.size());
        for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
            const BlockSums run = subtract(run_stage(call, name, tensor, "stages_f32", seed, threads), truth);
            for (std::size_t i = 0; i < baseline.size(); ++i) baseline[i] = std::max(baseline[i], run.errors[i]);
        }
        double worst = -1;
        for (std::size_t i = 0; i < baseline.size(); ++i) {
            const double n = std::max(actual.counts[i], 1.0), size = std::sqrt(actual.squares[i] / n);
            const double error = std::sqrt(actual.errors[i] / n);
            const double limit = factor * (std::sqrt(baseline[i] / n) + ulp(tensor.dtype(), size)) + 0x1p-120;
            const double excess = std::isnan(error) ? HUGE_VAL : error / limit;
            if (excess <= worst) continue;
            worst = excess;
            finding.ratio = size > 0 ? error / size : error;
            finding.limit = size > 0 ? limit / size : limit;
            finding.wrong = excess > 1;
        }
    } catch (const std::exception& e) {
        finding.note = e.what();
    }
    return finding;
}

}  // namespace

std::vector<StageFinding> check_stages(const io::Call& call, const std::map<std::string, Tensor>& intermediates,
                                       int threads) {
    std::vector<StageFinding> findings;
    for (const char* name : data_flow)
        if (const auto found = intermediates.find(name); found != intermediates.end())
            findings.push_back(check(call, name, found->second, threads));
    return findings;
}

std::vector<StageFinding> take_out_misshapen(const io::Call& call, std::map<std::string, Tensor>& intermediates) {
    std::vector<StageFinding> findings;
    Execution execution;
    execution.engine = "stages_f64";
    execution.stages.chunk_size = call.chunk_size;
    for (auto at = intermediates.begin(); at != intermediates.end();) {
        execution.stages.wanted = {{at->first, at->second}};
        try {
            io::check(call, {}, execution);
            ++at;
        } catch (const std::exception& e) {
            findings.push_back({at->first, 0, 0, false, e.what()});
            at = intermediates.erase(at);
        }
    }
    return findings;
}

std::string describe_stages(const std::vector<StageFinding>& findings) {
    std::ostringstream text;
    std::string right;
    for (const StageFinding& f : findings) {
        if (!f.note.empty()) continue;
        if (f.wrong) {
            text.precision(2);
            text << f.name << " is the first wrong intermediate in data flow, off by " << f.ratio
                 << " of itself, limit " << f.limit
                 << (right.empty() ? "; the dump holds none before it" : "; right before it: ") << right;
            return text.str();
        }
        right.append(right.empty() ? "" : ", ").append(f.name);
    }
    if (!right.empty()) text << "every intermediate of the dump is right: " << right;
    return text.str();
}

}  // namespace softdelta::diagnose

#include "judge/layer.h"

#include <random>

#include "io/file/core_view.h"
#include "io/file/stored_type.h"
#include "io/file/text.h"
#include "judge/verdict.h"

namespace softdelta::judge {

namespace {

// Tokens of each sequence by 64, or the rows of a state or parameter.
Blocks blocks_of(const io::LayerCall& call, const std::string& result) {
    const std::vector<std::int64_t> shape = io::output_shape(call, result);
    const bool state = result == "final_state" || result == "dinitial_state";
    const bool tokens = result == "y" || result == "dx" || result == "dz";
    Blocks b;
    if (tokens || state) {
        b.outer = shape[0], b.rows = shape[1];
        b.outer_names = {state ? "sequence" : "batch"}, b.outer_sizes = {shape[0]};
        b.row_name = state ? "channels" : "tokens";
    } else {
        b.rows = shape[0], b.row_name = "channels";
    }
    if (tokens && shape.size() == 4) {
        b.middle = shape[2];
        b.middle_names = {"head"}, b.middle_sizes = {shape[2]};
    }
    const std::size_t first_feature = tokens || state ? shape.size() - 1 : 1;
    for (std::size_t i = first_feature; i < shape.size(); ++i) b.features *= shape[i];
    b.ranges = row_ranges(b.rows, tokens ? io::load_indices(call.convolution.cu_seqlens) : Bounds{});
    return b;
}

// A call whose operands have other last digits in f32.
class NoisyCall {
  public:
    NoisyCall(const io::LayerCall& of, std::uint64_t seed) : call(of), random_(seed) {
        ConvolutionInputs& c = call.convolution;
        NormInputs& n = call.norm;
        const double ulp = ulp_of_one(n.x);
        for (Tensor* t : {&n.x, &n.weight}) disturb(*t, ulp);
        for (Tensor* t : {&c.x, &c.weight, &c.bias, &c.initial_state, &n.z, &call.dfinal_state}) disturb(*t, 0x1p-23);
        disturb(call.dy, ulp_of_one(call.dy));
    }
    io::LayerCall call;

  private:
    // Of the last place, of a number near 1.
    static double ulp_of_one(const Tensor& t) {
        if (!t) return 0;
        return t.dtype() == DType::bf16 ? 0x1p-7 : t.dtype() == DType::f16 ? 0x1p-10 : 0x1p-23;
    }

    // Every element by up to half an ulp, or one of f32.
    void disturb(Tensor& t, double ulp) {
        if (!t) return;
        memory_.emplace_back(t.dtype() == DType::f64 ? DType::f64 : DType::f32,
                             std::vector<std::int64_t>(t.shape().begin(), t.shape().end()));
        const core::Tensor from = io::core_view(t);
        t = memory_.back().view();
        const core::Tensor to = io::core_view(t);
        std::uniform_real_distribution<double> factor(1 - ulp / 2, 1 + ulp / 2);
        const std::int64_t count = t.count();
        for (std::int64_t i = 0; i < count; ++i) core::store(to, i, core::load(from, i) * factor(random_));
    }

    std::mt19937_64 random_;
    std::vector<io::OwnedTensor> memory_;
};

void compute(const io::LayerCall& call, const std::map<std::string, Tensor>& results, int threads) {
    Execution execution;
    execution.engine = "reference";
    execution.threads = threads;
    io::execute(call, results, execution);
}

}  // namespace

std::vector<Finding> verify(const io::LayerCall& call, const std::map<std::string, Tensor>& results,
                            const Options& options) {
    io::check(call, results);
    std::vector<Case> cases;
    for (const std::string& name : io::output_names(call)) {
        const auto found = results.find(name);
        if (found == results.end()) continue;
        cases.push_back(make_case(name, found->second, io::output_shape(call, name), blocks_of(call, name)));
    }
    const auto progress = [&](int step, const char* what) {
        if (options.progress) options.progress(static_cast<double>(step) / (baseline_runs + 1), what);
    };
    std::map<std::string, Tensor> truths, runs;
    for (const Case& c : cases) truths[c.name] = c.exact.truth.view(), runs[c.name] = c.baseline.view();
    progress(0, "truth");
    compute(call, truths, options.threads);
    for (int run = 1; run <= baseline_runs; ++run) {
        progress(run, "low-precision baseline");
        compute(NoisyCall(call, static_cast<std::uint64_t>(run)).call, runs, options.threads);
        for (Case& c : cases) add_run(c, options.threads, Baseline::plain);
    }
    std::vector<Finding> findings;
    const io::Call none;
    const LostScores lost;
    for (const Case& c : cases) findings.push_back(evidence_of(c, {}, {none, lost, options}).finding);
    return findings;
}

}  // namespace softdelta::judge

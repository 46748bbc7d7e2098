#include "judge/verify.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "io/call/quantised.h"
#include "io/call/results.h"
#include "io/file/text.h"
#include "judge/verdict.h"

namespace softdelta::judge {

namespace {

class Progress {
  public:
    Progress(const Options& options, int steps) : options_(options), steps_(steps) {}
    void step(const char* what) {
        if (options_.progress) options_.progress(static_cast<double>(std::min(done_, steps_)) / steps_, what);
        ++done_;
    }

  private:
    const Options& options_;
    int steps_, done_ = 0;
};

std::vector<Case> make_cases(const io::Call& call, const std::map<std::string, Tensor>& results,
                             const LostScores& lost) {
    std::vector<Case> cases;
    for (const auto& [name, shape, symbols] : io::results_of(call)) {
        const auto found = results.find(name);
        if (found == results.end()) continue;
        cases.push_back(
            make_case(name, found->second, shape, blocks_of(*symbols, shape, call.packing), lost.marks(name)));
        if (lost.any()) cases.back().kept = Yardstick{io::OwnedTensor(DType::f64, shape), {}, {}};
    }
    for (Case& c : cases)  // the cases stay where they are from here on
        if (!c.lost.empty()) c.exact.rows = {&c.lost, false}, c.kept->rows = {&c.lost, true};
    return cases;
}

// The f64 truth, and that of scores rounded to f32.
void compute_truths(const io::Call& call, std::vector<Case>& cases, bool float_scores, int threads,
                    Progress& progress) {
    for (const bool forward : {true, false}) {
        std::map<std::string, Tensor> map;
        for (Case& c : cases)
            if (is_forward(c.name) == forward) map[c.name] = (float_scores ? *c.kept : c.exact).truth.view();
        if (map.empty()) continue;
        progress.step(forward ? "truth, forward" : "truth, backward");
        Execution execution;
        execution.engine = "reference";
        execution.threads = threads;
        execution.rounding.float_scores = float_scores;
        io::execute(call, map, execution);
    }
}

// Whether right kernels take shortcuts that show: sums of gates in f32; large scores in base 2, and from lse.
bool has_shortcuts(const io::Call& call) {
    constexpr double large = 1024;
    return call.is_attention ? largest_score(call) >= large : call.delta.g || call.delta.g_gamma;
}

// Whether the recurrence in f32 may explain what is wrong: it rounds a state as often as there are tokens, and errs by
// little more than chunks do. Of many tokens it would take long, and much memory.
bool may_go_by_token(const io::Call& call, const std::vector<Evidence>& evidence) {
    constexpr double most_excess = 64, most_numbers = 1 << 25;
    if (call.is_attention || call.delta.q.dtype() != DType::f32) return false;
    const auto size = [](const Tensor& t, std::size_t d) { return static_cast<double>(t.shape(d)); };
    return size(call.delta.k, 1) * size(call.delta.k, 3) * size(call.delta.v, 3) <= most_numbers &&
           std::all_of(evidence.begin(), evidence.end(), [](const Evidence& e) { return e.excess < most_excess; });
}

bool any_wrong(const std::vector<Evidence>& evidence) {
    return std::any_of(evidence.begin(), evidence.end(),
                       [](const Evidence& e) { return e.finding.verdict == Verdict::wrong; });
}

// Whether what is wrong is little beyond its limit, everywhere. Where a block hangs on one or two roundings, which a
// few runs may all have been lucky with, more runs tell.
bool hangs_on_luck(const std::vector<Evidence>& evidence) {
    constexpr double little = 3;
    return any_wrong(evidence) &&
           std::all_of(evidence.begin(), evidence.end(), [](const Evidence& e) { return e.excess < little; });
}

}  // namespace

std::vector<Evidence> examine(const io::Call& call, const std::map<std::string, Tensor>& results,
                              const Options& options) {
    io::check(call, results);
    for (const auto& [name, ratio] : options.limits)
        if (!std::isfinite(ratio) || ratio < 0)
            throw std::invalid_argument("the limit of " + io::quote(name) + " is " + std::to_string(ratio) +
                                        ", expected a finite number from 0");
    const io::ExpandedCall plain(call, DType::f64);
    const LostScores lost = find_lost_scores(plain.call, options.threads);
    std::vector<Case> cases = make_cases(call, results, lost);
    const bool forward = std::any_of(cases.begin(), cases.end(), [](const Case& c) { return is_forward(c.name); });
    const bool backward = std::any_of(cases.begin(), cases.end(), [](const Case& c) { return !is_forward(c.name); });
    const int runs = baseline_runs * (has_shortcuts(plain.call) ? 2 : 1) + (lost.any() ? 2 : 1);
    Progress progress(options, runs * (forward + backward) + 1);
    std::map<std::string, io::OwnedTensor> terms =
        backward ? make_term_tensors(call) : std::map<std::string, io::OwnedTensor>{};
    compute_truths(call, cases, false, options.threads, progress);
    if (lost.any()) compute_truths(call, cases, true, options.threads, progress);
    BaselineRun run{Baseline::plain, options.threads, [&](const char* step) { progress.step(step); }};
    measure_baseline(call, run, terms, cases);
    if (backward && terms.empty()) terms = terms_of_truths(call, cases);
    const auto judge_all = [&] {
        progress.step("verdict");
        std::vector<Evidence> evidence;
        for (const Case& c : cases)
            evidence.push_back(evidence_of(c, cancellation_floor(call, c, terms), {plain.call, lost, options}));
        return evidence;
    };
    std::vector<Evidence> evidence = judge_all();
    if (!any_wrong(evidence)) return evidence;
    const auto run_again = [&] {
        measure_baseline(call, run, terms, cases);
        evidence = judge_all();
    };
    std::vector<Baseline> kinds = {Baseline::plain};
    if (has_shortcuts(plain.call)) {  // as many right kernels do
        kinds = {Baseline::shortcuts};
        if (!call.is_attention) kinds.push_back(Baseline::natural_sums);
    }
    for (const Baseline kind : kinds) {
        if (kind == Baseline::plain || !any_wrong(evidence)) continue;
        run.kind = kind;
        run_again();
    }
    if (hangs_on_luck(evidence)) {
        run.first = baseline_runs + 1, run.last = more_baseline_runs;
        for (const Baseline kind : kinds) {
            if (!any_wrong(evidence)) break;
            run.kind = kind;
            run_again();
        }
        run.first = 1, run.last = baseline_runs;
        for (const Baseline kind : {Baseline::chunks_of_128, Baseline::chunks_of_96}) {
            if (!any_wrong(evidence) || kinds.size() == 1) break;  // no sums of gates
            run.kind = kind;
            run_again();
        }
    }
    if (!any_wrong(evidence) || !may_go_by_token(plain.call, evidence)) return evidence;
    run.kind = Baseline::by_token, run.first = 1, run.last = baseline_runs;
    run_again();
    return evidence;
}

Verdict summarise(const std::vector<Finding>& findings) {
    Verdict worst = Verdict::right;
    for (const Finding& f : findings) {
        if (f.verdict == Verdict::wrong) return Verdict::wrong;
        if (f.verdict == Verdict::cannot_be_judged) worst = Verdict::cannot_be_judged;
    }
    return worst;
}

std::vector<Finding> verify(const io::Call& call, const std::map<std::string, Tensor>& results,
                            const Options& options) {
    std::vector<Finding> findings;
    for (Evidence& evidence : examine(call, results, options)) findings.push_back(std::move(evidence.finding));
    return findings;
}

}  // namespace softdelta::judge

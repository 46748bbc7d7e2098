#include "judge/verdict.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "io/file/text.h"

namespace softdelta::judge {

namespace {

// A limit above this part of the result's RMS judges nothing.
constexpr double judges = 0.5;

std::string print(const char* format, double a, double b) {
    char text[200];
    std::snprintf(text, sizeof text, format, a, b);
    return text;
}

std::vector<std::int64_t> unflatten(std::int64_t flat, const std::vector<std::int64_t>& shape) {
    std::vector<std::int64_t> index(shape.size());
    for (std::size_t i = shape.size(); i-- > 0; flat /= std::max<std::int64_t>(shape[i], 1))
        index[i] = shape[i] > 0 ? flat % shape[i] : 0;  // a tensor without elements has no index
    return index;
}

double ratio(double error, double truth) {
    return error == 0 ? 0 : truth == 0 ? HUGE_VAL : error / truth;
}

double sum(const std::vector<double>& x) {
    return std::accumulate(x.begin(), x.end(), 0.0);
}

// A result by one yardstick: RMS numbers of each block, and of the whole.
struct Measured {
    double error = 0, truth = 0, limit = 0, shortcut_limit = 0;  // of the whole
    std::vector<double> elements, errors, truths, limits;
    std::vector<double> shortcut_limits;  // with shortcuts
    Extremes extremes;

    // Of nothing nothing can be wrong, and infinities are right or not whatever stands beside them.
    bool judges_whole(double by) const { return by <= judges * truth || sum(elements) == 0 || extremes.infinities > 0; }
    // Next to the whole a block may be small: what counts is whether a wrong one would show.
    bool judges_block(std::size_t i, double by) const { return by <= judges * std::max(truths[i], truth); }
};

Measured measure(const Case& c, const Yardstick& by, int threads) {
    Measured m;
    const BlockErrors actual = measure_errors(c.blocks, by.rows, c.result, by.truth.view(), threads, &m.extremes);
    const double n = sum(actual.elements);
    m.error = root_mean(sum(actual.squared_error), n), m.truth = root_mean(sum(actual.squared_truth), n);
    m.limit = m.shortcut_limit = whole_limit(c, by.plain(), actual);
    m.limits = m.shortcut_limits = block_limits(c, by.plain(), actual);
    m.elements = actual.elements;
    for (std::size_t i = 0; i < m.elements.size(); ++i) {
        m.errors.push_back(root_mean(actual.squared_error[i], m.elements[i]));
        m.truths.push_back(root_mean(actual.squared_truth[i], m.elements[i]));
    }
    for (const auto& [kind, errors] : by.errors) {
        m.shortcut_limit = std::max(m.shortcut_limit, whole_limit(c, errors, actual));
        const std::vector<double> limits = block_limits(c, errors, actual);
        for (std::size_t i = 0; i < limits.size(); ++i)
            m.shortcut_limits[i] = std::max(m.shortcut_limits[i], limits[i]);
    }
    return m;
}

enum class Outcome { right, shortcuts, cancelled, unjudged, wrong };

// One block or the whole: its error, its limits, and how far f32 may lose digits.
struct Standing {
    double error, limit, shortcut_limit, floor;
    bool judged, shortcut_judged;  // whether the limits judge anything
};

Outcome judge_by(const Standing& s) {
    if (s.error <= s.limit) return s.judged ? Outcome::right : Outcome::unjudged;
    if (s.error <= s.floor) return Outcome::cancelled;
    if (s.error <= s.shortcut_limit) return s.shortcut_judged ? Outcome::shortcuts : Outcome::unjudged;
    return Outcome::wrong;
}

// The truth may be that of what f32 keeps of the scores, or the exact one: kernels that keep more are right too.
Outcome judge_by_kept(Outcome by_exact, double exact_error, const Standing& kept) {
    if (by_exact == Outcome::right) return by_exact;
    if (std::min(exact_error, kept.error) <= kept.limit) return kept.judged ? Outcome::right : Outcome::unjudged;
    return Outcome::wrong;
}

struct Tally {
    std::int64_t right = 0, shortcuts = 0, cancelled = 0, unjudged = 0, wrong = 0, worst = -1;
    double worst_excess = 0;

    void add(Outcome outcome, std::int64_t block, double excess) {
        ++(outcome == Outcome::right       ? right
           : outcome == Outcome::shortcuts ? shortcuts
           : outcome == Outcome::cancelled ? cancelled
           : outcome == Outcome::unjudged  ? unjudged
                                           : wrong);
        if (outcome != Outcome::wrong || excess <= worst_excess) return;
        worst = block, worst_excess = excess;
    }
};

class Judgement {
  public:
    Judgement(const Case& c, const std::optional<Floor>& floor, const Circumstances& known)
        : c_(c), floor_(floor), known_(known), exact_(measure(c, c.exact, known.options.threads)) {
        if (c.kept) kept_ = measure(c, *c.kept, known.options.threads);
        const auto given = known.options.limits.find(c.name);
        is_given_ = given != known.options.limits.end();
        if (is_given_) exact_.limit = exact_.shortcut_limit = given->second * exact_.truth;
        describe();
        judge_finite();
        judge_blocks();
        judge_whole();
        if (!c.lost.empty()) judge_lost_rows();
        conclude();
    }

    Finding finding;

    // The largest error of a block or of the whole, by what it may be.
    double excess() const {
        if (finding.verdict != Verdict::wrong) return 0;
        if (is_given_ || exact_.extremes.mismatches > 0) return HUGE_VAL;
        double most = exact_.error / std::max(exact_.shortcut_limit, floor_ ? floor_->whole : 0);
        const std::vector<double> limits = allowed();
        for (std::size_t i = 0; i < limits.size(); ++i)
            if (limits[i] > 0) most = std::max(most, exact_.errors[i] / limits[i]);
        return most;
    }

    // RMSE that a right kernel may have in each block. Of blocks with lost rows nothing can be said.
    std::vector<double> allowed() const {
        std::vector<double> allowed = exact_.shortcut_limits;
        for (std::size_t i = 0; i < allowed.size(); ++i) {
            if (floor_) allowed[i] = std::max(allowed[i], floor_->blocks[i]);
            if (kept_ && (c_.lost.empty() ? !exact_.judges_block(i, exact_.limits[i]) : kept_->elements[i] > 0))
                allowed[i] = HUGE_VAL;
        }
        return allowed;
    }

  private:
    void describe() {
        Finding& f = finding;
        f.name = c_.name, f.shape = c_.exact.truth.shape(), f.dtype = c_.result.dtype();
        f.largest_error = exact_.extremes.largest_error;
        f.largest_error_at = unflatten(exact_.extremes.largest_error_at, f.shape);
        f.ratio = ratio(exact_.error, exact_.truth);
        f.limit = ratio(exact_.limit, exact_.truth);
        if (!kept_ || (!c_.lost.empty() && sum(exact_.elements) > 0)) return;
        if (c_.lost.empty() && exact_.judges_whole(exact_.limit) && exact_.error <= exact_.limit) return;
        if (!kept_->judges_whole(kept_->limit)) return;
        f.limit = ratio(kept_->limit, kept_->truth);
        if (c_.lost.empty() && exact_.error <= kept_->error) return;
        f.ratio = ratio(kept_->error, kept_->truth);  // it is nearer to what f32 keeps of the scores
        f.largest_error = kept_->extremes.largest_error;
        f.largest_error_at = unflatten(kept_->extremes.largest_error_at, f.shape);
    }

    void judge_finite() {
        Extremes all = exact_.extremes;
        if (kept_ && !c_.lost.empty() && kept_->extremes.mismatches > 0) {
            const Extremes& lost = kept_->extremes;
            all.first_mismatch =
                all.mismatches == 0 ? lost.first_mismatch : std::min(all.first_mismatch, lost.first_mismatch);
            all.mismatches += lost.mismatches, all.true_nans += lost.true_nans;
        }
        if (all.mismatches > 0)
            fail("NaN or infinite at " + io::shape_text(unflatten(all.first_mismatch, finding.shape)) +
                 ", the first of " + std::to_string(all.mismatches) + " elements" +
                 (all.true_nans > 0 ? "; so is the truth there" : ""));
    }

    Outcome judge_block(std::size_t i) const {
        const Standing s{exact_.errors[i],
                         exact_.limits[i],
                         exact_.shortcut_limits[i],
                         floor_ ? floor_->blocks[i] : 0,
                         !known_.lost.any() || exact_.judges_block(i, exact_.limits[i]),
                         exact_.judges_block(i, exact_.shortcut_limits[i])};
        const Outcome outcome = judge_by(s);
        if (!kept_ || !c_.lost.empty()) return outcome;
        return judge_by_kept(outcome, s.error, standing_of_kept(i));
    }

    Standing standing_of_kept(std::size_t i) const {
        return {kept_->errors[i], kept_->limits[i], 0, 0, kept_->judges_block(i, kept_->limits[i]), false};
    }

    void judge_blocks() {
        for (std::size_t i = 0; !is_given_ && i < exact_.elements.size(); ++i)
            if (exact_.elements[i] > 0)
                blocks_.add(judge_block(i), static_cast<std::int64_t>(i), exact_.errors[i] / exact_.limits[i]);
        if (blocks_.wrong == 0) return;
        const auto w = static_cast<std::size_t>(blocks_.worst);
        fail(std::to_string(blocks_.wrong) + " of " + std::to_string(c_.blocks.count()) + " blocks; worst " +
             c_.blocks.name(blocks_.worst) +
             print(": ratio %.2g, limit %.2g", ratio(exact_.errors[w], exact_.truths[w]),
                   ratio(exact_.shortcut_limits[w], exact_.truths[w])));
    }

    void judge_whole() {
        const bool floored = floor_ && !is_given_;
        whole_ = judge_by({exact_.error, exact_.limit, exact_.shortcut_limit, floored ? floor_->whole : 0,
                           exact_.judges_whole(exact_.limit), exact_.judges_whole(exact_.shortcut_limit)});
        if (kept_ && c_.lost.empty() && !is_given_)
            whole_ = judge_by_kept(whole_, exact_.error,
                                   {kept_->error, kept_->limit, 0, 0, kept_->judges_whole(kept_->limit), false});
        if (whole_ == Outcome::wrong && blocks_.wrong == 0)
            fail(is_given_ ? "beyond the limit that was given" : "each block is within its limit, the whole is not");
    }

    // Rows of o, lse and dq whose scores f32 cannot keep, block by block.
    void judge_lost_rows() {
        std::vector<char> bounded_only(c_.lost.size());
        std::int64_t wrong = 0, bounded = 0, lost = 0;
        for (std::int64_t o = 0; o < c_.blocks.outer; ++o)
            for (std::int64_t r = 0; r < c_.blocks.range_count(); ++r)
                c_.blocks.for_each_run(o, r, [&](std::int64_t block, std::int64_t first, std::int64_t) {
                    const auto row = static_cast<std::size_t>(first / c_.blocks.features);
                    const Standing s = standing_of_kept(static_cast<std::size_t>(block));
                    lost += c_.lost[row];
                    bounded_only[row] = c_.lost[row] != 0 && (is_given_ || !s.judged);
                    bounded += bounded_only[row];
                });
        for (std::size_t i = 0; i < kept_->elements.size(); ++i)
            wrong += kept_->elements[i] > 0 && standing_of_kept(i).judged && !is_given_ &&
                     judge_by_kept(Outcome::wrong, error_of_lost(i), standing_of_kept(i)) == Outcome::wrong;
        const std::string rows = std::to_string(lost) + " rows whose scores f32 cannot keep";
        if (wrong > 0)
            fail("of " + rows + ", those of " + std::to_string(wrong) +
                 " blocks are neither what f32 keeps of them nor the truth");
        const std::int64_t outside =
            bounded > 0 ? RowBounds(known_.call).first_outside(c_.name, c_.result, bounded_only) : -1;
        if (outside >= 0)
            fail("beyond every bound at " + io::shape_text(unflatten(outside, finding.shape)) + ", in one of " + rows);
        if (finding.verdict != Verdict::wrong)
            note(rows + " are set apart" +
                 (bounded > 0 ? ", " + std::to_string(bounded) + " of them judged for being finite and bounded only"
                              : ""));
    }

    // The error against the exact truth in a block's lost rows.
    double error_of_lost(std::size_t block) const {
        if (lost_errors_.empty()) {
            const BlockErrors errors =
                measure_errors(c_.blocks, {&c_.lost, true}, c_.result, c_.exact.truth.view(), known_.options.threads);
            for (std::size_t i = 0; i < errors.elements.size(); ++i)
                lost_errors_.push_back(root_mean(errors.squared_error[i], errors.elements[i]));
        }
        return lost_errors_[block];
    }

    void conclude() {
        if (finding.verdict == Verdict::wrong) return;
        if (whole_ == Outcome::unjudged || blocks_.unjudged > 0) {
            finding.verdict = Verdict::cannot_be_judged;
            explain_unjudged();
        } else if (whole_ == Outcome::shortcuts || blocks_.shortcuts > 0) {
            finding.verdict = Verdict::digits_lost;
            note(shortcuts_taken() + ": " +
                 (blocks_.shortcuts > 0
                      ? std::to_string(blocks_.shortcuts) + " of " + std::to_string(c_.blocks.count()) + " blocks are"
                      : std::string("the whole is")) +
                 " beyond the limit without these shortcuts, and within that of kernels that take them");
        } else if (whole_ == Outcome::cancelled || blocks_.cancelled > 0) {
            finding.verdict = Verdict::digits_lost;
            note(print(
                "digits lost to cancellation: the error, %.2g, is rounding of the terms that it is a sum of, %.2g",
                exact_.error, floor_->terms > 0 ? floor_->terms : exact_.truth));
        }
    }

    void explain_unjudged() {
        const bool whole = whole_ == Outcome::unjudged;
        std::string why = (whole ? ""
                                 : std::to_string(blocks_.unjudged) + " of " + std::to_string(c_.blocks.count()) +
                                       " blocks cannot be judged: ");
        if (known_.lost.any())
            why += std::to_string(known_.lost.count) +
                   print(" rows have scores of up to %.2g, which f32 cannot keep: their part is left to rounding",
                         known_.lost.largest, 0);
        else if (is_given_)
            why += "a limit above 0.5 judges nothing";
        else if (exact_.truth == 0)
            why += "the truth is 0 everywhere, which tells nothing of a kernel";
        else
            why += print("rounding alone may be %.2g of the result, whose RMS is %.2g", finding.limit, exact_.truth);
        note(why);
    }

    std::string shortcuts_taken() const {
        if (known_.call.is_attention) return "large scores in base 2, or probabilities from lse in f32";
        if (c_.exact.errors.count(Baseline::by_token) > 0) return "the state rounded to f32 at every token";
        return "gates summed in f32, or near rows multiplied in the storage type";
    }

    void fail(const std::string& text) {
        finding.verdict = Verdict::wrong;
        note(text);
    }
    void note(const std::string& text) { finding.note += (finding.note.empty() ? "" : "; ") + text; }

    const Case& c_;
    const std::optional<Floor>& floor_;
    const Circumstances& known_;
    Measured exact_;
    std::optional<Measured> kept_;
    mutable std::vector<double> lost_errors_;
    bool is_given_ = false;
    Tally blocks_;
    Outcome whole_ = Outcome::right;
};

}  // namespace

Evidence evidence_of(const Case& c, const std::optional<Floor>& floor, const Circumstances& known) {
    const Judgement judgement(c, floor, known);
    Evidence evidence{judgement.finding, c.blocks, c.exact.truth, judgement.allowed(), judgement.excess(), {}};
    const auto shortcuts = c.exact.errors.find(Baseline::shortcuts);
    const BaselineErrors& baseline = shortcuts != c.exact.errors.end() ? shortcuts->second : c.exact.plain();
    for (std::int64_t b = 0; b < c.blocks.count(); ++b)
        evidence.independent.push_back(
            baseline.blocks[static_cast<std::size_t>(b)].independent(static_cast<double>(c.blocks.elements(b))));
    return evidence;
}

}  // namespace softdelta::judge

#include "diagnose/evidence/observation.h"

#include <algorithm>
#include <cmath>

namespace softdelta::diagnose {

namespace {

using Run = Eigen::Map<const Eigen::ArrayXd>;

struct Sums {
    std::vector<double> squares;
    std::vector<std::int64_t> mismatches;  // NaN or infinity against something else
};

// A number as a type holds it that has none from `infinite` on.
double stored(double x, double infinite) {
    return std::abs(x) >= infinite ? std::copysign(HUGE_VAL, x) : x;
}

// Blocks of a − b.
Sums subtract(const judge::Blocks& blocks, const Dense& a, const Dense* b, double infinite = HUGE_VAL) {
    const auto size = static_cast<std::size_t>(blocks.count());
    Sums sums{std::vector<double>(size), std::vector<std::int64_t>(size)};
    for (std::int64_t o = 0; o < blocks.outer; ++o)
        for (std::int64_t r = 0; r < blocks.range_count(); ++r)
            blocks.for_each_run(o, r, [&](std::int64_t block, std::int64_t first, std::int64_t n) {
                if (b != nullptr && infinite == HUGE_VAL) {
                    const double square = (Run(&a[first], n) - Run(&(*b)[first], n)).square().sum();
                    if (std::isfinite(square)) {
                        sums.squares[static_cast<std::size_t>(block)] += square;
                        return;
                    }
                }
                for (std::int64_t i = first; i < first + n; ++i) {
                    const double x = stored(a[i], infinite), y = b != nullptr ? stored((*b)[i], infinite) : 0,
                                 e = x - y;
                    if (std::isfinite(e))
                        sums.squares[static_cast<std::size_t>(block)] += e * e;
                    else if (b != nullptr && x != y && !(std::isnan(x) && std::isnan(y)))
                        ++sums.mismatches[static_cast<std::size_t>(block)];
                }
            });
    return sums;
}

bool is_within(Scope scope, const std::string& result) {
    const bool forward = result == "o" || result == "lse" || result == "final_state";
    return scope != (forward ? Scope::backward : Scope::forward);
}

}  // namespace

std::string Distance::worst_result() const {
    const auto less = [](const auto& a, const auto& b) { return a.second < b.second; };
    const auto worst = std::max_element(results.begin(), results.end(), less);
    return worst == results.end() ? "" : worst->first;
}

// Rounding costs what the judge allows; where the dump's numbers are larger than the truth, as much more.
Observation::Observation(const std::vector<judge::Evidence>& evidence, const std::map<std::string, Tensor>& actual) {
    std::map<std::string, const std::vector<double>*> independent;  // in the order of results
    for (const judge::Evidence& e : evidence) {
        const std::string& name = e.finding.name;
        actual_.emplace(name, Dense(actual.at(name)));
        truth_.emplace(name, Dense(e.truth.view()));
        const Sums truth = subtract(e.blocks, truth_.at(name), nullptr);
        const Sums observed = subtract(e.blocks, actual_.at(name), nullptr);
        double allowed = 0, square = 0;
        for (std::int64_t b = 0; b < e.blocks.count(); ++b) {
            const auto i = static_cast<std::size_t>(b);
            if (!std::isfinite(e.allowed[i])) continue;
            allowed += e.allowed[i] * e.allowed[i] * static_cast<double>(e.blocks.elements(b));
            square += truth.squares[i];
        }
        const double relative = square > 0 ? std::sqrt(allowed / square) : 0;
        constexpr double f16_infinite = 65520;
        Noise noise{e.blocks, e.allowed, actual.at(name).dtype() == DType::f16 ? f16_infinite : HUGE_VAL};
        for (std::int64_t b = 0; b < e.blocks.count(); ++b) {
            const auto i = static_cast<std::size_t>(b);
            const double n = std::max(static_cast<double>(e.blocks.elements(b)), 1.0);
            noise.of_block[i] = std::max(e.allowed[i], relative * std::sqrt(observed.squares[i] / n));
        }
        independent.emplace(name, &e.independent);
        noise_.emplace(name, std::move(noise));
    }
    for (const auto& [name, counts] : independent)
        independent_.insert(independent_.end(), counts->begin(), counts->end());
}

double Observation::scaled_part() const {
    constexpr double enough = 16;  // elements: of few, some factor always explains much
    double explained = 0, all = 0;
    for (const auto& [name, noise] : noise_) {
        const Dense &actual = actual_.at(name), &truth = truth_.at(name);
        const auto size = static_cast<std::size_t>(noise.blocks.count());
        std::vector<double> square(size), product(size), error(size);
        for (std::int64_t o = 0; o < noise.blocks.outer; ++o)
            for (std::int64_t r = 0; r < noise.blocks.range_count(); ++r)
                noise.blocks.for_each_run(o, r, [&](std::int64_t block, std::int64_t first, std::int64_t n) {
                    const auto b = static_cast<std::size_t>(block);
                    for (std::int64_t i = first; i < first + n; ++i) {
                        const double t = truth[i], e = actual[i] - t;
                        if (!std::isfinite(e)) continue;
                        square[b] += t * t, product[b] += e * t, error[b] += e * e;
                    }
                });
        for (std::size_t b = 0; b < size; ++b) {
            const auto n = static_cast<double>(noise.blocks.elements(static_cast<std::int64_t>(b)));
            const double allowed = n * noise.of_block[b] * noise.of_block[b];
            if (n < enough || !(error[b] > allowed) || square[b] == 0) continue;
            explained += product[b] * product[b] / square[b] / allowed;
            all += error[b] / allowed;
        }
    }
    return all > 0 ? explained / all : 0;
}

// Σ over blocks of what each says of a common multiple; errors of a block are as large as those that it has, and only
// so many of them independent.
Fit Observation::fit(const Results& mistaken, Scope scope) const {
    double products = 0, effects = 0, errors = 0, variance = 0;
    std::size_t next = 0;
    for (const auto& [name, noise] : noise_) {
        const Dense &actual = actual_.at(name), &truth = truth_.at(name);
        const Dense& changed = is_within(scope, name) ? mistaken.at(name) : truth;
        const auto size = static_cast<std::size_t>(noise.blocks.count());
        std::vector<double> product(size), effect(size), error(size);
        for (std::int64_t o = 0; o < noise.blocks.outer; ++o)
            for (std::int64_t r = 0; r < noise.blocks.range_count(); ++r)
                noise.blocks.for_each_run(o, r, [&](std::int64_t block, std::int64_t first, std::int64_t n) {
                    const auto b = static_cast<std::size_t>(block);
                    const auto errors_of = Run(&actual[first], n) - Run(&truth[first], n),
                               changes = Run(&changed[first], n) - Run(&truth[first], n);
                    const double ee = errors_of.square().sum(), dd = changes.square().sum();
                    if (std::isfinite(ee) && std::isfinite(dd)) {
                        product[b] += (errors_of * changes).sum(), effect[b] += dd, error[b] += ee;
                        return;
                    }
                    for (std::int64_t i = first; i < first + n; ++i) {
                        const double e = actual[i] - truth[i], d = changed[i] - truth[i];
                        if (!std::isfinite(e) || !std::isfinite(d)) continue;
                        product[b] += e * d, effect[b] += d * d, error[b] += e * e;
                    }
                });
        for (std::size_t b = 0; b < size; ++b) {
            const double independent = independent_[next++], unit = noise.of_block[b] * noise.of_block[b];
            if (!(unit > 0) || !std::isfinite(unit) || !(independent > 0)) continue;
            products += product[b] / unit, effects += effect[b] / unit, errors += error[b] / unit;
            variance += effect[b] / unit * (error[b] / unit) / independent;
        }
    }
    if (!(effects > 0) || !(errors > 0) || !(variance > 0)) return {};
    return {products / effects, std::abs(products) / std::sqrt(effects * errors),
            std::abs(products) / std::sqrt(variance)};
}

bool Observation::is_finite_less_often(const Results& results) const {
    for (const auto& [name, truth] : truth_) {
        const Dense& result = results.at(name);
        for (Index i = 0; i < truth.count(); ++i)
            if (std::isfinite(truth[i]) && !std::isfinite(result[i])) return true;
    }
    return false;
}

Results Observation::limit(Results mistaken, Scope scope) const {
    for (const auto& [name, truth] : truth_)
        if (!is_within(scope, name)) mistaken.at(name) = truth;
    return mistaken;
}

Results Observation::add(const Results& one, const Results& other) const {
    Results sum;
    for (const auto& [name, truth] : truth_) {
        const Dense &a = one.at(name), &b = other.at(name);
        Dense& to = sum.emplace(name, Dense(truth.shape())).first->second;
        for (Index i = 0; i < truth.count(); ++i) to[i] = a[i] + (b[i] - truth[i]);
    }
    return sum;
}

Distance Observation::between(const Results& mistaken, Scope scope, const Results& other) const {
    constexpr double mismatch_cost = 1e4;  // of a block full of NaN, relative to noise
    Distance distance;
    for (const auto& [name, noise] : noise_) {
        const Dense& result = (is_within(scope, name) ? mistaken : truth_).at(name);
        const Sums sums = subtract(noise.blocks, result, &other.at(name), noise.infinite);
        double squares = 0, allowed = 0;
        for (std::int64_t block = 0; block < noise.blocks.count(); ++block) {
            const auto i = static_cast<std::size_t>(block);
            const auto n = static_cast<double>(noise.blocks.elements(block));
            distance.blocks.push_back(0);
            if (n == 0 || !std::isfinite(noise.of_block[i])) continue;
            const double variance = noise.of_block[i] * noise.of_block[i];
            const double lost = static_cast<double>(sums.mismatches[i]) / n * mismatch_cost;
            const double ratio = sums.squares[i] / n / variance + lost * lost;
            distance.cost += std::log1p(ratio);
            distance.blocks.back() = std::sqrt(ratio);
            distance.worst_block = std::max(distance.worst_block, distance.blocks.back());
            double& worst = distance.worst_blocks[name];
            worst = std::max(worst, distance.blocks.back());
            squares += ratio * n * variance;
            allowed += variance * n;
        }
        distance.results[name] = allowed > 0 ? std::sqrt(squares / allowed) : 0;
    }
    return distance;
}

}  // namespace softdelta::diagnose

#include "diagnose/evidence/rank.h"

#include <algorithm>
#include <mutex>

#include "core/parallel.h"
#include "diagnose/replay/mistaken.h"
#include "diagnose/sampling/select.h"

namespace softdelta::diagnose {

namespace {

constexpr double seen = 1;           // an effect below this, relative to noise, does not show
constexpr double small = 2;          // nor does what is left below this,
constexpr double small_part = 0.01;  // or below this part of the error before: a mistake may amplify rounding
constexpr double indistinct = 0.2;   // two mistakes whose results differ by less are told apart by luck only
constexpr std::size_t seeds = 4;     // single mistakes that pairs are made with
constexpr double pair_share = 2;     // of the work that single mistakes may take

constexpr double loud = 4;         // noise is not larger than this, relative to what rounding may cost
constexpr double most_part = 0.5;  // of the squared error, which a mistake must take away

// What is left is rounding.
bool fits(const Distance& before, const Distance& left) {
    for (std::size_t i = 0; i < left.blocks.size(); ++i)
        if (!(left.blocks[i] < std::max(small, small_part * before.blocks[i]))) return false;
    return true;
}

// The logarithm of how much likelier a dump is with a mistake than without, when errors are normal and their size in
// each block is fitted to either: Σ n/2·log(before² / left²), n independent errors a block. Noise of any size is as
// likely without as with a mistake that does not have its pattern.
double compare_with_noise(const std::vector<double>& independent, const Distance& before, const Distance& left) {
    constexpr double rounding = 0.1;  // squared: what is left below it says nothing
    double sum = 0;
    for (std::size_t i = 0; i < left.blocks.size(); ++i) {
        const double b = before.blocks[i], l = left.blocks[i];
        sum += independent[i] / 2 * std::log((b * b + rounding) / (l * l + rounding));
    }
    return sum;
}

// Far likelier than noise, also as the best of so many, if noise can be as loud; and most of the error in the wrong
// blocks goes away.
bool improves(std::size_t tried, double evidence, const Distance& before, const Distance& left) {
    constexpr double far = 3;  // e³ = 20 times
    double had = 0, has = 0;
    for (std::size_t i = 0; i < left.blocks.size(); ++i) {
        if (before.blocks[i] <= 1) continue;
        had += before.blocks[i] * before.blocks[i];
        has += left.blocks[i] * left.blocks[i];
    }
    const bool likelier = before.worst_block >= loud || evidence > std::log(static_cast<double>(tried)) + far;
    return likelier && has < most_part * had;
}

// Candidates tried on all threads.
class Trial {
  public:
    Trial(const MistakenCall& call, const Observation& observation, const Distance& before, int threads,
          const Progress& progress)
        : call_(call), observation_(observation), before_(before), threads_(threads), progress_(progress) {}

    std::vector<Candidate> run(const std::vector<std::vector<const Entry*>>& sets, const char* step) const {
        std::vector<Candidate> candidates(sets.size());
        std::mutex showing;
        std::size_t done = 0;
        core::parallel_units(threads_, static_cast<Index>(sets.size()), [&] {
            return [&](Index unit) {
                const auto i = static_cast<std::size_t>(unit);
                const Results results = call_.run(sets[i]);
                Candidate& c = candidates[i];
                c.entries = sets[i];
                c.effect = observation_.between(results, Scope::both, observation_.truth()).worst_block;
                choose_scope(results, c);
                c.evidence = compare_with_noise(observation_.independent(), before_, c.left);
                c.improves = improves(sets.size(), c.evidence, before_, c.left);
                c.explains = c.improves && fits(before_, c.left);
                const std::lock_guard lock(showing);
                if (progress_) progress_(static_cast<double>(++done) / static_cast<double>(sets.size()), step);
            };
        });
        return candidates;
    }

    // Both passes, unless the mistake in one of them alone is much nearer to the dump.
    void choose_scope(const Results& results, Candidate& c) const {
        constexpr double much = 0.7;
        c.left = observation_.to(results, Scope::both);
        for (const Scope scope : {Scope::forward, Scope::backward}) {
            if (fits(before_, c.left)) break;
            Distance left = observation_.to(results, scope);
            if (left.cost > much * c.left.cost || !(left.cost < before_.cost)) continue;
            c.left = std::move(left);
            c.scope = scope;
        }
    }

    // Finds the candidates whose results are those of the best.
    void find_equal(std::vector<Candidate>& candidates) const {
        constexpr double near = 0.05;  // of the cost
        if (candidates.empty()) return;
        Candidate& best = candidates.front();
        const Results results = observation_.limit(call_.run(best.entries), best.scope);
        for (std::size_t i = 1; i < candidates.size(); ++i) {
            const Candidate& other = candidates[i];
            if (other.left.cost > best.left.cost * (1 + near) + near) break;
            if (other.scope != best.scope) continue;
            if (observation_.between(call_.run(other.entries), best.scope, results).worst_block < indistinct)
                best.equal.push_back(other.entries.back());
        }
    }

  private:
    const MistakenCall& call_;
    const Observation& observation_;
    const Distance& before_;
    int threads_;
    const Progress& progress_;
};

void sort(std::vector<Candidate>& candidates) {
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.left.cost < b.left.cost; });
}

// Each of the best mistakes with every other, the most likely pairs first.
std::vector<std::vector<const Entry*>> likely_pairs(const std::vector<Candidate>& singles) {
    std::vector<std::vector<const Entry*>> pairs;
    for (std::size_t sum = 1; sum < 2 * singles.size(); ++sum)
        for (std::size_t a = 0; a < std::min(seeds, singles.size()) && 2 * a < sum; ++a)
            if (const std::size_t b = sum - a; b < singles.size())
                pairs.push_back({singles[a].entries.front(), singles[b].entries.front()});
    return pairs;
}

}  // namespace

std::vector<const Entry*> Ranking::named() const {
    std::vector<const Entry*> names;
    const auto add = [&](const std::vector<Candidate>& candidates) {
        for (const Candidate& c : candidates)
            for (const Entry* entry : c.entries)
                if (std::find(names.begin(), names.end(), entry) == names.end()) names.push_back(entry);
    };
    if (!explained()) add(pairs);
    add(singles);
    return names;
}

Ranking rank(const io::Call& call, const Observation& observation, double work, int threads, const Progress& progress) {
    Ranking ranking;
    ranking.before = observation.to(observation.truth(), Scope::both);
    std::vector<std::vector<const Entry*>> sets;
    for (const Entry& entry : entries_of(call))
        if (entry.applies == nullptr || entry.applies(call))
            sets.push_back({&entry});
        else
            ranking.no_effect.push_back(&entry);

    const core::Work all_sets{0, 2 * work_of(call) * static_cast<double>(sets.size())};
    const int useful = core::useful_threads(threads, all_sets);
    const MistakenCall mistaken(call, useful);
    const Trial trial(mistaken, observation, ranking.before, useful, progress);
    for (Candidate& c : trial.run(sets, "mistakes"))
        if (c.effect == 0)
            ranking.no_effect.push_back(c.entries.front());
        else if (c.effect < seen)
            ranking.within_rounding.push_back(c.entries.front());
        else
            ranking.singles.push_back(std::move(c));
    sort(ranking.singles);
    trial.find_equal(ranking.singles);
    ranking.noise =
        ranking.before.worst_block < loud && observation.scaled_part() < most_part &&
        std::none_of(ranking.singles.begin(), ranking.singles.end(), [](const Candidate& c) { return c.improves; });
    if (ranking.singles.empty() || ranking.explained() || ranking.noise) return ranking;

    sets = likely_pairs(ranking.singles);
    const double most = 1 + pair_share * work / work_of(call);
    if (static_cast<double>(sets.size()) > most) {
        ranking.pairs_left_out = sets.size() - static_cast<std::size_t>(most);
        sets.resize(static_cast<std::size_t>(most));
    }
    ranking.pairs = trial.run(sets, "pairs of mistakes");
    sort(ranking.pairs);
    return ranking;
}

}  // namespace softdelta::diagnose

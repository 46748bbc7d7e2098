#include "diagnose/evidence/rank.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <set>

#include "core/parallel.h"
#include "diagnose/catalogue/places.h"
#include "diagnose/replay/changer.h"
#include "diagnose/replay/mistaken.h"
#include "diagnose/sampling/select.h"

namespace softdelta::diagnose {

namespace {

constexpr double seen = 1;            // an effect below this, relative to noise, does not show
constexpr double usual = 0.5;         // rounding rarely leaves more: something else may explain it better
constexpr double small = 2;           // nor does what is left below this,
constexpr double small_part = 0.01;   // or below this part of the error before: a mistake may amplify rounding
constexpr double indistinct = 0.2;    // two mistakes whose results differ by less are told apart by luck only
constexpr std::size_t seeds = 4;      // single mistakes that pairs are made with
constexpr double change_share = 0.3;  // of the work that single mistakes may take, those with names not counted
constexpr double pair_share = 0.3;

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

// The error is as large as what the mistake changes, or as what another factor of the part would.
bool is_of_size(const Candidate& c) {
    const bool any_factor = c.entries.front()->point.change == Change::missing;
    return any_factor ? std::abs(c.fit.times) > 0.2 && std::abs(c.fit.times) < 10
                      : c.fit.times > 0.7 && c.fit.times < 1.4;
}

// Hardly anything but rounding is left, more than 3 σ beyond noise if only this one had been tried.
bool has_pattern(const Distance& before, const Candidate& c) {
    constexpr double nearly_all = 0.1, sigmas = 3;
    double had = 0, has = 0;
    for (std::size_t i = 0; i < before.blocks.size(); ++i) {
        if (before.blocks[i] <= 1) continue;
        had += before.blocks[i] * before.blocks[i];
        has += c.left.blocks[i] * c.left.blocks[i];
    }
    return c.left.worst_block < seen && has < nearly_all * had &&
           std::max(c.fit.sigma, std::sqrt(2 * std::max(c.evidence, 0.0))) > sigmas;
}

// Two factors of one result: some product of them comes near any number.
bool are_one_factor(const Candidate& a, const Candidate& b) {
    const auto is_one = [](const Candidate& c) {
        const Entry& entry = *c.entries.front();
        return entry.mistake == Mistake::at_a_point && is_factor(entry.point.change);
    };
    const auto reached = [](const Candidate& c) {
        std::set<std::string> names;
        for (const auto& [result, effect] : c.reaches)
            if (effect > seen) names.insert(result);
        return names;
    };
    return is_one(a) && is_one(b) && reached(a) == reached(b) && reached(a).size() == 1;
}

// Pairs of `seeds` of n mistakes with each other and the rest.
std::size_t pairs_among(std::size_t n) {
    std::size_t pairs = 0;
    for (std::size_t i = 0; i < n; ++i) pairs += std::min(seeds, i);
    return pairs;
}

// Candidates tried on all threads.
class Trial {
  public:
    Trial(const MistakenCall& call, const Observation& observation, const Distance& before, int threads,
          const Progress& progress)
        : call_(call), observation_(observation), before_(before), threads_(threads), progress_(progress) {}

    std::vector<Candidate> run(const std::vector<std::vector<const Entry*>>& sets, std::size_t tried,
                               const char* step) const {
        std::vector<Candidate> candidates(sets.size());
        std::mutex showing;
        std::size_t done = 0;
        core::parallel_units(threads_, static_cast<Index>(sets.size()), [&] {
            return [&](Index unit) {
                const auto i = static_cast<std::size_t>(unit);
                const Results results = call_.run(sets[i]);
                Candidate& c = candidates[i];
                c.entries = sets[i];
                const Distance effect = observation_.between(results, Scope::both, observation_.truth());
                c.effect = effect.worst_block;
                c.reaches = effect.results;
                choose_scope(results, c);
                c.fit = observation_.fit(results, c.scope);
                if (c.scope != Scope::both)
                    if (const Fit fit = observation_.fit(results, Scope::both); fit.correlation > c.fit.correlation)
                        c.fit = fit;
                c.evidence = compare_with_noise(observation_.independent(), before_, c.left);
                c.improves = improves(tried, c.evidence, before_, c.left);
                c.explains = c.improves && fits(before_, c.left) && !overflows(sets[i], results);
                const std::lock_guard lock(showing);
                if (progress_) progress_(static_cast<double>(++done) / static_cast<double>(sets.size()), step);
            };
        });
        return candidates;
    }

    // A state that grows beyond all numbers looks like every other NaN: that explains none. Of softmax and of division
    // by β a NaN is what the mistake itself gives.
    bool overflows(const std::vector<const Entry*>& entries, const Results& results) const {
        if (results.count("final_state") == 0) return false;
        for (const Entry* entry : entries)
            if (entry->point.change == Change::over_beta) return false;
        return observation_.is_finite_less_often(results);
    }

    // Both passes, unless the mistake in one of them alone is much nearer to the dump.
    void choose_scope(const Results& results, Candidate& c) const {
        constexpr double much = 0.7, less = 0.99;
        c.left = observation_.to(results, Scope::both);
        for (const Scope scope : {Scope::forward, Scope::backward}) {
            if (fits(before_, c.left)) break;
            Distance left = observation_.to(results, scope);
            if (left.cost > much * c.left.cost || !(left.cost < less * before_.cost)) continue;
            c.left = std::move(left);
            c.scope = scope;
        }
    }

    // Finds the candidates whose results are those of the best. First among them comes one with a name of its own, then
    // one that both passes make.
    void find_equal(std::vector<Candidate>& candidates) const {
        constexpr double near = 0.05;  // of the cost
        if (candidates.empty()) return;
        const auto results_of = [this](const Candidate& c) {
            return observation_.limit(call_.run(c.entries), c.scope);
        };
        const auto plain = [](const Candidate& c) {
            return std::pair(c.entries.back()->mistake == Mistake::at_a_point, c.scope != Scope::both);
        };
        const Candidate& best = candidates.front();
        const Results results = results_of(best);
        std::vector<std::size_t> equal = {0};
        std::size_t plainest = 0;
        for (std::size_t i = 1; i < candidates.size(); ++i) {
            const Candidate& other = candidates[i];
            if (other.left.cost > best.left.cost * (1 + near) + near) break;
            if (observation_.between(results_of(other), Scope::both, results).worst_block >= indistinct) continue;
            equal.push_back(i);
            if (other.explains == best.explains && plain(other) < plain(candidates[plainest])) plainest = i;
        }
        std::vector<const Entry*> others;
        for (const std::size_t i : equal)
            if (i != plainest) others.push_back(candidates[i].entries.back());
        const auto first = candidates.begin(), chosen = first + static_cast<Index>(plainest);
        std::rotate(first, chosen, chosen + 1);
        candidates.front().equal = others;
    }

    // Each of the best with every other, those first whose effects leave least of the error when they are added up.
    std::vector<std::vector<const Entry*>> pairs(const std::vector<Candidate>& singles, std::size_t most) const {
        const std::size_t first = std::min(seeds, singles.size()), count = std::min(most, singles.size());
        std::vector<Results> alone(first);
        for (std::size_t a = 0; a < first; ++a) alone[a] = call_.run(singles[a].entries);
        std::vector<std::pair<double, std::vector<const Entry*>>> costs(first * count);
        core::parallel_units(threads_, static_cast<Index>(count), [&] {
            return [&](Index unit) {
                const auto b = static_cast<std::size_t>(unit);
                const Results results = call_.run(singles[b].entries);
                for (std::size_t a = 0; a < std::min(first, b); ++a)
                    if (!are_one_factor(singles[a], singles[b]))
                        costs[b * first + a] = {observation_.to(observation_.add(alone[a], results), Scope::both).cost,
                                                {singles[a].entries.front(), singles[b].entries.front()}};
            };
        });
        std::erase_if(costs, [](const auto& cost) { return cost.second.empty(); });
        std::ranges::stable_sort(costs, {}, [](const auto& cost) { return cost.first; });
        std::vector<std::vector<const Entry*>> pairs;
        for (auto& [cost, pair] : costs) pairs.push_back(std::move(pair));
        return pairs;
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

bool is_forward(const std::string& result) {
    return result == "o" || result == "lse" || result == "final_state";
}

// Changes at places, likeliest first. What is right limits the places: a part whose loss would show in a right result
// is not it. The loss of a part has the pattern of all factors that it may have; those are tried only where it fits.
class Search {
  public:
    Search(const io::Call& call, const Trial& trial, const Distance& before)
        : call_(call), trial_(trial), before_(before) {
        const Tensor& q = call.is_attention ? call.attention.q : call.delta.q;
        const Tensor& v = call.is_attention ? call.attention.k : call.delta.v;
        const double given = call.is_attention ? call.attention_options.scale : call.delta_options.scale;
        scale_ = std::isnan(given) ? 1 / std::sqrt(static_cast<double>(q.shape(3))) : given;
        group_ = static_cast<double>(std::max(q.shape(2), v.shape(2))) /
                 static_cast<double>(std::min(q.shape(2), v.shape(2)));
        for (const auto& [name, worst] : before.worst_blocks) {
            forward_wrong_ = forward_wrong_ || (is_forward(name) && worst > seen);
            if (worst < seen) right_.insert(name);
        }
    }

    // `most` changes, after the loss of every place.
    std::vector<Candidate> run(double most) {
        std::vector<std::vector<const Entry*>> first, others;
        for (const Entry& entry : points_of(call_)) {
            if (!may_be(entry)) continue;
            if (entry.point.change == Change::missing)
                first.push_back({&entry});
            else
                others.push_back({&entry});
        }
        tried_ = first.size() + others.size();
        std::vector<Candidate> found = trial_.run(first, tried_, "places");
        for (const Candidate& c : found)
            if (!right_.empty() && reaches_the_wrong_alone(c) && !is_another_scale(c))
                suspects_.push_back(c.entries.front());
        std::map<std::string_view, const Candidate*> of_place;
        for (const Candidate& c : found) of_place[c.entries.front()->point.place] = &c;
        const auto loss_of = [&](const std::vector<const Entry*>& set) {
            return find_loss(of_place, set.front()->point.place);
        };
        std::erase_if(others, [&](const std::vector<const Entry*>& set) {
            const Candidate* lost = loss_of(set);
            return lost != nullptr && !may_be_like(*set.front(), *lost);
        });
        const auto alike = [&](const std::vector<const Entry*>& set) {
            const Candidate* lost = loss_of(set);
            return lost == nullptr ? 1 : lost->fit.correlation;
        };
        std::ranges::stable_sort(others, std::greater<>(), alike);
        if (static_cast<double>(others.size()) > most) others.resize(static_cast<std::size_t>(most));
        std::vector<Candidate> changed = trial_.run(others, tried_, "changes");
        found.insert(found.end(), std::move_iterator(changed.begin()), std::move_iterator(changed.end()));
        return found;
    }
    std::size_t tried() const { return tried_; }
    const std::vector<const Entry*>& suspects() const { return suspects_; }

  private:
    using Losses = std::map<std::string_view, const Candidate*>;

    // The loss of a place, or of the part that a place is within: "kw" of "kw.decay", "o" of "sum of o".
    static const Candidate* find_loss(const Losses& losses, std::string_view place) {
        if (const auto own = losses.find(place); own != losses.end()) return own->second;
        constexpr std::string_view decay = ".decay", sum = "sum of ";
        if (place.starts_with(sum)) place.remove_prefix(sum.size());
        if (place.ends_with(decay)) place.remove_suffix(decay.size());
        if (const auto part = losses.find(place); part != losses.end()) return part->second;
        if (place == "G") return find_loss(losses, "g");
        const auto part = losses.lower_bound(place);  // "read_query" of "read_query S"
        constexpr std::size_t shortest = 5;           // a letter begins many names
        return place.size() >= shortest && part != losses.end() && part->first.starts_with(place) ? part->second
                                                                                                  : nullptr;
    }

    // Whatever the scale is, it is one factor of all that it reaches.
    static bool is_another_scale(const Candidate& lost) {
        constexpr double alike = 0.5;
        return lost.entries.front()->point.place == "scale" && lost.fit.correlation < alike;
    }
    bool reaches_the_wrong_alone(const Candidate& lost) const {
        constexpr double wrong = 2;
        return std::ranges::all_of(before_.worst_blocks, [&](const auto& block) {
            const double reached = lost.reaches.at(block.first);
            return right_.count(block.first) != 0 ? reached < wrong : block.second < wrong || reached > seen;
        });
    }
    bool may_be(const Entry& entry) const {
        if (entry.applies != nullptr && !entry.applies(call_)) return false;
        constexpr std::string_view suffix = ", as written";
        if (entry.point.place.ends_with(suffix))
            return right_.count(std::string(entry.point.place.substr(0, entry.point.place.size() - suffix.size()))) ==
                   0;
        return !forward_wrong_ || entry.from <= Phase::forward;
    }
    // Gates, and what is inverted: its loss says little of its multiples.
    static bool is_nonlinear(std::string_view place) {
        constexpr std::array places = {"g", "L", "A", "k", "p", "k in L and w", "β"};
        return std::ranges::find(places, place) != places.end();
    }
    // Whether an error may be that of a change at a place whose loss is known.
    bool may_be_like(const Entry& entry, const Candidate& lost) const {
        constexpr double clear = 10, small_reach = 0.01;
        const Change change = entry.point.change;
        if (change == Change::swapped) return true;  // of two operands
        for (const auto& [result, reached] : lost.reaches) {
            const bool of_pass = is_forward(result) == forward_wrong_;
            if (of_pass && !is_partial(entry.point.change) && right_.count(result) != 0 && reached > clear)
                return false;
            const double error = before_.results.at(result);
            if (of_pass && !is_of_exponent(change) && error > clear && reached < std::max(seen, small_reach * error))
                return false;
        }
        if (!is_factor(change) || entry.from == Phase::results) return true;
        const bool by_beta = change == Change::times_beta || change == Change::over_beta;
        // Results are linear in parts of the backward pass, save for what goes from chunk to chunk; not in those of the
        // forward pass, least of all in gates and in what is exponentiated.
        if (entry.from < Phase::backward)
            return call_.is_attention || by_beta || is_nonlinear(entry.point.place) || lost.fit.correlation > 0.2;
        if (lost.fit.correlation < 0.3) return false;
        if (by_beta) return true;
        constexpr double near = 3;
        const double part = lost.fit.times / (1 - factor_of(change, scale_, group_));
        return part > 1 / near && part < near;
    }

    const io::Call& call_;
    const Trial& trial_;
    const Distance& before_;
    double scale_ = 1, group_ = 1;
    bool forward_wrong_ = false;
    std::set<std::string> right_;
    std::vector<const Entry*> suspects_;
    std::size_t tried_ = 0;
};

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
    std::size_t tried = sets.size();
    const auto sort_out = [&](std::vector<Candidate> candidates) {
        for (Candidate& c : candidates)
            if (c.effect == 0)
                ranking.no_effect.push_back(c.entries.front());
            else if (c.effect < seen)
                ranking.within_rounding.push_back(c.entries.front());
            else
                ranking.singles.push_back(std::move(c));
    };
    sort_out(trial.run(sets, tried, "mistakes"));
    sort(ranking.singles);
    if (!ranking.explained() || ranking.singles.front().left.worst_block > usual) {
        Search search(call, trial, ranking.before);
        std::vector<Candidate> points = search.run(1 + change_share * work / work_of(call));
        std::erase_if(points, [](const Candidate& c) { return c.effect < seen; });
        tried += search.tried();
        ranking.suspects = search.suspects();
        sort_out(std::move(points));
        sort(ranking.singles);
    }
    trial.find_equal(ranking.singles);
    const double far = std::sqrt(9 + 2 * std::log(static_cast<double>(tried)));  // 3 σ, as the best of so many
    ranking.noise = ranking.before.worst_block < loud && observation.scaled_part() < most_part &&
                    std::none_of(ranking.singles.begin(), ranking.singles.end(), [&](const Candidate& c) {
                        return c.improves || (is_of_size(c) && c.fit.sigma > far);
                    });
    ranking.doubtful =
        ranking.noise && !ranking.singles.empty() && has_pattern(ranking.before, ranking.singles.front());
    if (ranking.singles.empty() || ranking.explained() || ranking.noise) return ranking;

    constexpr double most_runs = 160, most_pairs = 24;
    const double runs = std::min(1 + pair_share * work / work_of(call), most_runs);
    sets = trial.pairs(ranking.singles, static_cast<std::size_t>(runs));
    const auto most = static_cast<std::size_t>(std::min(runs, most_pairs));
    if (sets.size() > most) sets.resize(most);
    const std::size_t likely = std::min(ranking.singles.size(), static_cast<std::size_t>(most_runs));
    ranking.pairs_left_out = pairs_among(likely) - sets.size();
    ranking.pairs = trial.run(sets, sets.size(), "pairs of mistakes");
    sort(ranking.pairs);
    return ranking;
}

}  // namespace softdelta::diagnose

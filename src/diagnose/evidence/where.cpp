#include "diagnose/evidence/where.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <numbers>
#include <set>

#include "diagnose/replay/attention_call.h"
#include "diagnose/replay/attention_seen.h"
#include "diagnose/replay/delta_operands.h"
#include "diagnose/words.h"

namespace softdelta::diagnose {

namespace {

constexpr int digits = 3;

std::string percent(Index part, Index whole) {
    return number(100 * static_cast<double>(part) / static_cast<double>(std::max<Index>(whole, 1)), digits) + " %";
}
// Rows of an attention call without a key, by (sequence or batch row, head, row).
class DeadRows {
  public:
    explicit DeadRows(const io::Call& call) {
        if (!call.is_attention || !may_hide_all(call)) return;
        const AttentionCall attention(call);
        std::vector<char> seen;
        for (Index n = 0; n < attention_sequences(attention); ++n) {
            const AttentionPlace at = attention_place(call, {}, n);
            for (Index h = 0; h < attention.q.size(2); ++h)
                for (Index i = 0; i < at.q_count; ++i) {
                    find_seen(attention, {}, at, h, i, seen);
                    if (std::find(seen.begin(), seen.end(), 1) == seen.end()) rows_.insert({n, h, i});
                }
        }
    }
    bool empty() const { return rows_.empty(); }
    bool has(const ErrorRow& r) const { return rows_.count({index(r), r.head, r.row}) != 0; }
    // The first row after the first tile of rows of which none has a key; −1: there is none.
    Index after_first_tile(const ErrorRow& r) const {
        for (Index begin = 0; begin < r.count; begin += attention_tile) {
            const Index end = std::min(begin + attention_tile, r.count);
            Index i = begin;
            while (i < end && rows_.count({index(r), r.head, i}) != 0) ++i;
            if (i == end) return end;
        }
        return -1;
    }

  private:
    static bool may_hide_all(const io::Call& call) {
        const AttentionOptions& o = call.attention_options;
        return call.attention.mask || call.attention.bias || o.causal != Causal::none || o.window_left >= 0 ||
               o.window_right >= 0 || call.attention.cu_seqlens_q || call.attention.cache_seqlens;
    }
    static Index index(const ErrorRow& r) { return r.sequence >= 0 ? r.sequence : r.batch; }

    std::set<std::array<Index, 3>> rows_;
};

// A set of rows that errors may keep to.
struct Pattern {
    std::string words;
    std::function<bool(const ErrorRow&)> has;
};

std::string row_words(Index first, Index last) {
    return last > first ? "rows " + std::to_string(first) + " to " + std::to_string(last)
                        : "row " + std::to_string(first);
}

// Rows a to b of every `period`.
void add_period(const ErrorMap& map, Index period, std::vector<Pattern>& patterns) {
    std::vector<Index> wrong(static_cast<std::size_t>(period)), all = wrong;
    Index longest = 0;
    for (const ErrorRow& r : map.rows) {
        const auto at = static_cast<std::size_t>(r.row % period);
        ++all[at];
        wrong[at] += r.wrong();
        longest = std::max(longest, r.count);
    }
    const auto is_wrong = [&](Index i) {
        const auto at = static_cast<std::size_t>(i);
        return wrong[at] > 0 && 2 * wrong[at] >= all[at];
    };
    Index first = 0, last = period - 1;
    while (first < period && !is_wrong(first)) ++first;
    while (last > first && !is_wrong(last)) --last;
    if (first >= period || last - first + 1 == period || longest <= period + first) return;
    for (Index i = first; i <= last; ++i)
        if (!is_wrong(i)) return;
    patterns.push_back({row_words(first, last) + " of every " + std::to_string(period),
                        [=](const ErrorRow& r) { return r.row % period >= first && r.row % period <= last; }});
}

// Rows a to b, and from a on.
void add_range(const ErrorMap& map, Index chunk, const std::string& chunk_name, std::vector<Pattern>& patterns) {
    Index first = -1, last = -1;
    for (const ErrorRow& r : map.rows) {
        if (!r.wrong()) continue;
        if (first < 0 || r.row < first) first = r.row;
        last = std::max(last, r.row);
    }
    if (first > 0)
        patterns.push_back(
            {"rows from " + std::to_string(first) + " on" +
                 (chunk > 0 && first % chunk == 0 ? ": what goes from " + chunk_name + " to " + chunk_name : ""),
             [first](const ErrorRow& r) { return r.row >= first; }});
    if (first >= 0)
        patterns.push_back(
            {row_words(first, last), [first, last](const ErrorRow& r) { return r.row >= first && r.row <= last; }});
}

std::vector<Pattern> row_patterns(const ErrorMap& map, Index chunk, const std::string& chunk_name,
                                  const DeadRows& dead) {
    std::vector<Pattern> patterns;
    const auto tail = [chunk](const ErrorRow& r) { return r.row >= r.count / chunk * chunk; };
    if (!dead.empty() && (map.row_name == "queries")) {
        patterns.push_back({"rows that have no key", [&dead](const ErrorRow& r) { return dead.has(r); }});
        patterns.push_back({"rows after a tile of 64 rows without a key", [&dead](const ErrorRow& r) {
                                const Index first = dead.after_first_tile(r);
                                return first >= 0 && r.row >= first && !dead.has(r);
                            }});
    }
    if (map.row_name != "tokens" && map.row_name != "queries" && map.row_name != "keys") {
        add_range(map, 0, "", patterns);
        return patterns;
    }
    patterns.push_back({"the first row of each " + chunk_name + " of " + std::to_string(chunk),
                        [chunk](const ErrorRow& r) { return r.row % chunk == 0; }});
    patterns.push_back({"the last row of each " + chunk_name + " of " + std::to_string(chunk),
                        [chunk](const ErrorRow& r) { return r.row % chunk == chunk - 1 || r.row + 1 == r.count; }});
    patterns.push_back({"the last row of each sequence", [](const ErrorRow& r) { return r.row + 1 == r.count; }});
    patterns.push_back({"tails: " + chunk_name + "s of fewer than " + std::to_string(chunk) + " rows", tail});
    patterns.push_back(
        {"the first " + chunk_name + " of each sequence", [chunk](const ErrorRow& r) { return r.row < chunk; }});
    patterns.push_back({"all but the last " + chunk_name + " of each sequence",
                        [chunk](const ErrorRow& r) { return r.row < (r.count - 1) / chunk * chunk; }});
    for (const Index period : {2, 4, 8, 16, 32, 64, 128}) add_period(map, period, patterns);
    add_range(map, chunk, chunk_name, patterns);
    return patterns;
}

// Rows of the heads, batch rows and sequences that have a wrong one.
ErrorMap wrong_members(const ErrorMap& map) {
    std::set<Index> heads, batches, sequences;
    for (const ErrorRow& r : map.rows)
        if (r.wrong()) heads.insert(r.head), batches.insert(r.batch), sequences.insert(r.sequence);
    ErrorMap part = map;
    std::erase_if(part.rows, [&](const ErrorRow& r) {
        return heads.count(r.head) == 0 || batches.count(r.batch) == 0 || sequences.count(r.sequence) == 0;
    });
    return part;
}

// The smallest pattern that holds nearly all wrong rows and of which nearly all rows are wrong.
std::string describe_rows(const ErrorMap& map, const std::vector<Pattern>& patterns) {
    const auto total = static_cast<Index>(map.rows.size()), wrong = map.wrong_rows();
    std::string best;
    Index best_size = total;
    for (const Pattern& pattern : patterns) {
        Index size = 0, hits = 0;
        for (const ErrorRow& r : map.rows)
            if (pattern.has(r)) {
                ++size;
                hits += r.wrong();
            }
        const bool holds = 20 * hits >= 19 * wrong, full = 2 * hits >= size;
        if (!holds || !full || size >= best_size || 10 * size > 9 * total) continue;
        best_size = size;
        best = pattern.words + " (" + percent(hits, wrong) + " of the wrong rows are such, " + percent(hits, size) +
               " of such rows are wrong)";
    }
    return best;
}

// Whether wrong rows are far from the right ones. Of an error that every row has, chance decides which are beyond
// noise.
bool stand_out(const ErrorMap& map) {
    std::vector<double> wrong, right = {1};
    for (const ErrorRow& r : map.rows)
        if (r.wrong())
            wrong.push_back(r.nan ? HUGE_VAL : r.ratio);
        else
            right.push_back(r.ratio);
    constexpr double far = 3;
    std::sort(wrong.begin(), wrong.end()), std::sort(right.begin(), right.end());
    return !wrong.empty() && wrong[wrong.size() / 10] > far * right[right.size() - 1 - right.size() / 10];
}

// Few rows that follow no pattern, by number.
std::string describe_scattered(const ErrorMap& map) {
    std::set<Index> rows;
    for (const ErrorRow& r : map.rows)
        if (r.wrong()) rows.insert(r.row);
    constexpr std::size_t most = 12;
    const bool more = rows.size() > most;
    if (more) rows.erase(std::next(rows.begin(), most), rows.end());
    return "rows " + list(rows) + (more ? " …" : "") + ", in no pattern" +
           (stand_out(map) ? ": a race, or memory that nothing wrote, shows so" : "");
}

// Every other column, or one of four or eight, where these hold nearly all of the error.
std::string describe_interleaved(const std::vector<double>& squares, double all) {
    constexpr double most = 0.95;
    for (const std::size_t period : {8, 4, 2})
        for (std::size_t at = 0; at < period && 2 * period <= squares.size(); ++at) {
            double within = 0;
            for (std::size_t c = at; c < squares.size(); c += period) within += squares[c];
            if (within >= most * all)
                return "only channel " + std::to_string(at) + " of every " + std::to_string(period);
        }
    return "";
}

// Neighbouring columns that hold nearly all of the error.
std::string describe_channels(const judge::Evidence& e, const Dense& actual) {
    const auto& shape = e.finding.shape;
    constexpr Index least = 8;
    if (shape.size() != 4 || shape[3] < least) return "";
    const Dense truth(e.truth.view());
    const Index width = shape[3];
    std::vector<double> squares(static_cast<std::size_t>(width));
    double all = 0, largest = 0;
    for (Index i = 0; i < truth.count(); ++i) {
        const double d = actual[i] - truth[i];
        if (!std::isfinite(d)) return "";
        squares[static_cast<std::size_t>(i % width)] += d * d;
        all += d * d;
    }
    for (const double square : squares) largest = std::max(largest, square);
    constexpr double part = 0.1, most = 0.95;
    Index first = 0, last = width - 1;
    while (first < last && squares[static_cast<std::size_t>(first)] < part * largest) ++first;
    while (last > first && squares[static_cast<std::size_t>(last)] < part * largest) --last;
    double within = 0;
    for (Index c = first; c <= last; ++c) within += squares[static_cast<std::size_t>(c)];
    if (2 * (last - first + 1) > width || within < most * all) return describe_interleaved(squares, all);
    return "only channels " + std::to_string(first) + (last > first ? "-" + std::to_string(last) : "") + " of " +
           std::to_string(width);
}

// Numbers in the whole call; all of them, when `numbers` is empty.
std::set<Index> in_whole(const std::set<Index>& local, const std::vector<Index>& numbers) {
    std::set<Index> whole;
    for (const Index i : local) whole.insert(number_of(numbers, i));
    return whole;
}
std::set<Index> all_of(Index count, const std::vector<Index>& numbers) {
    std::set<Index> whole;
    for (Index i = 0; i < count; ++i) whole.insert(number_of(numbers, i));
    return whole;
}

// Heads, batch rows, sequences that are wrong while others are right. So many heads read one key head, 0: unknown.
std::string describe_members(const ErrorMap& map, Index group_size) {
    std::set<Index> heads, batches, sequences, all_sequences;
    for (const ErrorRow& r : map.rows) {
        all_sequences.insert(r.sequence);
        if (!r.wrong()) continue;
        heads.insert(r.head);
        batches.insert(r.batch);
        sequences.insert(r.sequence);
    }
    std::string text;
    const auto add = [&](const char* what, const std::set<Index>& wrong, const std::set<Index>& all) {
        text.append(text.empty() ? "" : "; ").append(what).append(list(wrong)).append(" of ").append(list(all));
    };
    if (static_cast<Index>(heads.size()) < map.heads) {
        const std::set<Index> wrong = in_whole(heads, map.head_numbers), all = all_of(map.heads, map.head_numbers);
        add("only heads ", wrong, all);
        const Index groups = group_size > 0 ? map.whole_heads / group_size : 0;
        std::set<Index> regrouped;
        for (const Index h : all)
            if (groups > 0 && h % groups != h / group_size) regrouped.insert(h);
        const Index rows = std::ranges::count_if(map.rows, [&](const ErrorRow& r) { return heads.count(r.head) != 0; });
        if (wrong == regrouped && 2 * map.wrong_rows() >= rows)
            text += ", those whose h mod " + std::to_string(groups) + " is not h / " + std::to_string(group_size) +
                    ": the order of groups";
    }
    if (static_cast<Index>(batches.size()) < map.batches)
        add("only batch rows or sequences ", in_whole(batches, map.batch_numbers),
            all_of(map.batches, map.batch_numbers));
    if (sequences.size() < all_sequences.size())
        add("only packed sequences ", in_whole(sequences, map.sequence_numbers),
            in_whole(all_sequences, map.sequence_numbers));
    return text;
}

struct Constant {
    double value;
    std::string name;
};

std::vector<Constant> constants(const io::Call& call) {
    const double size = static_cast<double>((call.is_attention ? call.attention.q : call.delta.q).shape(3));
    double scale = call.is_attention ? call.attention_options.scale : call.delta_options.scale;
    if (std::isnan(scale)) scale = 1 / std::sqrt(size);
    return {{scale, "the scale"},
            {1 / scale, "1/scale"},
            {scale * scale, "the scale squared"},
            {std::numbers::ln2, "ln 2"},
            {std::numbers::log2e, "1/ln 2"},
            {-1, "the sign"},
            {2, "two"},
            {0.5, "a half"}};
}

// β of a row of a value head; NaN where there is none.
class Betas {
  public:
    explicit Betas(const io::Call& call) {
        if (call.is_attention || !call.delta.beta) return;
        inputs_ = std::make_unique<DeltaInputs64>(call);
    }
    double of(const ErrorMap& map, const ErrorRow& r) const {
        if (!inputs_ || map.row_name != "tokens" || map.heads != inputs_->value_heads()) return std::nan("");
        const Index begin = r.sequence >= 0 ? inputs_->call.packing.tokens[static_cast<std::size_t>(r.sequence)] : 0;
        return inputs_->beta_of(r.batch, begin + r.row, r.head, {});
    }

  private:
    std::unique_ptr<DeltaInputs64> inputs_;
};

// One factor that turns the truth into the result in all wrong rows, or β of each.
std::string describe_factor(const ErrorMap& map, const std::vector<Constant>& known, const Betas& betas, Index width) {
    constexpr double same = 0.05;
    std::vector<double> factors;
    Index times_beta = 0, over_beta = 0;
    Index zeros = 0, scaled = 0, wrong = 0;
    for (const ErrorRow& r : map.rows) {
        if (!r.wrong() || r.nan) continue;
        ++wrong;
        zeros += r.zero;
        constexpr double small = 3;
        if (!r.zero && std::isfinite(r.factor) && r.rest < small * std::max(1.0, std::abs(r.factor))) {
            ++scaled;
            factors.push_back(r.factor);
            const double beta = betas.of(map, r);
            times_beta += std::abs(r.factor / beta - 1) < same;
            over_beta += std::abs(r.factor * beta - 1) < same;
        }
    }
    if (wrong == 0) return "";
    if (10 * zeros >= 9 * wrong) return percent(zeros, wrong) + " of the wrong rows are zero";
    if (10 * scaled < 9 * wrong) return "";
    std::sort(factors.begin(), factors.end());
    const double middle = factors[factors.size() / 2], low = factors[factors.size() / 20],
                 high = factors[factors.size() - 1 - factors.size() / 20];
    if (high - low > same * std::abs(middle)) {
        if (10 * times_beta >= 9 * scaled) return "each wrong row is the right one times its beta";
        if (10 * over_beta >= 9 * scaled) return "each wrong row is the right one divided by its beta";
        if (width == 1) return "";  // of one number some factor always is
        return "each wrong row is the right one times a factor of its own, " + number(low, digits) + " to " +
               number(high, digits);
    }
    if (std::abs(middle - 1) < same / 2) return "";
    std::string text = "wrong rows are the right ones times " + number(middle, digits);
    for (const Constant& c : known)
        if (std::abs(middle / c.value - 1) < same / 2) text += ", " + c.name;
    return text;
}

// Errors that grow along the sequence, quarter by quarter.
std::string describe_growth(const ErrorMap& map) {
    if (map.row_name != "tokens") return "";
    double sums[4] = {}, counts[4] = {};
    for (const ErrorRow& r : map.rows) {
        constexpr Index least = 64;
        if (r.count < least || !std::isfinite(r.ratio)) continue;
        const Index quarter = 4 * r.row / r.count;
        sums[quarter] += r.ratio * r.ratio;
        counts[quarter] += 1;
    }
    if (counts[0] == 0 || counts[3] == 0) return "";
    double q[4];
    for (int i = 0; i < 4; ++i) q[i] = std::sqrt(sums[i] / counts[i]);
    constexpr double growth = 3;
    if (!(q[1] >= q[0] && q[2] >= q[1] && q[3] >= 0.8 * q[2] && q[3] > growth * q[0])) return "";
    return "the error grows along the sequence" + std::string(q[3] < 1.3 * q[2] ? " and levels off" : "") + ": " +
           number(q[0], digits) + ", " + number(q[1], digits) + ", " + number(q[2], digits) + ", " +
           number(q[3], digits) + " times what rounding may cost in its four quarters";
}

// States and square biases written with their last two dimensions swapped.
std::string describe_transposition(const judge::Evidence& e, const Dense& actual) {
    const auto& shape = e.finding.shape;
    if (shape.size() != 4 || shape[2] != shape[3] || shape[2] < 2) return "";
    if (e.finding.name != "final_state" && e.finding.name != "dinitial_state" && e.finding.name != "dbias") return "";
    const Dense truth(e.truth.view());
    double straight = 0, swapped = 0;
    for (Index i = 0; i < shape[0]; ++i)
        for (Index j = 0; j < shape[1]; ++j) {
            straight += (actual.block(i, j) - truth.block(i, j)).squaredNorm();
            swapped += (actual.block(i, j) - truth.block(i, j).transpose()).squaredNorm();
        }
    constexpr double much = 0.01;
    if (!(swapped < much * straight)) return "";
    return "the last two dimensions are swapped: transposed, the error is " +
           number(std::sqrt(swapped / straight), digits) + " of what it is now";
}

std::string describe_nan(const ErrorMap& map, const DeadRows& dead) {
    Index nan = 0, dead_nan = 0;
    for (const ErrorRow& r : map.rows)
        if (r.nan) {
            ++nan;
            dead_nan += dead.has(r);
        }
    if (nan == 0) return "";
    std::string text = std::to_string(nan) + " rows are NaN or infinite";
    if (map.row_name != "queries" || dead_nan == 0) return text;
    return text + ", and " + (dead_nan == nan ? "all" : std::to_string(dead_nan)) +
           " of them are rows that have no key: 0/0, where o is 0 and lse is minus infinity";
}

// The row whose truth a wrong row holds; null: none.
const ErrorRow* find_owner(const ErrorMap& map, const ErrorRow& row, const Dense& actual, const Dense& truth, Index n) {
    const double most = 9 * row.noise * row.noise * static_cast<double>(n);
    for (const ErrorRow& other : map.rows) {
        double error = 0, square = 0;
        for (Index i = 0; i < n && error <= most; ++i) {
            const double x = actual[row.first + i], y = truth[other.first + i];
            error += (x - y) * (x - y);
            square += y * y;
        }
        if (error <= most && square > 16 * most) return &other;
    }
    return nullptr;
}

// Right columns in wrong places, as of tiles that are written in another order.
std::string describe_moved_channels(const ErrorMap& map, const judge::Evidence& e, const Dense& actual) {
    const Index width = e.blocks.features, step = std::max<Index>(static_cast<Index>(map.rows.size()) / 200, 1);
    constexpr Index least = 8, fewest_rows = 16;
    if (width < least || static_cast<Index>(map.rows.size()) < fewest_rows) return "";
    const Dense truth(e.truth.view());
    // The squared difference of column c and the truth's column d, and what rounding may make of it.
    const auto difference = [&](Index c, Index d) {
        double error = 0, allowed = 0, square = 0;
        for (std::size_t r = 0; r < map.rows.size(); r += static_cast<std::size_t>(step)) {
            const double x = actual[map.rows[r].first + c], y = truth[map.rows[r].first + d];
            error += (x - y) * (x - y);
            allowed += map.rows[r].noise * map.rows[r].noise;
            square += y * y;
        }
        return std::isfinite(error) && square > 16 * allowed ? error / allowed : HUGE_VAL;
    };
    constexpr double same = 9;
    Index wrong = 0, found = 0;
    std::string examples;
    for (Index c = 0; c < width; ++c) {
        if (difference(c, c) <= same) continue;
        ++wrong;
        Index owner = 0;
        while (owner < width && difference(c, owner) > same) ++owner;
        if (owner == width) continue;
        if (++found <= 2)
            examples += (examples.empty() ? "" : ", ") + ("channel " + std::to_string(c) + " that of channel ") +
                        std::to_string(owner);
    }
    return wrong > 0 && 10 * found >= 9 * wrong ? "they hold what belongs to other channels: " + examples : "";
}

// Right rows in wrong places: how far away they belong where all are moved alike, else two of them.
std::string describe_moved(const ErrorMap& map, const judge::Evidence& e, const Dense& actual) {
    const Index n = e.blocks.features;
    constexpr Index least = 16;  // by chance no row is that of another
    constexpr std::size_t sample = 40;
    if (n < least) return "";
    std::vector<const ErrorRow*> wrong;
    for (const ErrorRow& r : map.rows)
        if (r.wrong()) wrong.push_back(&r);
    const std::size_t step = std::max<std::size_t>(wrong.size() / sample, 1);
    const Dense truth(e.truth.view());
    std::map<std::array<Index, 3>, std::size_t> ways;
    std::string examples;
    std::size_t tried = 0, found = 0;
    for (std::size_t i = 0; i < wrong.size(); i += step) {
        const ErrorRow& r = *wrong[i];
        ++tried;
        const ErrorRow* owner = r.nan ? nullptr : find_owner(map, r, actual, truth, n);
        if (owner == nullptr) continue;
        ++found;
        ++ways[{owner->batch + owner->sequence - r.batch - r.sequence, owner->head - r.head, owner->row - r.row}];
        const auto place = [&](const ErrorRow& x) {
            return "row " + std::to_string(x.row) + " of head " + std::to_string(number_of(map.head_numbers, x.head));
        };
        if (found <= 2) examples += (examples.empty() ? "" : ", ") + place(r) + " that of " + place(*owner);
    }
    if (5 * found < 4 * tried) return "";  // small rows have no owner
    const auto way =
        std::max_element(ways.begin(), ways.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    if (10 * way->second < 9 * found) return "they hold what belongs to other rows: " + examples;
    const auto signed_number = [](Index i) { return (i > 0 ? "+" : "−") + std::to_string(std::abs(i)); };
    std::string shift;
    static constexpr const char* names[] = {"batch row or sequence ", "head ", "row "};
    for (std::size_t i = 0; i < std::size(names); ++i)
        if (const Index by = way->first[i]; by != 0)
            shift += (shift.empty() ? "" : ", ") + (names[i] + signed_number(by));
    return "they hold what belongs to " + shift;
}

}  // namespace

std::vector<std::string> describe_where(const io::Call& call, const std::vector<judge::Evidence>& evidence,
                                        const std::map<std::string, Tensor>& actual,
                                        const std::vector<ErrorMap>& maps) {
    const DeadRows dead(call);
    const Index key_heads = call.is_attention ? call.attention.k.shape(2) : call.delta.q.shape(2);
    const std::vector<Constant> known = constants(call);
    const Betas betas(call);
    std::vector<std::string> sentences;
    for (const ErrorMap& map : maps) {
        const auto found = std::find_if(evidence.begin(), evidence.end(),
                                        [&](const judge::Evidence& e) { return e.finding.name == map.result; });
        if (found == evidence.end() || found->finding.verdict != judge::Verdict::wrong) continue;
        const Index wrong = map.wrong_rows(), total = static_cast<Index>(map.rows.size());
        if (wrong == 0) {  // a block is beyond its limit, and no row of it stands out
            sentences.push_back(map.result + ": no row stands out, the error is spread over " + found->finding.note);
            continue;
        }
        std::string text =
            map.result + ": " + std::to_string(wrong) + " of " + std::to_string(total) + " rows are wrong";
        const auto add = [&](const std::string& words) {
            if (!words.empty()) text += "; " + words;
        };
        add(describe_nan(map, dead));
        const Index size =
            map.heads % std::max<Index>(key_heads, 1) == 0 ? map.heads / std::max<Index>(key_heads, 1) : 0;
        add(describe_members(map, size));
        const ErrorMap part = wrong_members(map);
        if (const auto rows_of_part = static_cast<Index>(part.rows.size()); wrong < rows_of_part) {
            const std::string rows =
                describe_rows(part, row_patterns(part, call.is_attention ? attention_tile : call.chunk_size,
                                                 call.is_attention ? "tile" : "chunk", dead));
            if (!rows.empty())
                add("only " + rows);
            else if (8 * wrong < rows_of_part)
                add(describe_scattered(part));
        }
        const Dense dense(actual.at(map.result));
        const std::string moved = describe_moved(map, *found, dense);
        add(moved.empty() ? describe_moved_channels(map, *found, dense) : moved);
        add(describe_channels(*found, dense));
        add(describe_factor(map, known, betas, found->blocks.features));
        add(describe_growth(map));
        add(describe_transposition(*found, dense));
        sentences.push_back(text);
    }
    return sentences;
}

}  // namespace softdelta::diagnose

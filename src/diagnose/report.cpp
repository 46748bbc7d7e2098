#include "diagnose/report.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <string_view>

#include "diagnose/blind.h"
#include "diagnose/words.h"
#include "io/file/text.h"
#include "judge/table.h"

namespace softdelta::diagnose {

namespace {

using judge::Cell;
using judge::Colour;
using judge::Table;

std::string names(const std::vector<const Entry*>& entries) {
    std::string text;
    for (const Entry* entry : entries) text += (text.empty() ? "" : " + ") + std::string(entry->name);
    return text;
}

Cell verdict_cell(judge::Verdict verdict) {
    switch (verdict) {
        case judge::Verdict::right:
            return {"right", Colour::green};
        case judge::Verdict::digits_lost:
            return {"right, digits lost", Colour::yellow};
        case judge::Verdict::cannot_be_judged:
            return {"cannot be judged", Colour::yellow};
        case judge::Verdict::wrong:
            break;
    }
    return {"wrong", Colour::red};
}

// Of a wrong dump those that are wrong or not judged, the verdict only where it is not the same of all.
Table findings(const Diagnosis& d) {
    const auto is_listed = [&](const judge::Finding& f) { return !d.wrong() || f.verdict != judge::Verdict::right; };
    const bool all_wrong = std::ranges::all_of(
        d.findings, [&](const judge::Finding& f) { return !is_listed(f) || f.verdict == judge::Verdict::wrong; });
    std::vector<std::string> columns = {"result", "ratio", "limit", "verdict", "note"};
    if (all_wrong) columns.erase(columns.begin() + 3);
    Table table(columns);
    for (const judge::Finding& f : d.findings) {
        if (!is_listed(f)) continue;
        std::vector<Cell> cells = {{f.name}, {number(f.ratio)}, {number(f.limit)}, verdict_cell(f.verdict), {f.note}};
        if (all_wrong) cells.erase(cells.begin() + 3);
        table.add(cells);
    }
    return table;
}

std::string right_results(const Diagnosis& d) {
    std::string names;
    for (const judge::Finding& f : d.findings)
        if (f.verdict == judge::Verdict::right) names.append(names.empty() ? "  right: " : ", ").append(f.name);
    return names.empty() ? "" : names + "\n";
}

// Results of which the same is said in one sentence, without percentages.
std::vector<std::string> gathered(const std::vector<std::string>& sentences) {
    constexpr std::string_view end = " rows are wrong";
    std::vector<std::pair<std::string, std::string>> groups;  // results, what is said of them
    for (const std::string& sentence : sentences) {
        const std::size_t at = sentence.find(end);
        if (at == std::string::npos) {
            groups.emplace_back("", sentence);
            continue;
        }
        std::string rest = sentence.substr(at);
        if (const std::size_t open = rest.find(" ("), percent = rest.find(" % of the wrong rows");
            open < percent && percent != std::string::npos)
            rest.erase(open, rest.find(')', percent) + 1 - open);
        const auto same = std::ranges::find(groups, rest, &std::pair<std::string, std::string>::second);
        if (same == groups.end())
            groups.emplace_back(sentence.substr(0, at), rest);
        else
            same->first.append(", ").append(sentence, 0, at);
    }
    std::vector<std::string> text;
    for (const auto& [results, said] : groups) text.push_back(results + said);
    return text;
}

// Errors relative to what rounding may cost.
Table ranked(const Ranking& ranking, std::size_t top) {
    Table table({"rank", "mistake", "error", "left", "in", "worst block"});
    const double before = ranking.before.results.at(ranking.before.worst_result());
    static constexpr const char* scopes[] = {"", ", forward only", ", backward only"};
    std::size_t rank = 0;
    if (ranking.noise)
        table.add({{std::to_string(++rank)},
                   {"none, only noise"},
                   {number(before)},
                   {number(before)},
                   {ranking.before.worst_result()},
                   {number(ranking.before.worst_block)}});
    const auto add = [&](const std::vector<Candidate>& candidates) {
        for (std::size_t i = 0; i < std::min(top, candidates.size()); ++i) {
            const Candidate& c = candidates[i];
            const std::string worst = c.left.worst_result();
            table.add({{std::to_string(++rank)},
                       {names(c.entries) + scopes[static_cast<std::size_t>(c.scope)]},
                       {number(before)},
                       {number(c.left.results.at(worst))},
                       {worst},
                       {number(c.left.worst_block)}});
        }
    };
    add(ranking.singles);
    return table;
}

std::string stages(const Diagnosis& d) {
    std::string text;
    if (const std::string sentence = describe_stages(d.stages); !sentence.empty())
        text.append("  ").append(sentence).append("\n");
    for (const StageFinding& f : d.stages)
        if (!f.note.empty()) text.append("  ").append(f.name).append(": not judged, ").append(f.note).append("\n");
    return text;
}

// Letters of a UTF-8 text.
std::size_t width_of(std::string_view text) {
    return static_cast<std::size_t>(
        std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

// Lines of at most 100 letters.
std::string indented(const std::vector<std::string>& sentences) {
    constexpr std::size_t most = 100;
    std::string text;
    for (const std::string& sentence : sentences) {
        std::size_t used = 1;
        std::istringstream words(sentence);
        text += " ";
        for (std::string word; words >> word; used += 1 + width_of(word)) {
            if (used + 1 + width_of(word) > most) text += "\n   ", used = 3;
            text.append(" ").append(word);
        }
        text += "\n";
    }
    return text;
}

}  // namespace

std::string report(const std::string& title, const io::Call& call, const Diagnosis& d, double seconds,
                   const ReportOptions& options) {
    const auto paint = [&](const std::string& text, Colour colour) {
        return options.coloured ? judge::paint(text, colour) : text;
    };
    char tenths[32];
    std::snprintf(tenths, sizeof tenths, "%.1f s", seconds);
    const Cell summary = verdict_cell(judge::summarise(d.findings));
    std::string text = paint(io::printable(title), Colour::bold) + ": " + paint(summary.text, summary.colour) + " (" +
                       call.op + ", " + tenths + ")\n";
    for (const std::string& sentence : d.examined) text.append("  examined: ").append(sentence).append("\n");
    if (!d.wrong()) return text + findings(d).text(options.coloured);
    const auto add = [&](const char* heading, const char* rest, const std::string& lines) {
        text.append("\n").append(paint(heading, Colour::bold)).append(rest).append("\n").append(lines);
    };
    add("Which mistake", "", indented(d.conclusion));
    add("Where", "", indented(gathered(d.where)));
    if (!d.stages.empty()) add("Which stage", "", stages(d));
    add("Results", "", findings(d).text(options.coloured) + right_results(d));
    if (const std::string blind = blindness_of(call, d.ranking).sentence(d.ranking.explained() ? 0 : 2); !blind.empty())
        text += indented({blind});
    if (!d.ranking.explained() && !d.ranking.explained_by_two() && (d.ranking.near() || d.ranking.noise))
        add("Ranking", ", errors relative to what rounding may cost",
            ranked(d.ranking, options.top).text(options.coloured));
    return text;
}

}  // namespace softdelta::diagnose

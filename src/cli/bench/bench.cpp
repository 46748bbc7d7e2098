// softdelta bench: this machine, operation by operation, against what it can do at most.
#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>

#include "cli/bench/measure.h"
#include "cli/bench/problem.h"
#include "cli/commands.h"
#include "cli/terminal.h"

namespace softdelta::cli {

namespace {

struct Request {
    int threads = 0;
    std::vector<std::string> only;
    bool json = false;
};

struct Row {
    std::string name;
    Limit limit = Limit::f32;
    double seconds = 0, rate = 0;  // flop/s or byte/s
    bool disturbed = false;        // it, or its limit
    std::optional<double> fraction;
    std::string failure;
};

Row measure(const Entry& entry, int threads, Limits& limits) {
    Row row;
    row.name = entry.name;
    const Problem problem = entry.make();
    row.limit = problem.limit;
    Execution execution;
    execution.engine = "fast";
    execution.threads = threads;
    try {
        const Measured seconds = median_seconds([&] { problem.call(execution); }), limit = limits[row.limit];
        row.seconds = seconds.value;
        row.rate = problem.work / row.seconds;
        row.disturbed = seconds.disturbed || limit.disturbed;
        if (limit.value > 0 && !row.disturbed) row.fraction = row.rate / limit.value;
    } catch (const Unsupported& e) {
        row.failure = e.what();
    }
    return row;
}

std::string format(const char* form, double value) {
    char text[64];
    std::snprintf(text, sizeof text, form, value);
    return text;
}

bool is_memory(Limit limit) {
    return limit == Limit::read || limit == Limit::copy;
}

std::string rate_text(Limit limit, double rate) {
    return format("%.4g", rate / 1e9) + (is_memory(limit) ? " GB/s" : " GFLOP/s");
}

const char* limit_name(Limit limit) {
    static const char* names[] = {"multiply-adds f32", "multiply-adds bf16", "memory read", "memory read and written"};
    return names[static_cast<std::size_t>(limit)];
}

std::string selected_level() {
    for (const IsaLevel& level : isa_levels())
        if (level.selected) return level.name;
    return "no fast kernels";
}

// Columns of the table: each row is printed when it has been measured.
class RowPrinter {
  public:
    RowPrinter(const std::vector<Entry>& entries, int threads) {
        for (const Entry& entry : entries) name_width_ = std::max(name_width_, static_cast<int>(entry.name.size()));
        std::printf("softdelta %s, %s, %d %s\n", softdelta_version(), selected_level().c_str(), threads,
                    threads == 1 ? "thread" : "threads");
        std::printf(
            "attention: B1 H8 S2048, decode H32/8 K32768; delta rules: B1 H16 T2048, step H32; "
            "layers: T4096, C8192, H32, step B32\n");
        print("operation", "time", "rate", "of limit");
    }
    void print(const Row& row) const {
        if (!row.failure.empty()) return print(row.name, "-", "-", coloured(row.failure, Colour::yellow));
        print(row.name, format("%.4g ms", row.seconds * 1e3), rate_text(row.limit, row.rate),
              row.disturbed  ? coloured("disturbed by other processes", Colour::yellow)
              : row.fraction ? format("%.0f %%", 100 * *row.fraction)
                             : "-");
    }

  private:
    void print(const std::string& name, const std::string& time, const std::string& rate,
               const std::string& limit) const {
        std::printf("  %-*s  %-10s  %-14s  %s\n", name_width_, name.c_str(), time.c_str(), rate.c_str(), limit.c_str());
        std::fflush(stdout);
    }
    int name_width_ = 0;
};

void print_json(const std::vector<Row>& rows, const std::map<Limit, Measured>& limits, int threads) {
    using nlohmann::ordered_json;
    ordered_json json{{"version", softdelta_version()}, {"isa", selected_level()}, {"threads", threads}};
    for (const auto& [limit, rate] : limits) json["limits"][limit_name(limit)] = rate.value;
    json["rows"] = ordered_json::array();
    for (const Row& row : rows) {
        ordered_json entry{{"name", row.name}};
        if (row.failure.empty()) {
            entry["ms"] = row.seconds * 1e3;
            entry[is_memory(row.limit) ? "gbytes_per_second" : "gflops"] = row.rate / 1e9;
            entry["of_limit"] = row.fraction ? ordered_json(*row.fraction) : ordered_json();
            entry["disturbed"] = row.disturbed;
        } else {
            entry["unsupported"] = row.failure;
        }
        json["rows"].push_back(entry);
    }
    std::printf("%s\n", json.dump(2).c_str());
}

void bench(const Request& request) {
    const int wanted = request.threads > 0 ? request.threads : omp_get_max_threads();
    const int threads = std::min(wanted, 16 * omp_get_num_procs());  // as the library cuts them
    std::vector<Entry> entries = attention_entries();
    for (auto more : {delta_entries, layer_entries})
        for (Entry& entry : more()) entries.push_back(std::move(entry));
    if (!request.only.empty())
        std::erase_if(entries, [&](const Entry& entry) {
            return std::none_of(request.only.begin(), request.only.end(),
                                [&](const std::string& part) { return entry.name.find(part) != std::string::npos; });
        });
    if (entries.empty()) throw std::invalid_argument("--only: no operation has this in its name");
    Limits limits(threads);
    std::vector<Row> rows;
    std::optional<RowPrinter> printer;
    if (!request.json) printer.emplace(entries, threads);
    ProgressLine progress("bench");
    for (const Entry& entry : entries) {
        progress.show(static_cast<double>(rows.size()) / static_cast<double>(entries.size()), entry.name.c_str());
        rows.push_back(measure(entry, threads, limits));
        progress.clear();
        if (printer) printer->print(rows.back());
    }
    if (request.json) return print_json(rows, limits.measured(), threads);
    for (const auto& [limit, rate] : limits.measured())
        std::printf("%-24s %s%s\n", limit_name(limit), rate_text(limit, rate.value).c_str(),
                    rate.disturbed ? ", disturbed by other processes" : "");
}

}  // namespace

void add_bench(CLI::App& app, int& status) {
    auto request = std::make_shared<Request>();
    CLI::App* command = app.add_subcommand("bench", "Time every operation on this CPU against what it can do at most");
    add_threads(*command, request->threads);
    command->add_option("--only", request->only, "Operations whose name contains this; may be repeated");
    command->add_flag("--json", request->json, "Print JSON");
    command->callback([request, &status] {
        bench(*request);
        status = right;
    });
}

}  // namespace softdelta::cli

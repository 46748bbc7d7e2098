// softdelta bench: this machine, operation by operation, against what it can do at most; or the layers of a model; or
// two such reports side by side.
#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>

#include "cli/bench/measure.h"
#include "cli/bench/models.h"
#include "cli/bench/problem.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "softdelta/judge.hpp"

namespace softdelta::cli {

namespace {

struct Request {
    int threads = 0;
    std::vector<std::string> only, compared;
    std::string model;
    std::int64_t batch = 1, context = 4096;
    bool json = false, loops = false;
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

using nlohmann::ordered_json;

ordered_json report(int threads) {
    return {{"version", softdelta_version()}, {"isa", selected_level()}, {"threads", threads}};
}

void print_json(const std::vector<Row>& rows, const std::map<Limit, Measured>& limits, int threads) {
    ordered_json json = report(threads);
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

// The layers of a model: each row is printed when it has been measured.
void bench_model(const Request& request, int threads) {
    const std::vector<ModelRow> rows = model_rows(request.model, request.batch, request.context);
    ordered_json json = report(threads);
    json["model"] = request.model, json["batch"] = request.batch, json["context"] = request.context;
    json["rows"] = ordered_json::array();
    const auto print = [&](const std::string& layer, const std::string& count, const std::string& time,
                           const std::string& token, const char* note = "") {
        if (request.json) return;
        std::printf("  %-36s  %6s  %14s  %14s  %s\n", layer.c_str(), count.c_str(), time.c_str(), token.c_str(), note);
        std::fflush(stdout);
    };
    if (!request.json)
        std::printf("softdelta %s, %s, %d %s: %s in bf16, batch %lld, context %lld\n", softdelta_version(),
                    selected_level().c_str(), threads, threads == 1 ? "thread" : "threads", request.model.c_str(),
                    static_cast<long long>(request.batch), static_cast<long long>(request.context));
    print("layer", "layers", "ms a layer", "us a token");
    Execution execution;
    execution.engine = "fast", execution.threads = threads;
    std::map<Step, double> seconds, tokens;  // of all layers
    ProgressLine progress("bench");
    for (const ModelRow& row : rows) {
        progress.show(static_cast<double>(json["rows"].size()) / static_cast<double>(rows.size()), row.name.c_str());
        const Problem problem = row.make();
        const Measured all = median_seconds([&] { problem.call(execution); });
        const double one = all.value / static_cast<double>(row.timed);
        seconds[row.step] += one * static_cast<double>(row.layers), tokens[row.step] = row.tokens;
        progress.clear();
        print(row.name, std::to_string(row.layers), format("%.4g", one * 1e3), format("%.4g", one / row.tokens * 1e6),
              all.disturbed ? "disturbed by other processes" : "");
        json["rows"].push_back({{"name", row.name},
                                {"layers", row.layers},
                                {"ms", one * 1e3},
                                {"us_per_token", one / row.tokens * 1e6},
                                {"disturbed", all.disturbed}});
    }
    static constexpr std::pair<Step, const char*> names[] = {
        {Step::prefill, "prefill"}, {Step::decode, "decode"}, {Step::training, "training"}};
    for (const auto& [step, name] : names) {
        const double rate = tokens[step] / seconds[step];
        json["tokens_per_second"][name] = rate;
        if (!request.json) std::printf("%s: %.4g tokens/s of these layers alone\n", name, rate);
    }
    if (request.json) std::printf("%s\n", json.dump(2).c_str());
}

// Where the time of products by matrix tiles goes: loops of one kind of instruction, on one thread and on all.
void bench_loops(int threads) {
    const std::vector<softdelta_loop> one = measure_loops(1), all = measure_loops(threads);
    if (one.empty()) throw Unsupported("--loops: " + selected_level() + " has no matrix tiles");
    std::printf("softdelta %s, %s: ns of a thread for an operation\n", softdelta_version(), selected_level().c_str());
    Table table({"operation", "1 thread", std::to_string(threads) + " threads", "together"});
    for (std::size_t i = 0; i < one.size(); ++i)
        table.add(
            {{one[i].name},
             {format("%.1f", one[i].seconds * 1e9)},
             {format("%.1f", all[i].seconds * 1e9)},
             {all[i].flops == 0 ? std::string() : rate_text(Limit::bf16, threads * all[i].flops / all[i].seconds)}});
    print(table);
}

// The rows of a report that bench --json wrote.
std::vector<ordered_json> rows_of(const std::string& path) {
    std::ifstream file(path);
    if (!file || file.peek() == std::ifstream::traits_type::eof())
        throw std::invalid_argument(path + ": cannot be read");
    const ordered_json report = ordered_json::parse(file, nullptr, false);
    if (!report.is_object() || !report.contains("rows") || !report["rows"].is_array())
        throw std::invalid_argument(path + ": expected what softdelta bench --json prints");
    std::vector<ordered_json> rows;
    for (const ordered_json& row : report["rows"])
        if (row.is_object() && row.contains("name") && row["name"].is_string() && row.contains("ms") &&
            row["ms"].is_number() && row["ms"] > 0)
            rows.push_back(row);
    return rows;
}

void compare(const std::string& first, const std::string& second) {
    const std::vector<ordered_json> a = rows_of(first), b = rows_of(second);
    Table table({"operation", "first, ms", "second, ms", "second / first"});
    int common = 0;
    for (const ordered_json& row : a) {
        const auto other = std::ranges::find(b, row["name"], [](const ordered_json& r) { return r["name"]; });
        if (other == b.end()) continue;
        ++common;
        const double before = row["ms"], after = (*other)["ms"];
        const bool disturbed = row.value("disturbed", false) || other->value("disturbed", false);
        table.add({{row["name"].get<std::string>()},
                   {format("%.4g", before)},
                   {format("%.4g", after)},
                   {format("%.2f", after / before) + (disturbed ? ", disturbed by other processes" : "")}});
    }
    if (common == 0) throw std::invalid_argument(second + ": has no operation of " + first);
    print(table);
}

void bench(const Request& request) {
    if (!request.compared.empty()) return compare(request.compared[0], request.compared[1]);
    const int wanted = request.threads > 0 ? request.threads : omp_get_max_threads();
    const int threads = std::min(wanted, 16 * omp_get_num_procs());  // as the library cuts them
    if (request.loops) return bench_loops(threads);
    if (!request.model.empty()) return bench_model(request, threads);
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
    command->add_flag("--loops", request->loops, "Time what products by matrix tiles are made of")
        ->excludes("--only", "--json");
    constexpr std::int64_t most = 1 << 20;
    CLI::Option* model =
        command
            ->add_option("--model", request->model,
                         "Time the layers of a model that are this library's, in prefill, decode and a training step")
            ->check(CLI::IsMember(model_names()))
            ->excludes("--only");
    command->add_option("--batch", request->batch, "Sequences of the model's calls; default 1")
        ->check(CLI::Range(std::int64_t{1}, most))
        ->needs(model);
    command->add_option("--context", request->context, "Tokens of each sequence; default 4096")
        ->check(CLI::Range(std::int64_t{1}, most))
        ->needs(model);
    command->add_option("--compare", request->compared, "Two reports of --json, row by row")
        ->expected(2)
        ->excludes("--only", "--json", model);
    command->callback([request, &status] {
        bench(*request);
        status = right;
    });
}

}  // namespace softdelta::cli

// softdelta verify: dumps in, verdicts out.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "diagnose/blind.h"
#include "io/call/layer.h"
#include "io/file/text.h"
#include "judge/layer.h"
#include "judge/memory.h"
#include "judge/verify.h"

namespace softdelta::cli {

namespace {

using Json = nlohmann::ordered_json;

struct VerifyRequest {
    std::vector<std::string> files;
    std::vector<std::string> limits;   // NAME=RATIO
    std::vector<std::string> require;  // results that must be there; "all"
    bool json = false;
    std::string engine;
    bool blind = false;  // say what the input cannot show
    bool own = false;    // judge an engine of ours instead of the dump's results
    int threads = 0;
    std::uint64_t memory = 0;
};

struct Report {
    std::string file, op, producer, error;
    std::string engine;  // whose results are judged; empty: the dump's own
    std::vector<std::string> notes;
    std::vector<judge::Finding> findings;
    std::vector<std::string> missing;  // results that must be there and are not
    std::optional<diagnose::Blindness> blind;
    double seconds = 0, memory = 0;  // bytes, as estimated

    Status status() const {
        if (!error.empty()) return unusable;
        const Status judged = status_of(judge::summarise(findings));
        return judged == right && !missing.empty() ? not_judged : judged;
    }
};

const char* name_of(DType type) {
    static constexpr const char* names[] = {"f64", "f32", "bf16", "f16", "bool", "i32", "i64"};
    return names[static_cast<std::size_t>(type)];
}

const char* name_of(judge::Verdict verdict) {
    static constexpr const char* names[] = {"right", "right, digits lost", "wrong", "cannot be judged"};
    return names[static_cast<std::size_t>(verdict)];
}

std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2e", x);
    return text;
}

std::map<std::string, double> parse_limits(const std::vector<std::string>& texts) {
    std::map<std::string, double> limits;
    for (const std::string& text : texts) {
        const std::size_t equal = text.find('=');
        std::size_t used = 0;
        double ratio = -1;
        try {
            ratio = equal == std::string::npos ? -1 : std::stod(text.substr(equal + 1), &used);
        } catch (const std::logic_error&) {
            used = 0;
        }
        if (equal == std::string::npos || equal == 0 || used != text.size() - equal - 1 || !std::isfinite(ratio) ||
            ratio < 0)
            throw std::invalid_argument("--limit is " + text + ", expected NAME=RATIO, as dq=0.01");
        limits[text.substr(0, equal)] = ratio;
    }
    return limits;
}

// The results to judge: the dump's, or those that an engine of ours makes of its inputs.
template <class Call>
std::map<std::string, Tensor> results_of(const Call& call, const io::CaseFile& file, const VerifyRequest& request,
                                         Report& report, std::vector<io::OwnedTensor>& memory) {
    std::map<std::string, Tensor> results;
    if (!request.own && call.outputs.empty()) {
        std::string names;
        for (const std::string& name : io::output_names(call)) names += (names.empty() ? "" : ", ") + name;
        io::fail(file.name, "holds no result to judge, expected some of " + names);
    }
    report.memory = judge::memory_to_judge(call, request.own ? io::output_names(call) : call.outputs, report.engine,
                                           request.threads);
    judge::expect_memory(file.name, report.memory, static_cast<double>(request.memory));
    if (!request.own) {
        for (const std::string& name : call.outputs) results[name] = file.view(name);
        return results;
    }
    for (const std::string& name : io::output_names(call)) {
        const auto given = file.tensors.find(name);
        const DType dtype = given != file.tensors.end() ? given->second.dtype() : io::output_dtype(call, name);
        memory.emplace_back(dtype, io::output_shape(call, name));
        results[name] = memory.back().view();
    }
    Execution execution;
    execution.engine = request.engine;
    execution.threads = request.threads;
    report.memory += static_cast<double>(io::check(call, results, execution));
    judge::expect_memory(file.name, report.memory, static_cast<double>(request.memory));
    io::execute(call, results, execution);
    return results;
}

// Required results that the dump lacks. A gradient of a state that did not come in is no one's duty.
template <class Call>
std::vector<std::string> missing_results(const Call& call, const io::CaseFile& file,
                                         const std::vector<std::string>& required) {
    const std::vector<std::string> known = io::output_names(call);
    std::vector<std::string> missing;
    const auto need = [&](const std::string& name) {
        if (std::ranges::find(call.outputs, name) == call.outputs.end()) missing.push_back(name);
    };
    for (const std::string& name : required) {
        if (name == "all") {
            for (const std::string& result : known)
                if (result != "dinitial_state" || file.tensors.count("initial_state") != 0) need(result);
        } else if (std::ranges::find(known, name) != known.end()) {
            need(name);
        } else {
            io::fail(file.name, "--require " + name + ": its call has no such result");
        }
    }
    return missing;
}

template <class Call>
void judge_call(const Call& call, const io::CaseFile& file, const VerifyRequest& request, judge::Options options,
                Report& report) {
    report.op = call.op;
    report.notes = call.warnings;
    if (const auto producer = file.metadata.find("producer"); producer != file.metadata.end())
        report.producer = producer->second;
    if constexpr (requires { call.intermediates; })
        for (const std::string& name : call.intermediates)
            report.notes.push_back(name + ": an intermediate, not judged");
    for (const auto& [name, limit] : options.limits)
        if (std::ranges::find(call.outputs, name) == call.outputs.end() && !request.own)
            report.notes.push_back("--limit " + name + ": the file has no such result");
    if (!request.own) report.missing = missing_results(call, file, request.require);
    ProgressLine progress(report.file);
    options.progress = [&](double fraction, const char* step) { progress.show(fraction, step); };
    std::vector<io::OwnedTensor> memory;
    const std::map<std::string, Tensor> results = results_of(call, file, request, report, memory);
    report.findings = judge::verify(call, results, options);
    if constexpr (std::is_same_v<Call, io::Call>) {
        report.blind =
            request.blind ? diagnose::blindness_of(call, results, request.threads) : diagnose::blindness_by_facts(call);
        if (!report.blind->unseen.empty() &&
            (request.blind || judge::summarise(report.findings) != judge::Verdict::wrong))
            report.notes.push_back(report.blind->sentence());
    }
}

Report judge_file(const std::string& path, const VerifyRequest& request, const judge::Options& options) {
    Report report;
    report.file = path;
    if (request.own) report.engine = request.engine;
    const auto start = std::chrono::steady_clock::now();
    try {
        const io::CaseFile file = io::read_case(path);
        std::visit([&](const auto& call) { judge_call(call, file, request, options, report); }, io::any_call_of(file));
    } catch (const io::CaseError& e) {
        report.error = e.what();
    } catch (const std::bad_alloc&) {
        report.error = path + ": out of memory";
    } catch (const std::exception& e) {
        report.error = path + ": " + e.what();
    }
    report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return report;
}

void print_table(const Report& report) {
    if (!report.error.empty()) {
        complain(report.error);
        return;
    }
    static constexpr Colour colours[] = {Colour::green, Colour::yellow, Colour::red, Colour::yellow};
    const auto summary = static_cast<std::size_t>(judge::summarise(report.findings));
    const bool incomplete = !report.missing.empty() && status_of(judge::summarise(report.findings)) == right;
    const std::string verdict = incomplete ? coloured("incomplete", Colour::yellow)
                                           : coloured(name_of(static_cast<judge::Verdict>(summary)), colours[summary]);
    const std::string producer = !report.engine.empty()    ? ", engine " + report.engine
                                 : report.producer.empty() ? ""
                                                           : ", " + io::quote(report.producer);
    std::printf("%s: %s (%s%s, %.1f s, %s)\n", coloured(io::printable(report.file), Colour::bold).c_str(),
                verdict.c_str(), report.op.c_str(), producer.c_str(), report.seconds,
                judge::memory_text(report.memory).c_str());
    Table table({"result", "shape", "type", "largest error", "at", "ratio", "limit", "verdict"});
    for (const judge::Finding& f : report.findings)
        table.add({{f.name},
                   {io::shape_text(f.shape)},
                   {name_of(f.dtype)},
                   {number(f.largest_error)},
                   {io::shape_text(f.largest_error_at)},
                   {number(f.ratio)},
                   {number(f.limit)},
                   {name_of(f.verdict), colours[static_cast<std::size_t>(f.verdict)]}});
    print(table);
    for (const judge::Finding& f : report.findings)
        if (!f.note.empty())
            std::printf("  %s: %s\n", coloured(f.name, colours[static_cast<std::size_t>(f.verdict)]).c_str(),
                        f.note.c_str());
    for (const std::string& name : report.missing) std::printf("  %s: missing\n", name.c_str());
    for (const std::string& note : report.notes) std::printf("  note: %s\n", note.c_str());
    std::printf("\n");
}

// JSON has no infinity or NaN: such a number is null.
Json to_json(const Report& report) {
    static constexpr const char* verdicts[] = {"right", "digits_lost", "wrong", "cannot_be_judged"};
    Json json{{"file", report.file}, {"status", report.status()}};
    if (!report.error.empty()) {
        json["error"] = report.error;
        return json;
    }
    json["op"] = report.op;
    json["producer"] = report.producer;
    json["engine"] = report.engine.empty() ? Json() : Json(report.engine);
    json["seconds"] = report.seconds;
    json["memory"] = static_cast<std::uint64_t>(report.memory);
    json["notes"] = report.notes;
    json["missing"] = report.missing;
    if (report.blind) {
        json["blind"] = Json::array();
        for (const diagnose::Entry* mistake : report.blind->unseen) json["blind"].push_back(mistake->name);
    }
    json["results"] = Json::array();
    for (const judge::Finding& f : report.findings)
        json["results"].push_back({{"name", f.name},
                                   {"shape", f.shape},
                                   {"type", name_of(f.dtype)},
                                   {"largest_error", f.largest_error},
                                   {"at", f.largest_error_at},
                                   {"ratio", f.ratio},
                                   {"limit", f.limit},
                                   {"verdict", verdicts[static_cast<std::size_t>(f.verdict)]},
                                   {"note", f.note}});
    return json;
}

bool is_better(Status a, Status b) {
    static constexpr int order[] = {0, 2, 3, 1};  // of right, wrong, unusable, not_judged
    return order[a] < order[b];
}

// One line.
void print_line(const Report& report) {
    static constexpr const char* words[] = {"right", "wrong", "unusable", "not judged"};
    static constexpr Colour colours[] = {Colour::green, Colour::red, Colour::red, Colour::yellow};
    const Status status = report.status();
    const std::string prefix = report.file + ": ";
    std::string why = report.error.starts_with(prefix) ? report.error.substr(prefix.size()) : report.error;
    for (const judge::Finding& f : report.findings)
        if (status != right && status == status_of(f.verdict))
            why += (why.empty() ? "" : "; ") + f.name + ": ratio " + number(f.ratio) + ", limit " + number(f.limit);
    for (const std::string& name : report.missing) why += (why.empty() ? "" : "; ") + name + ": missing";
    if (status == right) why = report.op + ", " + std::to_string(report.findings.size()) + " results";
    std::printf("%s: %s (%s)\n", io::printable(report.file).c_str(), coloured(words[status], colours[status]).c_str(),
                io::printable(why).c_str());
    if (report.blind && report.blind->of > 0 && !report.blind->unseen.empty())
        std::printf("  %s\n", report.blind->sentence().c_str());
}

// The case files of a folder, by name.
std::vector<std::string> files_of(const std::string& folder) {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
        if (entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
    std::ranges::sort(files);
    if (files.empty()) io::fail(folder, "holds no case file (.safetensors)");
    return files;
}

Status verify(const VerifyRequest& request) {
    judge::Options options;
    options.threads = request.threads;
    options.limits = parse_limits(request.limits);
    Status worst = right;
    Json all = Json::array();
    const auto judge_one = [&](const std::string& path, auto print) {
        const Report report = judge_file(path, request, options);
        worst = std::max(worst, report.status(), is_better);
        if (request.json)
            all.push_back(to_json(report));
        else
            print(report);
    };
    for (const std::string& path : request.files) {
        if (!std::filesystem::is_directory(path)) {
            judge_one(path, print_table);
            continue;
        }
        for (const std::string& file : files_of(path)) judge_one(file, print_line);
    }
    if (request.json) std::printf("%s\n", all.dump(2, ' ', true, Json::error_handler_t::replace).c_str());
    return worst;
}

}  // namespace

void add_verify(CLI::App& app, int& status) {
    auto request = std::make_shared<VerifyRequest>();
    CLI::App* command = app.add_subcommand("verify", "Compare every result in dumps with the f64 truth");
    command->add_option("FILE", request->files, "Case files (safetensors), or folders of them: a line for each file")
        ->required();
    command->add_flag("--json", request->json, "Print JSON");
    command
        ->add_option("--limit", request->limits,
                     "Limit of a result's error ratio, NAME=RATIO, instead of the computed one")
        ->allow_extra_args(false);
    command
        ->add_option("--require", request->require,
                     "Results that must be there, or all: a dump that lacks one is incomplete, status 3")
        ->delimiter(',')
        ->allow_extra_args(false);
    command->add_flag("--blind", request->blind,
                      "Say which mistakes this input cannot show; takes as long as diagnose");
    add_engine(*command, request->engine, "Judge this engine on the dump's inputs; the dump's results are ignored");
    add_threads(*command, request->threads);
    add_memory(*command, request->memory);
    command->callback([request, command, &status] {
        request->own = command->count("--engine") > 0;
        status = verify(*request);
    });
}

}  // namespace softdelta::cli

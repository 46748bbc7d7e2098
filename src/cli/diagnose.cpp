// softdelta diagnose: where a kernel is wrong, and which mistake it makes.
#include <chrono>
#include <cstdio>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "diagnose/blind.h"
#include "diagnose/diagnose.h"
#include "diagnose/evidence/plot.h"
#include "diagnose/report.h"
#include "io/file/output.h"
#include "io/file/text.h"

namespace softdelta::cli {

namespace {

using Json = nlohmann::ordered_json;
using diagnose::Candidate;
using diagnose::Diagnosis;
using diagnose::Entry;

struct DiagnoseRequest {
    std::string file, plot;
    bool json = false, catalogue = false;
    int threads = 0;
    std::uint64_t memory = 0;
    std::size_t top = 5;
};

Json to_json(const std::vector<const Entry*>& entries) {
    Json json = Json::array();
    for (const Entry* entry : entries) json.push_back(entry->name);
    return json;
}

Json to_json(const Candidate& c) {
    static constexpr const char* scopes[] = {"both", "forward", "backward"};
    return {{"mistakes", to_json(c.entries)}, {"scope", scopes[static_cast<std::size_t>(c.scope)]},
            {"left", c.left.results},         {"worst_block", c.left.worst_block},
            {"explains", c.explains},         {"equal", to_json(c.equal)}};
}

Json to_json(const std::string& file, const io::Call& call, const Diagnosis& d, double seconds, std::size_t top) {
    Json json{{"file", file}, {"status", status_of(judge::summarise(d.findings))}, {"seconds", seconds}};
    json["memory"] = static_cast<std::uint64_t>(d.memory);
    json["examined"] = d.examined;
    json["results"] = Json::array();
    static constexpr const char* verdicts[] = {"right", "digits_lost", "wrong", "cannot_be_judged"};
    for (const judge::Finding& f : d.findings)
        json["results"].push_back({{"name", f.name},
                                   {"ratio", f.ratio},
                                   {"limit", f.limit},
                                   {"verdict", verdicts[static_cast<std::size_t>(f.verdict)]},
                                   {"note", f.note}});
    json["where"] = d.where;
    json["stages"] = Json::array();
    for (const diagnose::StageFinding& f : d.stages)
        json["stages"].push_back(
            {{"name", f.name}, {"ratio", f.ratio}, {"limit", f.limit}, {"wrong", f.wrong}, {"note", f.note}});
    json["conclusion"] = d.conclusion;
    json["before"] = d.ranking.before.results;
    json["noise"] = d.ranking.noise;
    json["explained"] = d.ranking.explained() ? 1 : d.ranking.explained_by_two() ? 2 : 0;
    for (const auto& [name, list] : {std::pair{"ranking", &d.ranking.singles}, {"pairs", &d.ranking.pairs}}) {
        json[name] = Json::array();
        for (std::size_t i = 0; i < std::min(top, list->size()); ++i) json[name].push_back(to_json((*list)[i]));
    }
    json["pairs_left_out"] = d.ranking.pairs_left_out;
    json["blind"] = to_json(blindness_of(call, d.ranking).unseen);
    json["within_rounding"] = to_json(d.ranking.within_rounding);
    json["no_effect"] = to_json(d.ranking.no_effect);
    return json;
}

void write_plot(const DiagnoseRequest& request, const Diagnosis& d) {
    const std::string picture = diagnose::plot_errors(request.file, d.maps);
    io::write_file(request.plot, [&](const io::WriteBytes& write) { write(picture.data(), picture.size()); });
}

Status diagnose_file(const DiagnoseRequest& request) {
    if (request.file.empty()) throw std::invalid_argument("FILE is required");
    const auto start = std::chrono::steady_clock::now();
    const io::CaseFile file = io::read_case(request.file);
    const io::Call call = io::call_of(file);
    if (call.outputs.empty())
        throw io::CaseError(request.file + ": holds no result to diagnose, expected o, lse, final_state or a gradient");
    if (!request.plot.empty()) io::expect_output(request.plot, request.file);
    std::map<std::string, Tensor> results;
    for (const std::string& name : call.outputs) results[name] = file.view(name);
    std::map<std::string, Tensor> intermediates;
    for (const std::string& name : call.intermediates) intermediates[name] = file.view(name);
    Diagnosis d;
    try {
        ProgressLine progress(request.file);
        diagnose::Options options;
        options.threads = request.threads;
        options.memory = static_cast<double>(request.memory);
        options.progress = [&](double fraction, const char* step) { progress.show(fraction, step); };
        d = diagnose::diagnose(call, results, intermediates, options);
    } catch (const std::bad_alloc&) {
        throw io::CaseError(request.file + ": out of memory");
    } catch (const std::exception& e) {
        throw io::CaseError(request.file + ": " + e.what());
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!request.plot.empty()) write_plot(request, d);
    if (request.json)
        std::printf("%s\n", to_json(request.file, call, d, seconds, request.top)
                                .dump(2, ' ', true, Json::error_handler_t::replace)
                                .c_str());
    else
        std::fputs(diagnose::report(request.file, call, d, seconds, {request.top, wants_colour()}).c_str(), stdout);
    return status_of(judge::summarise(d.findings));
}

}  // namespace

void add_diagnose(CLI::App& app, int& status) {
    auto request = std::make_shared<DiagnoseRequest>();
    CLI::App* command = app.add_subcommand("diagnose", "Say where a dump is wrong, and which mistake explains it");
    command->add_option("FILE", request->file, "Case file (safetensors)");
    command->add_flag("--json", request->json, "Print JSON");
    command->add_option("--plot", request->plot, "Draw rows x heads of every wrong result, SVG");
    command->add_flag("--catalogue", request->catalogue, "Print the catalogue as Markdown, without a FILE");
    command->add_option("--top", request->top, "Mistakes to list")->capture_default_str();
    add_threads(*command, request->threads);
    add_memory(*command, request->memory);
    command->callback([request, &status] {
        if (request->catalogue)
            std::fputs(diagnose::catalogue_page().c_str(), stdout);
        else
            status = diagnose_file(*request);
    });
}

}  // namespace softdelta::cli

// softdelta info: this CPU, what is compiled in, what would run.
#include <omp.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"

namespace softdelta::cli {

namespace {

std::string cpu_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
    return "unknown";
}

// The names of the levels that have this property.
std::vector<std::string> names(bool IsaLevel::*property) {
    std::vector<std::string> found;
    for (const IsaLevel& level : isa_levels())
        if (level.*property) found.push_back(level.name);
    return found;
}

// Whether operands of bf16 are multiplied as such when a call leaves it open.
bool multiplies_bf16() {
    for (const IsaLevel& level : isa_levels())
        if (level.selected) return level.bf16_products;
    return false;
}

std::vector<std::string> engine_names() {
    std::vector<std::string> found;
    for (const EngineInfo& engine : list_engines())
        if (engine.available) found.push_back(engine.name);
    return found;
}

void print_json() {
    const std::vector<std::string> selected = names(&IsaLevel::selected);
    const nlohmann::ordered_json info{
        {"version", softdelta_version()},
        {"cpu", cpu_name()},
        {"compiled", names(&IsaLevel::compiled)},
        {"available", names(&IsaLevel::available)},
        {"selected", selected.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(selected.front())},
        {"bf16_products", multiplies_bf16() ? "bf16" : "f32"},
        {"threads", omp_get_max_threads()},
        {"engines", engine_names()}};
    std::printf("%s\n", info.dump(2).c_str());
}

void print_text() {
    const auto line = [](const char* label, bool IsaLevel::*property) {
        std::string text;
        for (const std::string& name : names(property)) text += (text.empty() ? "" : " ") + name;
        std::printf("%-11s %s\n", label, text.empty() ? "none" : text.c_str());
    };
    std::printf("softdelta   %s\nCPU         %s\n", softdelta_version(), cpu_name().c_str());
    line("compiled", &IsaLevel::compiled);
    line("available", &IsaLevel::available);
    line("selected", &IsaLevel::selected);
    std::printf("bf16        multiplied %s\n", multiplies_bf16() ? "by dot products of pairs" : "as f32");
    std::printf("threads     %d\n", omp_get_max_threads());
    const char* label = "engines";
    for (const EngineInfo& engine : list_engines()) {
        std::printf("%-11s %-10s  %s%s\n", label, engine.name.c_str(), engine.description.c_str(),
                    engine.available ? "" : " (not available here)");
        label = "";
    }
}

}  // namespace

void add_info(CLI::App& app, int& status) {
    CLI::App* command = app.add_subcommand("info", "Tell about this CPU, instruction sets and threads");
    auto json = std::make_shared<bool>(false);
    command->add_flag("--json", *json, "Print JSON");
    command->callback([json, &status] {
        *json ? print_json() : print_text();
        status = right;
    });
}

}  // namespace softdelta::cli

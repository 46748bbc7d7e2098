// softdelta info: this CPU, what is compiled in, what would run.
#include <omp.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/commands.h"

namespace softdelta::cli {

namespace {

std::string cpu_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
    return "unknown";
}

std::vector<std::string> available_levels() {
    std::vector<std::string> levels;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt")) levels.push_back("x86-64-v2");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) levels.push_back("avx2");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        levels.push_back("avx512");
        if (__builtin_cpu_supports("avx512bf16")) levels.push_back("avx512bf16");
    }
#endif
    return levels;
}

void print_info(bool json) {
    std::string levels;
    for (const std::string& level : available_levels()) levels += (levels.empty() ? "" : " ") + level;
    if (json) {
        const nlohmann::ordered_json info{{"version", softdelta_version()},
                                          {"cpu", cpu_name()},
                                          {"available", available_levels()},
                                          {"compiled", nlohmann::json::array()},
                                          {"selected", nullptr},
                                          {"threads", omp_get_max_threads()},
                                          {"engines", {"reference", "stages_f64", "stages_f32"}}};
        std::printf("%s\n", info.dump(2).c_str());
        return;
    }
    std::printf("softdelta   %s\nCPU         %s\navailable   %s\n", softdelta_version(), cpu_name().c_str(),
                levels.c_str());
    std::printf("compiled    no fast kernels\nselected    none\nthreads     %d\n", omp_get_max_threads());
    std::printf("engines     reference (f64 truth), stages_f64, stages_f32 (chunk form)\n");
}

}  // namespace

void add_info(CLI::App& app, int& status) {
    CLI::App* command = app.add_subcommand("info", "Tell about this CPU, instruction sets and threads");
    auto json = std::make_shared<bool>(false);
    command->add_flag("--json", *json, "Print JSON");
    command->callback([json, &status] {
        print_info(*json);
        status = right;
    });
}

}  // namespace softdelta::cli

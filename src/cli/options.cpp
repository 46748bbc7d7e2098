// Options that several commands have.
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cli/commands.h"

namespace softdelta::cli {

void add_engine(CLI::App& command, std::string& engine, const char* help) {
    std::vector<std::string> names{"automatic", "fast"};
    for (const EngineInfo& info : list_engines()) names.push_back(info.name);
    std::string choices;
    for (const std::string& name : names) choices += (choices.empty() ? "" : "|") + name;
    const auto known = [names, choices](const std::string& text) {
        return std::find(names.begin(), names.end(), text) != names.end() ? "" : text + ", expected one of " + choices;
    };
    command.add_option("--engine", engine, help)->check(CLI::Validator(known, ""))->type_name(choices);
}

void add_threads(CLI::App& command, int& threads) {
    command.add_option("--threads", threads, "Threads; default: one for each core. Results do not depend on it")
        ->type_name("N")
        ->check(CLI::Validator(
            [](const std::string& text) {
                const bool whole = text.size() < 10 && text.find_first_not_of("0123456789") == std::string::npos;
                return whole ? "" : text + ", expected a whole number from 0 to 999999999";
            },
            ""));
}

void add_memory(CLI::App& command, std::uint64_t& bytes) {
    bytes = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) / 2 * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    const auto to_bytes = [](std::string& text) -> std::string {
        const std::string given = text, units = "KMGT";
        const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
        const std::size_t unit = digits + 1 == text.size() ? units.find(text[digits]) : std::string::npos;
        const bool plain = digits == text.size();
        if (digits == 0 || digits > (plain ? 18 : 7) || (!plain && unit == std::string::npos))
            return given + ", expected a whole number, of bytes or with K, M, G or T";
        text = std::to_string(std::stoull(text.substr(0, digits)) << (plain ? 0 : 10 * (unit + 1)));
        return "";
    };
    command
        .add_option(
            "--memory", bytes,
            "What a call may need of memory, as 500M or 8G; it is estimated before it is computed. Default: half "
            "of the machine's")
        ->type_name("SIZE")
        ->transform(CLI::Validator(to_bytes, ""));
}

}  // namespace softdelta::cli

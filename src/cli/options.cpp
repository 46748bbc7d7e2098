// Options that several commands have.
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

}  // namespace softdelta::cli

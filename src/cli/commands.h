// The program's commands. Each adds itself to the command line; what it returns becomes the exit status.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "judge/verify.h"
#include "softdelta/softdelta.hpp"

namespace softdelta::cli {

// Exit status of the program. Of several files the worst counts: unusable, wrong, not_judged, right.
enum Status { right = 0, wrong = 1, unusable = 2, not_judged = 3 };

inline Status status_of(judge::Verdict verdict) {
    return verdict == judge::Verdict::wrong ? wrong : verdict == judge::Verdict::cannot_be_judged ? not_judged : right;
}

void add_verify(CLI::App& app, int& status);
void add_diagnose(CLI::App& app, int& status);
void add_run(CLI::App& app, int& status);
void add_make(CLI::App& app);
void add_info(CLI::App& app, int& status);
void add_bench(CLI::App& app, int& status);

// Options shared by the commands that compute.
void add_engine(CLI::App& command, std::string& engine, const char* help);
void add_threads(CLI::App& command, int& threads);

// --memory, bytes that a call may need besides its file; half of the machine's where it is not given.
void add_memory(CLI::App& command, std::uint64_t& bytes);

// The name of a value, which becomes the value; what it may be is said without the numbers behind it.
template <class Value>
CLI::Validator one_of(std::vector<std::pair<std::string, Value>> names) {
    const auto look_up = [names = std::move(names)](std::string& text) -> std::string {
        std::string expected;
        for (const auto& [name, value] : names) {
            if (text == name) {
                text = std::to_string(static_cast<int>(value));
                return "";
            }
            expected += (expected.empty() ? "" : ", ") + name;
        }
        return text + ", expected one of " + expected;
    };
    return CLI::Validator(look_up, "");
}

}  // namespace softdelta::cli

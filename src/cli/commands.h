// The program's commands. Each adds itself to the command line; what it returns becomes the exit status.
#pragma once

#include <CLI/CLI.hpp>

#include "softdelta/softdelta.hpp"

namespace softdelta::cli {

// Exit status of the program.
enum Status { right = 0, wrong = 1, unusable = 2 };

void add_verify(CLI::App& app, int& status);
void add_diagnose(CLI::App& app, int& status);
void add_run(CLI::App& app, int& status);
void add_make(CLI::App& app);
void add_info(CLI::App& app, int& status);
void add_bench(CLI::App& app, int& status);

// --engine and --threads, shared by the commands that compute.
void add_engine(CLI::App& command, Engine& engine, const char* help);
void add_threads(CLI::App& command, int& threads);

}  // namespace softdelta::cli

// The program as a function, for main and for Python.
#pragma once

namespace softdelta::cli {

// Runs the command in argv[1] and returns the exit status. It takes over the signals that end a process.
int program(int argc, const char* const* argv);

}  // namespace softdelta::cli

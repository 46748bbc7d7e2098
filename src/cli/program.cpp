// The program softdelta: verify, diagnose, run and make case files; tell about this CPU, and time it.
#include "cli/program.h"

#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "io/file/output.h"
#include "io/file/text.h"

namespace softdelta::cli {

namespace {

// A full disk or a closed pipe must not look like success.
void flush_output() {
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
        throw std::runtime_error("standard output cannot be written");
}

// Ends the process as the signal does by itself, which is what it finds set when it comes the second time. SIGPIPE too:
// a reader that went away wants no more.
void clean_up(int signal) {
    io::remove_unfinished();
    raise(signal);
}

void clean_up_at_signals() {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGALRM, SIGUSR1, SIGUSR2, SIGXFSZ, SIGXCPU}) {
        struct sigaction old {};
        if (sigaction(signal, nullptr, &old) != 0 || old.sa_handler == SIG_IGN) continue;  // as nohup wants it
        struct sigaction action {};
        action.sa_handler = clean_up;
        action.sa_flags = SA_RESETHAND;
        sigaction(signal, &action, nullptr);
    }
}

}  // namespace

int program(int argc, const char* const* argv) {
    CLI::App app{"softdelta: softmax attention and delta rules, and the truth about your kernel's gradients"};
    app.set_version_flag("--version", std::string("softdelta ") + softdelta_version());
    app.footer(
        "softdelta audit, of the Python package, judges functions of Python and libraries with softdelta's names.\n\n"
        "Exit status: 0 right, 1 a result is wrong, 2 a file or an argument cannot be used, 3 a result cannot be "
        "judged.");
    app.failure_message([](const CLI::App*, const CLI::Error& e) {
        return softdelta::io::printable(e.what()) + "\nRun with --help for more information.\n";
    });
    clean_up_at_signals();
    int status = right;
    add_verify(app, status);
    add_diagnose(app, status);
    add_run(app, status);
    add_make(app);
    add_info(app, status);
    add_bench(app, status);
    try {
        softdelta::isa_levels();  // a wrong SOFTDELTA_ISA is never ignored
        app.parse(argc, argv);
        if (app.get_subcommands().empty()) throw CLI::RequiredError("A command");
        flush_output();
        return status;
    } catch (const CLI::ParseError& e) {
        return app.exit(e) == 0 ? right : unusable;
    } catch (const std::bad_alloc&) {
        complain("out of memory");
    } catch (const std::exception& e) {
        complain(e.what());
    }
    return unusable;
}

}  // namespace softdelta::cli

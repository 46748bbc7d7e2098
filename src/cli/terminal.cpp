#include "cli/terminal.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "io/file/text.h"

namespace softdelta::cli {

bool wants_colour() {
    static const bool wanted = isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
    return wanted;
}

std::string coloured(const std::string& text, Colour colour) {
    return wants_colour() ? judge::paint(text, colour) : text;
}

void print(const Table& table) {
    std::fputs(table.text(wants_colour()).c_str(), stdout);
}

void complain(const std::string& text) {
    std::fflush(stdout);
    std::fprintf(stderr, "softdelta: %s\n", io::printable(text).c_str());
}

ProgressLine::ProgressLine(const std::string& title)
    : title_(io::printable(title)), terminal_(isatty(STDERR_FILENO) != 0) {}

void ProgressLine::show(double fraction, const char* step) {
    if (!terminal_) return;
    constexpr int size = 24;
    const int done = static_cast<int>(fraction * size);
    const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    std::fprintf(stderr, "\r\033[K%s [%s%s] %3.0f %%  %s  %.0f s", title_.c_str(),
                 std::string(static_cast<std::size_t>(done), '#').c_str(),
                 std::string(static_cast<std::size_t>(size - done), '.').c_str(), 100 * fraction, step, seconds);
    std::fflush(stderr);
    shown_ = true;
}

void ProgressLine::clear() {
    if (shown_) std::fprintf(stderr, "\r\033[K");
    shown_ = false;
}

}  // namespace softdelta::cli

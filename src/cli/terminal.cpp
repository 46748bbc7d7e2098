#include "cli/terminal.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace softdelta::cli {

namespace {

bool wants_colour() {
    static const bool wanted = isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
    return wanted;
}

// Characters shown, not bytes: UTF-8 continuation bytes do not count.
std::size_t width(const std::string& text) {
    return static_cast<std::size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace

std::string coloured(const std::string& text, Colour colour) {
    static const char* codes[] = {"", "\033[32m", "\033[33m", "\033[31m", "\033[1m"};
    if (colour == Colour::none || !wants_colour()) return text;
    return codes[static_cast<std::size_t>(colour)] + text + "\033[0m";
}

Table::Table(std::vector<std::string> header) {
    std::vector<Cell> cells;
    for (std::string& name : header) cells.push_back({std::move(name), Colour::bold});
    rows_.push_back(std::move(cells));
}

void Table::print() const {
    std::vector<std::size_t> widths(rows_.front().size());
    for (const auto& row : rows_)
        for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i].text));
    for (const auto& row : rows_) {
        std::string line = "  ";
        for (std::size_t i = 0; i < row.size(); ++i) {
            line += coloured(row[i].text, row[i].colour);
            if (i + 1 < row.size()) line += std::string(widths[i] - width(row[i].text) + 2, ' ');
        }
        std::printf("%s\n", line.substr(0, line.find_last_not_of(' ') + 1).c_str());
    }
}

ProgressLine::ProgressLine(std::string title) : title_(std::move(title)), terminal_(isatty(STDERR_FILENO) != 0) {}

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

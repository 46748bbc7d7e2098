// What a terminal gets: aligned tables, colour, a progress line. Files and pipes get plain text.
#pragma once

#include <chrono>
#include <string>

#include "judge/table.h"

namespace softdelta::cli {

using judge::Cell;
using judge::Colour;
using judge::Table;

// Whether standard output is a terminal that wants colour (NO_COLOR is honoured).
bool wants_colour();

// Text in a colour, where standard output wants it.
std::string coloured(const std::string& text, Colour colour);

void print(const Table& table);

// A line on standard error.
void complain(const std::string& text);

// One line on standard error that shows how far a long run is; nothing unless that is a terminal.
class ProgressLine {
  public:
    explicit ProgressLine(const std::string& title);
    ~ProgressLine() { clear(); }
    ProgressLine(const ProgressLine&) = delete;
    ProgressLine& operator=(const ProgressLine&) = delete;
    void show(double fraction, const char* step);
    void clear();

  private:
    std::string title_;
    bool terminal_;
    bool shown_ = false;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace softdelta::cli

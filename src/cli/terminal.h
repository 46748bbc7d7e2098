// What a terminal gets: aligned tables, colour, a progress line. Files and pipes get plain text.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace softdelta::cli {

enum class Colour { none, green, yellow, red, bold };

struct Cell {
    std::string text;
    Colour colour = Colour::none;
};

// Prints rows of cells to standard output, columns aligned; the last column is not padded.
class Table {
  public:
    explicit Table(std::vector<std::string> header);
    void add(std::vector<Cell> row) { rows_.push_back(std::move(row)); }
    void print() const;

  private:
    std::vector<std::vector<Cell>> rows_;
};

// Text in a colour, if standard output is a terminal that wants it (NO_COLOR is honoured).
std::string coloured(const std::string& text, Colour colour);

// One line on standard error that shows how far a long run is; nothing unless that is a terminal.
class ProgressLine {
  public:
    explicit ProgressLine(std::string title);
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

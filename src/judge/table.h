// Tables of reports, for people: aligned columns, colour where a terminal wants it.
#pragma once

#include <string>
#include <vector>

namespace softdelta::judge {

enum class Colour { none, green, yellow, red, bold };

// Text as a terminal shows it in a colour.
std::string paint(const std::string& text, Colour colour);

struct Cell {
    std::string text;
    Colour colour = Colour::none;
};

// Rows of cells; the last column is not padded.
class Table {
  public:
    explicit Table(std::vector<std::string> header);
    void add(std::vector<Cell> row) { rows_.push_back(std::move(row)); }
    std::string text(bool coloured) const;

  private:
    std::vector<std::vector<Cell>> rows_;
};

}  // namespace softdelta::judge

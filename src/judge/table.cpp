#include "judge/table.h"

#include <algorithm>

namespace softdelta::judge {

namespace {

// Characters shown, not bytes: UTF-8 continuation bytes do not count.
std::size_t width(const std::string& text) {
    return static_cast<std::size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace

std::string paint(const std::string& text, Colour colour) {
    static const char* codes[] = {"", "\033[32m", "\033[33m", "\033[31m", "\033[1m"};
    if (colour == Colour::none) return text;
    return codes[static_cast<std::size_t>(colour)] + text + "\033[0m";
}

Table::Table(std::vector<std::string> header) {
    std::vector<Cell> cells;
    for (std::string& name : header) cells.push_back({std::move(name), Colour::bold});
    rows_.push_back(std::move(cells));
}

std::string Table::text(bool coloured) const {
    std::vector<std::size_t> widths(rows_.front().size());
    for (const auto& row : rows_)
        for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i].text));
    std::string all;
    for (const auto& row : rows_) {
        std::string line = "  ";
        for (std::size_t i = 0; i < row.size(); ++i) {
            line += coloured ? paint(row[i].text, row[i].colour) : row[i].text;
            if (i + 1 < row.size()) line += std::string(widths[i] - width(row[i].text) + 2, ' ');
        }
        all += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    return all;
}

}  // namespace softdelta::judge

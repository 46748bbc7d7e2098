#include "diagnose/evidence/plot.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

#include "io/file/text.h"

namespace softdelta::diagnose {

namespace {

constexpr Index most_columns = 256;
constexpr double left = 150, width = 768, cell_height = 14, title_height = 40, gap = 34;

std::string escaped(const std::string& text) {
    std::string out;
    for (const char c : text)
        out.append(c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : std::string(1, c));
    return out;
}

// White within rounding, then yellow to red with every power of ten; black for NaN.
std::string colour_of(double ratio) {
    if (!std::isfinite(ratio)) return "#000000";
    const double x = std::clamp(std::log10(std::max(ratio, 1.0)) / 3, 0.0, 1.0);
    char text[16];
    std::snprintf(text, sizeof text, "#%02x%02x%02x", static_cast<unsigned>(255 - 75 * std::max(0.0, 2 * x - 1)),
                  static_cast<unsigned>(255 - 235 * x), static_cast<unsigned>(255 - 235 * std::min(1.0, 3 * x)));
    return text;
}

// The largest ratio in each cell: a line for each batch row and head, a column for one or more rows.
struct Cells {
    Index lines, columns, rows;
    std::vector<double> ratio;
};

Cells cells_of(const ErrorMap& map) {
    const Index lines = map.batches * map.heads;
    const Index rows = std::max<Index>(static_cast<Index>(map.rows.size()) / std::max<Index>(lines, 1), 1);
    const Index columns = std::min(rows, most_columns);
    Cells cells{lines, columns, rows, std::vector<double>(static_cast<std::size_t>(lines * columns))};
    std::vector<Index> next(static_cast<std::size_t>(lines));  // packed sequences follow each other
    for (const ErrorRow& row : map.rows) {
        const Index line = row.batch * map.heads + row.head;
        const Index at = std::min(next[static_cast<std::size_t>(line)]++, rows - 1);
        double& cell = cells.ratio[static_cast<std::size_t>(line * columns + at * columns / rows)];
        cell = std::max(cell, row.ratio);
    }
    return cells;
}

double draw(const ErrorMap& map, double top, std::ostringstream& out) {
    const Cells cells = cells_of(map);
    const double step = width / static_cast<double>(cells.columns);
    out << "<text x='8' y='" << top - 6 << "' font-weight='bold'>" << map.result << ": " << map.wrong_rows() << " of "
        << map.rows.size() << " rows wrong, " << map.row_name << " 0-" << cells.rows - 1
        << " from left to right</text>\n";
    for (Index line = 0; line < cells.lines; ++line) {
        const double y = top + static_cast<double>(line) * cell_height;
        out << "<text x='8' y='" << y + 11 << "'>batch " << line / map.heads << ", head " << line % map.heads
            << "</text>\n"
            << "<rect x='" << left << "' y='" << y << "' width='" << width << "' height='" << cell_height
            << "' fill='#ffffff' stroke='#cccccc'/>\n";
        for (Index column = 0; column < cells.columns; ++column) {
            const double ratio = cells.ratio[static_cast<std::size_t>(line * cells.columns + column)];
            if (ratio <= 1) continue;
            out << "<rect x='" << left + static_cast<double>(column) * step << "' y='" << y << "' width='" << step
                << "' height='" << cell_height << "' fill='" << colour_of(ratio) << "'/>\n";
        }
    }
    return top + static_cast<double>(cells.lines) * cell_height + gap;
}

}  // namespace

std::string plot_errors(const std::string& title, const std::vector<ErrorMap>& maps) {
    std::ostringstream body;
    double top = title_height + gap;
    for (const ErrorMap& map : maps)
        if (map.wrong_rows() > 0) top = draw(map, top, body);
    std::ostringstream out;
    out << "<svg xmlns='http://www.w3.org/2000/svg' width='" << left + width + 20 << "' height='" << top
        << "' font-family='sans-serif' font-size='11'>\n<rect width='100%' height='100%' fill='#f6f6f6'/>\n"
        << "<text x='8' y='18' font-size='14'>" << escaped(io::printable(title)) << "</text>\n"
        << "<text x='8' y='36'>error over what rounding may cost: white 1, yellow 10, orange 100, red 1000 and more, "
           "black NaN</text>\n"
        << body.str() << "</svg>\n";
    return out.str();
}

}  // namespace softdelta::diagnose

#include "judge/blocks.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

namespace softdelta::judge {

namespace {

constexpr std::int64_t block_rows = 64;

void append_ranges(std::vector<RowRange>& ranges, std::int64_t begin, std::int64_t end, std::int64_t sequence) {
    for (std::int64_t row = begin; row < end; row += block_rows)
        ranges.push_back({row, std::min(row + block_rows, end), sequence});
}

// The dimensions' names; the row dimension, what comes after `features` dimensions is summed within a row.
struct Layout {
    std::vector<std::string> names;
    std::size_t row;
    std::size_t features;
    Bounds bounds;
};

// "head" of "head 3, tokens 64-127"; features have no name.
std::string name_of(const core::Dimension& dim) {
    using enum core::Symbol;
    constexpr std::pair<core::Symbol, const char*> names[] = {{B, "batch"},   {N, "sequence"}, {T, "tokens"},
                                                              {nT, "tokens"}, {Lq, "queries"}, {Lk, "keys"},
                                                              {H, "head"},    {Hk, "head"},    {HV, "head"}};
    for (const auto& [symbol, name] : names)
        if (dim.alternatives[0] == symbol) return name;
    return "";
}

// The dimension of rows: tokens, queries or keys, of states the last but one.
std::size_t row_dimension(const std::vector<std::string>& names, const std::vector<std::int64_t>& shape) {
    for (std::size_t i = 0; i < names.size(); ++i) {
        const bool broadcast = names[i] == "queries" && shape[i] == 1 && names.back() == "keys";  // of a bias
        if ((names[i] == "tokens" || names[i] == "queries" || names[i] == "keys") && !broadcast) return i;
    }
    return names.size() - 2;
}

Layout layout_of(const core::Shape& symbols, const std::vector<std::int64_t>& shape, const io::Packing& packing) {
    if (symbols.rank == 1) return {{symbols.has(core::Symbol::HV) ? "elements" : "heads"}, 0, 0, {}};
    Layout layout{};
    for (int i = 0; i < symbols.rank; ++i)
        layout.names.push_back(name_of(symbols.dims.at(static_cast<std::size_t>(i))));
    layout.row = row_dimension(layout.names, shape);
    const core::Dimension& row = symbols.dims.at(layout.row);
    if (layout.names[layout.row].empty()) layout.names[layout.row] = "rows";
    for (std::size_t i = layout.row + 1; i < shape.size(); ++i) layout.features += layout.names[i] != "head";
    if (row.count > 1) return layout;  // of a bias, which has a batch of sequences
    layout.bounds = row.has(core::Symbol::T)    ? packing.tokens
                    : row.has(core::Symbol::nT) ? packing.steps
                    : row.has(core::Symbol::Lq) ? packing.queries
                    : row.has(core::Symbol::Lk) ? packing.keys
                                                : Bounds{};
    return layout;
}

}  // namespace

std::int64_t Blocks::elements(std::int64_t block) const {
    const RowRange& r = ranges[static_cast<std::size_t>(block / middle % range_count())];
    return (r.end - r.begin) * features;
}

std::string Blocks::name(std::int64_t block) const {
    const RowRange& r = ranges[static_cast<std::size_t>(block / middle % range_count())];
    std::string text;
    const auto append = [&](const std::vector<std::string>& names, const std::vector<std::int64_t>& sizes,
                            std::int64_t index) {
        std::int64_t stride = 1;
        for (const std::int64_t size : sizes) stride *= size;
        for (std::size_t i = 0; i < names.size(); ++i) {
            stride /= sizes[i];
            if (sizes[i] > 1) text += names[i] + " " + std::to_string(index / stride % sizes[i]) + ", ";
        }
    };
    append(outer_names, outer_sizes, block / middle / range_count());
    append(middle_names, middle_sizes, block % middle);
    if (r.sequence >= 0) text += "sequence " + std::to_string(r.sequence) + ", ";
    return text + row_name + " " + std::to_string(r.begin) + "-" + std::to_string(r.end - 1);
}

std::vector<RowRange> row_ranges(std::int64_t rows, const Bounds& bounds) {
    std::vector<RowRange> ranges;
    if (bounds.empty()) append_ranges(ranges, 0, rows, -1);
    for (std::size_t n = 0; n + 1 < bounds.size(); ++n)
        append_ranges(ranges, bounds[n], bounds[n + 1], static_cast<std::int64_t>(n));
    return ranges;
}

double block_count(const core::Shape& symbols, const std::vector<std::int64_t>& shape, const io::Packing& packing) {
    const auto ranges = [](double rows) { return std::ceil(rows / static_cast<double>(block_rows)); };
    double count = 1;
    if (symbols.rank == 1) {
        for (const std::int64_t size : shape) count *= static_cast<double>(size);
        return ranges(count);
    }
    const Layout layout = layout_of(symbols, shape, packing);
    for (std::size_t i = 0; i + layout.features < shape.size(); ++i) {
        const auto size = static_cast<double>(shape[i]);
        count *= i == layout.row ? ranges(size) + static_cast<double>(layout.bounds.size()) : size;
    }
    return count;
}

Blocks blocks_of(const core::Shape& symbols, std::vector<std::int64_t> shape, const io::Packing& packing) {
    Blocks blocks;
    blocks.parameters = symbols.rank == 1;
    if (blocks.parameters)  // those of a gate have any shape in a file
        shape = {std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>())};
    const Layout layout = layout_of(symbols, shape, packing);
    for (std::size_t i = 0; i < shape.size(); ++i) {
        if (i < layout.row) {
            blocks.outer *= shape[i];
            blocks.outer_names.push_back(layout.names[i]);
            blocks.outer_sizes.push_back(shape[i]);
        } else if (i == layout.row) {
            blocks.rows = shape[i];
            blocks.row_name = layout.names[i];
        } else if (i + layout.features < shape.size()) {
            blocks.middle *= shape[i];
            blocks.middle_names.push_back(layout.names[i]);
            blocks.middle_sizes.push_back(shape[i]);
        } else {
            blocks.features *= shape[i];
        }
    }
    blocks.ranges = row_ranges(blocks.rows, layout.bounds);
    return blocks;
}

}  // namespace softdelta::judge

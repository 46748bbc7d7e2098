#include "diagnose/evidence/error_map.h"

#include <algorithm>
#include <cmath>

namespace softdelta::diagnose {

namespace {

// The index in a dimension of the given name, of those that were folded into one.
Index unfold(const std::vector<std::string>& names, const std::vector<std::int64_t>& sizes, Index index,
             const std::string& name) {
    for (std::size_t i = names.size(); i-- > 0; index /= sizes[i])
        if (names[i] == name) return index % sizes[i];
    return 0;
}

Index size_of(const std::vector<std::string>& names, const std::vector<std::int64_t>& sizes, const std::string& name) {
    for (std::size_t i = 0; i < names.size(); ++i)
        if (names[i] == name) return sizes[i];
    return 1;
}

// One row of a result against the truth's.
void compare(const Dense& actual, const Dense& truth, Index first, Index n, double noise, ErrorRow& row) {
    double error = 0, product = 0, square = 0, observed = 0;
    for (Index i = first; i < first + n; ++i) {
        const double x = actual[i], y = truth[i];
        if (!std::isfinite(x) || !std::isfinite(y)) {
            row.nan = row.nan || x != y;
            continue;
        }
        error += (x - y) * (x - y);
        product += x * y;
        square += y * y;
        observed += x * x;
    }
    const auto count = static_cast<double>(std::max<Index>(n, 1));
    row.ratio = row.nan ? HUGE_VAL : std::sqrt(error / count) / noise;
    row.factor = square > 0 ? product / square : std::nan("");
    row.zero = observed == 0 && square > 0;
    const double rest = square > 0 ? observed - product * product / square : observed;
    row.rest = std::sqrt(std::max(rest, 0.0) / count) / noise;
}

}  // namespace

// A row may be larger than others of its block, and luck adds to that.
bool ErrorRow::wrong() const {
    constexpr double most = 3;
    return nan || ratio > most;
}

Index ErrorMap::wrong_rows() const {
    return std::count_if(rows.begin(), rows.end(), [](const ErrorRow& row) { return row.wrong(); });
}

ErrorMap map_errors(const judge::Evidence& evidence, const Tensor& tensor) {
    const judge::Blocks& blocks = evidence.blocks;
    const Dense actual(tensor), truth(evidence.truth.view());
    ErrorMap map;
    map.result = evidence.finding.name, map.row_name = blocks.row_name;
    for (const char* batch : {"batch", "sequence"})
        map.batches = std::max(map.batches, size_of(blocks.outer_names, blocks.outer_sizes, batch));
    map.heads = size_of(blocks.outer_names, blocks.outer_sizes, "head") *
                size_of(blocks.middle_names, blocks.middle_sizes, "head");
    map.whole_heads = map.heads;
    std::vector<std::int64_t> begin, end;  // of the sequence of each range
    for (std::size_t r = 0; r < blocks.ranges.size(); ++r) {
        const bool first = r == 0 || blocks.ranges[r].sequence != blocks.ranges[r - 1].sequence;
        begin.push_back(first ? blocks.ranges[r].begin : begin.back());
        end.push_back(blocks.ranges[r].end);
    }
    for (std::size_t r = end.size(); r-- > 1;)
        if (blocks.ranges[r].sequence == blocks.ranges[r - 1].sequence) end[r - 1] = end[r];
    for (Index o = 0; o < blocks.outer; ++o)
        for (Index r = 0; r < blocks.range_count(); ++r)
            blocks.for_each_run(o, r, [&](std::int64_t block, std::int64_t first, std::int64_t n) {
                const auto range = static_cast<std::size_t>(r);
                const Index m = block % blocks.middle;
                ErrorRow row{};
                row.batch = unfold(blocks.outer_names, blocks.outer_sizes, o, "batch") +
                            unfold(blocks.outer_names, blocks.outer_sizes, o, "sequence");
                row.head = unfold(blocks.outer_names, blocks.outer_sizes, o, "head") +
                           unfold(blocks.middle_names, blocks.middle_sizes, m, "head");
                row.sequence = blocks.ranges[range].sequence;
                row.row = first / blocks.features / blocks.middle % blocks.rows - begin[range];
                row.count = end[range] - begin[range];
                row.first = first, row.noise = evidence.allowed[static_cast<std::size_t>(block)];
                compare(actual, truth, first, n, row.noise, row);
                map.rows.push_back(row);
            });
    return map;
}

}  // namespace softdelta::diagnose

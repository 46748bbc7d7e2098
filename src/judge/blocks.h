// A result seen as blocks of 64 rows of one sequence and one head, so that one wrong row does not drown in the rest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/operands.h"
#include "io/call/call.h"

namespace softdelta::judge {

struct RowRange {
    std::int64_t begin, end;
    std::int64_t sequence;  // of a packed call; −1: not packed
};

// A dense tensor as [outer, rows, middle, features]; a block is one (outer, range of rows, middle).
struct Blocks {
    std::int64_t outer = 1, rows = 1, middle = 1, features = 1;
    bool parameters = false;  // a gradient of parameters: its elements are sums over rows of other tensors
    std::vector<RowRange> ranges;
    std::string row_name = "rows";                       // what a row is: tokens, queries, keys, …
    std::vector<std::string> outer_names, middle_names;  // the dimensions folded into outer and middle
    std::vector<std::int64_t> outer_sizes, middle_sizes;

    std::int64_t range_count() const { return static_cast<std::int64_t>(ranges.size()); }
    std::int64_t count() const { return outer * range_count() * middle; }
    std::int64_t index(std::int64_t o, std::int64_t range, std::int64_t m) const {
        return (o * range_count() + range) * middle + m;
    }
    std::int64_t elements(std::int64_t block) const;
    // "head 3, tokens 64-127" of a block
    std::string name(std::int64_t block) const;

    // Calls visit(block, first element, count) for every contiguous run of a range of rows of one `outer`.
    template <class Visit>
    void for_each_run(std::int64_t o, std::int64_t range, Visit&& visit) const {
        const RowRange& r = ranges[static_cast<std::size_t>(range)];
        for (std::int64_t row = r.begin; row < r.end; ++row)
            for (std::int64_t m = 0; m < middle; ++m)
                visit(index(o, range, m), ((o * rows + row) * middle + m) * features, features);
    }
};

using io::Bounds;

// Rows of the whole tensor, or of each packed sequence, by 64.
std::vector<RowRange> row_ranges(std::int64_t rows, const Bounds& bounds);

// How many blocks_of would list.
double block_count(const core::Shape& symbols, const std::vector<std::int64_t>& shape, const io::Packing& packing);

// Of a result by its shape, in symbols and in numbers.
Blocks blocks_of(const core::Shape& symbols, std::vector<std::int64_t> shape, const io::Packing& packing);

}  // namespace softdelta::judge

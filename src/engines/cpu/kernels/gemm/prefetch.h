// Fetching memory into the cache while something else is computed. Rows of a head lie far apart, often each in a page
// of its own, and the processor's own prefetcher stops at the end of a page.
#pragma once

#include "engines/cpu/kernels/gemm/rows.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

inline constexpr Index cache_line = 64;  // bytes

inline void prefetch_bytes(const void* data, Index bytes) {
    for (Index i = 0; i < bytes; i += cache_line) prefetch_line(static_cast<const char*>(data) + i);
}

// A row of n elements that are neighbours; others are left alone.
inline void prefetch_row(Row row, Index n) {
    if (row.scales != nullptr) {
        const Index step = row.scales->block_step;
        return prefetch_bytes(row.data, step <= 2 * core::quantised_block ? n / core::quantised_block * step : 0);
    }
    prefetch_bytes(row.data, row.step == 1 ? n * static_cast<Index>(core::size_of(row.dtype)) : 0);
}

// Calls fetch(r) for rows [row, end), two of them at each call. product() calls it before every register tile.
template <class Fetch>
class PrefetchRows {
  public:
    PrefetchRows(Index row, Index end, Fetch fetch) : row_(row), end_(end), fetch_(fetch) {}
    void operator()() {
        for (Index i = 0; i < 2 && row_ < end_; ++i, ++row_) fetch_(row_);
    }

  private:
    Index row_, end_;
    Fetch fetch_;
};

// A list of rows, fetched a few cache lines at a time between products.
class PrefetchList {
  public:
    // `count` rows of `bytes` bytes, `row` bytes between rows.
    void add(const void* data, Index row, Index bytes, Index count) {
        rows_[count_++] = {static_cast<const char*>(data), row, (bytes + cache_line - 1) / cache_line, count};
        lines_ += rows_[count_ - 1].lines * count;
    }

    Index lines() const { return lines_; }  // of all rows

    // Not to the first cache, of which rows that lie a multiple of a page apart would fill a few sets.
    void fetch_to_second_cache() { to_second_cache_ = true; }

    // Fetches so many lines.
    void next(Index lines) {
        while (lines > 0 && which_ < count_) {
            const Rows& x = rows_[which_];
            const Index n = lines < x.lines - line_ ? lines : x.lines - line_;
            const char* first = x.data + row_ * x.row + line_ * cache_line;
            for (Index i = 0; i < n; ++i)
                to_second_cache_ ? prefetch_line_to_second(first + i * cache_line)
                                 : prefetch_line(first + i * cache_line);
            lines -= n;
            line_ += n;
            if (line_ < x.lines) return;
            line_ = 0;
            if (++row_ < x.count) continue;
            row_ = 0;
            ++which_;
        }
    }

  private:
    struct Rows {
        const char* data;
        Index row, lines, count;
    };
    Rows rows_[8];  // as many as a chunk of the backward pass has: q, k, p, v, g, do, U, the state
    Index count_ = 0, lines_ = 0;
    Index which_ = 0, row_ = 0, line_ = 0;
    bool to_second_cache_ = false;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

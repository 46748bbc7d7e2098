// Prefetch: every row once and none beyond the last, however the calls cut them; only lines that exist.
#include "engines/cpu/kernels/gemm/prefetch.h"

#include <gtest/gtest.h>

#include "engines/cpu/kernels/tiles.h"

namespace softdelta::test {
namespace {

TEST(Prefetch, RowsAreFetchedTwoAtACall) {
    for (Index begin = 0; begin < 3; ++begin)
        for (Index end = begin; end < begin + 6; ++end) {
            std::vector<Index> fetched;
            PrefetchRows rows(begin, end, [&](Index r) { fetched.push_back(r); });
            for (Index call = 1; call < 8; ++call) {
                rows();
                ASSERT_EQ(static_cast<Index>(fetched.size()), std::min(2 * call, end - begin));
            }
            for (std::size_t i = 0; i < fetched.size(); ++i) EXPECT_EQ(fetched[i], begin + static_cast<Index>(i));
        }
}

TEST(Prefetch, AListCountsItsLines) {
    const Buffer<float> memory(64);
    PrefetchList list;
    EXPECT_EQ(list.lines(), 0);
    list.add(memory.data(), 128, 65, 2);  // two rows of two lines
    EXPECT_EQ(list.lines(), 4);
    list.add(memory.data(), 0, 64, 1);
    EXPECT_EQ(list.lines(), 5);
    list.next(3);
    list.next(100);  // more than there are
    EXPECT_EQ(list.lines(), 5);
}

}  // namespace
}  // namespace softdelta::test

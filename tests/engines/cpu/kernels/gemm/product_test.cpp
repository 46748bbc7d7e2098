// Register-tile products against f64: every number of rows and vectors, starts, ranges, and both orders of A.
#include <gtest/gtest.h>

#include <cmath>

#include "engines/cpu/kernels/tiles.h"

namespace softdelta::test {
namespace {

struct Problem {
    Index rows, vectors, depth;
    Start start;
    bool transposed;     // A[k][m] in memory
    bool column_ranges;  // some columns of some row tiles alone
    bool depth_ranges;   // a part of the depth for each row tile
};

// One of some thousand elements that were drawn once: to draw all of them would take most of the test's time.
template <class P>
Element<P> some_element(std::mt19937_64& random) {
    static const std::vector<Element<P>> drawn = [&] {
        std::vector<Element<P>> elements;
        while (elements.size() < 4096) elements.push_back(random_element<P>(random));
        return elements;
    }();
    return drawn[random() % drawn.size()];
}

template <class P>
class Case {
  public:
    Case(const Problem& p, std::mt19937_64& random)
        : p_(p),
          columns_(p.vectors * W),
          tiles_((p.rows + row_tile<P> - 1) / row_tile<P>),
          a_(p.rows * p.depth),
          b_(columns_ * p.depth),
          c_((p.rows - 1) * row_length() + columns_),
          factor_(p.rows),
          before_(static_cast<std::size_t>(c_.count())) {
        for (Index i = 0; i < a_.count(); ++i) a_[i] = some_element<P>(random);
        for (Index i = 0; i < b_.count(); ++i) b_[i] = some_element<P>(random);
        for (Index m = 0; m < p.rows; ++m) factor_[m] = some_element<FloatProduct>(random);
        for (Index i = 0; i < c_.count(); ++i)
            c_[i] = before_[static_cast<std::size_t>(i)] = some_element<FloatProduct>(random);
        for (Index t = 0; t < tiles_; ++t) {
            column_ranges_.push_back(draw_range(p.vectors, random, W));
            depth_ranges_.push_back(draw_range(p.depth, random, 1));
        }
    }

    void run() const {
        [[maybe_unused]] const typename P::Tiles tiles;
        product<P>(p_.rows, columns_, {a_.data(), p_.transposed ? 1 : p_.depth, p_.transposed ? p_.rows : 1},
                   {b_.data(), p_.depth},
                   {c_.data(), row_length(), p_.start, p_.start == Start::scale ? factor_.data() : nullptr},
                   p_.column_ranges ? column_ranges_.data() : nullptr,
                   p_.depth_ranges ? depth_ranges_.data() : nullptr);
    }

    void check() const {
        const std::vector<double> columns = columns_of_b();
        for (Index m = 0; m < p_.rows; ++m) {
            const std::vector<double> row = row_of_a(m);
            for (Index n = 0; n < row_length() && m * row_length() + n < c_.count(); ++n) {
                const float actual = c_[m * row_length() + n];
                if (!is_computed(m, n))
                    ASSERT_EQ(actual, before(m, n)) << m << ", " << n << " is not to be touched";
                else
                    check_element(m, n, row.data(), columns.data() + n * numbers(), static_cast<double>(actual));
            }
        }
    }

  private:
    static Range draw_range(Index count, std::mt19937_64& random, Index unit) {
        const Index begin = static_cast<Index>(random() % static_cast<std::uint64_t>(count + 1));
        const Index end = begin + static_cast<Index>(random() % static_cast<std::uint64_t>(count - begin + 1));
        return {begin * unit, end * unit};
    }
    Index row_length() const { return columns_ + 3; }  // between rows lies what is not C
    float before(Index m, Index n) const { return before_[static_cast<std::size_t>(m * row_length() + n)]; }

    // Whole panels around the columns of the row tile; without depth nothing but zeros.
    bool is_computed(Index m, Index n) const {
        if (n >= columns_) return false;
        const auto t = static_cast<std::size_t>(m / row_tile<P>);
        const Index panel = n / NR * NR, end = std::min(panel + NR, columns_);
        const Range columns = column_ranges_[t];
        if (p_.column_ranges && (columns.end <= panel || columns.begin >= end)) return false;
        return p_.start == Start::zero || !depth(m).empty();
    }
    Range depth(Index m) const {
        return p_.depth_ranges ? depth_ranges_[static_cast<std::size_t>(m / row_tile<P>)] : Range{0, p_.depth};
    }

    // Row m of A and the columns of B, one after the other, as numbers along the depth.
    Index numbers() const { return p_.depth * P::depth; }
    std::vector<double> row_of_a(Index m) const {
        std::vector<double> row;
        for (Index k = 0; k < p_.depth; ++k)
            for (Index i = 0; i < P::depth; ++i)
                row.push_back(static_cast<double>(part(a_[p_.transposed ? k * p_.rows + m : m * p_.depth + k], i)));
        return row;
    }
    std::vector<double> columns_of_b() const {
        std::vector<double> columns;
        for (Index n = 0; n < columns_; ++n) {
            const Index panel = n / NR * NR, width = std::min(NR, columns_ - panel);
            for (Index k = 0; k < p_.depth; ++k)
                for (Index i = 0; i < P::depth; ++i)
                    columns.push_back(static_cast<double>(part(b_[panel * p_.depth + k * width + n - panel], i)));
        }
        return columns;
    }

    void check_element(Index m, Index n, const double* row, const double* column, double actual) const {
        double exact = 0, size = 0;
        if (p_.start != Start::zero) {
            exact =
                static_cast<double>(before(m, n)) * (p_.start == Start::scale ? static_cast<double>(factor_[m]) : 1);
            size = std::abs(exact);
        }
        for (Index k = depth(m).begin * P::depth; k < depth(m).end * P::depth; ++k) {
            const double x = row[k] * column[k];
            exact += x, size += std::abs(x);
        }
        ASSERT_NEAR(actual, exact, 0x1p-23 * size * (1 + static_cast<double>(p_.depth))) << m << ", " << n;
    }

    Problem p_;
    Index columns_, tiles_;
    Buffer<Element<P>> a_, b_;
    Buffer<float> c_, factor_;
    std::vector<float> before_;
    std::vector<Range> column_ranges_, depth_ranges_;
};

TEST(Product, IsRightForEveryTail) {
    std::mt19937_64 random(1);
    for_each_product([&](auto product_kind) {
        for (Index rows = 1; rows <= 2 * row_tile<decltype(product_kind)> + 1; ++rows)
            for (Index vectors = 1; vectors <= 2 * NR_vectors + 1; ++vectors)
                for (const Index depth : {1, 2, 7, 16, 37, 70})
                    for (const Start start : {Start::zero, Start::add, Start::scale})
                        for (int flags = 0; flags < 8; ++flags) {
                            const Problem p{rows,          vectors, depth, start, flags % 2 == 1, flags / 2 % 2 == 1,
                                            flags / 4 == 1};
                            const Case<decltype(product_kind)> c(p, random);
                            c.run();
                            c.check();
                            if (testing::Test::HasFailure()) {
                                FAIL() << "rows " << rows << ", vectors " << vectors << ", depth " << depth
                                       << ", start " << static_cast<int>(start) << ", flags " << flags;
                            }
                        }
    });
}

}  // namespace
}  // namespace softdelta::test

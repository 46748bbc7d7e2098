// Packing: where each number of a strided row goes, zeros around them, and nothing read beyond a row.
#include <gtest/gtest.h>

#include "engines/cpu/kernels/tiles.h"

namespace softdelta::test {
namespace {

// Rows of n elements, `step` apart, each beside an unreadable page; all numbers are small and exact in every type.
template <class T>
class RowsOf {
  public:
    RowsOf(Index count, Index n, Index step) : n_(n), step_(step) {
        for (Index r = 0; r < count; ++r) {
            const Index length = n == 0 ? 0 : (n - 1) * std::abs(step) + 1;
            memory_.emplace_back(length, r % 2 == 0 ? Side::end : Side::begin);
            for (Index i = 0; i < n; ++i) first(r)[i * step] = to_stored<T>(static_cast<double>(number(r, i)));
        }
    }
    static float number(Index r, Index i) { return static_cast<float>((r * 31 + i * 7) % 97 + 1); }
    Row operator()(Index r) const { return {first(r), dtype_of<T>(), step_}; }

  private:
    T* first(Index r) const {
        T* data = memory_[static_cast<std::size_t>(r)].data();
        return step_ < 0 ? data + (n_ - 1) * -step_ : data;
    }
    Index n_, step_;
    std::vector<Buffer<T>> memory_;
};

TEST(Pack, RowsOfAnyTypeAndStepAreLoadedAndStored) {
    for_each_type([](auto type) {
        using T = decltype(type);
        for (Index n = 1; n <= 3 * W + 1; ++n)
            for (const Index step : {1, 2, -1, -3}) {
                const RowsOf<T> rows(2, n, step);
                const Buffer<float> out(round_up(n, W));
                for (Index r = 0; r < 2; ++r) {
                    load_row(rows(r), n, out.data());
                    for (Index i = 0; i < out.count(); ++i) ASSERT_EQ(out[i], i < n ? rows.number(r, i) : 0.0F);
                }
                const RowsOf<T> copy(1, n, step);
                for (Index i = 0; i < n; ++i) out[i] = static_cast<float>(i % 50) - 20;
                store_row(out.data(), n, const_cast<void*>(copy(0).data), dtype_of<T>(), step);
                for (Index i = 0; i < n; ++i)
                    ASSERT_EQ(to_f32(static_cast<const T*>(copy(0).data)[i * step]), static_cast<float>(i % 50) - 20);
            }
    });
}

// Calls test(P{}, T{}) for products and the types of their rows: pairs are made of bf16 alone.
template <class Test>
void for_each_packing(const Test& test) {
    for_each_type([&](auto type) { test(FloatProduct{}, type); });
    if constexpr (has_bf16_products) test(PairProduct{}, core::bf16{});
}

constexpr Index most = 2 * NR + W + 1;  // two panels, one of a vector, and a tail

TEST(Pack, A) {
    for_each_packing([](auto product_kind, auto type) {
        using P = decltype(product_kind);
        for (Index n = 1; n <= most; ++n)
            for (const Index step : {1, -2}) {
                constexpr Index count = 7;
                const RowsOf<decltype(type)> rows(count, n, step);
                const Buffer<Element<P>> out(count * a_row_length<P>(n));
                pack_a<P>(count, n, rows, out.data());
                for (Index r = 0; r < count; ++r)
                    for (Index i = 0; i < a_row_length<P>(n) * P::depth; ++i)
                        ASSERT_EQ(part(out[r * a_row_length<P>(n) + i / P::depth], i % P::depth),
                                  i < n ? rows.number(r, i) : 0.0F)
                            << "n " << n << ", row " << r << ", element " << i;
            }
    });
}

// Element (k, column) of B of `depth` rows and `columns` columns.
template <class P>
Index panel_element(Index k, Index column, Index depth, Index columns) {
    const Index panel = column / NR * NR;
    return panel * depth + k * std::min(NR, columns - panel) + column - panel;
}

TEST(Pack, BTransposed) {
    for_each_packing([](auto product_kind, auto type) {
        using P = decltype(product_kind);
        for (Index count = 1; count <= most; ++count)
            for (const Index n : {1, 2, 5, 16, 31, 32, 33})
                for (const Index step : {1, -2}) {
                    const RowsOf<decltype(type)> rows(count, n, step);
                    const Index depth = (n + P::depth - 1) / P::depth, columns = round_up(count, W);
                    const Buffer<Element<P>> stage(W * a_row_length<P>(n)), out(columns * depth);
                    pack_b_transposed<P>(count, n, rows, stage.data(), out.data());
                    for (Index r = 0; r < columns; ++r)
                        for (Index i = 0; i < depth * P::depth; ++i)
                            ASSERT_EQ(part(out[panel_element<P>(i / P::depth, r, depth, columns)], i % P::depth),
                                      r < count && i < n ? rows.number(r, i) : 0.0F)
                                << "count " << count << ", n " << n << ", row " << r << ", element " << i;
                }
    });
}

TEST(Pack, B) {
    for_each_packing([](auto product_kind, auto type) {
        using P = decltype(product_kind);
        for (Index n = 1; n <= most; ++n)
            for (const Index count : {1, 2, 5, 8})
                for (const Index step : {1, -2}) {
                    const RowsOf<decltype(type)> rows(count, n, step);
                    const Index depth = (count + P::depth - 1) / P::depth, columns = round_up(n, W);
                    const Buffer<Stored<P>> stage(2 * round_up(n, 2 * W));
                    const Buffer<Element<P>> out(columns * depth);
                    const auto check = [&](Index cleared) {
                        for (Index r = 0; r < depth * P::depth; ++r)
                            for (Index i = 0; i < columns; ++i)
                                ASSERT_EQ(part(out[panel_element<P>(r / P::depth, i, depth, columns)], r % P::depth),
                                          r < count && i < n && r != cleared ? rows.number(r, i) : 0.0F)
                                    << "n " << n << ", count " << count << ", row " << r << ", element " << i;
                    };
                    pack_b(count, n, rows, stage.data(), out.data(), P{});
                    check(-1);
                    clear_b_row<P>(count / 2, count, n, out.data());
                    check(count / 2);
                }
    });
}

}  // namespace
}  // namespace softdelta::test

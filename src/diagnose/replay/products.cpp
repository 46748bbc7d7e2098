// Products of f64 matrices, most of what a diagnosis computes: compiled for three sizes of x86's vectors, of which the
// program takes the best that the CPU has.
#include <algorithm>

#include "diagnose/replay/dense.h"

namespace softdelta::diagnose {

namespace {

// A vector of any CPU: the compiler cuts it into those that there are.
constexpr Index width = 8;
using Eight [[gnu::vector_size(width * sizeof(double))]] = double;

struct Left {
    const double* data;
    Index row, step;  // from a row to the next, from a term of the sum to the next
};
struct Right {
    const double* data;
    Index row, columns, terms;
};

// A tile of C = factor · A · B of `rows` rows and `count` columns, mostly 8.
template <Index rows, bool full>
[[gnu::always_inline]] inline void multiply_tile(const Left& a, const Right& b, Index count, double factor, double* c) {
    Eight sum[rows] = {};
    for (Index t = 0; t < b.terms; ++t) {
        Eight row = {};
        if (full)
            __builtin_memcpy(&row, b.data + t * b.row, sizeof row);
        else
            for (Index j = 0; j < count; ++j) row[j] = b.data[t * b.row + j];
        for (Index i = 0; i < rows; ++i) sum[i] += a.data[i * a.row + t * a.step] * row;
    }
    for (Index i = 0; i < rows; ++i)
        for (Index j = 0; j < count; ++j) c[i * b.columns + j] = factor * sum[i][j];
}

template <Index rows>
[[gnu::always_inline]] inline void multiply_rows(const Left& a, const Right& b, double factor, double* c) {
    Index j = 0;
    for (; j + width <= b.columns; j += width)
        multiply_tile<rows, true>(a, {b.data + j, b.row, b.columns, b.terms}, width, factor, c + j);
    if (j < b.columns)
        multiply_tile<rows, false>(a, {b.data + j, b.row, b.columns, b.terms}, b.columns - j, factor, c + j);
}

template <Index rows>
[[gnu::always_inline]] inline void multiply_all(const Left& a, Index m, const Right& b, double factor, double* c) {
    Index i = 0;
    for (; i + rows <= m; i += rows)
        multiply_rows<rows>({a.data + i * a.row, a.row, a.step}, b, factor, c + i * b.columns);
    for (; i < m; ++i) multiply_rows<1>({a.data + i * a.row, a.row, a.step}, b, factor, c + i * b.columns);
}

using Product = void(const Left& a, Index m, const Right& b, double factor, double* c);

void multiply_plainly(const Left& a, Index m, const Right& b, double factor, double* c) {
    multiply_all<2>(a, m, b, factor, c);
}

#ifdef __x86_64__
[[gnu::target("avx2")]] void multiply_by_4(const Left& a, Index m, const Right& b, double factor, double* c) {
    multiply_all<4>(a, m, b, factor, c);
}
[[gnu::target("avx512f")]] void multiply_by_8(const Left& a, Index m, const Right& b, double factor, double* c) {
    multiply_all<8>(a, m, b, factor, c);
}
Product* best_product() {
    return __builtin_cpu_supports("avx512f") ? multiply_by_8
           : __builtin_cpu_supports("avx2")  ? multiply_by_4
                                             : multiply_plainly;
}
#else
Product* best_product() {
    return multiply_plainly;
}
#endif

Matrix multiply_by(const Left& a, Index m, const Operand& b, double factor) {
    static Product* const product = best_product();
    Matrix c(m, b.cols());
    product(a, m, {b.data(), b.outerStride(), b.cols(), b.rows()}, factor, c.data());
    return c;
}

}  // namespace

Matrix multiply(const Operand& a, const Operand& b, double factor) {
    return multiply_by({a.data(), a.outerStride(), 1}, a.rows(), b, factor);
}
Matrix multiply_at(const Operand& a, const Operand& b, double factor) {
    return multiply_by({a.data(), 1, a.outerStride()}, a.cols(), b, factor);
}
Matrix multiply_bt(const Operand& a, const Operand& b, double factor) {
    const Matrix across = b.transpose();
    return multiply_by({a.data(), a.outerStride(), 1}, a.rows(), across, factor);
}

}  // namespace softdelta::diagnose

// The inner loop of the reference's attention: sums of weighted rows,  c[i][:] += Σ_t weight(i, t)·row[t][:].
// Every element of c takes its terms one by one in ascending t, so results do not depend on how the work is cut.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "core/tensor.h"

namespace softdelta::reference {

using core::Index;

struct Matrix {
    double* data;
    Index row_stride;
    Index column_stride = 1;

    double* row(Index i) const { return data + i * row_stride; }
    Matrix transposed() const { return {data, column_stride, row_stride}; }
};

// Which terms a sum has: all, or those with a weight other than 0, so that NaN or Inf in a row without weight stays
// out.
enum class Terms { all, weighted };

struct WeightedRows {
    static constexpr Index capacity = 32;
    std::array<double, capacity> weight;
    std::array<const double*, capacity> row;
    Index count = 0;

    void add(double w, const double* r) {
        weight[static_cast<std::size_t>(count)] = w;
        row[static_cast<std::size_t>(count++)] = r;
    }
};

// sum [n] += the weighted rows [n]; four at a time share one pass over the sum.
inline void add_weighted_rows(const WeightedRows& terms, Index n, double* sum) {
    const double* w = terms.weight.data();
    const double* const* row = terms.row.data();
    Index t = 0;
    for (; t + 4 <= terms.count; t += 4) {
        const double w0 = w[t], w1 = w[t + 1], w2 = w[t + 2], w3 = w[t + 3];
        const double *r0 = row[t], *r1 = row[t + 1], *r2 = row[t + 2], *r3 = row[t + 3];
#pragma omp simd
        for (Index j = 0; j < n; ++j) sum[j] = sum[j] + w0 * r0[j] + w1 * r1[j] + w2 * r2[j] + w3 * r3[j];
    }
    for (; t < terms.count; ++t) {
        const double w0 = w[t];
        const double* r0 = row[t];
#pragma omp simd
        for (Index j = 0; j < n; ++j) sum[j] += w0 * r0[j];
    }
}

// c [rows, n] += weight [rows, terms] · row [terms, n]. Terms go in blocks that stay in cache for all rows of c.
inline void add_product(Terms which, Index rows, Index terms, Index n, Matrix weight, Matrix row, Matrix c) {
    for (Index begin = 0; begin < terms; begin += WeightedRows::capacity) {
        const Index end = std::min(terms, begin + WeightedRows::capacity);
        for (Index i = 0; i < rows; ++i) {
            WeightedRows block;
            for (Index t = begin; t < end; ++t) {
                const double w = weight.row(i)[t * weight.column_stride];
                if (which == Terms::all || w != 0) block.add(w, row.row(t));
            }
            add_weighted_rows(block, n, c.row(i));
        }
    }
}

}  // namespace softdelta::reference

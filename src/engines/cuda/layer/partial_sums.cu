#include "engines/cuda/layer/partial_sums.h"

#include "engines/cuda/device/grid.h"

namespace softdelta::cuda {

namespace {

constexpr Index group = 64;
constexpr int column_threads = 128;

// A thread sums a column of a group of rows.
__global__ void add_groups(const float* from, Index rows, Index columns, float* to) {
    const Index column = static_cast<Index>(blockIdx.y) * column_threads + threadIdx.x, first = blockIdx.x * group;
    if (column >= columns) return;
    float sum = 0;
    for (Index row = first; row < min(first + group, rows); ++row) sum += from[row * columns + column];
    to[blockIdx.x * columns + column] = sum;
}

__global__ void store_columns(const float* sums, View out, Index rows, Index columns) {
    const Index i = static_cast<Index>(blockIdx.x) * column_threads + threadIdx.x;
    if (i >= rows * columns) return;
    store(out, i % rows * out.stride[0] + i / rows * out.stride[1], sums[i]);
}

}  // namespace

Index PartialSums::floats() const {
    return (std::max<Index>(rows, 1) + blocks_of(rows, group)) * columns;
}

const float* PartialSums::add(float* memory, cudaStream_t stream) const {
    float *from = memory, *to = memory + std::max<Index>(rows, 1) * columns;
    if (rows == 0)
        check(cudaMemsetAsync(from, 0, static_cast<std::size_t>(columns) * sizeof(float), stream), "sums of no rows");
    for (Index left = rows; left > 1; left = blocks_of(left, group)) {
        launch(add_groups, {{blocks_of(left, group), blocks_of(columns, column_threads)}, column_threads}, stream, "partial sums",
               from, left, columns, to);
        std::swap(from, to);
    }
    return from;
}

void store_sums(const float* sums, Index first, const core::Tensor& out, cudaStream_t stream) {
    if (!out || out.count() == 0) return;
    const Index rows = out.shape[0], columns = out.count() / rows;
    launch(store_columns, {blocks_of(rows * columns, column_threads), column_threads}, stream, "sums of weights", sums + first,
           view_of(out), rows, columns);
}

}  // namespace softdelta::cuda

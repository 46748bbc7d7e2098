// Tensors of a call as dense f64, and matrices within them.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "io/call/call.h"
#include "io/file/core_view.h"

namespace softdelta::diagnose {

using Index = Eigen::Index;
using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXd;
using View = Eigen::Map<Matrix, 0, Eigen::OuterStride<>>;
using ConstView = Eigen::Map<const Matrix, 0, Eigen::OuterStride<>>;

// factor·a·b, and with aᵀ, or bᵀ. Eigen's code of a product is long: these are compiled once.
using Operand = Eigen::Ref<const Matrix>;
Matrix multiply(const Operand& a, const Operand& b, double factor = 1);
Matrix multiply_at(const Operand& a, const Operand& b, double factor = 1);
Matrix multiply_bt(const Operand& a, const Operand& b, double factor = 1);

class Dense {
  public:
    Dense() = default;
    explicit Dense(std::vector<std::int64_t> shape) : shape_(std::move(shape)) {
        std::size_t n = 1;
        for (const std::int64_t size : shape_) n *= static_cast<std::size_t>(size);
        data_.resize(n);
    }
    // A copy of a dense tensor of any type; of an absent one, nothing.
    explicit Dense(const Tensor& t) {
        if (!t) return;
        *this = Dense(std::vector<std::int64_t>(t.shape().begin(), t.shape().end()));
        const core::Tensor from = io::core_view(t);
        for (std::size_t i = 0; i < data_.size(); ++i) data_[i] = core::load(from, static_cast<core::Index>(i));
    }

    explicit operator bool() const { return !shape_.empty(); }
    Index size(std::size_t dim) const { return shape_[dim]; }
    Index count() const { return static_cast<Index>(data_.size()); }
    const std::vector<std::int64_t>& shape() const { return shape_; }
    double& operator[](Index i) { return data_[static_cast<std::size_t>(i)]; }
    const double& operator[](Index i) const { return data_[static_cast<std::size_t>(i)]; }

    // Rows [begin, begin + count) of one head of [B, T, H, W]: [count, W]; of [B, T, H]: [count, 1].
    View rows(Index b, Index begin, Index count, Index h) {
        return {data_.data() + at(b, begin, h), count, width(), Eigen::OuterStride<>(size(2) * width())};
    }
    ConstView rows(Index b, Index begin, Index count, Index h) const {
        return {data_.data() + at(b, begin, h), count, width(), Eigen::OuterStride<>(size(2) * width())};
    }
    // The matrix [M, N] at [i, j] of [I, J, M, N].
    View block(Index i, Index j) {
        return {data_.data() + (i * size(1) + j) * size(2) * size(3), size(2), size(3), Eigen::OuterStride<>(size(3))};
    }
    ConstView block(Index i, Index j) const {
        return {data_.data() + (i * size(1) + j) * size(2) * size(3), size(2), size(3), Eigen::OuterStride<>(size(3))};
    }

  private:
    Index width() const { return shape_.size() == 4 ? size(3) : 1; }
    Index at(Index b, Index t, Index h) const { return ((b * size(1) + t) * size(2) + h) * width(); }

    std::vector<std::int64_t> shape_;
    std::vector<double> data_;
};

using Results = std::map<std::string, Dense>;

// Zeros for every result that the call can have.
inline Results make_results(const io::Call& call) {
    Results results;
    for (const std::string& name : io::output_names(call)) results.emplace(name, Dense(io::output_shape(call, name)));
    return results;
}

}  // namespace softdelta::diagnose

// Dense f32 copies of a call's tensors, as the small kernels of these tests compute with them.
#pragma once

#include <Eigen/Dense>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "io/call/call.h"

namespace softdelta::test {

using Index = Eigen::Index;
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Rows = Eigen::Map<Matrix, 0, Eigen::OuterStride<>>;
using Results = std::map<std::string, io::OwnedTensor>;

// To nearest, ties to even: what a kernel does to the operands of its products.
inline float round_to(DType storage, float x) {
    if (storage == DType::bf16) return core::to_float(core::to_bf16(static_cast<double>(x)));
    if (storage == DType::f16) return core::to_float(core::to_f16(static_cast<double>(x)));
    return x;
}
inline Matrix round_to(DType storage, const Matrix& x) {
    return x.unaryExpr([storage](float y) { return round_to(storage, y); });
}

class Floats {
  public:
    Floats() = default;
    explicit Floats(const std::vector<std::int64_t>& shape) : tensor_(DType::f32, shape) {}
    // A copy of a dense tensor of any type; of an absent one, nothing.
    explicit Floats(const Tensor& t) {
        if (!t) return;
        *this = Floats(std::vector<std::int64_t>(t.shape().begin(), t.shape().end()));
        const core::Tensor from = flat(t);
        for (Index i = 0; i < t.count(); ++i) (*this)[i] = static_cast<float>(core::load(from, i));
    }

    explicit operator bool() const { return tensor_.data() != nullptr; }
    Index size(std::size_t dim) const { return tensor_.shape()[dim]; }
    float& operator[](Index i) const { return static_cast<float*>(tensor_.data())[i]; }

    // Rows of one head of [B, T, H, W]: [count, W]; of [B, T, H]: [count, 1].
    Rows rows(Index b, Index begin, Index count, Index h) const {
        const Index heads = size(2), width = tensor_.shape().size() == 4 ? size(3) : 1;
        return {&(*this)[((b * size(1) + begin) * heads + h) * width], count, width,
                Eigen::OuterStride<>(heads * width)};
    }
    // The matrix at [i, j] of [I, J, M, N]: [M, N].
    Rows block(Index i, Index j) const {
        return {&(*this)[(i * size(1) + j) * size(2) * size(3)], size(2), size(3), Eigen::OuterStride<>(size(3))};
    }

    io::OwnedTensor stored(DType type) const {
        io::OwnedTensor result(type, tensor_.shape());
        const core::Tensor to = flat(result.view());
        for (Index i = 0; i < result.count(); ++i) core::store(to, i, static_cast<double>((*this)[i]));
        return result;
    }

  private:
    static core::Tensor flat(const Tensor& t) {
        core::Tensor view;
        view.data = t.data();
        view.dtype = static_cast<core::DType>(t.dtype());
        return view;
    }

    io::OwnedTensor tensor_;
};

// A place in f32 for every result of a call, for sums over heads and sequences; rounded once, when it is stored.
class Sums {
  public:
    explicit Sums(const io::Call& call) : call_(call) {
        for (const std::string& name : io::output_names(call))
            sums_.emplace(name, Floats(io::output_shape(call, name)));
    }
    bool has(const std::string& name) const { return sums_.count(name) != 0; }
    const Floats& operator[](const std::string& name) const { return sums_.at(name); }

    Results stored() const {
        Results results;
        for (const auto& [name, sum] : sums_) results.emplace(name, sum.stored(io::output_dtype(call_, name)));
        return results;
    }

  private:
    const io::Call& call_;
    std::map<std::string, Floats> sums_;
};

inline std::map<std::string, Tensor> views(const Results& results) {
    std::map<std::string, Tensor> map;
    for (const auto& [name, tensor] : results) map.emplace(name, tensor.view());
    return map;
}

}  // namespace softdelta::test

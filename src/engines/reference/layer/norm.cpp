// The gated norm: blocks of rows, row by row. A block has a sum for the gradient of weight; they are added in order.
//
//     n = x r,  r = 1/√(mean x² + ε),  y = w n f(z)
//     dn = dy w f(z),  dx = r (dn − n mean(dn n)),  dz = dy w n f'(z),  dw = Σ dy n f(z)
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "engines/reference/layer/activation.h"
#include "engines/reference/reference.h"
#include "engines/work.h"

namespace softdelta::reference {

namespace {

using core::Index;
using core::Tensor;
using Numbers = std::vector<double>;

constexpr Index block_rows = 64;

Index row_count(const core::NormInputs& in) {
    return in.x.shape[0] * in.x.shape[1] * in.x.shape[2];
}
Index block_count(const core::NormInputs& in) {
    return (row_count(in) + block_rows - 1) / block_rows;
}

// Where row `row` of a tensor [B, T, H, D] begins.
Index row_offset(const Tensor& t, Index row) {
    const Index H = t.shape[2], T = t.shape[1];
    return t.offset({row / (H * T), row / H % T, row % H});
}

// What a thread keeps of a row.
class Row {
  public:
    Row(const core::NormInputs& in, const core::NormOptions& options)
        : in_(in), options_(options), n_(channels()), z_(channels()), weight_(channels(), 1) {
        if (in.weight) core::load_row(in.weight, 0, 0, in.x.shape[3], weight_.data());
    }

    std::size_t channels() const { return static_cast<std::size_t>(in_.x.shape[3]); }

    void load(Index row) {
        load_into(in_.x, row, n_);
        if (in_.z) load_into(in_.z, row, z_);
        double squares = 0;
        for (const double x : n_) squares += x * x;
        r = 1 / std::sqrt(squares / static_cast<double>(n_.size()) + options_.epsilon);
        for (double& x : n_) x *= r;
    }
    void load_into(const Tensor& t, Index row, Numbers& numbers) const {
        core::load_row(t, row_offset(t, row), 3, in_.x.shape[3], numbers.data());
    }
    static void store(const Tensor& t, Index row, const Numbers& numbers) {
        if (t) core::store_row(t, row_offset(t, row), 3, t.shape[3], numbers.data());
    }

    double n(std::size_t d) const { return n_[d]; }
    double weight(std::size_t d) const { return weight_[d]; }
    double gate(std::size_t d) const { return in_.z ? activate(options_.gate, z_[d]) : 1; }
    double gate_slope(std::size_t d) const { return derivative(options_.gate, z_[d]); }

    double r = 0;

  private:
    const core::NormInputs& in_;
    const core::NormOptions& options_;
    Numbers n_, z_, weight_;
};

class Backward {
  public:
    Backward(const core::NormInputs& in, const core::NormOptions& options, const core::NormGradients& grad,
             std::vector<Numbers>& sums)
        : in_(in), grad_(grad), sums_(sums), row_(in, options), dy_(row_.channels()), dn_(dy_), dx_(dy_), dz_(dy_) {}

    void operator()(Index block) {
        Numbers& sum = sums_[static_cast<std::size_t>(block)];
        sum.assign(row_.channels(), 0);
        const Index end = std::min((block + 1) * block_rows, row_count(in_));
        for (Index row = block * block_rows; row < end; ++row) run(row, sum);
    }

  private:
    void run(Index row, Numbers& sum) {
        row_.load(row);
        row_.load_into(grad_.dy, row, dy_);
        double product = 0;
        for (std::size_t d = 0; d < dy_.size(); ++d) {
            const double gated = dy_[d] * row_.gate(d);
            sum[d] += gated * row_.n(d);
            dn_[d] = gated * row_.weight(d);
            product += dn_[d] * row_.n(d);
            if (grad_.dz) dz_[d] = dy_[d] * row_.weight(d) * row_.n(d) * row_.gate_slope(d);
        }
        const double mean = product / static_cast<double>(dy_.size());
        for (std::size_t d = 0; d < dy_.size(); ++d) dx_[d] = row_.r * (dn_[d] - row_.n(d) * mean);
        Row::store(grad_.dx, row, dx_);
        Row::store(grad_.dz, row, dz_);
    }

    const core::NormInputs& in_;
    const core::NormGradients& grad_;
    std::vector<Numbers>& sums_;
    Row row_;
    Numbers dy_, dn_, dx_, dz_;
};

}  // namespace

void norm_forward(const core::NormInputs& in, const core::NormOptions& options, const core::Execution& execution,
                  const core::NormOutputs& out) {
    const core::Work work = engines::work_of(in, engines::Direction::forward);
    core::parallel_units(core::useful_threads(execution.threads, work), block_count(in), [&] {
        return [&, row = Row(in, options), y = Numbers(static_cast<std::size_t>(in.x.shape[3]))](Index block) mutable {
            for (Index i = block * block_rows; i < std::min((block + 1) * block_rows, row_count(in)); ++i) {
                row.load(i);
                for (std::size_t d = 0; d < y.size(); ++d) y[d] = row.weight(d) * row.n(d) * row.gate(d);
                Row::store(out.y, i, y);
            }
        };
    });
}

void norm_backward(const core::NormInputs& in, const core::NormOptions& options, const core::Execution& execution,
                   const core::NormGradients& grad) {
    std::vector<Numbers> sums(static_cast<std::size_t>(block_count(in)));
    const core::Work work = engines::work_of(in, engines::Direction::backward);
    core::parallel_units(core::useful_threads(execution.threads, work), block_count(in),
                         [&] { return Backward(in, options, grad, sums); });
    for (Index d = 0; grad.dweight && d < in.x.shape[3]; ++d) {
        double total = 0;
        for (const Numbers& sum : sums) total += sum[static_cast<std::size_t>(d)];
        core::store(grad.dweight, grad.dweight.offset({d}), total);
    }
}

}  // namespace softdelta::reference

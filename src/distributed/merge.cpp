#include "distributed/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/parallel.h"

namespace softdelta::distributed {

namespace {

using core::Index;
using core::Tensor;

constexpr double infinity = std::numeric_limits<double>::infinity();

// The rows of one query position. T is what sums are kept in; the few exponents of a row are in f64.
template <class T>
class Rows {
  public:
    Rows(const std::vector<core::AttentionOutputs>& parts, const core::AttentionOutputs& out)
        : parts_(parts), out_(out), weights_(parts.size()) {
        const auto size = static_cast<std::size_t>(parts.front().o.shape[3]);
        sum_.resize(size);
        row_.resize(size);
    }

    void run(Index batch, Index query) {
        const Index heads = parts_.front().o.shape[2];
        for (Index h = 0; h < heads; ++h) {
            const double lse = find_weights(batch, query, h);
            if (out_.lse) core::store(out_.lse, out_.lse.offset({batch, h, query}), lse);
            if (out_.o) merge_row(batch, query, h);
        }
    }

  private:
    // Of each part, e^(lse_r − lse): 0 of one without a key. Returns lse.
    double find_weights(Index batch, Index query, Index h) {
        double top = -infinity, sum = 0;
        for (std::size_t r = 0; r < parts_.size(); ++r) {
            const Tensor& t = parts_[r].lse;
            weights_[r] = core::load(t, t.offset({batch, h, query}));
            top = weights_[r] > top ? weights_[r] : top;
        }
        for (double& w : weights_) {
            if (w == -infinity)
                w = 0;
            else
                w = w == top ? 1 : std::exp(w - top);  // of a sink of +∞, too
            sum += w;
        }
        for (double& w : weights_) w = w == 0 ? 0 : w / sum;
        return sum == 0 ? -infinity : top + std::log(sum);
    }

    void merge_row(Index batch, Index query, Index h) {
        const Index size = static_cast<Index>(sum_.size());
        std::fill(sum_.begin(), sum_.end(), T(0));
        for (std::size_t r = 0; r < parts_.size(); ++r) {
            if (weights_[r] == 0) continue;
            const Tensor& t = parts_[r].o;
            const T weight = static_cast<T>(weights_[r]);
            core::load_row(t, t.offset({batch, query, h, 0}), 3, size, row_.data());
            for (std::size_t c = 0; c < sum_.size(); ++c) sum_[c] += weight * row_[c];
        }
        core::store_row(out_.o, out_.o.offset({batch, query, h, 0}), 3, size, sum_.data());
    }

    const std::vector<core::AttentionOutputs>& parts_;
    const core::AttentionOutputs& out_;
    std::vector<double> weights_;  // [parts]
    std::vector<T> sum_, row_;     // [Dv]
};

template <class T>
void run(const std::vector<core::AttentionOutputs>& parts, int threads, const core::AttentionOutputs& out) {
    const Tensor& o = parts.front().o;
    core::parallel_units(threads, o.shape[0] * o.shape[1], [&] {
        return [&, rows = Rows<T>(parts, out)](Index unit) mutable { rows.run(unit / o.shape[1], unit % o.shape[1]); };
    });
}

}  // namespace

void merge(const std::vector<core::AttentionOutputs>& parts, int threads, const core::AttentionOutputs& out) {
    const auto is_f64 = [](const core::AttentionOutputs& part) { return part.o.dtype == core::DType::f64; };
    std::any_of(parts.begin(), parts.end(), is_f64) ? run<double>(parts, threads, out)
                                                    : run<float>(parts, threads, out);
}

}  // namespace softdelta::distributed

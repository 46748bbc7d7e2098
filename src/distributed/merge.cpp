#include "distributed/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "core/rows.h"

namespace softdelta::distributed {

namespace {

using core::Index;
using core::Tensor;

constexpr double infinity = std::numeric_limits<double>::infinity();

constexpr Index queries_of_unit = 16;  // an lse of f32 fills a cache line, which no other thread writes to

// Some queries of a batch row. T is what sums are kept in; the few exponents of a row are in f64.
template <class T>
class Rows {
  public:
    Rows(const std::vector<core::AttentionOutputs>& parts, const core::AttentionOutputs& out)
        : parts_(parts),
          out_(out),
          heads_(parts.front().o.shape[2]),
          weights_(static_cast<std::size_t>(heads_) * parts.size() * queries_of_unit),
          lse_(queries_of_unit),
          sum_(static_cast<std::size_t>(parts.front().o.shape[3])) {}

    void run(Index batch, Index first, Index count) {
        for (Index h = 0; h < heads_; ++h) {
            for (std::size_t r = 0; r < parts_.size(); ++r) {
                const Tensor& t = parts_[r].lse;
                core::read_row(t, t.offset({batch, h, first}), 2, count, weights(h, r));
            }
            for (Index i = 0; i < count; ++i) lse_[static_cast<std::size_t>(i)] = find_weights(h, i);
            if (out_.lse) core::write_row(out_.lse, out_.lse.offset({batch, h, first}), 2, count, lse_.data());
        }
        if (!out_.o) return;
        for (Index i = 0; i < count; ++i)  // heads lie side by side
            for (Index h = 0; h < heads_; ++h) merge_row(batch, first, i, h);
    }

  private:
    double* weights(Index h, std::size_t part) {
        return weights_.data() + (static_cast<std::size_t>(h) * parts_.size() + part) * queries_of_unit;
    }

    // Makes e^(lse_r − lse) of the lse_r of query i: 0 of a part without a key. Returns lse.
    double find_weights(Index h, Index i) {
        double top = -infinity, sum = 0;
        for (std::size_t r = 0; r < parts_.size(); ++r) top = weights(h, r)[i] > top ? weights(h, r)[i] : top;
        for (std::size_t r = 0; r < parts_.size(); ++r) {
            double& w = weights(h, r)[i];
            if (w == -infinity)
                w = 0;
            else
                w = w == top ? 1 : std::exp(w - top);  // of a sink of +∞, too
            sum += w;
        }
        for (std::size_t r = 0; r < parts_.size(); ++r) {
            double& w = weights(h, r)[i];
            w = w == 0 ? 0 : w / sum;
        }
        return sum == 0 ? -infinity : top + std::log(sum);
    }

    void merge_row(Index batch, Index first, Index i, Index h) {
        const auto size = static_cast<Index>(sum_.size());
        T* sum = sum_.data();
        std::fill_n(sum, size, T(0));
        for (std::size_t r = 0; r < parts_.size(); ++r) {
            const double share = weights(h, r)[i];
            if (share == 0) continue;
            const Tensor& t = parts_[r].o;
            core::with_row(t, t.offset({batch, first + i, h, 0}), 3, [&](const auto* o, auto step) {
                for (Index c = 0; c < size; ++c)
                    sum[c] += static_cast<T>(share) * static_cast<T>(core::widen(o[c * step]));
            });
        }
        core::write_row(out_.o, out_.o.offset({batch, first + i, h, 0}), 3, size, sum);
    }

    const std::vector<core::AttentionOutputs>& parts_;
    const core::AttentionOutputs& out_;
    Index heads_;
    std::vector<double> weights_;  // [heads, parts, queries_of_unit]
    std::vector<double> lse_;      // [queries_of_unit]
    std::vector<T> sum_;           // [Dv]
};

template <class T>
void run(const std::vector<core::AttentionOutputs>& parts, int threads, const core::AttentionOutputs& out) {
    const Tensor& o = parts.front().o;
    const Index queries = o.shape[1], blocks = (queries + queries_of_unit - 1) / queries_of_unit;
    core::Work work;
    work.bytes = static_cast<double>(o.count()) * static_cast<double>((parts.size() + 1) * core::size_of(o.dtype));
    core::parallel_units(core::useful_threads(threads, work), o.shape[0] * blocks, [&] {
        return [&, rows = Rows<T>(parts, out)](Index unit) mutable {
            const Index first = unit % blocks * queries_of_unit;
            rows.run(unit / blocks, first, std::min(queries_of_unit, queries - first));
        };
    });
}

}  // namespace

void merge(const std::vector<core::AttentionOutputs>& parts, int threads, const core::AttentionOutputs& out) {
    const auto is_f64 = [](const core::AttentionOutputs& part) { return part.o.dtype == core::DType::f64; };
    std::any_of(parts.begin(), parts.end(), is_f64) ? run<double>(parts, threads, out)
                                                    : run<float>(parts, threads, out);
}

}  // namespace softdelta::distributed

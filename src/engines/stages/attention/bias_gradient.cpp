#include "engines/stages/attention/bias_gradient.h"

#include <algorithm>

#include "engines/stages/attention/rounding.h"

namespace softdelta::stages::attention {

namespace {

constexpr Index most_numbers_in_sums = Index{1} << 26;  // of accumulators that share slices

std::vector<Unit> list_units(const core::AttentionInputs& in) {
    std::vector<Unit> units;
    for (Index n = 0; n < core::sequence_count(in); ++n)
        for (Index hk = 0; hk < in.k.shape[2]; ++hk) units.push_back({n, hk});
    return units;
}

}  // namespace

template <class T>
BiasGradient<T>::BiasGradient(const core::AttentionInputs& in, const core::Execution& execution, const Tensor& dbias)
    : in_(in), execution_(execution), dbias_(dbias) {
    if (dbias_) {
        const Index bias_heads = dbias_.shape[1], key_heads = in.k.shape[2];
        heads_ = bias_heads == 1 ? 1 : bias_heads / key_heads;
        rows_ = dbias_.shape[2];
        keys_ = dbias_.shape[3];
    }
    plan_accumulators();
}

template <class T>
void BiasGradient<T>::plan_accumulators() {
    const std::vector<Unit> units = list_units(in_);
    if (!dbias_) {
        for (const Unit& unit : units) accumulators_.push_back({0, true, {unit}, {}});
        return;
    }
    const Index slices = dbias_.shape[0] * (dbias_.shape[1] / heads_);
    std::vector<std::vector<Unit>> sharing(static_cast<std::size_t>(slices));
    for (const Unit& unit : units) sharing[static_cast<std::size_t>(slice_of(unit))].push_back(unit);

    const Index affordable = std::max<Index>(1, most_numbers_in_sums / std::max<Index>(1, dbias_.count()));
    for (Index slice = 0; slice < slices; ++slice) {
        const std::vector<Unit>& all = sharing[static_cast<std::size_t>(slice)];
        const Index count = static_cast<Index>(all.size()), accumulators = std::clamp<Index>(count, 1, affordable);
        for (Index accumulator = 0; accumulator < accumulators; ++accumulator)
            accumulators_.push_back({slice,
                                     accumulators == 1,
                                     {all.begin() + count * accumulator / accumulators,
                                      all.begin() + count * (accumulator + 1) / accumulators},
                                     {}});
    }
}

template <class T>
Index BiasGradient<T>::slice_of(const Unit& unit) const {
    const Index batch = dbias_.shape[0] == 1 ? 0 : unit.sequence;
    return dbias_.shape[1] == 1 ? batch : batch * in_.k.shape[2] + unit.key_head;
}

template <class T>
void BiasGradient<T>::begin(Index accumulator) {
    if (dbias_)
        accumulators_[static_cast<std::size_t>(accumulator)].sum.assign(
            static_cast<std::size_t>(heads_ * rows_ * keys_), T(0));
}

template <class T>
void BiasGradient<T>::add(Index accumulator, Index h, Index i, Index j, const Tile<T>& ds) {
    if (!dbias_) return;
    T* const slice = accumulators_[static_cast<std::size_t>(accumulator)].sum.data() + h % heads_ * rows_ * keys_;
    using Rows = Eigen::Map<Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>, 0, Eigen::OuterStride<>>;
    Rows sum(slice + (rows_ == 1 ? 0 : i) * keys_ + (keys_ == 1 ? 0 : j), rows_ == 1 ? 1 : ds.rows(),
             keys_ == 1 ? 1 : ds.cols(), Eigen::OuterStride<>(keys_));
    const T slope = static_cast<T>(core::bias_slope(in_, h));
    if (rows_ == 1 && keys_ == 1) {
        sum(0, 0) += slope * ds.sum();
    } else if (rows_ == 1) {
        sum += slope * ds.colwise().sum();
    } else if (keys_ == 1) {
        sum += slope * ds.rowwise().sum();
    } else {
        sum += slope * ds;
    }
}

template <class T>
void BiasGradient<T>::finish(Index accumulator) {
    Accumulator& done = accumulators_[static_cast<std::size_t>(accumulator)];
    if (!dbias_ || !done.alone) return;
    store_slice(done.slice, done.sum);
    done.sum = {};
}

template <class T>
void BiasGradient<T>::store_shared_slices() {
    for (std::size_t first = 0; first < accumulators_.size();) {
        std::size_t next = first + 1;
        for (; next < accumulators_.size() && accumulators_[next].slice == accumulators_[first].slice; ++next)
            for (std::size_t x = 0; x < accumulators_[next].sum.size(); ++x)
                accumulators_[first].sum[x] += accumulators_[next].sum[x];
        if (dbias_ && !accumulators_[first].alone) store_slice(accumulators_[first].slice, accumulators_[first].sum);
        first = next;
    }
}

template <class T>
void BiasGradient<T>::store_slice(Index slice, Buffer<T>& sum) const {
    Rounding rounding = make_rounding<T>(in_, execution_, RoundedPass::bias, slice);
    rounding.stored(sum.data(), static_cast<Index>(sum.size()), dbias_.dtype);
    const Index slices_per_batch = dbias_.shape[1] / heads_;
    const Index batch = slice / slices_per_batch, first_head = slice % slices_per_batch * heads_;
    const T* row = sum.data();
    for (Index h = first_head; h < first_head + heads_; ++h)
        for (Index i = 0; i < rows_; ++i, row += keys_)
            core::store_row(dbias_, dbias_.offset({batch, h, i, 0}), 3, keys_, row);
}

template class BiasGradient<double>;
template class BiasGradient<float>;

}  // namespace softdelta::stages::attention

#include "engines/reference/attention/bias_gradient.h"

#include <algorithm>

namespace softdelta::reference {

BiasGradient::BiasGradient(const core::AttentionInputs& in, const core::Tensor& dbias)
    : dbias_(dbias),
      heads_(dbias.shape[1] == in.q.shape[2] ? in.q.shape[2] / in.k.shape[2] : 1),
      queries_(dbias.shape[2]),
      keys_(dbias.shape[3]),
      sum_(static_cast<std::size_t>(heads_ * queries_ * keys_)) {}

void BiasGradient::select(const KeyHead& head) {
    const Index batch = dbias_.shape[0] == 1 ? 0 : head.sequence.mask_batch;
    const Index first_head = core::shared_head(dbias_, head.head(0), head.in->q.shape[2]);
    if (batch == batch_ && first_head == first_head_) return;
    finish();
    batch_ = batch;
    first_head_ = first_head;
    std::fill(sum_.begin(), sum_.end(), 0.0);
}

double* BiasGradient::row(const KeyHead& head, Index r) {
    const Index h = heads_ == 1 ? 0 : r % heads_;
    const Index i = queries_ == 1 ? 0 : head.query(r);
    return sum_.data() + (h * queries_ + i) * keys_;
}

void BiasGradient::add(const KeyHead& head, Range rows, Range keys, Matrix ds) {
    for (Index r = rows.begin; r < rows.end; ++r) {
        const double* from = ds.row(r - rows.begin);
        double* to = row(head, r);
        const double slope = core::bias_slope(*head.in, head.head(r));
        if (keys_shared())
            for (Index j = 0; j < keys.count(); ++j) *to += slope * from[j];
        else
            for (Index j = 0; j < keys.count(); ++j) to[keys.begin + j] += slope * from[j];
    }
}

void BiasGradient::finish() {
    if (batch_ < 0) return;
    for (Index h = 0; h < heads_; ++h)
        for (Index i = 0; i < queries_; ++i)
            core::store_row(dbias_, dbias_.offset({batch_, first_head_ + h, i, 0}), 3, keys_,
                            sum_.data() + (h * queries_ + i) * keys_);
}

}  // namespace softdelta::reference

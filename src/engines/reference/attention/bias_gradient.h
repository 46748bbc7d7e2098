// The gradient of bias: ds, times the slope of its head, summed over whatever shares an element of bias, in the order
// in which rows are added.
#pragma once

#include <vector>

#include "engines/reference/attention/rows.h"

namespace softdelta::reference {

// Holds one slice [heads of a group|1, Lq|1, Lk|1] of bias at a time, so key heads that share one must follow each
// other.
class BiasGradient {
  public:
    BiasGradient(const core::AttentionInputs& in, const core::Tensor& dbias);

    // Turns to the slice of a key head; the one before is stored when it is another.
    void select(const KeyHead& head);

    // Adds ds [rows, keys]. Calls with other keys may run at the same time, unless keys_shared().
    void add(const KeyHead& head, Range rows, Range keys, Matrix ds);
    bool keys_shared() const { return keys_ == 1; }

    // Stores the last slice.
    void finish();

  private:
    double* row(const KeyHead& head, Index r);

    core::Tensor dbias_;
    Index heads_, queries_, keys_;        // sizes of a slice
    Index batch_ = -1, first_head_ = -1;  // where it lies in bias
    std::vector<double> sum_;
};

}  // namespace softdelta::reference

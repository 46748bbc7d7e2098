// dbias: ds, times the slope of its head, summed over every dimension that bias broadcasts, in a fixed order, without
// locks, rounded once.
//
// A slice is what the query heads of one key head of one sequence add to: [1 or group, Lq|1, Lk|1] of bias. Units
// (sequence, key head) with the same slice are spread over a few accumulators. The units of an accumulator run one
// after the other, and accumulators are added in their order. Shapes alone decide which unit belongs to which
// accumulator.
#pragma once

#include <vector>

#include "core/attention.h"
#include "core/execution.h"
#include "engines/stages/attention/tiles.h"

namespace softdelta::stages::attention {

struct Unit {
    Index sequence, key_head;
};

template <class T>
class BiasGradient {
  public:
    // Without dbias every unit has an accumulator of its own, which is empty.
    BiasGradient(const core::AttentionInputs& in, const core::Execution& execution, const Tensor& dbias);

    Index accumulator_count() const { return static_cast<Index>(accumulators_.size()); }
    const std::vector<Unit>& units(Index accumulator) const {
        return accumulators_[static_cast<std::size_t>(accumulator)].units;
    }

    void begin(Index accumulator);
    // ds [rows, keys] of queries from i and keys from j of query head h
    void add(Index accumulator, Index h, Index i, Index j, const Tile<T>& ds);
    void finish(Index accumulator);

    void store_shared_slices();  // when all accumulators have finished

  private:
    struct Accumulator {
        Index slice;
        bool alone;  // the only one of its slice
        std::vector<Unit> units;
        Buffer<T> sum;
    };

    void plan_accumulators();
    Index slice_of(const Unit& unit) const;
    void store_slice(Index slice, Buffer<T>& sum) const;

    const core::AttentionInputs& in_;
    const core::Execution& execution_;
    Tensor dbias_;
    Index heads_ = 0, rows_ = 0, keys_ = 0;  // of a slice
    std::vector<Accumulator> accumulators_;
};

}  // namespace softdelta::stages::attention

// dbias: ds summed over every dimension that bias broadcasts, in a fixed order, without locks, rounded once.
//
// A slice is what the query heads of one key head of one sequence add to: [1 or group, Lq|1, Lk|1] of bias. Units
// (sequence, key head) with the same slice are spread over a few lanes; a lane runs its units one after the other into
// a sum of its own, and the sums are added in the order of lanes. Shapes alone decide which lane does what.
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
    // Without dbias every unit is a lane and nothing is summed.
    BiasGradient(const core::AttentionInputs& in, const core::Execution& execution, const Tensor& dbias);

    Index lane_count() const { return static_cast<Index>(lanes_.size()); }
    const std::vector<Unit>& units(Index lane) const { return lanes_[static_cast<std::size_t>(lane)].units; }

    void begin(Index lane);
    // ds [rows, keys] of queries from i and keys from j of query head h
    void add(Index lane, Index h, Index i, Index j, const Tile<T>& ds);
    void finish(Index lane);

    void store_shared_slices();  // after every lane has finished

  private:
    struct Lane {
        Index slice;
        bool alone;  // nobody else adds to the slice
        std::vector<Unit> units;
        Buffer<T> sum;
    };

    void plan_lanes();
    Index slice_of(const Unit& unit) const;
    void store_slice(Index slice, Buffer<T>& sum) const;

    const core::AttentionInputs& in_;
    const core::Execution& execution_;
    Tensor dbias_;
    Index heads_ = 0, rows_ = 0, keys_ = 0;  // of a slice
    std::vector<Lane> lanes_;
};

}  // namespace softdelta::stages::attention

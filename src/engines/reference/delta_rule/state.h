// States of the delta rules in tiles: [tiles, K, 16] dense f64, columns from V on zero.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "engines/reference/delta_rule/step.h"

namespace softdelta::reference {

// A view of the states [.., K, V] of a call, from [.., V, K] if they are stored so.
inline core::Tensor keys_first(core::Tensor t, bool state_v_first) {
    if (t && state_v_first) {
        const auto last = static_cast<std::size_t>(t.rank - 1);
        std::swap(t.shape[last - 1], t.shape[last]);
        std::swap(t.stride[last - 1], t.stride[last]);
    }
    return t;
}

// Columns of tile `tile` of the state [K, V] at `offset` of t [.., K, V], to and from S [K, 16].
inline void load_tile(const core::Tensor& t, Index offset, Index tile, double* S) {
    const auto rows = static_cast<std::size_t>(t.rank - 2);
    const Index K = t.shape[rows], first = tile * tile_columns, n = std::min(tile_columns, t.shape[rows + 1] - first);
    for (Index i = 0; i < K; ++i)
        core::load_row(t, offset + i * t.stride[rows] + first * t.stride[rows + 1], t.rank - 1, n,
                       S + i * tile_columns);
}

inline void store_tile(const core::Tensor& t, Index offset, Index tile, const double* S) {
    const auto rows = static_cast<std::size_t>(t.rank - 2);
    const Index K = t.shape[rows], first = tile * tile_columns, n = std::min(tile_columns, t.shape[rows + 1] - first);
    for (Index i = 0; i < K; ++i)
        core::store_row(t, offset + i * t.stride[rows] + first * t.stride[rows + 1], t.rank - 1, n,
                        S + i * tile_columns);
}

// All columns of one state; absent t: zeros.
class State {
  public:
    State(Index K, Index V) : tile_size_(K * tile_columns), S_(static_cast<std::size_t>(tile_count(V) * tile_size_)) {}

    double* tile(Index i) { return S_.data() + i * tile_size_; }
    Index tiles() const { return static_cast<Index>(S_.size()) / tile_size_; }

    void load(const core::Tensor& t, Index n, Index head) {
        std::fill(S_.begin(), S_.end(), 0.0);
        for (Index i = 0; t && i < tiles(); ++i) load_tile(t, t.offset({n, head}), i, tile(i));
    }
    void store(const core::Tensor& t, Index n, Index head) {
        for (Index i = 0; t && i < tiles(); ++i) store_tile(t, t.offset({n, head}), i, tile(i));
    }

  private:
    Index tile_size_;
    std::vector<double> S_;
};

}  // namespace softdelta::reference

// Where the gradient of the bias is summed. A bias of its own for every row and key is written tile by tile. One that
// rows, heads or sequences share is added to in f32, in place when dbias is f32. One number for all keys of a row is
// known without the tiles.
#pragma once

#include "core/attention.h"
#include "engines/cpu/attention/head.h"
#include "engines/cpu/kernels/scratch.h"
#include "engines/cpu/kernels/table.h"

namespace softdelta::cpu {

class AttentionBiasGradient {
  public:
    AttentionBiasGradient(const core::AttentionInputs& in, const core::AttentionGradients& grad,
                          const AttentionHeads& heads);

    bool by_rows() const { return grad_.dbias && grad_.dbias.shape[3] == 1; }
    bool by_tiles() const { return grad_.dbias && !by_rows(); }
    kernels::AttentionGradient::Bias mode() const {
        using Bias = kernels::AttentionGradient::Bias;
        return writes_ ? Bias::write : Bias::add;
    }

    // Heads that add to the same plane of dbias share an accumulator; shared: some have several heads.
    bool shared() const { return by_tiles() && !writes_ && accumulators() < heads_.sequences() * heads_.key_heads(); }
    Index accumulators() const {
        return (one_batch() ? 1 : heads_.sequences()) * (one_head() ? 1 : heads_.key_heads());
    }
    Index accumulator(Index sequence, Index key_head) const {
        return (one_batch() ? 0 : sequence) * (one_head() ? 1 : heads_.key_heads()) + (one_head() ? 0 : key_head);
    }

    void take(kernels::Scratch& memory);
    void clear(int threads) const;
    // What tiles write or add to; no data when they have nothing to do.
    kernels::Plane plane(Index sequence, Index key_head) const;
    void add_row(Index sequence, Index head, Index query, float value);
    void finish(const kernels::AttentionBackward& kernel, int threads) const;

  private:
    bool one_batch() const { return grad_.dbias.shape[0] == 1; }
    bool one_head() const { return grad_.dbias.shape[1] == 1; }

    const core::AttentionInputs& in_;
    const core::AttentionGradients& grad_;
    const AttentionHeads& heads_;
    bool writes_ = false;
    Tensor sums_;  // f32, shaped as dbias; dbias itself when it can be
};

}  // namespace softdelta::cpu

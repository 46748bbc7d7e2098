// An attention call in f64, a tile of query rows at a time, forward and backward, with mistakes.
#pragma once

#include "diagnose/catalogue/mistake.h"
#include "diagnose/replay/dense.h"

namespace softdelta::diagnose {

class AttentionCall {
  public:
    explicit AttentionCall(const io::Call& call);

    const io::Call& call;
    double scale;
    Dense q, k, v, mask, bias, sink, alibi_slopes, bias_slopes, d_o, dlse;

    Results run(const Mistakes& mistakes) const;
};

}  // namespace softdelta::diagnose

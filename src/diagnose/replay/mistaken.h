// Any call of the library in f64, with mistakes.
#pragma once

#include <memory>
#include <vector>

#include "diagnose/catalogue/catalogue.h"
#include "diagnose/replay/delta_call.h"

namespace softdelta::diagnose {

class AttentionCall;

class MistakenCall {
  public:
    MistakenCall(const io::Call& call, int threads);
    ~MistakenCall();
    MistakenCall(const MistakenCall&) = delete;
    MistakenCall& operator=(const MistakenCall&) = delete;

    // Without entries: the truth.
    Results run(const std::vector<const Entry*>& entries) const;

  private:
    std::unique_ptr<DeltaCall> delta_;
    std::unique_ptr<AttentionCall> attention_;
};

}  // namespace softdelta::diagnose

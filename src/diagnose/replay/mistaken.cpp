#include "diagnose/replay/mistaken.h"

#include <algorithm>

#include "diagnose/replay/attention_call.h"

namespace softdelta::diagnose {

MistakenCall::MistakenCall(const io::Call& call, int threads) {
    if (call.is_attention)
        attention_ = std::make_unique<AttentionCall>(call);
    else
        delta_ = std::make_unique<DeltaCall>(call, threads);
}

MistakenCall::~MistakenCall() = default;

Results MistakenCall::run(const std::vector<const Entry*>& entries) const {
    Mistakes mistakes;
    Phase from = Phase::results;
    for (const Entry* entry : entries) {
        entry->mistake == Mistake::at_a_point ? mistakes.add(entry->point) : mistakes.add(entry->mistake);
        from = std::min(from, entry->from);
    }
    return attention_ ? attention_->run(mistakes) : delta_->run(mistakes, from);
}

}  // namespace softdelta::diagnose

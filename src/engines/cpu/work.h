// How much work a call is, from its shapes: core::useful_threads chooses the number of threads by it.
#pragma once

#include "core/parallel.h"
#include "engines/cpu/attention/head.h"
#include "engines/cpu/delta_rule/call.h"
#include "engines/work.h"

namespace softdelta::cpu {

using engines::Direction;

core::Work attention_work(const AttentionHeads& heads, const core::AttentionInputs& in, Direction direction);
core::Work delta_work(const DeltaCall& call, const core::DeltaInputs& in, Direction direction);

}  // namespace softdelta::cpu

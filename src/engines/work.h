// How much work a call is, from its shapes: core::useful_threads chooses the number of threads by it. work_of() is of
// engines that compute every product one after the other.
#pragma once

#include "core/attention.h"
#include "core/delta_rule.h"
#include "core/layer/convolution.h"
#include "core/layer/norm.h"
#include "core/parallel.h"

namespace softdelta::engines {

enum class Direction { forward, backward };

// How many flops take as long as the exponential of a score and what belongs to it.
inline constexpr core::Index exponential_flops = 16;

double bytes_of(const core::Tensor& t);

// Of so many scores.
core::Work score_work(const core::AttentionInputs& in, double scores, Direction direction);

core::Work work_of(const core::AttentionInputs& in, const core::AttentionOptions& options, Direction direction);
core::Work work_of(const core::DeltaInputs& in, Direction direction);
core::Work work_of(const core::ConvolutionInputs& in, Direction direction);
core::Work work_of(const core::NormInputs& in, Direction direction);

}  // namespace softdelta::engines

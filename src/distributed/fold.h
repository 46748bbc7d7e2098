// Summaries of ranges in a row: the state that enters each of them.
#pragma once

#include "core/ranges.h"

namespace softdelta::distributed {

// states[0] = initial_state, states[r + 1] = M[r] states[r] + E[r]; final_state is the one after the last.
void fold(const core::DeltaFoldInputs& in, bool state_v_first, int threads, const core::DeltaFoldOutputs& out);

// Gradients, from the last range to the first: E is R, initial_state the gradient of the state that leaves the last
// range. states[r] is the gradient of the state that leaves range r, dS[r − 1] = M[r]ᵀ dS[r] + R[r]; final_state is
// that of the state that enters the first.
void fold_backward(const core::DeltaFoldInputs& in, bool state_v_first, int threads, const core::DeltaFoldOutputs& out);

}  // namespace softdelta::distributed

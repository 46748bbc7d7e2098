// How much of a call to examine, and which part.
#pragma once

#include "diagnose/sampling/screen.h"

namespace softdelta::diagnose {

// Multiply-adds of computing a selection, or all, with one mistake.
double work_of(const io::Call& call, const Selection& selection);
double work_of(const io::Call& call);

// Bytes, about, that replays of a call hold besides what its verdict takes.
double memory_of(const io::Call& call, int threads);

// As much as takes no more than `work` multiply-adds, but at least one group of heads of one sequence: the farthest
// from the fast path first, then the nearest and the next farthest in turn. All sequences of one group come before more
// groups where they can: parameters' gradients sum over sequences.
Selection select(const io::Call& call, const Screen& screen, double work);

}  // namespace softdelta::diagnose

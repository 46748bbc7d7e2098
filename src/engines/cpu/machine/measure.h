// What this machine can do at most, measured: a benchmark compares with it. Threads run at once (0: OpenMP's default);
// each figure is the median of a few runs and takes less than a second.
#pragma once

#include "engines/cpu/kernels/table.h"

namespace softdelta::cpu {

// flop/s
double measure_flops(const kernels::Ceiling& ceiling, int threads);

// flop/s of products of bf16 pairs. By matrix tiles the fastest loop of this kind counts.
double measure_bf16(const kernels::Table& kernels, kernels::Loop::Products products, int threads);

// Seconds of a thread for an operation of the loop.
double measure_loop(const kernels::Loop& loop, int threads);

// bytes/s read from memory, far beyond the caches
double measure_bandwidth(const kernels::Table& kernels, int threads);

}  // namespace softdelta::cpu

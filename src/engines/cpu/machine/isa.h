// The instruction sets that the fast kernels exist for, and which of them runs.
#pragma once

#include <span>

#include "core/execution.h"
#include "engines/cpu/kernels/table.h"

namespace softdelta::cpu {

struct Level {
    const char* name;             // as SOFTDELTA_ISA spells it
    const kernels::Table* table;  // null: not compiled in
    bool supported;               // by this CPU and its operating system

    bool available() const;  // and its tiles were not refused
};

// All levels, each an extension of the one before. Detected once.
std::span<const Level> isa_levels();

// The last level available, or the one that was selected, or that the environment's SOFTDELTA_ISA names. Null when none
// is available. Throws core::Unsupported when the one named is not.
const Level* selected_level();

// Selects a level for all calls to come; null: the environment's again. Throws core::Unsupported when it is not
// available.
void select_level(const char* name);

// The kernels of the selected level, which may run from now on: the system is asked for the tiles that they need.
const kernels::Table* find_kernels();

// The same; throws core::Unsupported instead of returning null.
const kernels::Table& selected_kernels();

// Whether operands of bf16 are multiplied as pairs rather than as f32. Where `execution` does not say, the level and
// the CPU's maker decide: matrix tiles multiply pairs only; on AMD's cores pairs give twice the flops of f32; on
// Intel's vectors they give no more.
bool use_bf16_products(const core::Execution& execution, const kernels::Table& kernels);

// Whether decode fetches lines to the second cache alone: a Zen 4's first one waits for 24 lines at most. Others that
// were measured lose by it. Only rows of f32 and bf16 were tried.
bool decode_fetches_to_second_cache();

}  // namespace softdelta::cpu

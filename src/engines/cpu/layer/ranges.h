// Tokens or rows of a call cut into ranges, from shapes alone, and the memory of the threads that take them.
#pragma once

#include <algorithm>

#include "core/parallel.h"
#include "engines/cpu/kernels/range.h"
#include "engines/cpu/kernels/table.h"
#include "engines/cpu/machine/workspace.h"

namespace softdelta::cpu {

using core::Index;
using core::Tensor;

// Equal ranges of at least `shortest`, at most `most` of them.
struct Ranges {
    Index total, length;

    Ranges(Index count, Index shortest, Index most)
        : total(count), length(std::max(shortest, (count + most - 1) / most)) {}
    Index count() const { return (total + length - 1) / length; }
    kernels::Range operator[](Index i) const { return {i * length, std::min((i + 1) * length, total)}; }
};

// Each worker's scratch memory, one after the other.
struct ThreadMemory {
    core::Team team;
    std::size_t each;

    ThreadMemory(const core::Team& of, std::size_t bytes) : team(of), each(whole_pages(bytes)) {}
    std::size_t bytes() const { return static_cast<std::size_t>(team.workers) * each; }
    std::byte* of(std::byte* memory, int thread) const { return memory + static_cast<std::size_t>(thread) * each; }
};

inline void* at(const Tensor& t, Index offset) {
    return static_cast<std::byte*>(t.data) + offset * static_cast<Index>(core::size_of(t.dtype));
}

}  // namespace softdelta::cpu

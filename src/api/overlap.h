// Results that share memory with what is read, or with each other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/execution.h"
#include "core/operands.h"
#include "core/tensor.h"

namespace softdelta::api {

// The addresses of a view that is not empty: its lowest byte, and the byte behind its highest.
struct Extent {
    std::uintptr_t first, end;
};
Extent extent(const core::Tensor& t);

// Whether two views have a byte in common. Views of one buffer that interleave (q, k and v in one packed tensor) have
// none. Views so tangled that finding out would take long count as overlapping.
bool overlap(const core::Tensor& a, const core::Tensor& b);

// The operands of a call, collected to be compared; absent tensors are left out.
class Operands {
  public:
    Operands() {}  // leaves the array as it is

    void reads(const char* name, const core::Tensor& t) { add(name, t, false); }
    void writes(const char* name, const core::Tensor& t) { add(name, t, true); }
    // All of a structure, by its table.
    template <class Struct>
    void add(const Struct& tensors) {
        core::for_each_given(tensors, [&](const core::Operand<Struct>& operand, const core::Tensor& t) {
            add(operand.name, t, operand.written);
        });
    }
    // What execution adds: intermediates are written, and so are the workspace and what is kept.
    void writes(const core::Execution& execution);

    // A result that may be an operand itself, element for element.
    struct InPlace {
        std::string_view result, operand;
    };
    // Refuses a result that overlaps another operand.
    void expect_apart(std::span<const InPlace> allowed = {}) const;

  private:
    struct Operand {
        const char* name;
        const core::Tensor* tensor;
        std::uintptr_t first, end;  // bytes
        bool written;
    };
    static constexpr std::size_t most = 96, most_stages = 64;

    void add(const char* name, const core::Tensor& t, bool written);

    std::array<Operand, most> all_;  // no allocation: a call that is given its memory makes none
    std::size_t count_ = 0;
    core::Tensor workspace_, kept_;
};

}  // namespace softdelta::api

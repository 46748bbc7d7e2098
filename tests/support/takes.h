// Whether a rule takes an operand, by the table of operands.
#pragma once

#include <string_view>

#include "core/delta_rule.h"

namespace softdelta::test {

inline bool takes(const core::Rule& rule, std::string_view operand) {
    return core::find_operand<core::DeltaInputs>(operand)->need(rule).use != core::Use::none;
}

}  // namespace softdelta::test

// A checked call of a delta rule: its inputs and options, and the checks of tensors that belong to it.
#pragma once

#include "api/check.h"
#include "api/operands.h"
#include "core/delta_rule.h"

namespace softdelta::api {

struct DeltaCall {
    core::DeltaInputs in;
    core::DeltaOptions options{};
    CheckedExecution how{};
    Sizes sizes{};
};

DeltaCall check_delta_call(const softdelta_delta_inputs* inputs, const softdelta_delta_options* options,
                           const softdelta_execution* execution);

// The rule of a number of softdelta_rule.
const core::Rule& check_rule(std::int32_t rule);

// Where K and V are exchanged the error says so.
void refuse_transposed(const char* name, const Tensor& state, const core::Shape& shape, const DeltaCall& c);

// Type, shape and whether results are writable, of every operand that is given.
template <class Struct>
void check_operands(const DeltaCall& c, const Struct& tensors) {
    Sizes of_states = c.sizes;
    core::for_each_given(tensors, [&](const core::Operand<Struct>& operand, const Tensor& t) {
        if (operand.input != nullptr) return;
        const core::Shape& shape = core::shape_of(operand, c.options);
        const bool is_state = shape.has(core::Symbol::N) && shape.has(core::Symbol::V);
        if (!is_state) return expect_operand(operand, t, shape, c.sizes);
        refuse_transposed(operand.name, t, shape, c);
        of_states[core::Symbol::N] = is_pool(c.in, operand.written) ? Size{} : c.sizes[core::Symbol::N];
        expect_operand(operand, t, shape, of_states);
    });
}

}  // namespace softdelta::api

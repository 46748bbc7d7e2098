// What a call can yield, in terms of its operands.
#pragma once

#include <string_view>

#include "io/call/call.h"
#include "io/call/operands.h"

namespace softdelta::io {

const Operation& operation_of(const Call& call);

// An input that the call has; an absent tensor when it has none of this name.
Tensor input_of(const Call& call, std::string_view name);

// The shape in symbols of an input, a result or a gradient that is given; null for what is none of them.
const core::Shape* find_shape(const Call& call, std::string_view name);

}  // namespace softdelta::io

// What a call can yield, in terms of its operands.
#pragma once

#include <string_view>

#include "io/call/call.h"
#include "io/call/operands.h"

namespace softdelta::io {

const Operation& operation_of(const Call& call);

// An input that the call has; an absent tensor when it has none of this name.
Tensor input_of(const Call& call, std::string_view name);

}  // namespace softdelta::io

// Keys and values of 8 or 4 bits as what they stand for.
#pragma once

#include <array>

#include "io/call/call.h"

namespace softdelta::io {

// The call with keys and values of this type instead of quantised numbers with scales. Views into `memory`, and into
// what the given call views.
struct ExpandedCall {
    ExpandedCall(const Call& given, DType dtype);

    Call call;
    std::array<OwnedTensor, 2> memory;
};

}  // namespace softdelta::io

// What is applied to a result of a layer, or to its gate.
#pragma once

#include <cstdint>

namespace softdelta::core {

enum class Activation : std::uint8_t {
    none,     // f(x) = x; of a gate: there is none
    silu,     // x·σ(x)
    sigmoid,  // σ(x)
};

}  // namespace softdelta::core

// The engine of fast kernels for this CPU.
#pragma once

#include "engines/engine.h"

namespace softdelta::cpu {

extern const engines::Engine engine;

}  // namespace softdelta::cpu

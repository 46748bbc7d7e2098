// Engines in shared libraries that lie beside this one.
#pragma once

#include <string>

#include "engines/engine.h"

namespace softdelta::api {

struct Plugin {
    const engines::Engine* engine = nullptr;  // null: there is none
    std::string reason;                       // why there is none
};

// The CUDA engine; looked for once.
const Plugin& cuda_plugin();

}  // namespace softdelta::api

// Engines in shared libraries: they lie in a folder beside this one, or beside the program that has this code. A
// library opens another one by its absolute path alone, and never in a program with the rights of another user; a build
// without such engines opens none.
#pragma once

#include <string>

#include "engines/engine.h"

namespace softdelta::api {

struct Plugin {
    const engines::Engine* engine = nullptr;  // null: there is none
    std::string reason;                       // why there is none
};

// The CUDA engine; looked for once, when it is first asked for.
const Plugin& cuda_plugin();

}  // namespace softdelta::api

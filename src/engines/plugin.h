// The door between the library and an engine that comes as a shared library of its own. Both are built from the same
// sources: the plugin refuses a library of another build.
#pragma once

#include "engines/engine.h"

extern "C" {

// Exported by libsoftdelta_cuda.so. Null: `build_id` is not the plugin's own.
using softdelta_plugin_engine = const softdelta::engines::Engine*(const char* build_id);
}

namespace softdelta::engines {

inline constexpr const char* build_id = SOFTDELTA_BUILD_ID;  // cmake/build_id.cmake
inline constexpr const char* plugin_symbol = "softdelta_plugin_engine_v1";
#if defined(SOFTDELTA_PLUGIN_FOLDER)
// Seen from the folder of the library's code.
inline constexpr const char* cuda_plugin = SOFTDELTA_PLUGIN_FOLDER "libsoftdelta_cuda.so";
#endif

}  // namespace softdelta::engines

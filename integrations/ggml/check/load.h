// The backend under test and ggml's CPU backend, as scripts/ggml builds them.
#pragma once

#include <cstdlib>

#include "ggml-backend.h"

namespace check {

// With SOFTDELTA_GGML_DEVICE=1 the backend is a device of its own; else it computes for ggml's CPU backend.
inline bool load(bool own_device) {
    for (const char* variable : {"GGML_BACKEND_PATH", "SOFTDELTA_GGML_TAKE"}) unsetenv(variable);
    setenv("SOFTDELTA_GGML_DEVICE", own_device ? "1" : "0", 1);
    setenv("SOFTDELTA_GGML_LOG", "counts", 1);
    if (own_device) setenv("SOFTDELTA_GGML_TAKE", "all", 1);
    ggml_backend_load_all();
    return ggml_backend_load(SOFTDELTA_GGML_LIBRARY) != nullptr;
}

}  // namespace check

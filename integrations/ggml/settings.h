// Variables of the environment, read once. A value that is not one of those listed is named in a line of warning, and
// the default stays.
#pragma once

namespace softdelta_ggml {

// SOFTDELTA_GGML_TAKE=none takes no operation, =all takes what the library can compute, faster or not.
enum class Take { faster, none, all };
// SOFTDELTA_GGML_LOG (log.h).
enum class LogLevel { off, counts, times };

struct Settings {
    Take take = Take::faster;
    LogLevel log = LogLevel::off;
    bool own_device = false;  // SOFTDELTA_GGML_DEVICE=1 (device.cpp)
};

const Settings& settings();

}  // namespace softdelta_ggml

// An engine in a library of its own that says on standard output that its code runs.
#include <unistd.h>

#include <cstring>

#include "engines/plugin.h"

namespace {

[[maybe_unused]] const auto loaded = write(STDOUT_FILENO, "loaded ", 7);

const softdelta::engines::Engine engine{.name = PLUGIN_NAME,
                                        .description = "",
                                        .device = softdelta::core::DeviceType::cuda,
                                        .choice = softdelta::engines::Choice::by_name,
                                        .attention_forward = {},
                                        .attention_backward = {},
                                        .delta_forward = {},
                                        .delta_backward = {}};

}  // namespace

extern "C" __attribute__((visibility("default"))) const softdelta::engines::Engine* softdelta_plugin_engine_v1(
    const char* build_id) {
    return std::strcmp(build_id, softdelta::engines::build_id) == 0 ? &engine : nullptr;
}

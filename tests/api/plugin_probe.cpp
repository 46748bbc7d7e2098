// Prints which engine lies beside this program, or why there is none.
#include <cstdio>

#include "api/engines/plugin.h"

int main() {
    const softdelta::api::Plugin& plugin = softdelta::api::cuda_plugin();
    std::puts(plugin.engine != nullptr ? plugin.engine->name : plugin.reason.c_str());
}

#include "api/engines/plugin.h"

#if defined(SOFTDELTA_CUDA)
#include <dlfcn.h>
#include <sys/auxv.h>

#include <cstdint>
#include <fstream>

#include "engines/plugin.h"
#endif

#include "core/once.h"

namespace softdelta::api {

namespace {

#if defined(SOFTDELTA_CUDA)

Plugin load(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return {nullptr, dlerror()};
    const auto function = reinterpret_cast<softdelta_plugin_engine*>(dlsym(library, engines::plugin_symbol));
    const engines::Engine* engine = function == nullptr ? nullptr : function(engines::build_id);
    if (engine != nullptr) return {engine, ""};  // stays loaded as long as the process
    dlclose(library);
    return {nullptr, path + ": of another build, expected " + engines::build_id};
}

// The folder of the file that this code was loaded from, as the kernel knows it: the shared library, or the program
// that it is linked into. dladdr gives argv[0] for a program, and for a library the name that it was searched
// by: a caller may choose both. "": unknown.
std::string own_folder() {
    const auto here = reinterpret_cast<std::uintptr_t>(&load);
    std::ifstream maps("/proc/self/maps");
    std::uintptr_t first = 0, end = 0;
    char dash = 0;
    std::string access, offset, device, node, file;
    while (maps >> std::hex >> first >> dash >> end >> access >> offset >> device >> node && std::getline(maps, file))
        if (first <= here && here < end) {
            file.erase(0, file.find_first_not_of(' '));
            return file.starts_with('/') ? file.substr(0, file.rfind('/') + 1) : "";
        }
    return "";
}

Plugin find() {
    if (getauxval(AT_SECURE) != 0) return {nullptr, "a program with the rights of another user loads no engine"};
    const std::string folder = own_folder();
    if (folder.empty()) return {nullptr, "/proc/self/maps does not tell where the library lies"};
    return load(folder + engines::cuda_plugin);
}

#else

Plugin find() {
    return {nullptr, "this build has none"};
}

#endif

}  // namespace

const Plugin& cuda_plugin() {
    static constinit core::Once<Plugin> plugin;
    return plugin.get(find);
}

}  // namespace softdelta::api

#include "api/engines/plugin.h"

#include <dlfcn.h>

#include "engines/plugin.h"
#include "softdelta/softdelta.h"

namespace softdelta::api {

namespace {

// The folder of the file that this code was loaded from: the shared library, or the program that it is linked into.
std::string own_folder() {
    Dl_info info{};
    if (dladdr(reinterpret_cast<const void*>(&softdelta_version), &info) == 0 || info.dli_fname == nullptr) return "";
    const std::string file = info.dli_fname;
    const std::size_t slash = file.rfind('/');
    return slash == std::string::npos ? "" : file.substr(0, slash + 1);
}

Plugin load(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return {nullptr, dlerror()};
    const auto function = reinterpret_cast<softdelta_plugin_engine*>(dlsym(library, engines::plugin_symbol));
    const engines::Engine* engine = function == nullptr ? nullptr : function(softdelta_version());
    if (engine == nullptr) {
        dlclose(library);
        return {nullptr, path + ": of another version, expected " + softdelta_version()};
    }
    return {engine, ""};  // stays loaded as long as the process
}

}  // namespace

const Plugin& cuda_plugin() {
    static const Plugin plugin = load(own_folder() + engines::cuda_plugin);
    return plugin;
}

}  // namespace softdelta::api

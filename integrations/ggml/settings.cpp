#include "settings.h"

#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ggml-impl.h"

namespace softdelta_ggml {

namespace {

template <class Value>
void read(const char* variable, const std::vector<std::pair<std::string_view, Value>>& values, Value& out) {
    const char* given = std::getenv(variable);
    if (given == nullptr || *given == 0) return;
    std::string names;
    for (const auto& [name, value] : values) {
        if (name == given) {
            out = value;
            return;
        }
        names += (names.empty() ? "" : ", ") + std::string(name);
    }
    GGML_LOG_WARN("softdelta: %s is '%s', expected one of: %s; it is ignored\n", variable, given, names.c_str());
}

}  // namespace

const Settings& settings() {
    static const Settings value = [] {
        Settings s;
        read("SOFTDELTA_GGML_TAKE", {{"none", Take::none}, {"all", Take::all}}, s.take);
        read("SOFTDELTA_GGML_LOG", {{"counts", LogLevel::counts}, {"times", LogLevel::times}}, s.log);
        read("SOFTDELTA_GGML_DEVICE", {{"0", false}, {"1", true}}, s.own_device);
        return s;
    }();
    return value;
}

}  // namespace softdelta_ggml

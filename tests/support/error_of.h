// What a call says when it refuses its arguments; nothing: an empty text.
#pragma once

#include <exception>
#include <functional>
#include <string>

namespace softdelta::test {

inline std::string error_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const std::exception& e) {
        return e.what();
    }
    return "";
}

}  // namespace softdelta::test

// What the inside throws. The C interface turns it into a status code and a message, C++ into std::invalid_argument.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace softdelta::core {

// Text from outside, for a message: what is not printable ASCII is written as \xNN.
inline std::string printable(std::string_view text) {
    constexpr char digits[] = "0123456789abcdef";
    std::string clean;
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte >= 0x20 && byte < 0x7f)
            clean += c;
        else
            clean.append("\\x").append({digits[byte >> 4], digits[byte & 15]});
    }
    return clean;
}

// An argument is wrong: the message names it, what was expected and what was given.
struct InvalidArgument : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// The call is legal but this engine, build or machine cannot do it.
struct Unsupported : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace softdelta::core

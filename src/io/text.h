// Parts of messages. Whatever comes out of a file is quoted: a message stays one line of printable ASCII.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "io/case_file.h"

namespace softdelta::io {

// In double quotes, at most 60 bytes, others than printable ASCII as \xNN.
inline std::string quote(std::string_view s) {
    constexpr std::size_t longest = 60;
    constexpr char digits[] = "0123456789abcdef";
    std::string text = "\"";
    for (const char c : s.substr(0, longest)) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte >= 0x7f)
            text += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
        else if (c == '"' || c == '\\')
            text += {'\\', c};
        else
            text += c;
    }
    return text + (s.size() > longest ? "\"..." : "\"");
}

// [2, 64, 3]
inline std::string shape_text(std::span<const std::int64_t> shape) {
    std::string text = "[";
    for (const std::int64_t size : shape) {
        if (text.size() > 1) text += ", ";
        text += std::to_string(size);
    }
    return text + "]";
}

[[noreturn]] inline void fail(const std::string& file, const std::string& fault) {
    throw CaseError(file.empty() ? fault : file + ": " + fault);
}

}  // namespace softdelta::io

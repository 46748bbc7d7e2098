// Numbers as the report writes them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <set>
#include <string>

namespace softdelta::diagnose {

inline std::string number(double x, int digits = 2) {
    char text[32];
    std::snprintf(text, sizeof text, "%.*g", digits, x);
    return text;
}

// 0-3, 7
inline std::string list(const std::set<std::int64_t>& numbers) {
    std::string text;
    for (auto at = numbers.begin(); at != numbers.end();) {
        std::int64_t last = *at, first = *at;
        while (++at != numbers.end() && *at == last + 1) last = *at;
        text.append(text.empty() ? "" : ", ").append(std::to_string(first));
        if (last > first) text.append("-").append(std::to_string(last));
    }
    return text;
}

}  // namespace softdelta::diagnose

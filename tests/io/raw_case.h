// Files written by hand, right or wrong, and what the reader says about them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "io/file/case_file.h"

namespace softdelta::io {

inline std::string little_endian(std::uint64_t number) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(number >> (8 * i) & 0xff);
    return bytes;
}

inline std::string raw_case(const std::string& header, const std::string& data = "") {
    return little_endian(header.size()) + header + data;
}

inline CaseFile parse(const std::string& bytes) {
    return parse_case(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size(), "x");
}

// The message with which a call fails; it must be one line.
template <class Fails>
std::string fault_of(Fails&& fails) {
    try {
        fails();
    } catch (const CaseError& error) {
        const std::string text = error.what();
        EXPECT_EQ(text.find('\n'), text.npos) << text;
        return text;
    }
    return "no fault";
}

inline std::string fault_of_bytes(const std::string& bytes) {
    return fault_of([&] { parse(bytes); });
}

}  // namespace softdelta::io

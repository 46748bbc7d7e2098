// Parts of messages. Whatever comes out of a file, and its name too, is shown as one line of printable characters:
// nobody's file can move the cursor or print a second line.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "io/file/case_file.h"

namespace softdelta::io {

// The text as it is, but \xNN for each byte of what is no printable character of UTF-8.
std::string printable(std::string_view s);

// In double quotes, at most 60 bytes, others than printable ASCII as \xNN.
std::string quote(std::string_view s);

// [2, 64, 3], of a shape or an index.
std::string shape_text(std::span<const std::int64_t> shape);

// Throw CaseError: the fault, behind the name of the file where one is given.
[[noreturn]] void fail(const std::string& fault);
[[noreturn]] void fail(const std::string& file, const std::string& fault);

}  // namespace softdelta::io

// Files that are written: whole or not at all. A new one is written beside the old one and takes its name, its mode
// included; a symbolic link stays one.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace softdelta::io {

// Throws CaseError when `path` cannot be written, before the work is done whose results it shall hold: no such folder,
// no permission, no regular file, or the very file that is read (`input`; empty: none).
void expect_output(const std::string& path, const std::string& input = "");

// Calls fill(write), which writes bytes one after the other by write(data, size). Throws CaseError.
using WriteBytes = std::function<void(const void* data, std::size_t size)>;
void write_file(const std::string& path, const std::function<void(const WriteBytes&)>& fill);

// Removes what write_file has begun; for the handler of a signal that ends the process.
void remove_unfinished() noexcept;

}  // namespace softdelta::io

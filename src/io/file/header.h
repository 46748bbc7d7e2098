// The JSON header of a safetensors file, read with mistrust.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "softdelta/softdelta.hpp"

namespace softdelta::io {

struct TensorEntry {
    std::string name;
    DType dtype = DType::f64;
    std::vector<std::int64_t> shape;
    std::uint64_t begin = 0, end = 0;  // bytes after the header
};

struct Header {
    std::map<std::string, std::string> metadata;
    std::vector<TensorEntry> tensors;  // in the order of their data, which they cover without a gap
};

inline constexpr std::string_view metadata_key = "__metadata__";
inline constexpr std::uint64_t max_header_bytes = 100'000'000;  // of the safetensors format

// `data_bytes` follow the header in the file. Throws CaseError.
Header parse_header(std::string_view json, std::uint64_t data_bytes);

}  // namespace softdelta::io

// A case from the fuzzer's bytes that is small enough to compute many of a second: the bytes of a file, or one
// drawn from them where they say that a header is longer than any.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fuzz/drawn_case.h"
#include "io/call/call.h"
#include "io/call/layer.h"
#include "io/file/text.h"

namespace softdelta::test {

inline void require(bool holds) {
    if (!holds) std::abort();
}

// C: Call, or LayerCall.
template <class C>
struct Small {
    io::CaseFile file;
    C call;
};
using SmallCall = Small<io::Call>;

// Elements, a dimension of 0 counted as 1: loops run over what is around it.
inline bool is_small(const std::vector<std::int64_t>& shape) {
    constexpr std::int64_t most = 4096;
    std::int64_t n = 1;
    for (const std::int64_t size : shape) {
        if (size > most) return false;
        n *= std::max<std::int64_t>(size, 1);
        if (n > most) return false;
    }
    return true;
}

// Nothing when the bytes are no case, or a large one.
inline std::optional<io::CaseFile> read_small_file(const std::uint8_t* data, std::size_t size) {
    try {
        constexpr std::size_t length_bytes = 8;
        const bool drawn = size >= length_bytes && data[length_bytes - 1] == 0xff;
        io::CaseFile file = drawn ? DrawnCase(data + length_bytes, size - length_bytes).draw()
                                  : io::parse_case(reinterpret_cast<const std::byte*>(data), size, "case");
        for (const auto& [name, tensor] : file.tensors)
            if (!is_small(tensor.shape())) return std::nullopt;
        return file;
    } catch (const io::CaseError&) {
        return std::nullopt;
    }
}

// call_of: of the file's operation. Nothing when it refuses the file, or results are large.
template <class C>
std::optional<Small<C>> small_call(io::CaseFile file, C (*call_of)(const io::CaseFile&)) {
    try {
        std::optional<Small<C>> small{Small<C>{}};
        small->file = std::move(file);
        small->call = call_of(small->file);
        for (const std::string& name : io::output_names(small->call))
            if (!is_small(io::output_shape(small->call, name))) return std::nullopt;
        return small;
    } catch (const io::CaseError&) {
        return std::nullopt;
    }
}

// A message is one line of printable text.
inline void require_line(const std::string& text) {
    require(!text.empty() && io::printable(text) == text);
}

inline std::map<std::string, Tensor> views_of(const SmallCall& small, const std::vector<std::string>& names) {
    std::map<std::string, Tensor> views;
    for (const std::string& name : names) views[name] = small.file.tensors.at(name).view();
    return views;
}

}  // namespace softdelta::test

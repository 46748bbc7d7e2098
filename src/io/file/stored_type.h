// Types a case file stores, and the size of dense tensors of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string_view>

#include "softdelta/softdelta.hpp"

namespace softdelta::io {

struct StoredType {
    std::string_view name;  // in safetensors
    DType dtype;
    std::size_t bytes;
};

inline constexpr std::array<StoredType, 10> stored_types{{
    {"F64", DType::f64, 8},
    {"F32", DType::f32, 4},
    {"BF16", DType::bf16, 2},
    {"F16", DType::f16, 2},
    {"BOOL", DType::boolean, 1},
    {"I32", DType::i32, 4},
    {"I64", DType::i64, 8},
    {"I8", DType::i8, 1},
    {"U8", DType::u8, 1},
    {"F8_E4M3", DType::f8, 1},
}};

constexpr const StoredType& stored_type(DType dtype) {
    return stored_types[static_cast<std::size_t>(dtype)];
}

constexpr bool is_float(DType dtype) {
    return dtype <= DType::f16;
}

// Bytes of a dense tensor; nothing when they, or its strides, are more than memory can hold.
constexpr std::optional<std::size_t> dense_bytes(DType dtype, std::span<const std::int64_t> shape) {
    constexpr std::uint64_t most = std::numeric_limits<std::int64_t>::max();
    std::uint64_t bytes = stored_type(dtype).bytes;
    bool empty = false;
    for (const std::int64_t size : shape) {
        if (size == 0) empty = true;  // counts as one: strides must not overflow either
        const std::uint64_t factor = size == 0 ? 1 : static_cast<std::uint64_t>(size);  // below 0: too large as well
        if (bytes > most / factor) return std::nullopt;
        bytes *= factor;
    }
    return empty ? 0 : bytes;
}

}  // namespace softdelta::io

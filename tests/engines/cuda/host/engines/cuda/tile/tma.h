// The copy engine on the host: a box is there when the phase of its counter ends.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {

struct BoxShape {
    void* data = nullptr;
    std::uint64_t size[4] = {};
    std::uint64_t stride[4] = {};
    unsigned columns = 64, rows = 1;
    bool swizzled_there = false;
};

struct Boxes {
    BoxShape shape;
    bool given = false;
};

inline Boxes boxes_of(const BoxShape& shape) {
    for (int i = 1; i < 4; ++i)
        if (shape.stride[i] % 8 != 0 || shape.stride[i] == 0) return {};
    return {shape, reinterpret_cast<std::uintptr_t>(shape.data) % 16 == 0};
}

inline void cut_boxes(Boxes& to, const Boxes& from, const void* data, int count) {
    to = from;
    to.shape.data = const_cast<void*>(data);
    to.shape.size[1] = static_cast<std::uint64_t>(count);
}
inline void take_cut_boxes(const Boxes&) {}

// use(16 bytes of shared memory, the first of eight elements of the tensor, how many of them there are)
template <class Use>
void for_box(std::uint32_t place, const Boxes& boxes, int column, int row, int i2, int i3, const Use& use) {
    const BoxShape& s = boxes.shape;
    const auto first = static_cast<std::uint64_t>(i2) * s.stride[2] + static_cast<std::uint64_t>(i3) * s.stride[3];
    host::check(static_cast<std::uint64_t>(i2) < s.size[2] && static_cast<std::uint64_t>(i3) < s.size[3],
                "a box outside of its tensor");
    host::check(place % (s.rows > 1 ? 1024 : 128) == 0, "a box's place is not where the copy engine begins");
    for (unsigned r = 0; r < s.rows; ++r)
        for (unsigned u = 0; u < s.columns / 8; ++u) {
            const auto i = static_cast<std::uint64_t>(row) + r, j = static_cast<std::uint64_t>(column) + 8 * u;
            const std::uint64_t left = i < s.size[1] && j < s.size[0] ? s.size[0] - j : 0;
            const unsigned unit = s.rows > 1 && !s.swizzled_there ? u ^ (r & 7) : u;
            use(host::shared_at(place + r * 128 + 16 * unit, 16),
                static_cast<std::uint16_t*>(s.data) + (left > 0 ? first + i * s.stride[1] + j : 0),
                static_cast<int>(std::min<std::uint64_t>(left, 8)));
        }
}
inline void copy_box(std::uint32_t to, const Boxes& boxes, int column, int row, int i2, int i3, std::uint32_t counter) {
    for_box(to, boxes, column, row, i2, i3, [counter](std::byte* here, const std::uint16_t* there, int elements) {
        host::begin_copy(counter, here, there, elements);
    });
}
inline void copy_side_by_side(std::uint32_t to, const void* from, int bytes, std::uint32_t counter) {
    host::check(to % 16 == 0 && reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && bytes % 16 == 0,
                "bytes that the copy engine does not take");
    for (int at = 0; at < bytes; at += 16)
        host::begin_copy(counter, host::shared_at(to + static_cast<std::uint32_t>(at), 16),
                         reinterpret_cast<const std::uint16_t*>(static_cast<const char*>(from) + at), 8);
}
inline void store_box(const Boxes& boxes, std::uint32_t from, int column, int row, int i2, int i3) {
    for_box(from, boxes, column, row, i2, i3,
            [](std::byte* here, std::uint16_t* there, int elements) { host::store(here, there, elements); });
}
inline void store_bytes(void* to, std::uint32_t from, int bytes) {
    for (int at = 0; at < bytes; at += 16)
        host::store(host::shared_at(from + static_cast<std::uint32_t>(at), 16), static_cast<char*>(to) + at, 8);
}
inline void wait_for_stored_boxes() {
    host::wait_for_stored();
}
inline void arrive_expecting(std::uint32_t counter, int bytes) {
    host::expect(counter, bytes);
    host::arrive(counter);
}

}  // namespace softdelta::cuda

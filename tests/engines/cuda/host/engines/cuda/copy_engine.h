// The copy engine on the host: a box is there at once.
#pragma once

#include <cstdint>
#include <cstring>

#include "engines/cuda/ptx.h"

namespace softdelta::cuda {

struct BoxShape {
    void* data = nullptr;
    std::uint64_t size[4] = {};
    std::uint64_t stride[4] = {};
    unsigned columns = 64, rows = 1;
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

inline void copy_box(std::uint32_t to, const Boxes& boxes, int column, int row, int i2, int i3, std::uint32_t) {
    const BoxShape& s = boxes.shape;
    const auto first = static_cast<std::uint64_t>(i2) * s.stride[2] + static_cast<std::uint64_t>(i3) * s.stride[3];
    host::check(static_cast<std::uint64_t>(i2) < s.size[2] && static_cast<std::uint64_t>(i3) < s.size[3],
                "a box outside of its tensor");
    for (unsigned r = 0; r < s.rows; ++r)
        for (unsigned u = 0; u < s.columns / 8; ++u) {
            std::uint16_t eight[8] = {};
            for (unsigned e = 0; e < 8; ++e) {
                const auto i = static_cast<std::uint64_t>(row) + r, j = static_cast<std::uint64_t>(column) + 8 * u + e;
                if (i < s.size[1] && j < s.size[0])
                    eight[e] = static_cast<const std::uint16_t*>(s.data)[first + i * s.stride[1] + j];
            }
            const std::uint32_t place = s.rows > 1 ? r * 128 + ((u ^ (r & 7)) << 4) : 16 * u;
            host::check(to % (s.rows > 1 ? 1024 : 128) == 0, "a box's place is not where the copy engine begins");
            std::memcpy(host::shared_at(to + place, 16), eight, sizeof eight);
        }
}
inline void arrive_expecting(std::uint32_t counter, int) {
    host::arrive(counter);
}

}  // namespace softdelta::cuda

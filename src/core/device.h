// Where a tensor's memory lies, as DLPack numbers it.
#pragma once

#include <cstdint>

namespace softdelta::core {

enum class DeviceType : std::int32_t { cpu = 1, cuda = 2 };

struct Device {
    DeviceType type = DeviceType::cpu;
    std::int32_t id = 0;  // of several

    bool operator==(const Device&) const = default;
    bool is_cpu() const { return type == DeviceType::cpu; }
};

}  // namespace softdelta::core

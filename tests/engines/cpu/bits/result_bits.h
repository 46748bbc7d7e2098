// Hashes of results: a change that must keep every bit prints the same lines before and after.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>

#include "io/call/call.h"

namespace softdelta::test {

// A line for each result: "LEVEL FAMILY SEED NAME HASH" (FNV-1a, 64 bits).
inline void print_hashes(const std::string& level, const char* family, std::uint64_t seed,
                         const std::map<std::string, io::OwnedTensor>& results) {
    for (const auto& [name, tensor] : results) {
        std::uint64_t hash = 0xcbf29ce484222325u;
        const auto* bytes = static_cast<const unsigned char*>(tensor.data());
        for (std::size_t i = 0; i < tensor.bytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
        std::printf("%s %s %llu %s %016llx\n", level.c_str(), family, static_cast<unsigned long long>(seed),
                    name.c_str(), static_cast<unsigned long long>(hash));
    }
}

}  // namespace softdelta::test

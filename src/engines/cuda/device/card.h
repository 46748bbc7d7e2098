// What a GPU has that decides which kernels run, and how large their tiles are. SOFTDELTA_CUDA_LEVEL names a row: the
// GPU is then used as if it had no more than that.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <string>

#include "core/error.h"
#include "core/once.h"
#include "engines/cuda/device/launch.h"

namespace softdelta::cuda {

// Kernels of sm_90a (Hopper: warpgroups and a copy engine), and those that run on everything from sm_80 on.
enum class Level { sm_80, sm_90a };

struct Card {
    const char* name;
    Level level;
    int shared_bytes;    // that a block may have
    int capability = 0;  // of the GPU itself: 90 is 9.0
};
inline constexpr int least_capability = 80;

inline constexpr std::array cards{
    Card{"sm_80", Level::sm_80, 163 << 10},    // A100; no kernel of its level asks for more elsewhere
    Card{"sm_86", Level::sm_80, 99 << 10},     // A40, RTX 30
    Card{"sm_89", Level::sm_80, 99 << 10},     // L40, RTX 40
    Card{"sm_120", Level::sm_80, 99 << 10},    // RTX 50
    Card{"sm_90a", Level::sm_90a, 227 << 10},  // H100, H200
};
inline constexpr int least_shared_bytes = 99 << 10;  // of all of them

// The environment is read once: a host may change it later, and no thread may read it then.
inline const Card& named_card() {
    static constinit core::Once<std::string> once;
    const std::string& name = once.get([] {
        const char* named = std::getenv("SOFTDELTA_CUDA_LEVEL");
        return std::string(named == nullptr ? cards.back().name : named);
    });
    for (const Card& card : cards)
        if (name == card.name) return card;
    std::string names;
    for (const Card& card : cards) names += std::string(names.empty() ? "" : ", ") + card.name;
    throw core::InvalidArgument("SOFTDELTA_CUDA_LEVEL is " + core::printable(name) + ", expected one of " + names);
}

inline Card make_card(core::Device device) {
#if defined(SOFTDELTA_CUDA_HAS_SM_90A)
    constexpr bool has_warpgroups = true;
#else
    constexpr bool has_warpgroups = false;
#endif
    const auto attribute = [&](cudaDeviceAttr which) {
        int value = 0;
        return cudaDeviceGetAttribute(&value, which, device.id) == cudaSuccess ? value : 0;
    };
    Card card = named_card();
    card.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
    if (!has_warpgroups || card.capability != 90) card.level = Level::sm_80;
    if (card.level == Level::sm_80) card.shared_bytes = std::min(card.shared_bytes, cards.front().shared_bytes);
    card.shared_bytes = std::min(card.shared_bytes, attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    return card;
}
inline Card card_of(core::Device device) {
    constexpr std::size_t most_known = 64;
    static constinit std::array<core::Once<Card>, most_known> known;
    const auto id = static_cast<std::size_t>(device.id);
    return id < most_known ? known[id].get([&] { return make_card(device); }) : make_card(device);
}
inline Level level_of(core::Device device) {
    return card_of(device).level;
}

// use.template operator()<small>(): whether the current GPU has no room for tiles of so many bytes.
template <int bytes, class Use>
void with_room(const Use& use) {
    if constexpr (bytes > least_shared_bytes) {
        core::Device device;
        check(cudaGetDevice(&device.id), "the current device");
        if (bytes > card_of(device).shared_bytes) return use.template operator()<true>();
    }
    use.template operator()<false>();
}

}  // namespace softdelta::cuda

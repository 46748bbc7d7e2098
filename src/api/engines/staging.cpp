#include "api/engines/staging.h"

#include <algorithm>

#include "api/overlap.h"

namespace softdelta::api {

void Staging::add(const core::Tensor& t, bool written) {
    if (t.count() == 0) return;
    const auto [first, end] = extent(t);
    blocks_.push_back({first, end, written});
}

void Staging::to_device() {
    std::sort(blocks_.begin(), blocks_.end(), [](const Block& a, const Block& b) { return a.first < b.first; });
    std::vector<Block> apart;
    for (const Block& block : blocks_) {
        if (apart.empty() || block.first >= apart.back().end) {
            apart.push_back(block);
            continue;
        }
        apart.back().end = std::max(apart.back().end, block.end);
        apart.back().written |= block.written;
    }
    blocks_ = std::move(apart);
    for (Block& block : blocks_) {
        block.device = memory_.allocate(block.end - block.first);
        memory_.to_device(block.device, reinterpret_cast<const void*>(block.first), block.end - block.first);
    }
}

void Staging::move(core::Tensor& t) const {
    if (!t) return;
    t.device = device_;
    if (t.count() == 0) return;
    const auto at = reinterpret_cast<std::uintptr_t>(t.data);
    const auto behind = std::upper_bound(blocks_.begin(), blocks_.end(), at,
                                         [](auto address, const Block& b) { return address < b.first; });
    const Block& block = *(behind - 1);
    t.data = static_cast<std::byte*>(block.device) + (at - block.first);
}

void Staging::to_host() const {
    for (const Block& block : blocks_)
        if (block.written) memory_.to_host(reinterpret_cast<void*>(block.first), block.device, block.end - block.first);
}

Staging::~Staging() {
    for (const Block& block : blocks_)
        if (block.device != nullptr) memory_.release(block.device);
}

}  // namespace softdelta::api

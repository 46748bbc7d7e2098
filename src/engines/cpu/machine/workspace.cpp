#include "engines/cpu/machine/workspace.h"

#include <pthread.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <array>
#include <cstdlib>
#include <new>
#include <string>

#include "core/error.h"
#include "engines/cpu/machine/kept_memory.h"
#include "engines/cpu/machine/thresholds.h"

namespace softdelta::cpu {

namespace {

constexpr std::size_t alignment = 64;

constexpr std::size_t round_up(std::size_t bytes, std::size_t multiple) {
    return (bytes + multiple - 1) / multiple * multiple;
}

// Memory of an earlier call.
struct Kept {
    void* data = nullptr;
    std::size_t size = 0;
};

// Between calls at most one block is kept, in `idle` while nobody uses it.
class KeptMemory {
  public:
    ~KeptMemory() { release(); }

    // `bytes` or more.
    Kept* take(std::size_t bytes) {
        Kept* block = idle_.exchange(nullptr);
        if (block != nullptr && block->size >= bytes) return block;
        release(block);
        return make(bytes);
    }
    void give_back(Kept* block) {
        if (block->size <= thresholds::most_kept_memory) block = idle_.exchange(block);
        release(block);
    }

    void release() { release(idle_.exchange(nullptr)); }

  private:
    // Large memory comes in huge pages where the system has them.
    static Kept* make(std::size_t bytes) {
        const bool large = bytes >= thresholds::huge_page;
        const std::size_t unit = large ? thresholds::huge_page : alignment;
        auto* block = new Kept{std::aligned_alloc(unit, round_up(bytes, unit)), round_up(bytes, unit)};
        if (block->data == nullptr) {
            delete block;
            throw std::bad_alloc();
        }
#if defined(__linux__)
        if (large) madvise(block->data, block->size, MADV_HUGEPAGE);
#endif
        return block;
    }
    static void release(Kept* block) {
        if (block == nullptr) return;
        std::free(block->data);
        delete block;
    }

    std::atomic<Kept*> idle_{nullptr};
};

constinit KeptMemory kept;

// The workspaces in use, each where a hash of its address says. The memory itself tells nothing: it may hold anything
// before a call. A place that another workspace has is left to it: then a call goes unseen, and none is refused
// wrongly.
constinit std::array<std::atomic<std::uintptr_t>, 1024> in_use{};

// Other threads, and their calls, are not copied by a fork.
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] {
    for (auto& place : in_use) place.store(0, std::memory_order_relaxed);
});

// Null: its place is taken.
std::atomic<std::uintptr_t>* claim(const void* workspace) {
    const auto address = reinterpret_cast<std::uintptr_t>(workspace);
    constexpr std::uint64_t factor = 0x9e3779b97f4a7c15;  // Fibonacci hashing
    auto& place = in_use[static_cast<std::size_t>(address * factor >> 54)];
    std::uintptr_t holder = 0;
    if (place.compare_exchange_strong(holder, address, std::memory_order_acquire)) return &place;
    if (holder == address)
        throw core::InvalidArgument(
            "execution.workspace is in use by another call, expected memory that one call uses at a time");
    return nullptr;
}

}  // namespace

void release_kept_memory() {
    kept.release();
}

std::size_t Workspace::with_alignment(std::size_t bytes) {
    return bytes == 0 ? 0 : bytes + alignment;
}

Workspace::Workspace(const core::Execution& execution, std::size_t bytes) {
    if (execution.workspace == nullptr) {
        if (bytes == 0) return;
        Kept* block = kept.take(bytes);
        own_ = block;
        data_ = static_cast<std::byte*>(block->data);
        return;
    }
    if (execution.workspace_size < with_alignment(bytes))
        throw core::InvalidArgument("execution.workspace_size: " + std::to_string(execution.workspace_size) +
                                    ", expected " + std::to_string(with_alignment(bytes)) + " or more");
    if (bytes == 0) return;
    claim_ = claim(execution.workspace);
    data_ = static_cast<std::byte*>(execution.workspace);
    data_ += (alignment - reinterpret_cast<std::size_t>(data_) % alignment) % alignment;
}

Workspace::~Workspace() {
    if (claim_ != nullptr) claim_->store(0, std::memory_order_release);
    if (own_ != nullptr) kept.give_back(static_cast<Kept*>(own_));
}

}  // namespace softdelta::cpu

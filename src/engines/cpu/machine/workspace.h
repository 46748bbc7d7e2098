// The memory of one call: the caller's when there is some, allocated otherwise.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/execution.h"

namespace softdelta::cpu {

// Up to whole pages: threads' parts of a workspace share none.
constexpr std::size_t whole_pages(std::size_t bytes) {
    return (bytes + 4095) / 4096 * 4096;
}

class Workspace {
  public:
    // The size that a caller must provide for `bytes` aligned bytes.
    static std::size_t with_alignment(std::size_t bytes);

    // Throws core::InvalidArgument when the caller's memory is too small or in use, std::bad_alloc when there is none.
    Workspace(const core::Execution& execution, std::size_t bytes);
    ~Workspace();
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    std::byte* data() const { return data_; }

  private:
    std::byte* data_ = nullptr;
    void* own_ = nullptr;
    std::atomic<std::uintptr_t>* claim_ = nullptr;
};

}  // namespace softdelta::cpu

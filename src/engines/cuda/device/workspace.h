// The memory of one call on a GPU: the caller's when there is some; otherwise the stream's, allocated and freed in its
// order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engines/cuda/device/launch.h"

namespace softdelta::cuda {

// Parts of a memory, one after the other; from null it only counts.
class MemoryParts {
  public:
    static constexpr std::size_t alignment = 256;

    explicit MemoryParts(std::byte* memory) : memory_(memory) {}

    template <class T>
    T* take(core::Index count) {
        std::byte* at = memory_ == nullptr ? nullptr : memory_ + used_;
        used_ += (static_cast<std::size_t>(count) * sizeof(T) + alignment - 1) / alignment * alignment;
        return reinterpret_cast<T*>(at);
    }
    std::size_t used() const { return used_; }

  private:
    std::byte* memory_;
    std::size_t used_ = 0;
};

// What make(parts) takes.
template <class Make>
std::size_t bytes_of(const Make& make) {
    MemoryParts counted(nullptr);
    make(counted);
    return counted.used();
}

class Workspace {
  public:
    // What a caller must provide so that `bytes` lie aligned in it.
    static std::size_t with_alignment(std::size_t bytes) { return bytes == 0 ? 0 : bytes + MemoryParts::alignment; }

    Workspace(const core::Execution& execution, std::size_t bytes) : stream_(stream_of(execution)) {
        if (execution.workspace == nullptr) {
            if (bytes > 0) check(cudaMallocAsync(&own_, bytes, stream_), "memory for the call");
            data_ = static_cast<std::byte*>(own_);
            return;
        }
        if (execution.workspace_size < with_alignment(bytes))
            throw core::InvalidArgument("execution.workspace_size: " + std::to_string(execution.workspace_size) +
                                        ", expected " + std::to_string(with_alignment(bytes)) + " or more");
        const auto at = reinterpret_cast<std::uintptr_t>(execution.workspace);
        data_ = static_cast<std::byte*>(execution.workspace) +
                (MemoryParts::alignment - at % MemoryParts::alignment) % MemoryParts::alignment;
    }
    ~Workspace() {
        if (own_ != nullptr) cudaFreeAsync(own_, stream_);
    }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    std::byte* data() const { return data_; }

  private:
    cudaStream_t stream_;
    void* own_ = nullptr;
    std::byte* data_ = nullptr;
};

}  // namespace softdelta::cuda

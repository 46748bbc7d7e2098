// The memory of one call: the caller's when there is some, allocated otherwise.
#pragma once

#include <cstddef>
#include <new>
#include <string>

#include "core/error.h"
#include "core/execution.h"

namespace softdelta::cpu {

class Workspace {
  public:
    static constexpr std::size_t alignment = 64;

    // What a caller must provide so that `bytes` lie aligned in it.
    static std::size_t with_alignment(std::size_t bytes) { return bytes == 0 ? 0 : bytes + alignment; }

    Workspace(const core::Execution& execution, std::size_t bytes) {
        if (execution.workspace == nullptr) {
            if (bytes > 0) own_ = data_ = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{alignment}));
            return;
        }
        if (execution.workspace_size < with_alignment(bytes))
            throw core::InvalidArgument("execution.workspace_size: " + std::to_string(execution.workspace_size) +
                                        ", expected " + std::to_string(with_alignment(bytes)) + " or more");
        data_ = static_cast<std::byte*>(execution.workspace);
        data_ += (alignment - reinterpret_cast<std::size_t>(data_) % alignment) % alignment;
    }
    ~Workspace() {
        if (own_ != nullptr) ::operator delete (own_, std::align_val_t{alignment});
    }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    std::byte* data() const { return data_; }

  private:
    std::byte* data_ = nullptr;
    std::byte* own_ = nullptr;
};

}  // namespace softdelta::cpu

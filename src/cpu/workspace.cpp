#include "cpu/workspace.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <new>
#include <string>

#include "core/error.h"

namespace softdelta::cpu {

namespace {

constexpr std::size_t alignment = 64;
constexpr std::size_t huge_page = std::size_t{2} << 20;

constexpr std::size_t round_up(std::size_t bytes, std::size_t multiple) {
    return (bytes + multiple - 1) / multiple * multiple;
}

// Large memory comes in huge pages where the system has them: touching it a first time in small pages costs a tenth of
// a backward pass.
void* allocate(std::size_t bytes) {
    const bool large = bytes >= huge_page;
    void* data = std::aligned_alloc(large ? huge_page : alignment, round_up(bytes, large ? huge_page : alignment));
    if (data == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    if (large) madvise(data, round_up(bytes, huge_page), MADV_HUGEPAGE);
#endif
    return data;
}

}  // namespace

std::size_t Workspace::with_alignment(std::size_t bytes) {
    return bytes == 0 ? 0 : bytes + alignment;
}

Workspace::Workspace(const core::Execution& execution, std::size_t bytes) {
    if (execution.workspace == nullptr) {
        if (bytes > 0) own_ = allocate(bytes);
        data_ = static_cast<std::byte*>(own_);
        return;
    }
    if (execution.workspace_size < with_alignment(bytes))
        throw core::InvalidArgument("execution.workspace_size: " + std::to_string(execution.workspace_size) +
                                    ", expected " + std::to_string(with_alignment(bytes)) + " or more");
    data_ = static_cast<std::byte*>(execution.workspace);
    data_ += (alignment - reinterpret_cast<std::size_t>(data_) % alignment) % alignment;
}

Workspace::~Workspace() {
    std::free(own_);
}

}  // namespace softdelta::cpu

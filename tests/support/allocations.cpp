#include "support/allocations.h"

#include <atomic>
#include <climits>
#include <cstdlib>

#if defined(__GLIBC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#include <malloc.h>

#include <cerrno>

namespace {

constexpr int never = INT_MAX;

std::atomic<int> allocations{0}, first_failure{never}, last_failure{never};
std::atomic<bool> failed{false};
std::atomic<std::int64_t> blocks{0}, bytes{0}, peak{0};

bool fails() {
    const int number = allocations++;
    if (number < first_failure || number > last_failure) return false;
    failed = true;
    errno = ENOMEM;
    return true;
}

void* taken(void* memory) {
    if (memory == nullptr) return memory;
    ++blocks;
    const std::int64_t now = bytes += static_cast<std::int64_t>(malloc_usable_size(memory));
    for (std::int64_t most = peak; now > most && !peak.compare_exchange_weak(most, now);) {
    }
    return memory;
}

void given_back(void* memory) {
    if (memory == nullptr) return;
    --blocks;
    bytes -= static_cast<std::int64_t>(malloc_usable_size(memory));
}

}  // namespace

// Every allocation of the process comes here, operator new's among them.
extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* old, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);
void __libc_free(void* memory);

[[gnu::visibility("default")]] void* malloc(std::size_t size) noexcept {
    return fails() ? nullptr : taken(__libc_malloc(size));
}
[[gnu::visibility("default")]] void* calloc(std::size_t count, std::size_t size) noexcept {
    return fails() ? nullptr : taken(__libc_calloc(count, size));
}
[[gnu::visibility("default")]] void* realloc(void* old, std::size_t size) noexcept {
    if (fails()) return nullptr;
    given_back(old);
    void* const memory = __libc_realloc(old, size);
    if (memory == nullptr && size > 0) taken(old);
    return taken(memory);
}
[[gnu::visibility("default")]] void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
    return fails() ? nullptr : taken(__libc_memalign(alignment, size));
}
[[gnu::visibility("default")]] void* memalign(std::size_t alignment, std::size_t size) noexcept {
    return aligned_alloc(alignment, size);
}
[[gnu::visibility("default")]] int posix_memalign(void** memory, std::size_t alignment, std::size_t size) noexcept {
    *memory = aligned_alloc(alignment, size);
    return *memory == nullptr ? ENOMEM : 0;
}
[[gnu::visibility("default")]] void free(void* memory) noexcept {
    given_back(memory);
    __libc_free(memory);
}
}

int softdelta::test::count_allocations() {
    return allocations;
}
std::int64_t softdelta::test::blocks_held() {
    return blocks;
}
std::int64_t softdelta::test::bytes_held() {
    return bytes;
}
std::int64_t softdelta::test::peak_bytes() {
    return peak;
}
void softdelta::test::follow_peak() {
    peak = bytes.load();
}
void softdelta::test::fail_allocations(int first, bool all) {
    failed = false;
    last_failure = all ? never : allocations + first;
    first_failure = allocations + first;
}
bool softdelta::test::stop_failing() {
    first_failure = never;
    return failed;
}
#else
int softdelta::test::count_allocations() {
    return -1;
}
std::int64_t softdelta::test::blocks_held() {
    return 0;
}
std::int64_t softdelta::test::bytes_held() {
    return 0;
}
std::int64_t softdelta::test::peak_bytes() {
    return 0;
}
void softdelta::test::follow_peak() {}
void softdelta::test::fail_allocations(int, bool) {}
bool softdelta::test::stop_failing() {
    return false;
}
#endif

#include "support/guarded.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <new>
#include <vector>

#include "support/offsets.h"

namespace softdelta::test {

namespace {

std::size_t page_size() {
    static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return size;
}

void protect(std::span<std::byte> pages, int access) {
    if (!pages.empty() && mprotect(pages.data(), pages.size(), access) != 0) throw std::bad_alloc();
}

std::size_t size_of(const Tensor& t) {
    return core::size_of(static_cast<core::DType>(t.dtype()));
}

// Bytes from the first element to the lowest one, and from there to the end of the highest.
struct Span {
    std::int64_t before = 0, size = 0;
};

Span span_of(const Tensor& t) {
    if (t.count() == 0) return {};
    std::int64_t low = 0, high = 0;
    for (std::size_t dim = 0; dim < t.rank(); ++dim) {
        const std::int64_t reach = (t.shape(dim) - 1) * t.stride()[dim];
        (reach < 0 ? low : high) += reach;
    }
    const auto bytes = static_cast<std::int64_t>(size_of(t));
    return {-low * bytes, (high - low + 1) * bytes};
}

thread_local char last_words[4096];

void on_bad_access(int signal) {
    const ssize_t ignored = write(STDERR_FILENO, last_words, strnlen(last_words, sizeof last_words));
    static_cast<void>(ignored);
    std::signal(signal, SIG_DFL);  // the access is tried again
}

}  // namespace

GuardedMemory::GuardedMemory(std::size_t size, Side side) : size_(size) {
    const std::size_t inside = (size + page_size() - 1) / page_size() * page_size();
    mapped_ = inside + 2 * page_size();
    void* mapping = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<std::byte*>(mapping);
    protect(pages(), PROT_READ | PROT_WRITE);
    std::memset(pages().data(), 0xff, inside);
    data_ = pages().data() + (side == Side::end ? inside - size : 0);
}

GuardedMemory::~GuardedMemory() {
    if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

GuardedMemory& GuardedMemory::operator=(GuardedMemory&& other) noexcept {
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

std::span<std::byte> GuardedMemory::pages() const {
    return mapping_ == nullptr ? std::span<std::byte>()
                               : std::span(mapping_, mapped_).subspan(page_size(), mapped_ - 2 * page_size());
}

void GuardedMemory::make_read_only() const {
    protect(pages(), PROT_READ);
}

void GuardedMemory::make_unreadable(std::size_t begin, std::size_t size) const {
    const auto offset = static_cast<std::size_t>(data_ - pages().data());
    const std::size_t first = (offset + begin + page_size() - 1) / page_size() * page_size();
    const std::size_t last = (offset + begin + size) / page_size() * page_size();
    if (first < last) protect(pages().subspan(first, last - first), PROT_NONE);
}

bool GuardedMemory::rest_is_intact() const {
    const auto untouched = [](std::byte b) { return b == std::byte{0xff}; };
    const auto before = static_cast<std::size_t>(data_ - pages().data());
    return std::ranges::all_of(pages().first(before), untouched) &&
           std::ranges::all_of(pages().subspan(before + size_), untouched);
}

Guarded::Guarded(const Tensor& layout, Side side) {
    const Span span = span_of(layout);
    memory_ = GuardedMemory(static_cast<std::size_t>(span.size), side);
    view_ = Tensor(memory_.data() + span.before, layout.dtype(), layout.shape(), layout.stride());
}

Guarded Guarded::input(const Tensor& t, Side side) {
    if (!t) return {};
    Guarded copy(t, side);
    with_element(t, [&](auto element) {
        constexpr std::int64_t size = sizeof element;
        auto* to = static_cast<std::byte*>(copy.view_.data());
        const auto* from = static_cast<const std::byte*>(t.data());
        for_each_offset(t, [=](std::int64_t i) { std::memcpy(to + size * i, from + size * i, size); });
    });
    copy.memory_.make_read_only();
    return copy;
}

Guarded Guarded::result(const Tensor& layout, Side side) {
    return {layout, side};
}

bool Guarded::gaps_are_intact() const {
    if (!view_) return true;
    const std::span<const std::byte> pages = memory_.pages();
    std::vector<std::byte> rest(pages.begin(), pages.end());  // without the elements
    std::byte* const first = rest.data() + (static_cast<std::byte*>(view_.data()) - pages.data());
    with_element(view_, [&](auto element) {
        constexpr std::int64_t size = sizeof element;
        for_each_offset(view_, [=](std::int64_t i) { std::memset(first + size * i, 0xff, size); });
    });
    return rest.empty() || (rest[0] == std::byte{0xff} && std::memcmp(rest.data(), &rest[1], rest.size() - 1) == 0);
}

void tell_on_bad_access(const std::string& what) {
    const std::size_t length = what.copy(last_words, sizeof last_words - 2);
    last_words[length] = '\n';
    last_words[length + 1] = '\0';
    std::signal(SIGSEGV, on_bad_access);
}

}  // namespace softdelta::test

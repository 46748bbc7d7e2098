// A copy of a tensor beside an unreadable page: an access beyond its end, or before its beginning, ends the program.
#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "softdelta/softdelta.hpp"

namespace softdelta::test {

// Where the page lies.
enum class Side { end, begin };

// Bytes between two unreadable pages, touching one of them. Every byte is 0xff, which is NaN in every float type.
class GuardedMemory {
  public:
    GuardedMemory() = default;
    GuardedMemory(std::size_t size, Side side);
    ~GuardedMemory();
    GuardedMemory(GuardedMemory&& other) noexcept { *this = std::move(other); }
    GuardedMemory& operator=(GuardedMemory&& other) noexcept;

    std::byte* data() const { return data_; }
    std::size_t size() const { return size_; }
    // All that can be written, `data` among it.
    std::span<std::byte> pages() const;
    void make_read_only() const;
    // The whole pages within `size` bytes from `begin` on.
    void make_unreadable(std::size_t begin, std::size_t size) const;
    // Whether what lies beside `data` on its pages is as it was.
    bool rest_is_intact() const;

  private:
    std::byte* mapping_ = nullptr;
    std::size_t mapped_ = 0;
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

// Where a call works: in memory of its own, or in a workspace.
enum class Memory { own, workspace };

// Calls run(execution), with `bytes` of workspace or none. Throws when a byte beside them was written.
template <class Run>
void run_in(Memory memory, std::size_t bytes, Side side, Execution execution, const Run& run) {
    if (memory == Memory::own) return run(execution);
    const GuardedMemory workspace(bytes, side);
    execution.workspace = {workspace.data(), bytes};
    run(execution);
    if (!workspace.rest_is_intact()) throw std::runtime_error("memory outside of the workspace was written");
}

class Guarded {
  public:
    Guarded() = default;
    // An input: the same type, shape, strides and numbers; writing to it ends the program.
    static Guarded input(const Tensor& t, Side side);
    // A result of this layout, not written yet.
    static Guarded result(const Tensor& layout, Side side);

    const Tensor& view() const { return view_; }
    // Whether the bytes that are no element, within the tensor and around it, are as they were.
    bool gaps_are_intact() const;

  private:
    Guarded(const Tensor& layout, Side side);
    GuardedMemory memory_;
    Tensor view_;
};

// What a program that ends by a bad access says last, for each thread.
void tell_on_bad_access(const std::string& what);

}  // namespace softdelta::test

// Copies of a test's tensors on the GPU, with the same layout, between guard bytes.
#pragma once

#include <cstddef>
#include <memory>

#include "softdelta/softdelta.hpp"

namespace softdelta::test {

bool has_gpu();

// An event of the default stream, as if another stream had recorded it.
class GpuEvent {
  public:
    GpuEvent();
    void* get() const { return event_.get(); }

  private:
    struct Free {
        void operator()(void* event) const;
    };
    std::unique_ptr<void, Free> event_;
};

class GpuTensor {
  public:
    GpuTensor() = default;
    static GpuTensor input(const Tensor& host);   // with the host's elements
    static GpuTensor dense(const Tensor& host);   // the same elements, row-major; strides of zero stay
    static GpuTensor result(const Tensor& host);  // every byte as in a NaN

    const Tensor& view() const { return view_; }
    // Elements [begin, begin + count) of one dimension.
    Tensor part(std::size_t dim, std::int64_t begin, std::int64_t count) const;
    // Copies elements to a tensor of the same shape, strides and type. Throws when bytes around or between the
    // elements of a result were written.
    void copy_to(const Tensor& host) const;
    // Throws when bytes before or after the elements were written.
    void check_guards() const;

  private:
    GpuTensor(const Tensor& host, bool poison);

    struct Free {
        void operator()(std::byte* memory) const;
    };
    std::unique_ptr<std::byte, Free> memory_;
    std::size_t bytes_ = 0;      // of the span of elements
    std::ptrdiff_t lowest_ = 0;  // bytes from the first element to the lowest
    bool poisoned_ = false;
    Tensor view_;
};

}  // namespace softdelta::test

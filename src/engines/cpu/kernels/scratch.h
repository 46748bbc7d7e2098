// Scratch memory cut into aligned pieces. With a null start it only counts.
#pragma once

#include <cstddef>

#include "core/tensor.h"

namespace softdelta::kernels {

class Scratch {
  public:
    explicit Scratch(std::byte* start) : start_(start) {}

    template <class T>
    T* take(core::Index count) {
        std::byte* piece = start_ == nullptr ? nullptr : start_ + used_;
        used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
        return reinterpret_cast<T*>(piece);
    }
    std::size_t used() const { return used_; }

  private:
    std::byte* start_;
    std::size_t used_ = 0;
};

}  // namespace softdelta::kernels

// Values that are made when they are first asked for.
#pragma once

#include <atomic>
#include <memory>

namespace softdelta::core {

// Threads that ask at once each make the value, and one's is kept. There is no lock: a process that is forked while
// another thread holds it would wait for ever. The value lives as long as the process.
template <class T>
class Once {
  public:
    template <class Make>
    const T& get(const Make& make) {
        const T* kept = kept_.load(std::memory_order_acquire);
        if (kept != nullptr) return *kept;
        auto made = std::make_unique<const T>(make());
        return kept_.compare_exchange_strong(kept, made.get(), std::memory_order_acq_rel) ? *made.release() : *kept;
    }

  private:
    std::atomic<const T*> kept_{nullptr};
};

}  // namespace softdelta::core

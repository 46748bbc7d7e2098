// Whether this process was forked after the library was loaded.
#pragma once

#include <pthread.h>

#include <atomic>

namespace softdelta::core {

namespace fork_state {

inline std::atomic<bool> forked{false};
inline const int handler = pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

}  // namespace fork_state

// Fork copies the calling thread alone. The OpenMP runtime of the child still counts on the threads that it had, and a
// parallel region would wait for them for ever.
inline bool forked() {
    return fork_state::forked.load(std::memory_order_relaxed);
}

}  // namespace softdelta::core

// Threads that a caller gives to a call, instead of OpenMP's.
#pragma once

#include <cstdint>

namespace softdelta::core {

// Calls task(task_context, i) for each i below count, and returns when all have returned. Tasks may run one after the
// other: a worker ends when no unit is left, and waits for earlier units alone.
struct ParallelFor {
    void (*run)(void* context, std::int32_t count, void (*task)(void* task_context, std::int32_t i),
                void* task_context) = nullptr;
    void* context = nullptr;
};

// Of the call that this thread computes, while it does; null: OpenMP's.
inline thread_local const ParallelFor* threads_of_call = nullptr;

class UseThreads {
  public:
    explicit UseThreads(const ParallelFor& given) : before_(threads_of_call) {
        threads_of_call = given.run != nullptr ? &given : nullptr;
    }
    ~UseThreads() { threads_of_call = before_; }
    UseThreads(const UseThreads&) = delete;
    UseThreads& operator=(const UseThreads&) = delete;

  private:
    const ParallelFor* before_;
};

}  // namespace softdelta::core

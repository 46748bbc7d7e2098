// The interpreter's lock, given up and taken back. A daemon thread that wants it back while the interpreter ends must
// not go on. Before Python 3.14 pthread_exit ends it, and its unwinding ends the process at the first frame that lets
// no exception through. Here such a thread waits for the end of the process, as it does in Python 3.14.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <thread>

namespace softdelta::python {

// Calls take(), which takes the lock.
template <class Take>
auto take_lock(const Take& take) {
    try {
        return take();
    } catch (...) {  // no exception: the unwinding of pthread_exit
        for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
}

class Unlocked {
  public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    ~Unlocked() {
        take_lock([this] { PyEval_RestoreThread(state_); });
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    PyThreadState* state_;
};

class Locked {
  public:
    Locked() : state_(take_lock([] { return PyGILState_Ensure(); })) {}
    ~Locked() { PyGILState_Release(state_); }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;

  private:
    PyGILState_STATE state_;
};

}  // namespace softdelta::python

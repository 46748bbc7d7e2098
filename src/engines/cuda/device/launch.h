// The host's side of a launch: errors of the runtime as exceptions, the tensors' device while a call runs, events.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "core/device.h"
#include "core/error.h"
#include "core/execution.h"

namespace softdelta::cuda {

inline void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // a failed launch is reported once
    throw core::Unsupported(std::string("cuda: ") + what + ": " + cudaGetErrorString(error));
}

inline void check(CUresult result, const char* what) {
    if (result == CUDA_SUCCESS) return;
    throw core::Unsupported(std::string("cuda: ") + what + ": error " + std::to_string(static_cast<int>(result)));
}

// A function of the driver's, which is not linked.
template <class Function>
Function* driver_function(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name);
    if (found == nullptr) throw core::Unsupported(std::string("cuda: this driver has no ") + name);
    return reinterpret_cast<Function*>(found);
}

// The tensors' device while a call runs. The caller's is not set anew at the end: that would make a context on a GPU
// that the program may not use.
class OnDevice {
  public:
    explicit OnDevice(core::Device device) : device_(device.id) {
        int current = 0;
        check(cudaGetDevice(&current), "the current device");
        if (device_ == current) return;
        CUcontext context = nullptr;
        check(driver().retain(&context, device_), "the tensors' device");
        const CUresult pushed = driver().push(context);
        changed_ = pushed == CUDA_SUCCESS;
        if (!changed_) driver().release(device_);
        check(pushed, "the tensors' device");
    }
    ~OnDevice() {
        if (!changed_) return;
        CUcontext context = nullptr;
        driver().pop(&context);
        driver().release(device_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    struct Driver {
        decltype(&cuDevicePrimaryCtxRetain) retain;
        decltype(&cuDevicePrimaryCtxRelease) release;
        decltype(&cuCtxPushCurrent) push;
        decltype(&cuCtxPopCurrent) pop;
    };
    static const Driver& driver() {
        static const Driver found{driver_function<decltype(cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain"),
                                  driver_function<decltype(cuDevicePrimaryCtxRelease)>("cuDevicePrimaryCtxRelease"),
                                  driver_function<decltype(cuCtxPushCurrent)>("cuCtxPushCurrent"),
                                  driver_function<decltype(cuCtxPopCurrent)>("cuCtxPopCurrent")};
        return found;
    }

    int device_;
    bool changed_ = false;
};

inline int multiprocessors(core::Device device) {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.id), "the device's multiprocessors");
    return count;
}
// Of the current device.
inline int multiprocessors() {
    core::Device device;
    check(cudaGetDevice(&device.id), "the current device");
    return multiprocessors(device);
}

// Of a grid.
struct Blocks {
    core::Index x, y, z;

    Blocks(core::Index of_x, core::Index of_y = 1, core::Index of_z = 1) : x(of_x), y(of_y), z(of_z) {}
    Blocks(const dim3& all) : Blocks(all.x, all.y, all.z) {}
    operator dim3() const { return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)); }
};
// As many as have them all, of so many each.
inline core::Index blocks_of(core::Index all, core::Index each) {
    return (all + each - 1) / each;
}

inline cudaStream_t stream_of(const core::Execution& execution) {
    return static_cast<cudaStream_t>(execution.stream);
}

// Events of the caller, which order a call against other streams. Null: none.
inline void wait_for(void* event, cudaStream_t stream) {
    if (event != nullptr)
        check(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(event), 0), "waiting for an event");
}
inline void record(void* event, cudaStream_t stream) {
    if (event != nullptr) check(cudaEventRecord(static_cast<cudaEvent_t>(event), stream), "recording an event");
}

}  // namespace softdelta::cuda

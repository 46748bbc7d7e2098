// The host's side of a launch: errors of the runtime as exceptions, and the tensors' device while a call runs.
#pragma once

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

// The caller's device comes back at the end.
class OnDevice {
  public:
    explicit OnDevice(core::Device device) {
        check(cudaGetDevice(&before_), "the current device");
        if (device.id != before_) check(cudaSetDevice(device.id), "the tensors' device");
        changed_ = device.id != before_;
    }
    ~OnDevice() {
        if (changed_) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    int before_ = 0;
    bool changed_ = false;
};

// Bytes of shared memory that a block may have; 0 where the driver does not say.
inline int most_shared_bytes(core::Device device) {
    int bytes = 0;
    const cudaError_t error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.id);
    return error == cudaSuccess ? bytes : 0;
}

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

inline cudaStream_t stream_of(const core::Execution& execution) {
    return static_cast<cudaStream_t>(execution.stream);
}

}  // namespace softdelta::cuda

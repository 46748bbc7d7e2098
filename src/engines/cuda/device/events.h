// Events of the caller, which order a call against other streams. Null: none.
#pragma once

#include "engines/cuda/device/launch.h"

namespace softdelta::cuda {

inline void wait_for(void* event, cudaStream_t stream) {
    if (event != nullptr)
        check(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(event), 0), "waiting for an event");
}

inline void record(void* event, cudaStream_t stream) {
    if (event != nullptr) check(cudaEventRecord(static_cast<cudaEvent_t>(event), stream), "recording an event");
}

}  // namespace softdelta::cuda

// unload LIBRARY: loads it, makes a call with two threads, unloads it. The threads wait for the next call in the OpenMP
// runtime, which must still be there.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "softdelta/softdelta.h"

int main(int argc, char** argv) {
    void* library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : nullptr;
    if (library == nullptr) return 2;
    const auto forward =
        reinterpret_cast<decltype(&softdelta_delta_forward)>(dlsym(library, "softdelta_delta_forward"));
    std::vector<float> rows(512 * 4 * 64, 0.125F), o(rows.size());
    std::int64_t shape[] = {1, 512, 4, 64};
    const DLTensor in{rows.data(), {kDLCPU, 0}, 4, {kDLFloat, 32, 1}, shape, nullptr, 0};
    DLTensor out{o.data(), {kDLCPU, 0}, 4, {kDLFloat, 32, 1}, shape, nullptr, 0};
    softdelta_delta_inputs inputs = softdelta_delta_inputs_default();
    inputs.q = inputs.k = inputs.v = &in;
    const softdelta_delta_options options = softdelta_delta_options_default(SOFTDELTA_RULE_DELTA);
    softdelta_execution execution = softdelta_execution_default();
    execution.threads = 2;
    const softdelta_delta_outputs outputs{sizeof outputs, &out, nullptr, nullptr, nullptr};
    if (forward(&inputs, &outputs, &options, &execution) != SOFTDELTA_OK) return 3;
    dlclose(library);
    usleep(300000);
    std::puts("the threads are alive");
    return 0;
}

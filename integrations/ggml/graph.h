// A graph of ggml computed by two: softdelta takes the operations that it computes faster, ggml's CPU backend what lies
// between them.
#pragma once

#include "ggml-backend-impl.h"

namespace softdelta_ggml {

// The CPU backend computes its graphs by this from now on. False: it is not made as this file was compiled for, and
// stays as it is. set_threads sets its number of threads.
bool take_over(ggml_backend_t backend, ggml_backend_set_n_threads_t set_threads);

// A device of its own, an accelerator in ggml's words, for the tests of single operations: they compare devices.
ggml_backend_reg_t device_registry();

}  // namespace softdelta_ggml

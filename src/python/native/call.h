// What the bindings share: a call of the C interface without the interpreter's lock, its status as an exception.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "python/native/lock.h"
#include "python/native/views.h"
#include "softdelta/softdelta.hpp"

namespace softdelta::python {

// Arguments that every operation ends with.
struct How {
    const char* engine;
    int threads;
    bool bf16;  // uint16 arrays hold bf16

    std::uintptr_t state_ready = 0, state_done = 0;  // events
    std::uintptr_t kept = 0;                         // an address
    std::size_t kept_size = 0;
    bool float_products = false;

    softdelta_gpu gpu() const {
        return {sizeof(softdelta_gpu), reinterpret_cast<void*>(state_ready), reinterpret_cast<void*>(state_done),
                reinterpret_cast<void*>(kept), kept_size};
    }
    // Without what gpu() says.
    softdelta_execution execution(const Views& views) const {
        softdelta_execution e = softdelta_execution_default();
        e.engine = engine;
        e.threads = threads;
        e.stream = views.stream();
        e.bf16_products = float_products ? SOFTDELTA_BF16_PRODUCTS_F32 : SOFTDELTA_BF16_PRODUCTS_AUTOMATIC;
        return e;
    }
};

// The reference computes a call of f64 though nobody named it, and f64 is NumPy's default: a program is told so once.
inline void tell_of_f64(const char* engine, std::initializer_list<const DLTensor*> main_operands) {
    static bool told = false;
    if (told || std::string_view(engine) != "automatic") return;
    for (const DLTensor* t : main_operands)
        if (t == nullptr || t->dtype.code != kDLFloat || t->dtype.bits != 64) return;
    told = true;
    const char* text =
        "all main operands are f64, so the reference computes this call, slowly: convert them to f32, or say "
        "engine=\"reference\"";
    if (PyErr_WarnEx(PyExc_UserWarning, text, 1) != 0) throw nb::python_error();
}

template <class Function>
void run(Function&& function) {
    softdelta_status status{};
    {
        const Unlocked unlocked;
        status = function();
    }
    if (status == SOFTDELTA_INVALID_ARGUMENT) throw nb::value_error(softdelta_last_error());
    if (status != SOFTDELTA_OK) detail::check(status);
}

// Memory for a call on a GPU. A library that keeps its memory serves it faster than the driver, whose pool goes back to
// the system whenever a program waits for the GPU. workspace(&bytes) asks how much the call needs.
template <class Workspace>
void take_memory(Views& views, softdelta_execution& execution, Workspace&& workspace) {
    if (!views.on_gpu()) return;
    std::size_t bytes = 0;
    run([&] { return workspace(&bytes); });
    if (bytes == 0) return;
    execution.workspace = views.memory(bytes);
    execution.workspace_size = bytes;
}

void bind_attention(nb::module_& m);
void bind_delta_rule(nb::module_& m);
void bind_diagnose(nb::module_& m);
void bind_layer(nb::module_& m);
void bind_machine(nb::module_& m);
void bind_ranges(nb::module_& m);
void bind_verify(nb::module_& m);
void bind_xla(nb::module_& m);

}  // namespace softdelta::python

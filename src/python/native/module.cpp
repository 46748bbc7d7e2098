// The extension module softdelta._native.
#include "python/native/call.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "The C interface of softdelta for Python objects; use the package softdelta.";
    const nb::exception<softdelta::Unsupported> unsupported(m, "Unsupported", PyExc_NotImplementedError);
    softdelta::python::bind_attention(m);
    softdelta::python::bind_delta_rule(m);
    softdelta::python::bind_diagnose(m);
    softdelta::python::bind_layer(m);
    softdelta::python::bind_machine(m);
    softdelta::python::bind_ranges(m);
    softdelta::python::bind_verify(m);
#ifdef SOFTDELTA_XLA
    softdelta::python::bind_xla(m);
#endif
}

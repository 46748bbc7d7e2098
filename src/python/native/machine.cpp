// softdelta._native: version and instruction sets.
#include "python/native/call.h"

namespace softdelta::python {

namespace {

nb::list isa_levels() {
    nb::list all;
    for (const IsaLevel& level : softdelta::isa_levels()) {
        nb::dict d;
        d["name"] = nb::str(level.name.c_str());
        d["compiled"] = level.compiled;
        d["available"] = level.available;
        d["selected"] = level.selected;
        all.append(d);
    }
    return all;
}

nb::list engines() {
    nb::list names;
    for (const EngineInfo& engine : list_engines()) names.append(nb::str(engine.name.c_str()));
    return names;
}

}  // namespace

void bind_machine(nb::module_& m) {
    m.def("version", [] { return nb::str(softdelta_version()); });
    m.def("engines", &engines);
    m.def("isa_levels", &isa_levels);
}

}  // namespace softdelta::python

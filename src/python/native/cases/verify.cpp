// softdelta._native: case files written from arrays, and the verdict on one.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "diagnose/blind.h"
#include "io/file/output.h"
#include "io/file/text.h"
#include "python/native/call.h"
#include "python/native/cases/cases.h"

namespace softdelta::python {

namespace {

using Limits = std::map<std::string, double>;

// Returns warnings: what nobody knows by its name.
std::vector<std::string> write(const nb::bytes& where, const Metadata& metadata, const nb::dict& tensors, bool bf16) {
    const std::string path = path_of(where);
    io::CaseFile file = case_of(metadata, tensors, bf16);
    file.name = path;
    const io::Call call = io::call_of(file);  // refuses what contradicts itself
    std::map<std::string, Tensor> results;
    for (const std::string& name : call.outputs) results[name] = file.view(name);
    io::check(call, results);
    const Unlocked unlocked;
    io::write_case(path, file);
    return call.warnings;
}

// Judges results or, with an engine and none given, what the engine makes of the inputs.
nb::dict judge_case(const io::CaseFile& file, const nb::dict& actual, const Limits& limits, const std::string& engine,
                    int threads, bool bf16) {
    const io::Call call = io::call_of(file);
    const bool compute = !engine.empty() && actual.empty();
    ResultsToJudge results;
    if (compute)
        for (const std::string& result : io::output_names(call)) results.allocate(call, result);
    else
        results = results_of(call, file, actual, bf16);
    expect_results(results, file);
    std::vector<judge::Finding> findings;
    {
        const Unlocked unlocked;
        if (compute) {
            Execution execution;
            execution.engine = engine;
            execution.threads = threads;
            io::execute(call, results.views, execution);
        }
        judge::Options options;
        options.threads = threads;
        options.limits = limits;
        findings = judge::verify(call, results.views, options);
    }
    nb::dict d = verdict_of(file, call, findings);
    nb::list notes = nb::cast<nb::list>(d["notes"]), expected;
    for (const std::string& stage : call.intermediates)
        notes.append(nb::str((stage + ": an intermediate, not judged").c_str()));
    const std::string blind = diagnose::blindness_by_facts(call).sentence();
    if (!blind.empty() && judge::summarise(findings) != judge::Verdict::wrong) notes.append(nb::str(blind.c_str()));
    for (const std::string& result : io::output_names(call))
        if (result != "dinitial_state" || file.tensors.count("initial_state") != 0)
            expected.append(nb::str(result.c_str()));
    d["expected"] = expected;
    return d;
}

nb::dict verify_file(const nb::bytes& where, const nb::dict& actual, const Limits& limits, const std::string& engine,
                     int threads, bool bf16) {
    return judge_case(io::read_case(path_of(where)), actual, limits, engine, threads, bf16);
}

nb::dict verify_case(const Metadata& metadata, const nb::dict& tensors, const nb::dict& actual, const Limits& limits,
                     const std::string& engine, int threads, bool bf16) {
    return judge_case(case_of(metadata, tensors, bf16), actual, limits, engine, threads, bf16);
}

}  // namespace

void bind_verify(nb::module_& m) {
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const io::CaseError& e) {
            PyErr_SetString(PyExc_ValueError, io::printable(e.what()).c_str());
        }
    });
    m.def("expect_output",
          [](const nb::bytes& path, const nb::bytes& input) { io::expect_output(path_of(path), path_of(input)); });
    m.def("write_text", [](const nb::bytes& path, const std::string& text) {
        io::write_file(path_of(path), [&](const io::WriteBytes& write) { write(text.data(), text.size()); });
    });
    m.def("write_case", &write);
    m.def("verify_file", &verify_file);
    m.def("verify_case", &verify_case);
}

}  // namespace softdelta::python

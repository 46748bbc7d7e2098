// softdelta._native: case files written from arrays, and the verdict on one.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "io/call.h"
#include "io/case_file.h"
#include "judge/verify.h"
#include "python/call.h"

namespace softdelta::python {

namespace {

constexpr const char* dtype_names[] = {"f64", "f32", "bf16", "f16", "bool", "i32", "i64"};
constexpr const char* verdict_names[] = {"right", "digits_lost", "wrong"};

DType dtype_of(const std::string& name, DLDataType type) {
    static constexpr std::pair<DLDataType, DType> known[] = {
        {{kDLFloat, 64, 1}, DType::f64}, {{kDLFloat, 32, 1}, DType::f32}, {{kDLBfloat, 16, 1}, DType::bf16},
        {{kDLFloat, 16, 1}, DType::f16}, {{6, 8, 1}, DType::boolean},     {{kDLUInt, 8, 1}, DType::boolean},
        {{kDLInt, 32, 1}, DType::i32},   {{kDLInt, 64, 1}, DType::i64}};
    for (const auto& [dlpack, dtype] : known)
        if (dlpack.code == type.code && dlpack.bits == type.bits && type.lanes == 1) return dtype;
    throw nb::value_error((name + ": its type is none of f64, f32, bf16, f16, bool, i32, i64").c_str());
}

// Copies a strided view, innermost dimension last, to dense memory.
void copy_dense(const DLTensor& t, int dim, const char* from, std::size_t item, char*& to) {
    if (dim == t.ndim) {
        std::memcpy(to, from, item);
        to += item;
        return;
    }
    std::int64_t step = t.strides != nullptr ? t.strides[dim] : 1;
    for (int d = dim + 1; t.strides == nullptr && d < t.ndim; ++d) step *= t.shape[d];
    for (std::int64_t i = 0; i < t.shape[dim]; ++i)
        copy_dense(t, dim + 1, from + i * step * static_cast<std::int64_t>(item), item, to);
}

io::OwnedTensor copy_of(const std::string& name, nb::handle object, bool bf16) {
    Views views(bf16);
    const DLTensor& t = *views.input(name.c_str(), object);
    io::OwnedTensor copy(dtype_of(name, t.dtype), std::vector<std::int64_t>(t.shape, t.shape + t.ndim));
    char* to = static_cast<char*>(copy.data());
    if (copy.count() > 0) copy_dense(t, 0, static_cast<const char*>(t.data) + t.byte_offset, t.dtype.bits / 8u, to);
    return copy;
}

io::CaseFile case_of(const std::map<std::string, std::string>& metadata, const nb::dict& tensors, bool bf16) {
    io::CaseFile file;
    file.metadata = metadata;
    for (const auto& [key, object] : tensors) {
        const auto name = nb::cast<std::string>(key);
        file.tensors[name] = copy_of(name, object, bf16);
    }
    return file;
}

// Returns warnings: what nobody knows by its name.
std::vector<std::string> write(const std::string& path, const std::map<std::string, std::string>& metadata,
                               const nb::dict& tensors, bool bf16) {
    const io::CaseFile file = case_of(metadata, tensors, bf16);
    const io::Call call = io::call_of(file, path);  // refuses what contradicts itself
    const nb::gil_scoped_release release;
    io::write_case(path, file);
    return call.warnings;
}

nb::dict to_python(const judge::Finding& f) {
    nb::list shape, at;
    for (const std::int64_t n : f.shape) shape.append(n);
    for (const std::int64_t n : f.largest_error_at) at.append(n);
    nb::dict d;
    d["name"] = nb::str(f.name.c_str());
    d["shape"] = nb::tuple(shape);
    d["dtype"] = dtype_names[static_cast<std::size_t>(f.dtype)];
    d["largest_error"] = f.largest_error;
    d["at"] = nb::tuple(at);
    d["ratio"] = f.ratio;
    d["limit"] = f.limit;
    d["verdict"] = verdict_names[static_cast<std::size_t>(f.verdict)];
    d["note"] = nb::str(f.note.c_str());
    return d;
}

using Limits = std::map<std::string, double>;

// The results to judge, by name: those given, else those that an engine makes, else the file's.
std::map<std::string, Tensor> results_of(const io::Call& call, const io::CaseFile& file, const nb::dict& actual,
                                         int engine, bool bf16, std::vector<io::OwnedTensor>& memory) {
    const std::vector<std::string> known = io::output_names(call);
    std::map<std::string, Tensor> results;
    for (const auto& [key, object] : actual) {
        const auto name = nb::cast<std::string>(key);
        if (std::find(known.begin(), known.end(), name) == known.end())
            throw nb::value_error((name + " is no result that this case of " + call.op + " can have").c_str());
        memory.push_back(copy_of(name, object, bf16));
        results[name] = memory.back().view();
    }
    if (!results.empty()) return results;
    if (engine < 0) {
        for (const std::string& name : call.outputs) results[name] = file.tensors.at(name).view();
        return results;
    }
    for (const std::string& name : known) {
        memory.emplace_back(io::output_dtype(call, name), io::output_shape(call, name));
        results[name] = memory.back().view();
    }
    return results;
}

// {"op", "producer", "notes": [str], "results": [dict]}
nb::dict judge_case(const io::CaseFile& file, const std::string& name, const nb::dict& actual, const Limits& limits,
                    int engine, int threads, bool bf16) {
    const io::Call call = io::call_of(file, name);
    std::vector<io::OwnedTensor> memory;
    const auto results = results_of(call, file, actual, engine, bf16, memory);
    if (results.empty())
        throw nb::value_error((name + " holds no result to judge, expected o, lse, final_state or a gradient").c_str());
    for (const auto& [result, tensor] : results) {
        const std::vector<std::int64_t> shape(tensor.shape().begin(), tensor.shape().end());
        if (shape != io::output_shape(call, result))
            throw nb::value_error((result + ": its shape is not the one that follows from the inputs").c_str());
    }
    std::vector<judge::Finding> findings;
    {
        const nb::gil_scoped_release release;
        if (engine >= 0 && actual.size() == 0) {
            Execution execution;
            execution.engine = static_cast<Engine>(engine);
            execution.threads = threads;
            io::execute(call, results, execution);
        }
        judge::Options options;
        options.threads = threads;
        options.limits = limits;
        findings = judge::verify(call, results, options);
    }
    nb::list rows, notes;
    for (const judge::Finding& f : findings) rows.append(to_python(f));
    for (const std::string& warning : call.warnings) notes.append(nb::str(warning.c_str()));
    for (const std::string& stage : call.intermediates)
        notes.append(nb::str((stage + ": an intermediate, not judged").c_str()));
    nb::dict d;
    d["op"] = nb::str(call.op.c_str());
    const auto producer = file.metadata.find("producer");
    d["producer"] = nb::str(producer != file.metadata.end() ? producer->second.c_str() : "");
    d["notes"] = notes;
    d["results"] = rows;
    return d;
}

nb::dict verify_file(const std::string& path, const nb::dict& actual, const Limits& limits, int engine, int threads,
                     bool bf16) {
    return judge_case(io::read_case(path), path, actual, limits, engine, threads, bf16);
}

nb::dict verify_case(const std::map<std::string, std::string>& metadata, const nb::dict& tensors,
                     const nb::dict& actual, const Limits& limits, int engine, int threads, bool bf16) {
    return judge_case(case_of(metadata, tensors, bf16), "the case", actual, limits, engine, threads, bf16);
}

}  // namespace

void bind_verify(nb::module_& m) {
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const io::CaseError& e) {
            PyErr_SetString(PyExc_ValueError, e.what());
        }
    });
    m.def("write_case", &write);
    m.def("verify_file", &verify_file);
    m.def("verify_case", &verify_case);
}

}  // namespace softdelta::python

// softdelta._native: case files written from arrays, and the verdict on one.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

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

void write(const std::string& path, const std::map<std::string, std::string>& metadata, const nb::dict& tensors,
           bool bf16) {
    io::CaseFile file;
    file.metadata = metadata;
    for (const auto& [key, object] : tensors) {
        const auto name = nb::cast<std::string>(key);
        if (!object.is_none()) file.tensors[name] = copy_of(name, object, bf16);
    }
    io::call_of(file, path);  // refuses what contradicts itself
    const nb::gil_scoped_release release;
    io::write_case(path, file);
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

// {"op", "producer", "notes": [str], "results": [dict]}. `actual` by result replaces what the file holds; `engine`
// other than -1 judges ours.
nb::dict verify(const std::string& path, const std::map<std::string, double>& limits, const nb::dict& actual,
                int engine, int threads, bool bf16) {
    const io::CaseFile file = io::read_case(path);
    io::Call call = io::call_of(file, path);
    std::vector<io::OwnedTensor> memory;
    std::map<std::string, Tensor> results;
    std::vector<std::string> wanted = engine >= 0 ? io::output_names(call) : call.outputs;
    if (engine < 0 && actual.size() > 0) wanted.clear();
    for (const auto& [key, object] : actual) wanted.push_back(nb::cast<std::string>(key));
    for (const std::string& name : wanted) {
        if (actual.contains(name.c_str())) {
            memory.push_back(copy_of(name, actual[name.c_str()], bf16));
            const auto names = io::output_names(call);
            if (std::find(names.begin(), names.end(), name) == names.end())
                throw nb::value_error((name + " is no result of this " + call.op + ", or lacks its do").c_str());
            if (memory.back().shape() != io::output_shape(call, name))
                throw nb::value_error((name + ": its shape is not that of the case's result").c_str());
        } else if (engine >= 0) {
            memory.emplace_back(io::output_dtype(call, name), io::output_shape(call, name));
        } else {
            results[name] = file.tensors.at(name).view();
            continue;
        }
        results[name] = memory.back().view();
    }
    if (results.empty())
        throw nb::value_error(
            (path + ": holds no result to judge, expected o, lse, final_state or a gradient").c_str());
    std::vector<judge::Finding> findings;
    {
        const nb::gil_scoped_release release;
        if (engine >= 0) {
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
    for (const std::string& name : call.intermediates)
        notes.append(nb::str((name + ": an intermediate, not judged").c_str()));
    nb::dict d;
    d["op"] = nb::str(call.op.c_str());
    const auto producer = file.metadata.find("producer");
    d["producer"] = nb::str(producer != file.metadata.end() ? producer->second.c_str() : "");
    d["notes"] = notes;
    d["results"] = rows;
    return d;
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
    m.def("verify", &verify);
}

}  // namespace softdelta::python

#include "python/native/cases/cases.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "io/call/other_names.h"
#include "io/file/text.h"
#include "python/native/views.h"

namespace softdelta::python {

namespace {

constexpr const char* dtype_names[] = {"f64", "f32", "bf16", "f16", "bool", "i32", "i64", "i8", "u8", "f8_e4m3"};
constexpr const char* verdict_names[] = {"right", "digits_lost", "wrong", "cannot_be_judged"};

// Bytes are bool in a mask alone.
DType dtype_of(const std::string& name, DLDataType type) {
    if (type.code == kDLUInt && type.bits == 8 && type.lanes == 1 && name == "mask") return DType::boolean;

    static constexpr std::pair<DLDataType, DType> known[] = {
        {{kDLFloat, 64, 1}, DType::f64}, {{kDLFloat, 32, 1}, DType::f32}, {{kDLBfloat, 16, 1}, DType::bf16},
        {{kDLFloat, 16, 1}, DType::f16}, {{6, 8, 1}, DType::boolean},     {{kDLUInt, 8, 1}, DType::u8},
        {{kDLInt, 8, 1}, DType::i8},     {{10, 8, 1}, DType::f8},         {{kDLInt, 32, 1}, DType::i32},
        {{kDLInt, 64, 1}, DType::i64}};
    for (const auto& [dlpack, dtype] : known)
        if (dlpack.code == type.code && dlpack.bits == type.bits && type.lanes == 1) return dtype;
    throw nb::value_error(
        (name + ": its type is none of f64, f32, bf16, f16, bool, i32, i64, i8, u8, f8_e4m3").c_str());
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

}  // namespace

io::CaseFile case_of(const Metadata& metadata, const nb::dict& tensors, bool bf16) {
    io::CaseFile file{"the case", metadata, {}};
    for (const auto& [key, object] : tensors) {
        const auto name = nb::cast<std::string>(key);
        file.tensors[name] = copy_of(name, object, bf16);
    }
    return file;
}

void ResultsToJudge::allocate(const io::Call& call, const std::string& name) {
    memory.emplace_back(io::output_dtype(call, name), io::output_shape(call, name));
    views[name] = memory.back().view();
}

ResultsToJudge results_of(const io::Call& call, const io::CaseFile& file, const nb::dict& actual, bool bf16) {
    const std::vector<std::string> known = io::output_names(call);
    ResultsToJudge results;
    for (const auto& [key, object] : actual) {
        const auto name = nb::cast<std::string>(key);
        if (std::find(known.begin(), known.end(), name) == known.end())
            throw nb::value_error((name + " is no result that this case of " + call.op + " can have" +
                                   io::hint_of_name(name, [&](std::string_view ours) {
                                       return std::ranges::count(known, ours) > 0;
                                   })).c_str());
        results.memory.push_back(copy_of(name, object, bf16));
        const Tensor view = results.views[name] = results.memory.back().view();
        if (std::vector<std::int64_t>(view.shape().begin(), view.shape().end()) != io::output_shape(call, name))
            throw nb::value_error((name + ": its shape is not the one that follows from the inputs").c_str());
    }
    if (results.views.empty())
        for (const std::string& name : call.outputs) results.views[name] = file.view(name);
    return results;
}

void expect_results(const ResultsToJudge& results, const io::CaseFile& file) {
    if (results.views.empty())
        io::fail(file.name, "holds no result to judge, expected o, lse, final_state or a gradient");
}

nb::dict verdict_of(const io::CaseFile& file, const io::Call& call, const std::vector<judge::Finding>& findings) {
    nb::list rows, notes;
    for (const judge::Finding& f : findings) rows.append(to_python(f));
    for (const std::string& warning : call.warnings) notes.append(nb::str(warning.c_str()));
    nb::dict d;
    d["op"] = nb::str(call.op.c_str());
    const auto producer = file.metadata.find("producer");
    d["producer"] = producer != file.metadata.end() ? nb::cast(producer->second) : nb::cast("");
    d["results"] = rows;
    d["notes"] = notes;
    return d;
}

}  // namespace softdelta::python

// A call's tensors and options as they come from Python: tuples in the order of softdelta.h, whose names are those of
// fields_of and whose ends may be missing.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "core/attention.h"
#include "python/native/views.h"
#include "softdelta/softdelta.hpp"

namespace softdelta::python {

// Whether a tensor has rows and heads, which heads_first exchanges: q, k, v, o and their gradients.
inline bool has_rows_and_heads(std::string_view name) {
    const auto has = [](const core::Shape& shape) { return shape.rank == 4 && shape.dims[1].count == 1; };
    if (const auto* input = core::find_operand<core::AttentionInputs>(name)) return has(input->shape);
    if (const auto* output = core::find_operand<core::AttentionOutputs>(name)) return has(output->shape);
    const auto* gradient = core::find_operand<core::AttentionGradients>(name);
    if (gradient == nullptr) return false;
    return gradient->input != nullptr ? has_rows_and_heads(name.substr(1)) : has(gradient->shape);
}

template <class Struct>
CStruct<Struct> tensors_of(Views& views, const nb::tuple& objects, bool heads_first = false) {
    static constexpr const auto& fields = fields_of<Struct>;
    static const auto with_heads = [] {
        std::array<bool, fields.size()> all{};
        for (std::size_t i = 0; i < fields.size(); ++i) all[i] = has_rows_and_heads(fields[i].name);
        return all;
    }();
    CStruct<Struct> c{};
    c.size = sizeof c;
    const std::size_t given = objects.size();
    if (given > fields.size()) throw nb::type_error("more tensors than the structure has");
    for (std::size_t i = 0; i < given; ++i) {
        const auto& field = fields[i];
        const nb::handle object = PyTuple_GetItem(objects.ptr(), static_cast<Py_ssize_t>(i));
        const bool swap = heads_first && with_heads[i];
        if (field.given != nullptr)
            c.*field.given = views.input(field.name, object, swap);
        else
            c.*field.wanted = views.result(field.name, object, swap);
    }
    return c;
}

// Reads a tuple of options from its first entry on.
class Options {
  public:
    explicit Options(const nb::tuple& values) : values_(values) {}

    template <class T>
    T next() {
        return nb::cast<T>(nb::handle(PyTuple_GetItem(values_.ptr(), static_cast<Py_ssize_t>(at_++))));
    }

  private:
    nb::handle values_;
    std::size_t at_ = 0;
};

// Options from values in the order of the C structure: read.next<T>().
template <class Read>
softdelta_attention_options attention_options_of(Read read) {
    return {sizeof(softdelta_attention_options), read.template next<double>(),       read.template next<std::int32_t>(),
            read.template next<std::int64_t>(),  read.template next<std::int64_t>(), read.template next<double>(),
            read.template next<std::int32_t>(),  read.template next<std::int64_t>(), read.template next<std::int64_t>(),
            read.template next<std::int64_t>()};
}

template <class Read>
softdelta_delta_options delta_options_of(Read read) {
    return {sizeof(softdelta_delta_options),    read.template next<std::int32_t>(), read.template next<double>(),
            read.template next<bool>(),         read.template next<bool>(),         read.template next<double>(),
            read.template next<bool>(),         read.template next<bool>(),         read.template next<bool>(),
            read.template next<std::int64_t>(), read.template next<std::int32_t>(), read.template next<std::int32_t>()};
}

}  // namespace softdelta::python

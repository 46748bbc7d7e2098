// The tensors of a call, visited by the table of core/operands.h: imported from the C structures, and checked.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "api/check.h"
#include "core/attention.h"
#include "core/cache.h"
#include "core/delta_rule.h"
#include "core/layer/convolution.h"
#include "core/layer/norm.h"
#include "core/operands.h"
#include "core/ranges.h"
#include "softdelta/softdelta.hpp"

namespace softdelta::api {

// The public structure of the same name; these functions are types and have no body.
AttentionInputs public_of(const core::AttentionInputs&);
AttentionOutputs public_of(const core::AttentionOutputs&);
AttentionGradients public_of(const core::AttentionGradients&);
CacheAppendInputs public_of(const core::CacheAppendInputs&);
CacheAppendOutputs public_of(const core::CacheAppendOutputs&);
DeltaInputs public_of(const core::DeltaInputs&);
DeltaOutputs public_of(const core::DeltaOutputs&);
DeltaGradients public_of(const core::DeltaGradients&);
DeltaSummary public_of(const core::DeltaSummary&);
DeltaSummaryGradient public_of(const core::DeltaSummaryGradient&);
DeltaFoldInputs public_of(const core::DeltaFoldInputs&);
DeltaFoldOutputs public_of(const core::DeltaFoldOutputs&);
ConvolutionInputs public_of(const core::ConvolutionInputs&);
ConvolutionOutputs public_of(const core::ConvolutionOutputs&);
ConvolutionGradients public_of(const core::ConvolutionGradients&);
NormInputs public_of(const core::NormInputs&);
NormOutputs public_of(const core::NormOutputs&);
NormGradients public_of(const core::NormGradients&);
template <class Struct>
using Public = decltype(public_of(std::declval<Struct>()));

// Every tensor of the C structure as a core view. Both tables have the same names in the same order.
template <class Struct>
Struct import_all(const CStruct<Public<Struct>>& c) {
    constexpr const auto& operands = core::operands_of<Struct>;
    constexpr const auto& fields = fields_of<Public<Struct>>;
    static_assert(
        [] {
            for (std::size_t i = 0; i < operands.size(); ++i)
                if (std::string_view(operands[i].name) != fields.at(i).name ||
                    operands[i].written != (fields.at(i).wanted != nullptr))
                    return false;
            return operands.size() == fields.size();
        }(),
        "core::operands_of and fields_of differ");
    static_assert(sizeof(Struct) == operands.size() * sizeof(Tensor), "a tensor is missing from core::operands_of");
    Struct tensors{};
    for (std::size_t i = 0; i < operands.size(); ++i) {
        Tensor& t = tensors.*operands[i].tensor;
        const DLTensor* given = operands[i].written ? c.*fields[i].wanted : c.*fields[i].given;
        if (given == nullptr) continue;
        t = import(operands[i].name, given);
        if (operands[i].kind == core::Kind::boolean && t.dtype == core::DType::u8) t.dtype = core::DType::boolean;
    }
    return tensors;
}

// All tensors of a call lie on the device of its first operand; lengths may lie on the host, too.
template <class Struct>
void expect_one_device(const Struct& tensors, core::Device device, const char* first = "q") {
    core::for_each_given(tensors, [&](const core::Operand<Struct>& operand, const Tensor& t) {
        expect_device(operand.name, t, operand.kind, device, first);
    });
}

// What every rule needs is there and has its rank, so that sizes can be read from it.
template <class Struct>
void expect_required(const Struct& tensors) {
    for (const core::Operand<Struct>& operand : core::operands_of<Struct>) {
        if (operand.need != core::needs::required) continue;
        const Tensor& t = tensors.*operand.tensor;
        if (!t) expect_present(operand.name, t, core::text_of(operand.shape).c_str());  // every call comes here
        expect_rank(operand.name, t, operand.shape);
    }
}

// Whether the states that are read, or written, are a pool: it has any number of entries.
template <class Inputs>
bool is_pool(const Inputs& in, bool written) {
    return in.state_indices || (written && in.final_state_indices);
}
template <class Inputs>
void expect_no_pool(const Inputs& in) {
    core::for_each_given(in, [](const auto& operand, const Tensor&) {
        if (core::is_of_pools(operand.name))
            throw core::Unsupported(std::string(operand.name) + ": there are no gradients through a pool of states");
    });
}

// A call without a result, and without an intermediate, does nothing: the caller forgot one.
template <class Struct>
void expect_result(const char* name, const Struct& tensors, const core::Execution& execution = {}) {
    if (!execution.stages.empty()) return;
    std::string names;
    for (const core::Operand<Struct>& operand : core::operands_of<Struct>) {
        if (!operand.written) continue;
        if (tensors.*operand.tensor) return;
        names.append(names.empty() ? "" : ", ").append(operand.name);
    }
    refuse(name, "empty", "one or more of " + names);
}

// Type and shape; a result is also writable.
template <class Struct>
void expect_operand(const core::Operand<Struct>& operand, const Tensor& t, const core::Shape& shape,
                    const Sizes& sizes) {
    expect_kind(operand.name, t, operand.kind);
    expect_shape(operand.name, t, shape, sizes);
    if (operand.written) expect_writable(operand.name, t);
}

}  // namespace softdelta::api

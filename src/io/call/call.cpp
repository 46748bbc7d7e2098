#include "io/call/call.h"

#include <algorithm>

#include "io/call/metadata.h"
#include "io/call/other_names.h"
#include "io/call/results.h"
#include "io/call/tensors.h"
#include "io/file/core_view.h"
#include "io/file/stored_type.h"
#include "io/file/text.h"

namespace softdelta::io {
namespace {

using Shape = std::vector<std::int64_t>;

const Operation& read_operation(const CaseFile& file) {
    const auto found = file.metadata.find("op");
    if (found == file.metadata.end()) fail("metadata op is missing");
    if (const Operation* op = find_operation(found->second)) return *op;
    if (is_layer(found->second))
        fail("metadata op: " + quote(found->second) +
             " is a layer, which the commands softdelta run and softdelta verify take, and nothing else; "
             "diagnose knows no mistakes of it");
    std::string names(operations.front().name);
    for (const core::Rule& rule : core::rules) names.append(", ").append(rule.name);
    fail("metadata op: expected " + names + " or rule: and facts, found " + quote(found->second));
}

bool has(const CaseFile& file, std::string_view tensor) {
    return file.tensors.count(std::string(tensor)) != 0;
}

// Every tensor is one of this operation, a stage, or unknown; one of another operation is a contradiction.
void sort_tensors(const CaseFile& file, const Operation& op, Call& call) {
    for (const auto& entry : file.tensors) {
        const std::string& tensor = entry.first;
        if (belongs(op, tensor)) continue;
        const auto knows = [&](const Operation& other) { return belongs(other, tensor); };
        if (std::any_of(operations.begin(), operations.end(), knows))
            fail(tensor + ": no tensor of " + std::string(op.name));
        if (core::find_operand<core::DeltaInputs>(tensor) != nullptr && core::is_of_pools(tensor))
            fail(tensor + ": a pool of states is not supported in a case file");
        if (lists(call.is_attention ? attention_stages : delta_stages, tensor))
            call.intermediates.push_back(tensor);
        else
            call.warnings.push_back("tensor " + quote(tensor) + " is unknown and was ignored" +
                                    hint_of_name(tensor, [&](std::string_view name) { return belongs(op, name); }));
    }
}

// The tensors of a structure by their names. Those that every operation has are there with their rank.
template <class Core, class Struct>
void read_inputs(const CaseFile& file, const Operation& op, Struct& in) {
    for (const auto& field : fields_of<Struct>) {
        if (!in_files(field.name)) continue;
        Tensor& t = in.*field.tensor;
        t = file.view(field.name);
        if (!t && use_of(op, field.name) == core::Use::required)
            fail(std::string(field.name) + ": missing, but " + std::string(op.name) + " needs it");
        const core::Operand<Core>& operand = *core::find_operand<Core>(field.name);
        const bool blocks = t && core::is_quantised(core_type(t.dtype())) && t.rank() == 5;  // the library knows which
        if (operand.need == core::needs::required && t.rank() != static_cast<std::size_t>(operand.shape.rank) &&
            !blocks)
            fail(std::string(field.name) + ": shape " + shape_text(t.shape()) + ", expected " +
                 core::text_of(operand.shape));
    }
}

// Packed sequences lie in one batch row of `packed`, all of whose rows they take.
Bounds read_bounds(const std::string& tensor, const Tensor& t, const Tensor& packed) {
    if (!t) return {};
    const std::int64_t rows = packed.shape(1);
    if (t.dtype() != DType::i32 && t.dtype() != DType::i64)
        fail(tensor + ": type " + std::string(stored_type(t.dtype()).name) + ", expected I32 or I64");
    if (t.rank() != 1 || t.count() < 1) fail(tensor + ": shape " + shape_text(t.shape()) + ", expected [N+1]");
    Bounds bounds = load_indices(t);
    std::int64_t before = 0;
    for (std::size_t i = 0; i < bounds.size(); ++i) {
        const std::int64_t row = bounds[i];
        const bool last = i + 1 == bounds.size();
        if (row < before || (i == 0 && row != 0) || (last && row != rows))
            fail(tensor + ": element " + std::to_string(i) + " is " + std::to_string(row) +
                 ", expected to ascend from 0 to " + std::to_string(rows));
        before = row;
    }
    if (packed.shape(0) != 1) fail(tensor + ": " + std::to_string(packed.shape(0)) + " batch rows, expected 1");
    return bounds;
}

// cu_seqlens alone stands for both; keys in caches have lengths of their own.
Packing read_packing(const CaseFile& file, AttentionInputs& in) {
    const bool both = has(file, "cu_seqlens"), q = has(file, "cu_seqlens_q"), k = has(file, "cu_seqlens_k");
    if (both && (q || k)) fail("cu_seqlens: given together with cu_seqlens_q or cu_seqlens_k");
    const bool caches = static_cast<bool>(in.cache_seqlens);
    if (caches && (both || k))
        fail(std::string(both ? "cu_seqlens" : "cu_seqlens_k") +
             ": given together with cache_seqlens, expected cu_seqlens_q alone");
    if (q != k && !(q && caches))
        fail(std::string(q ? "cu_seqlens_k" : "cu_seqlens_q") + ": missing, but its partner is given");
    if (both) in.cu_seqlens_q = in.cu_seqlens_k = file.view("cu_seqlens");
    if (in.cu_seqlens_k && in.cu_seqlens_q.count() != in.cu_seqlens_k.count())
        fail("cu_seqlens_k: shape " + shape_text(in.cu_seqlens_k.shape()) + ", expected " +
             shape_text(in.cu_seqlens_q.shape()) + " as cu_seqlens_q");
    return {.tokens = {},
            .queries = read_bounds(both ? "cu_seqlens" : "cu_seqlens_q", in.cu_seqlens_q, in.q),
            .keys = read_bounds(both ? "cu_seqlens" : "cu_seqlens_k", in.cu_seqlens_k, in.k)};
}

// A parameter in any shape, [HV] or [1, 1, HV, 1], as the vector that the library takes.
void flatten_parameters(Call& call) {
    for (const auto& field : fields_of<DeltaInputs>) {
        Tensor& t = call.delta.*field.tensor;
        if (!t || !is_gate_parameter(field.name)) continue;
        call.parameter_shapes[field.name] = {t.shape().begin(), t.shape().end()};
        t = Tensor(t.data(), t.dtype(), {t.count()});
    }
}

void read_given_gradients(const CaseFile& file, Call& call) {
    const auto read = [&](const std::string& tensor, const char* result, Tensor& field) {
        field = file.view(tensor);
        if (field) expect_float_of_shape(tensor, field, output_shape(call, result));
    };
    read("do", "o", call.d_o);
    if (call.is_attention)
        read("dlse", "lse", call.dlse);
    else
        read("dfinal_state", "final_state", call.dfinal_state);
}

// Of a gradient that is not among the possible results.
const char* why_impossible(const Call& call) {
    if (call.is_attention && call.attention.block_table) return "there are no gradients through a paged cache";
    if (has_quantised_numbers(call)) return "there are no gradients of numbers with scales";
    if (call.is_attention && !call.d_o) return "a gradient, but do is missing";
    if (!call.is_attention && !call.d_o && !call.dfinal_state) return "a gradient, but do and dfinal_state are missing";
    return "the gradient of an input that is missing";
}

void find_outputs(const CaseFile& file, const Operation& op, Call& call) {
    const std::vector<Result> possible = results_of(call);
    for (const Result& result : possible) {
        if (!has(file, result.name)) continue;
        expect_float_of_shape(result.name, file.view(result.name), result.shape);
        call.outputs.push_back(result.name);
    }
    for (const auto& entry : file.tensors)
        if (is_gradient(op, entry.first) && std::ranges::count(possible, entry.first, &Result::name) == 0)
            fail(entry.first + ": " + why_impossible(call));
}

}  // namespace

Call call_of(const CaseFile& file) try {
    const Operation& op = read_operation(file);
    Call call;
    call.op = op.name;
    call.is_attention = op.is_attention();
    if (!call.is_attention) call.delta_options.rule = static_cast<Rule>(core::number_of(*op.rule));
    read_options(file, call);
    sort_tensors(file, op, call);
    if (call.is_attention) {
        read_inputs<core::AttentionInputs>(file, op, call.attention);
        call.packing = read_packing(file, call.attention);
    } else {
        read_inputs<core::DeltaInputs>(file, op, call.delta);
        flatten_parameters(call);
        call.packing.tokens = read_bounds("cu_seqlens", call.delta.cu_seqlens, call.delta.q);
        for (const std::int64_t token : call.packing.tokens)
            call.packing.steps.push_back(token * call.delta_options.steps);
    }
    read_given_gradients(file, call);
    find_outputs(file, op, call);
    return call;
} catch (const CaseError& error) {
    fail(file.name, error.what());
}

}  // namespace softdelta::io

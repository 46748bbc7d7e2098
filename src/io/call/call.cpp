#include "io/call/call.h"

#include <algorithm>
#include <span>

#include "io/call/results.h"
#include "io/file/metadata.h"
#include "io/file/stored_type.h"
#include "io/file/text.h"

namespace softdelta::io {
namespace {

using Shape = std::vector<std::int64_t>;

const Operation& read_operation(const CaseFile& file, const std::string& name) {
    const auto found = file.metadata.find("op");
    if (found == file.metadata.end()) fail(name, "metadata op is missing");
    for (const Operation& op : operations)
        if (op.name == found->second) return op;
    fail(name, "metadata op: expected attention, delta_rule, gated_delta_rule, kda, comba or simple_gla, found " +
                   quote(found->second));
}

bool has(const CaseFile& file, std::string_view tensor) {
    return file.tensors.count(std::string(tensor)) != 0;
}

Tensor view_of(const CaseFile& file, std::string_view tensor) {
    const auto found = file.tensors.find(std::string(tensor));
    return found == file.tensors.end() ? Tensor{} : found->second.view();
}

bool belongs(const Operation& op, std::string_view tensor) {
    return takes(op, tensor) || lists(op.outputs, tensor) || is_gradient(op, tensor);
}

// Every tensor is one of this operation, a stage, or unknown; one of another operation is a contradiction.
void sort_tensors(const CaseFile& file, const Operation& op, const std::string& name, Call& call) {
    for (const auto& entry : file.tensors) {
        const std::string& tensor = entry.first;
        if (belongs(op, tensor)) continue;
        const auto knows = [&](const Operation& other) { return belongs(other, tensor); };
        if (std::any_of(operations.begin(), operations.end(), knows))
            fail(name, tensor + ": no tensor of " + std::string(op.name));
        if (tensor == "state_indices") fail(name, "state_indices: a pool of states is not supported in a case file");
        if (lists(call.is_attention ? attention_stages : delta_stages, tensor))
            call.intermediates.push_back(tensor);
        else
            call.warnings.push_back("tensor " + quote(tensor) + " is unknown and was ignored");
    }
    for (const char* tensor : {"q", "k", "v", "g", "p"})
        if (lists(op.required, tensor) && !has(file, tensor))
            fail(name, std::string(tensor) + ": missing, but " + call.op + " needs it");
}

void expect_rank(const std::string& name, const char* tensor, const Tensor& t, std::size_t rank, const char* shape) {
    if (t.rank() != rank) fail(name, std::string(tensor) + ": shape " + shape_text(t.shape()) + ", expected " + shape);
}

std::int64_t load_index(const Tensor& t, std::int64_t i) {
    return t.dtype() == DType::i32 ? static_cast<const std::int32_t*>(t.data())[i]
                                   : static_cast<const std::int64_t*>(t.data())[i];
}

// Packed sequences lie in one batch row of `packed`: 0 = first ≤ … ≤ last = rows.
void expect_packing(const std::string& name, const std::string& tensor, const Tensor& t, const Tensor& packed) {
    if (!t) return;
    const std::int64_t rows = packed.shape(1);
    if (t.dtype() != DType::i32 && t.dtype() != DType::i64)
        fail(name, tensor + ": type " + std::string(stored_type(t.dtype()).name) + ", expected I32 or I64");
    if (t.rank() != 1 || t.count() < 1) fail(name, tensor + ": shape " + shape_text(t.shape()) + ", expected [N+1]");
    std::int64_t before = 0;
    for (std::int64_t i = 0; i < t.count(); ++i) {
        const std::int64_t row = load_index(t, i);
        const bool last = i + 1 == t.count();
        if (row < before || (i == 0 && row != 0) || (last && row != rows))
            fail(name, tensor + ": element " + std::to_string(i) + " is " + std::to_string(row) +
                           ", expected to ascend from 0 to " + std::to_string(rows));
        before = row;
    }
    if (packed.shape(0) != 1) fail(name, tensor + ": " + std::to_string(packed.shape(0)) + " batch rows, expected 1");
}

// cu_seqlens alone stands for both; keys in caches have lengths of their own.
void read_packing(const CaseFile& file, const std::string& name, AttentionInputs& in) {
    const bool both = has(file, "cu_seqlens"), q = has(file, "cu_seqlens_q"), k = has(file, "cu_seqlens_k");
    if (both && (q || k)) fail(name, "cu_seqlens: given together with cu_seqlens_q or cu_seqlens_k");
    const bool caches = static_cast<bool>(in.cache_seqlens);
    if (caches && (both || k))
        fail(name, std::string(both ? "cu_seqlens" : "cu_seqlens_k") +
                       ": given together with cache_seqlens, expected cu_seqlens_q alone");
    if (q != k && !(q && caches))
        fail(name, std::string(q ? "cu_seqlens_k" : "cu_seqlens_q") + ": missing, but its partner is given");
    if (both) in.cu_seqlens_q = in.cu_seqlens_k = view_of(file, "cu_seqlens");
    if (in.cu_seqlens_k && in.cu_seqlens_q.count() != in.cu_seqlens_k.count())
        fail(name, "cu_seqlens_k: shape " + shape_text(in.cu_seqlens_k.shape()) + ", expected " +
                       shape_text(in.cu_seqlens_q.shape()) + " as cu_seqlens_q");
    expect_packing(name, both ? "cu_seqlens" : "cu_seqlens_q", in.cu_seqlens_q, in.q);
    expect_packing(name, both ? "cu_seqlens" : "cu_seqlens_k", in.cu_seqlens_k, in.k);
}

void read_attention(const CaseFile& file, const std::string& name, Call& call) {
    AttentionInputs& in = call.attention;
    for (const auto& operand : attention_inputs) in.*operand.field = view_of(file, operand.name);
    expect_rank(name, "q", in.q, 4, "[B, Lq, H, D]");
    expect_rank(name, "k", in.k, 4, "[B, Lk, Hk, D]");
    expect_rank(name, "v", in.v, 4, "[B, Lk, Hk, Dv]");
    read_packing(file, name, in);
}

// A per-head parameter in any shape, [HV] or [1, 1, HV, 1], as the vector that the library takes.
Shape flatten(Tensor& t) {
    Shape shape(t.shape().begin(), t.shape().end());
    if (t) t = Tensor(t.data(), t.dtype(), {t.count()});
    return shape;
}

void read_delta(const CaseFile& file, const std::string& name, Call& call) {
    DeltaInputs& in = call.delta;
    for (const auto& operand : delta_inputs) in.*operand.field = view_of(file, operand.name);
    expect_rank(name, "q", in.q, 4, "[B, T, H, K]");
    expect_rank(name, "k", in.k, 4, "[B, T, H, K]");
    expect_rank(name, "v", in.v, 4, "[B, T, HV, V]");
    call.A_log_shape = flatten(in.A_log);
    call.dt_bias_shape = flatten(in.dt_bias);
    expect_packing(name, "cu_seqlens", in.cu_seqlens, in.q);
}

void expect_float_of_shape(const std::string& name, const std::string& tensor, const Tensor& t, const Shape& shape) {
    if (!is_float(t.dtype()))
        fail(name, tensor + ": type " + std::string(stored_type(t.dtype()).name) + ", expected F64, F32, BF16 or F16");
    if (!std::equal(t.shape().begin(), t.shape().end(), shape.begin(), shape.end()))
        fail(name, tensor + ": shape " + shape_text(t.shape()) + ", expected " + shape_text(shape));
}

void read_given_gradients(const CaseFile& file, const std::string& name, Call& call) {
    const auto read = [&](const std::string& tensor, const char* result, Tensor& field) {
        field = view_of(file, tensor);
        if (field) expect_float_of_shape(name, tensor, field, output_shape(call, result));
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
    if (call.is_attention && !call.d_o) return "a gradient, but do is missing";
    if (!call.is_attention && !call.d_o && !call.dfinal_state) return "a gradient, but do and dfinal_state are missing";
    return "the gradient of an input that is missing";
}

void find_outputs(const CaseFile& file, const Operation& op, const std::string& name, Call& call) {
    const std::vector<std::string> possible = output_names(call);
    for (const std::string& tensor : possible) {
        if (!has(file, tensor)) continue;
        expect_float_of_shape(name, tensor, view_of(file, tensor), output_shape(call, tensor));
        call.outputs.push_back(tensor);
    }
    for (const auto& entry : file.tensors)
        if (is_gradient(op, entry.first) && std::count(possible.begin(), possible.end(), entry.first) == 0)
            fail(name, entry.first + ": " + why_impossible(call));
}

}  // namespace

Call call_of(const CaseFile& file, const std::string& name) {
    const Operation& op = read_operation(file, name);
    Call call;
    call.op = op.name;
    call.is_attention = &op == &operations.front();
    call.delta_options.rule = op.rule;
    read_options(file, name, call);
    sort_tensors(file, op, name, call);
    call.is_attention ? read_attention(file, name, call) : read_delta(file, name, call);
    read_given_gradients(file, name, call);
    find_outputs(file, op, name, call);
    return call;
}

}  // namespace softdelta::io

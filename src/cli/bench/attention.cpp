// Attention to be timed. Work counted is that of query-key pairs that are not masked.
#include <algorithm>

#include "cli/bench/problem.h"

namespace softdelta::cli {

namespace {

using io::OwnedTensor;
using std::int64_t;

Limit limit_of(DType dtype) {
    return dtype == DType::bf16 ? Limit::bf16 : Limit::f32;
}

int64_t unmasked_pairs(const AttentionShape& s) {
    if (s.causal == Causal::none) return s.queries * s.keys;
    const int64_t before = s.causal == Causal::bottom_right ? s.keys - s.queries : 0;
    int64_t pairs = 0;
    for (int64_t i = before; i < before + s.queries; ++i) pairs += s.window < 0 ? i + 1 : std::min(i + 1, s.window);
    return pairs;
}

// True but for one pair in 64: every tile is partial, none is empty.
OwnedTensor sparse_mask(int64_t queries, int64_t keys) {
    OwnedTensor mask(DType::boolean, {1, 1, queries, keys});
    auto* keep = static_cast<unsigned char*>(mask.data());
    for (int64_t i = 0; i < queries * keys; ++i) keep[i] = (i * 37 + i / keys * 11) % 64 != 0;
    return mask;
}

struct AttentionOperands {
    OwnedTensor q, k, v, d_o, o, lse, dq, dk, dv, mask, bias, dbias, sink, dsink;
    Tensor first_columns;  // of k

    explicit AttentionOperands(const AttentionShape& s) {
        const int64_t size = s.value_size > 0 ? s.value_size : s.head_size;
        const std::vector<int64_t> query{s.batch, s.queries, s.heads, s.head_size},
            key{s.batch, s.keys, s.key_heads, s.head_size}, value{s.batch, s.keys, s.key_heads, size},
            out{s.batch, s.queries, s.heads, size};
        q = random_tensor(s.dtype, query, 1);
        k = random_tensor(s.dtype, key, 2);
        if (s.shared_values)
            first_columns = Tensor(k.data(), s.dtype, value, k.view().stride());
        else
            v = random_tensor(s.dtype, value, 3);
        o = OwnedTensor(s.dtype, out);
        lse = OwnedTensor(DType::f32, {s.batch, s.heads, s.queries});
        if (s.sink) sink = random_tensor(DType::f32, {s.heads}, 6);
        if (s.extra == Extra::mask) mask = sparse_mask(s.queries, s.keys);
        if (s.extra == Extra::bias || s.extra == Extra::row_bias) {
            const std::vector<int64_t> shape{1, s.heads, s.extra == Extra::bias ? s.queries : 1, s.keys};
            bias = random_tensor(s.dtype, shape, 4);
            if (s.pass == Pass::backward_bias) dbias = OwnedTensor(s.dtype, shape);
        }
        if (s.pass == Pass::forward) return;
        d_o = random_tensor(s.dtype, out, 5);
        dq = OwnedTensor(s.dtype, query);
        dk = OwnedTensor(s.dtype, key);
        dv = OwnedTensor(s.dtype, value);
        if (s.sink) dsink = OwnedTensor(DType::f32, {s.heads});
    }

    static Tensor view(const OwnedTensor& tensor) { return tensor.shape().empty() ? Tensor() : tensor.view(); }
    AttentionInputs inputs() const {
        return {.q = view(q),
                .k = view(k),
                .v = first_columns ? first_columns : view(v),
                .mask = view(mask),
                .bias = view(bias),
                .sink = view(sink)};
    }
    AttentionOutputs outputs() const { return {.o = view(o), .lse = view(lse)}; }
    AttentionGradients gradients() const {
        return {.o = view(o),
                .lse = view(lse),
                .d_o = view(d_o),
                .dq = view(dq),
                .dk = view(dk),
                .dv = view(dv),
                .dbias = view(dbias),
                .dsink = view(dsink)};
    }
};

}  // namespace

Problem make_attention(const AttentionShape& shape) {
    const auto operands = std::make_shared<AttentionOperands>(shape);
    AttentionOptions options;
    options.causal = shape.causal;
    if (shape.window >= 0) options.window_left = shape.window - 1;
    Problem problem;
    problem.limit = limit_of(shape.dtype);
    const int64_t sizes = shape.head_size + (shape.value_size > 0 ? shape.value_size : shape.head_size);
    problem.work = 2.0 * static_cast<double>(shape.batch * unmasked_pairs(shape) * shape.heads * sizes);
    if (shape.extra == Extra::mask) problem.work *= 63.0 / 64;
    const auto forward = [operands, options](const Execution& execution) {
        attention_forward(operands->inputs(), operands->outputs(), options, execution);
    };
    if (shape.pass == Pass::forward) {
        problem.call = forward;
        return problem;
    }
    const bool training = shape.pass == Pass::training;
    problem.work *= training ? 3.5 : 2.5;
    problem.call = [operands, options, forward, training, saved = false](const Execution& execution) mutable {
        if (training || !saved) forward(execution);
        saved = true;
        attention_backward(operands->inputs(), operands->gradients(), options, execution);
    };
    return problem;
}

Problem make_attention_decode(int64_t length, DType dtype, bool paged) {
    constexpr int64_t block_rows = 64;
    AttentionShape shape;
    shape.heads = 32, shape.queries = 1, shape.keys = length, shape.head_size = 128, shape.dtype = dtype;
    const auto operands = std::make_shared<AttentionOperands>(shape);
    AttentionInputs in = operands->inputs();
    auto table = std::make_shared<std::vector<std::int32_t>>(static_cast<std::size_t>(length / block_rows));
    auto used = std::make_shared<int64_t>(length);
    if (paged) {  // blocks in an order that strides through the pool
        const auto blocks = static_cast<int64_t>(table->size());
        for (int64_t i = 0; i < blocks; ++i)
            (*table)[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i * 37 % blocks);
        const auto pool = {blocks, block_rows, shape.key_heads, shape.head_size};
        in.k = Tensor(in.k.data(), dtype, pool), in.v = Tensor(in.v.data(), dtype, pool);
        in.block_table = Tensor(table->data(), DType::i32, {1, blocks});
        in.cache_seqlens = Tensor(used.get(), DType::i64, {1});
    }
    Problem problem;
    problem.limit = Limit::read;
    problem.work = static_cast<double>(operands->k.bytes() + operands->v.bytes());
    problem.call = [operands, in, table, used](const Execution& execution) {
        attention_forward(in, operands->outputs(), {}, execution);
    };
    return problem;
}

std::vector<Entry> attention_entries() {
    std::vector<Entry> entries;
    const auto add = [&entries](const std::string& name, AttentionShape shape) {
        for (const DType dtype : {DType::f32, DType::bf16})
            for (const int64_t size : {64, 128}) {
                shape.dtype = dtype, shape.head_size = size;
                entries.push_back({"attention " + name + " " + type_name(dtype) + " D" + std::to_string(size),
                                   [shape] { return make_attention(shape); }});
            }
    };
    add("forward", {});
    add("forward causal", {.causal = Causal::top_left});
    add("forward mask", {.extra = Extra::mask});
    add("forward bias", {.extra = Extra::bias});
    add("forward window 256", {.causal = Causal::top_left, .window = 256});
    add("backward", {.pass = Pass::backward});
    add("backward causal", {.causal = Causal::top_left, .pass = Pass::backward});
    add("backward bias", {.extra = Extra::bias, .pass = Pass::backward});
    add("backward dbias", {.extra = Extra::bias, .pass = Pass::backward_bias});
    add("backward dbias [1,H,1,S]", {.extra = Extra::row_bias, .pass = Pass::backward_bias});
    for (const DType dtype : {DType::f32, DType::bf16})
        for (const bool paged : {false, true})
            entries.push_back({std::string("attention decode ") + (paged ? "paged " : "") + type_name(dtype) + " D128",
                               [dtype, paged] { return make_attention_decode(32768, dtype, paged); }});
    return entries;
}

}  // namespace softdelta::cli

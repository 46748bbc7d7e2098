// GGML_OP_SSM_SCAN in Mamba-2's form, a decay per head. Shapes as ggml writes them, fastest first: states [K, V, H,
// pool], x [V, H, T, N], dt [H, T, N], A [1, H], B and C [K, G, T, N], ids [N]: where in the pool a sequence begins.
// The result holds y [V, H, T, N] and then `slots` states [K, V, H, N] (delta_rule.h).
//
// It is simple_gla: q = C, k = B, d = softplus(dt), v = d·x, g = d·A.
#include <softdelta/softdelta.h>

#include <algorithm>
#include <cmath>

#include "operations/delta_rule.h"
#include "operations/operations.h"
#include "operations/thresholds.h"
#include "operations/view.h"

namespace softdelta_ggml {

namespace {

struct Node {
    const ggml_tensor *states, *x, *dt, *decay, *b, *c, *ids;
    std::int64_t slots, key_size, value_size, heads, groups, tokens, sequences;
    float *y, *last;  // last: [slots, sequences, heads, value_size, key_size]

    explicit Node(const ggml_tensor* op)
        : states(op->src[0]),
          x(op->src[1]),
          dt(op->src[2]),
          decay(op->src[3]),
          b(op->src[4]),
          c(op->src[5]),
          ids(op->src[6]) {
        slots = ggml_get_op_params_i32(op, 0);
        key_size = states->ne[0];
        value_size = x->ne[0];
        heads = x->ne[1];
        groups = b->ne[1];
        tokens = x->ne[2];
        sequences = x->ne[3];
        y = static_cast<float*>(op->data);
        last = y + value_size * heads * tokens * sequences;
    }
    std::int64_t state_size() const { return heads * value_size * key_size; }
    float* slot(std::int64_t s) const { return last + s * sequences * state_size(); }
};

float softplus(float x) {
    return x > 20 ? x : std::log(1 + std::exp(x));  // as ggml has it
}

// Gates and values of tokens [begin, begin + count): rows of heads, sequence by sequence.
void expand(const Node& op, std::int64_t begin, std::int64_t count, Resources& resources) {
    const std::int64_t rows = op.sequences * count;
    resources.gates.resize(static_cast<std::size_t>(rows * op.heads));
    resources.values.resize(static_cast<std::size_t>(rows * op.heads * op.value_size));
    const auto* decay = static_cast<const float*>(op.decay->data);
    float *gates = resources.gates.data(), *values = resources.values.data();
#pragma omp parallel for num_threads(resources.threads) schedule(static)
    for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t n = i / count, t = begin + i % count;
        const auto* dt = reinterpret_cast<const float*>(row(op.dt, t, n, 0));
        for (std::int64_t h = 0; h < op.heads; ++h) {
            const float d = softplus(dt[h]);
            const auto* x = reinterpret_cast<const float*>(row(op.x, h, t, n));
            float* value = values + (i * op.heads + h) * op.value_size;
            gates[i * op.heads + h] = d * decay[h];
            for (std::int64_t j = 0; j < op.value_size; ++j) value[j] = d * x[j];
        }
    }
}

// States of the sequences: where the first lies, and how far it is to the next.
struct States {
    float* data;
    std::int64_t stride;
};

// Those that sequences begin from: where they are in the pool, or a copy in `to` where they lie in no order.
States first_states(const Node& op, float* to) {
    const auto* ids = static_cast<const std::int32_t*>(op.ids->data);
    const std::int64_t step = op.sequences > 1 ? ids[1] - ids[0] : 0;
    const auto at = [&](std::int64_t n) { return reinterpret_cast<float*>(row(op.states, 0, 0, ids[n])); };
    bool ordered = step >= 0;
    for (std::int64_t n = 1; n < op.sequences && ordered; ++n) ordered = ids[n] == ids[0] + n * step;
    if (ordered) return {at(0), step * stride(op.states, 3)};
    for (std::int64_t n = 0; n < op.sequences; ++n) std::copy_n(at(n), op.state_size(), to + n * op.state_size());
    return {to, op.state_size()};
}

// Tokens [begin, begin + count) from one state to the next.
std::string run(const Node& op, std::int64_t begin, std::int64_t count, const States& from, float* to,
                Resources& resources) {
    expand(op, begin, count, resources);
    const std::int64_t n = op.sequences, values = op.heads * op.value_size;
    const auto keys = [&](const ggml_tensor* t) {
        return View(row(t, 0, begin, 0), f32, {n, count, op.groups, op.key_size},
                    {stride(t, 3), stride(t, 2), stride(t, 1), 1});
    };
    const auto states = [&](const States& x) {
        return View(x.data, f32, {n, op.heads, op.value_size, op.key_size},
                    {x.stride, op.value_size * op.key_size, op.key_size, 1});
    };
    View q = keys(op.c), k = keys(op.b), initial = states(from), final = states({to, op.state_size()});
    View v(resources.values.data(), f32, {n, count, op.heads, op.value_size},
           {count * values, values, op.value_size, 1});
    View g(resources.gates.data(), f32, {n, count, op.heads}, {count * op.heads, op.heads, 1});
    View o(op.y + begin * values, f32, {n, count, op.heads, op.value_size},
           {op.tokens * values, values, op.value_size, 1});
    softdelta_delta_inputs in = softdelta_delta_inputs_default();
    in.q = q.get();
    in.k = k.get();
    in.v = v.get();
    in.g = g.get();
    in.initial_state = initial.get();
    softdelta_delta_options options = softdelta_delta_options_default(SOFTDELTA_RULE_SIMPLE_GLA);
    options.scale = 1;
    options.state_v_first = 1;
    return delta_forward(in, o.out(), final.out(), options, resources.threads);
}

}  // namespace

Support ssm_scan_support(const ggml_tensor* op) {
    const Node x(op);
    for (const ggml_tensor* t : {x.states, x.x, x.dt, x.decay, x.b, x.c})
        if (t->type != GGML_TYPE_F32 || !is_plain(t)) return {};
    const bool mamba2 = x.decay->ne[0] == 1 && x.heads % x.groups == 0 && x.tokens > 0;
    return {mamba2, mamba2 && x.tokens >= scan_tokens};
}

std::string compute_ssm_scan(const ggml_tensor* op, Resources& resources) {
    const Node x(op);
    const std::int64_t numbers = x.sequences * x.heads * x.value_size;
    const std::int64_t most = std::max(key_block, expanded_numbers / numbers / key_block * key_block);
    States from{};
    return run_into_slots(x.tokens, x.slots, most, [&](std::int64_t begin, std::int64_t count, std::int64_t slot) {
        float* to = x.slot(slot);
        if (begin == 0) from = first_states(x, to);
        std::string error = run(x, begin, count, from, to, resources);
        from = {to, x.state_size()};
        return error;
    });
}

}  // namespace softdelta_ggml

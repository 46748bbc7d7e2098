// GGML_OP_GATED_DELTA_NET, shapes as ggml writes them, fastest first: q, k [S, Hk, T, N'], v [S, H, T, N], g [1 or S,
// H, T, N], beta [1, H, T, N], state [S, S, H, N]. The result holds o [S, H, T, N] and then `slots` states [S, S, H, N]
// (delta_rule.h).
//
// ggml gives value head h the keys of head h mod Hk, which the library calls tiled.
#include <softdelta/softdelta.h>

#include <cmath>

#include "operations/delta_rule.h"
#include "operations/operations.h"
#include "operations/thresholds.h"
#include "operations/view.h"

namespace softdelta_ggml {

namespace {

struct Node {
    const ggml_tensor *q, *k, *v, *g, *beta, *state;
    std::int64_t slots, size, heads, key_heads, tokens, sequences;
    float* o;
    float* states;  // [slots, sequences, heads, S, S]

    explicit Node(const ggml_tensor* op)
        : q(op->src[0]), k(op->src[1]), v(op->src[2]), g(op->src[3]), beta(op->src[4]), state(op->src[5]) {
        slots = ggml_get_op_params_i32(op, 0);
        size = v->ne[0];
        heads = v->ne[1];
        key_heads = q->ne[1];
        tokens = v->ne[2];
        sequences = v->ne[3];
        o = static_cast<float*>(op->data);
        states = o + size * heads * tokens * sequences;
    }
    bool channel_gate() const { return g->ne[0] == size; }
    std::int64_t state_size() const { return size * size; }
    float* slot(std::int64_t s) const { return states + s * sequences * heads * state_size(); }
};

// Sequences that share their queries and keys.
struct Part {
    std::int64_t sequence, sequences, key_sequence;
    bool one_key_sequence;  // for all of them
};

// Tokens [begin, begin + count) of a part, from one state to the next.
std::string run(const Node& op, const Part& part, std::int64_t begin, std::int64_t count, const float* from,
                std::int64_t from_stride, float* to, int threads) {
    const std::int64_t heads = op.heads, n = part.sequences, s = op.size;
    const auto keys = [&](const ggml_tensor* t) {
        return View(row(t, 0, begin, part.key_sequence), f32, {n, count, op.key_heads, s},
                    {part.one_key_sequence ? 0 : stride(t, 3), stride(t, 2), stride(t, 1), 1});
    };
    const auto state = [&](const float* data, std::int64_t sequence_stride) {
        return View(const_cast<float*>(data) + part.sequence * sequence_stride, f32, {n, heads, s, s},
                    {sequence_stride, op.state_size(), s, 1});
    };
    View q = keys(op.q), k = keys(op.k);
    View v(row(op.v, 0, begin, part.sequence), f32, {n, count, heads, s},
           {stride(op.v, 3), stride(op.v, 2), stride(op.v, 1), 1});
    char* gates = row(op.g, 0, begin, part.sequence);
    View g = op.channel_gate()
                 ? View(gates, f32, {n, count, heads, s}, {stride(op.g, 3), stride(op.g, 2), stride(op.g, 1), 1})
                 : View(gates, f32, {n, count, heads}, {stride(op.g, 3), stride(op.g, 2), stride(op.g, 1)});
    View beta(row(op.beta, 0, begin, part.sequence), f32, {n, count, heads},
              {stride(op.beta, 3), stride(op.beta, 2), stride(op.beta, 1)});
    const std::int64_t row = s * op.heads;
    View o(op.o + (part.sequence * op.tokens + begin) * row, f32, {n, count, heads, s}, {op.tokens * row, row, s, 1});
    View initial = state(from, from_stride), final = state(to, op.heads * op.state_size());

    softdelta_delta_inputs in = softdelta_delta_inputs_default();
    in.q = q.get();
    in.k = k.get();
    in.v = v.get();
    in.g = g.get();
    in.beta = beta.get();
    in.initial_state = initial.get();
    softdelta_delta_options options =
        softdelta_delta_options_default(op.channel_gate() ? SOFTDELTA_RULE_KDA : SOFTDELTA_RULE_GATED_DELTA);
    options.scale = 1 / std::sqrt(static_cast<float>(s));
    options.head_order = SOFTDELTA_HEAD_ORDER_TILED;
    options.state_v_first = 1;  // ggml keeps the state transposed: row j is column j of S
    return delta_forward(in, o.out(), final.out(), options, threads);
}

// In one call, or in steps of a few where tokens are few in all.
std::string run_slots(const Node& op, const Part& part, int threads) {
    const float* from = static_cast<const float*>(op.state->data);
    std::int64_t from_stride = stride(op.state, 3);
    const std::int64_t most = op.tokens <= delta_stepped_tokens ? delta_step_tokens : op.tokens;
    return run_into_slots(op.tokens, op.slots, most, [&](std::int64_t begin, std::int64_t count, std::int64_t slot) {
        float* to = op.slot(slot);
        std::string error = run(op, part, begin, count, from, from_stride, to, threads);
        from = to;
        from_stride = op.heads * op.state_size();
        return error;
    });
}

}  // namespace

Support gated_delta_net_support(const ggml_tensor* op) {
    const Node x(op);
    for (const ggml_tensor* t : {x.q, x.k, x.v, x.g, x.beta, x.state})
        if (t == nullptr || t->type != GGML_TYPE_F32 || !is_plain(t)) return {};
    const bool shapes = x.q->ne[0] == x.size && x.k->ne[1] == x.key_heads && x.k->ne[3] == x.q->ne[3] &&
                        x.heads % x.key_heads == 0 && x.sequences % x.q->ne[3] == 0 && x.tokens > 0;
    return {shapes, shapes && x.tokens >= delta_tokens};
}

std::string compute_gated_delta_net(const ggml_tensor* op, Resources& resources) {
    const Node x(op);
    const std::int64_t batches = x.q->ne[3], sharing = x.sequences / batches;
    const std::int64_t parts = sharing == 1 ? 1 : batches;
    for (std::int64_t i = 0; i < parts; ++i) {
        const Part part{i * sharing, x.sequences / parts, i, sharing > 1};
        if (std::string error = run_slots(x, part, resources.threads); !error.empty()) return error;
    }
    return "";
}

}  // namespace softdelta_ggml

// dq, dk, dp of a key head: summed over the value heads that read it, then stored through l2norm.
#pragma once

#include "engines/cpu/kernels/delta_rule/backward/operands.h"
#include "engines/cpu/kernels/delta_rule/backward/results.h"
#include "engines/cpu/kernels/delta_rule/backward/tokens.h"
#include "engines/cpu/kernels/delta_rule/backward/unfold.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

template <class P>
class KeySums {
  public:
    KeySums(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& scratch)
        : q(scratch.take<float>(sizes.rows * sizes.key_row())),
          k(scratch.take<float>(sizes.rows * sizes.key_row())),
          p(scratch.take<float>(sizes.rows * sizes.key_row())),
          heads_(heads),
          row_(sizes.key_row()) {}

    // The gradients of a value head's chunk; dβ gets its part in the key that erases. first: of the group.
    void add_chunk(Index n, const KeyChunk<P>& keys, const float* beta, bool first, const ChunkGradients<P>& d) const {
        const Index columns = round_up(heads_.key_size, W);
        for (Index i = 0; i < n; ++i) {
            const Index row = i * d.key_row;
            for (Index m = 0; !first && m < columns; m += W) {
                store(q + row + m, load(q + row + m) + load(d.dq + row + m));
                store(k + row + m, load(k + row + m) + load(d.dk + row + m));
            }
            if (!heads_.erases()) continue;
            d.dbeta[i] += dot(keys.p + i * keys.row, d.de + row, columns);
            float* dp = heads_.rule.own_p ? p : k;
            const bool starts = heads_.rule.own_p && first;
            for (Index m = 0; m < columns; m += W) {
                const F x = splat(beta[i]) * load(d.de + row + m);
                store(dp + row + m, starts ? x : load(dp + row + m) + x);
            }
        }
    }

    // The same of the token form.
    void add_tokens(Index n, bool first, const TokenBackward<P>& tokens) const {
        const Index K = heads_.key_size;
        const auto add = [first](double x, float& to) {
            to = static_cast<float>(first ? x : x + static_cast<double>(to));
        };
        for (Index i = 0; i < n; ++i) {
            const Index row = i * row_;
            for (Index m = K; m < round_up(K, W); ++m)  // whole vectors are read
                q[row + m] = k[row + m] = p[row + m] = 0;
            for (Index m = 0; m < K; ++m) {
                add(tokens.dq(i)[m], q[row + m]);
                add(heads_.rule.own_p ? tokens.dk(i)[m] : tokens.dk(i)[m] + tokens.dp(i)[m], k[row + m]);
                if (heads_.rule.own_p) add(tokens.dp(i)[m], p[row + m]);
            }
        }
    }

    void store_gradients(const Tokens& at, const DeltaGradients& grad, float* buffer) const {
        const auto store_one = [&](const DeltaRows& given, const DeltaRows& t, float* dy) {
            store_key_gradient(given, t, at, heads_.key_size, heads_.l2norm, dy, row_, buffer);
        };
        store_one(heads_.q, grad.dq, q);
        store_one(heads_.k, grad.dk, k);
        if (heads_.rule.own_p) store_one(heads_.p, grad.dp, p);
    }

    float *q, *k, *p;  // [n, K]

  private:
    const DeltaHeads& heads_;
    Index row_;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

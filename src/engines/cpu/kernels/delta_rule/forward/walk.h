// The walk of a chunk of f32: the recurrence itself, many value columns at a time, and each number of the state read
// and written once for a token. For few keys it takes fewer flops than products of chunks, and for tokens of two steps
// of which the second erases nothing (RWKV-7) half of them:
//     S ← e^g∘S + k₀ u₀ᵀ + k₁ u₁ᵀ,   o = S ᵀ(scale·q),   the next token's u₀ = β(v − Sᵀp)
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/prepare.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Whether chunks of these heads are walked. Not those of KDA and GDN-2, whose keys are mostly 128.
template <class P>
bool is_walked(const DeltaHeads& heads) {
    constexpr Index few_keys = 64;
    return P::depth == 1 && heads.has_channel_gate() && heads.rule.erase != core::Erase::from_decayed_state &&
           (heads.key_size <= few_keys || (heads.erases() && heads.q.steps > 1));
}

template <class P>
class Walk {
  public:
    Walk(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& scratch) : heads_(heads), row_(sizes.key_row()) {
        if (!is_walked<P>(heads)) return;
        for (float** x : {&decay_, &read_, &erase_}) *x = scratch.take<float>(sizes.rows * row_);
        for (float** x : {&zeros_, &ones_}) *x = scratch.take<float>(row_);
        erases_ = scratch.take<bool>(sizes.rows);
    }

    // Rows of what reads and decays, of these tokens.
    void prepare(const Tokens& at, const KeyChunk<P>& keys, const GateChunk& gates) const {
        const Index K = heads_.key_size;
        for (Index m = 0; m < K; m += W) store(zeros_ + m, splat(0.0F)), store(ones_ + m, splat(1.0F));
        for (Index i = 0; i < at.n; ++i) {
            const Index row = i * row_;
            for (Index m = 0; m < K && heads_.g.has(at.begin + i); m += W)
                store(decay_ + row + m,
                      exp_of_sum(load(gates.g + row + m),
                                 gates.g_rest == nullptr ? splat(0.0F) : load(gates.g_rest + row + m)));
            for (Index m = 0; m < K && heads_.reads() && heads_.q.has(at.begin + i); m += W)
                store(read_ + row + m, splat(heads_.scale) * load(keys.q + row + m));
            erases_[i] = heads_.erases() && prepare_erase(keys.p + row, gates.beta[i], erase_ + row);
        }
    }

    // Value columns of `part`, whose rows β∘v lie under the state; they become U. o: [n, V], null: not wanted.
    void run(const Tokens& at, const KeyChunk<P>& keys, Range part, const StatePanels<P>& state, float* o, Index o_row,
             Prefetch& ahead) const {
        constexpr int most = vector_registers >= 32 ? 4 : 2;
        const Index blocks = (part.end - part.begin + most * W - 1) / (most * W), sweeps = (at.n + 1) / 2 * blocks;
        const Index lines = ahead.lines() / sweeps + 1;
        for (Index c = part.begin; c < part.end;) {
            const auto first = state.panel(c);
            Block block{{first.state, first.state},
                        {first.rows, first.rows},
                        first.width,
                        o == nullptr ? nullptr : o + c,
                        o_row};
            if (c + 2 * NR <= part.end && most == 4) {
                const auto second = state.panel(c + NR);
                block.state[1] = second.state, block.rows[1] = second.rows;
                run_block<most>(at, keys, block, ahead, lines);
                c += 2 * NR;
            } else if (first.width == NR) {
                run_block<2>(at, keys, block, ahead, lines);
                c += NR;
            } else {
                run_block<1>(at, keys, block, ahead, lines);
                c += W;
            }
        }
    }

  private:
    // Some vectors of value columns: two of each panel.
    struct Block {
        float *state[2], *rows[2];
        Index width;
        float* o;
        Index o_row;

        SOFTDELTA_INLINE float* at(float* const (&x)[2], Index i, int n) const {
            return x[n / 2] + i * width + n % 2 * W;
        }
    };

    // Gives whether p is not 0.
    bool prepare_erase(const float* p, float beta, float* out) const {
        Mask is_zero = splat(0.0F) <= splat(0.0F);
        for (Index m = 0; m < heads_.key_size; m += W) {
            is_zero = is_zero & (abs(load(p + m)) <= splat(0.0F));
            store(out + m, splat(-beta) * load(p + m));
        }
        return !all(is_zero);
    }

    template <int vectors>
    void run_block(const Tokens& at, const KeyChunk<P>& keys, const Block& x, Prefetch& ahead, Index lines) const {
        if (erases_[0]) erase<vectors>(x);
        for (Index i = 0, end = 0; i < at.n; i = end) {
            ahead.next(lines);
            // a step that nothing is read before goes with the one before it
            const bool two = i + 1 < at.n && !erases_[i + 1] && !heads_.q.has(at.begin + i);
            end = i + (two ? 2 : 1);
            const Sweep of{heads_.g.has(at.begin + i) ? decay_ + i * row_ : ones_, keys.k + i * row_,
                           heads_.reads() && heads_.q.has(at.begin + end - 1) ? read_ + (end - 1) * row_ : zeros_,
                           end < at.n && erases_[end] ? erase_ + end * row_ : nullptr};
            if (two)
                heads_.erases() ? sweep<vectors, 2, true>(x, i, of) : sweep<vectors, 2, false>(x, i, of);
            else
                heads_.erases() ? sweep<vectors, 1, true>(x, i, of) : sweep<vectors, 1, false>(x, i, of);
        }
    }

    // Of the first row.
    template <int vectors>
    void erase(const Block& x) const {
        F u[vectors];
        for (int n = 0; n < vectors; ++n) u[n] = load(x.at(x.rows, 0, n));
        for (Index m = 0; m < heads_.key_size; ++m)
#pragma GCC unroll 4
            for (int n = 0; n < vectors; ++n) u[n] = fma(splat(erase_[m]), load(x.at(x.state, m, n)), u[n]);
        for (int n = 0; n < vectors; ++n) store(x.at(x.rows, 0, n), u[n]);
    }

    // What a sweep multiplies with, [K] each: of its first row the decay and the key, of its last one what reads, and
    // of the row behind it what erases, or null.
    struct Sweep {
        const float *decay, *key, *read, *erase;
    };

    template <int vectors, int rows, bool erases>
    void sweep(const Block& x, Index i, const Sweep& of) const {
        constexpr Index width = vectors == 1 ? W : NR;
        F u[rows][vectors], o[vectors], next[vectors];
        for (int n = 0; n < vectors; ++n) {
            for (int r = 0; r < rows; ++r) u[r][n] = load(x.at(x.rows, i + r, n));
            o[n] = splat(0.0F);
            if (erases) next[n] = of.erase == nullptr ? splat(0.0F) : load(x.at(x.rows, i + rows, n));
        }
        const float *decays = of.decay, *keys = of.key, *second = of.key + (rows - 1) * row_, *reads = of.read;
        const float* erased = of.erase == nullptr ? zeros_ : of.erase;
        float *state = x.state[0], *beside = x.state[1];
        const Index K = heads_.key_size;
#pragma GCC unroll 1
        for (Index m = 0; m < K; ++m, state += width, beside += width) {
            const F decay = splat(decays[m]), key = splat(keys[m]), read = splat(reads[m]);
            const F other = rows == 2 ? splat(second[m]) : key, p = erases ? splat(erased[m]) : key;
#pragma GCC unroll 4
            for (int n = 0; n < vectors; ++n) {
                float* at = (n < 2 ? state : beside) + n % 2 * W;
                F s = fma(key, u[0][n], decay * load(at));
                if (rows == 2) s = fma(other, u[rows - 1][n], s);
                store(at, s);
                o[n] = fma(read, s, o[n]);
                if (erases) next[n] = fma(p, s, next[n]);
            }
        }
        for (int n = 0; n < vectors; ++n) {
            if (x.o != nullptr) store(x.o + (i + rows - 1) * x.o_row + n * W, o[n]);
            if (erases && of.erase != nullptr) store(x.at(x.rows, i + rows, n), next[n]);
        }
    }

    const DeltaHeads& heads_;
    Index row_;
    float *decay_ = nullptr, *read_ = nullptr, *erase_ = nullptr;  // [n, K]: e^g, scale·q, −β p
    float *zeros_ = nullptr, *ones_ = nullptr;                     // [K]
    bool* erases_ = nullptr;                                       // [n]
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

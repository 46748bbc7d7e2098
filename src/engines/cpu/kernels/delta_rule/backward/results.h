// Between the gradients of a chunk and the caller's tensors: dO comes in, dv goes out. dq, dk and dp are summed over
// the value heads that read a key head. All pass through l2norm, the raw gate and β's logits (docs/math.md,
// "Preparation").
#pragma once

#include "engines/cpu/kernels/delta_rule/backward/tokens.h"
#include "engines/cpu/kernels/delta_rule/backward/unfold.h"
#include "engines/cpu/kernels/delta_rule/chunk/gate.h"
#include "engines/cpu/kernels/delta_rule/chunk/keys.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Σ y² and Σ y∘d in f64, over whole vectors.
struct RowSums {
    double square, along;
};
inline RowSums sums_in_double(const float* y, const float* d, Index n) {
    D squares[2] = {D(0.0), D(0.0)}, products[2] = {D(0.0), D(0.0)};
    for (Index m = 0; m < n; m += W)
        for (Index part = 0; part < 2; ++part) {
            const D own = load_double(y + m + part * double_width);
            squares[part] = squares[part] + own * own;
            products[part] = products[part] + own * load_double(d + m + part * double_width);
        }
    alignas(64) double lanes[2][double_width];
    (squares[0] + squares[1]).store_aligned(lanes[0]);
    (products[0] + products[1]).store_aligned(lanes[1]);
    for (Index half = double_width / 2; half > 0; half /= 2)
        for (Index i = 0; i < half; ++i) {
            lanes[0][i] += lanes[0][i + half];
            lanes[1][i] += lanes[1][i + half];
        }
    return {lanes[0][0], lanes[1][0]};
}

// Sums over the tokens of a value head, in f64: dA_log, dg_gamma, of the bias [K|1].
constexpr Index gate_sums(Index channels) {
    return 2 + channels;
}

// dg becomes dx, W of them: times the slope dg/dx of raw gates x + bias. In f64: a slope may be beyond f32 where the
// gate wipes the state, and dg is 0.
inline void multiply_by_gate_slopes(const DeltaHeads& heads, double rate, const float* x, const float* bias,
                                    float* dg) {
    const D speed(rate), scale(heads.lower_bound * rate), none(0.0);
    alignas(64) double slope[W];
    for (Index i = 0; i < W; ++i) slope[i] = static_cast<double>(x[i]) + static_cast<double>(bias[i]);
    for (Index i = 0; i < W; i += double_width) {
        const D y = D::load_aligned(slope + i);
        if (heads.raw_gate == core::RawGate::softplus)
            (none - speed * sigmoid(y)).store_aligned(slope + i);
        else
            (scale * sigmoid(speed * y) * sigmoid(none - speed * y)).store_aligned(slope + i);
    }
    for (Index i = 0; i < W; ++i) dg[i] = static_cast<float>(static_cast<double>(dg[i]) * slope[i]);
}

// The way from the gates of a value head to what was given.
class GateAdjoint {
  public:
    // bias: [K], a vector at least; buffer: as much, and n.
    GateAdjoint(const DeltaHeads& heads, const Tokens& at, float* bias, float* buffer, double* sums)
        : heads_(heads),
          at_(at),
          raw_(heads.raw_gate != core::RawGate::none),
          rate_(gate_rate(heads, at.head)),
          bias_(bias),
          buffer_(buffer),
          A_log_sum_(sums),
          gate_sum_(sums + 1),
          bias_sums_(sums + 2) {
        const Index channels = heads.channels();
        load_parameters(heads.gate_bias, at.head, channels, bias);
    }

    // g, dg: [n], or [n, K] in rows of `row`; dg is overwritten.
    void store_to(const DeltaRows& t, const float* g, float* dg, Index row) {
        const Index size = heads_.has_channel_gate() ? row : 1;
        for (Index i = 0; heads_.g.steps > 1 && i < at_.n; ++i)  // steps without a gate
            for (Index m = 0; !heads_.g.has(at_.begin + i) && m < size; ++m) dg[i * size + m] = 0;
        if (heads_.has_channel_gate())
            store_channels(t, g, dg, row);
        else
            store_shared(t, g, dg);
    }

  private:
    static F first_lanes(F x, Index count) { return select(iota() < splat(static_cast<float>(count)), x, splat(0.0F)); }

    // W elements: dg becomes dx. A gate that wipes the state sends nothing to A_log, however large it is.
    SOFTDELTA_INLINE F pass(float* dg, const float* g, const float* x, const float* bias, Index n) {
        const F d = first_lanes(load(dg), n);
        store(dg, d);
        multiply_by_gate_slopes(heads_, rate_, x, bias, dg);
        const F dx = load(dg);
        if (heads_.raw_gate == core::RawGate::softplus) return select(d == splat(0.0F), splat(0.0F), d * load(g));
        return select(dx == splat(0.0F), splat(0.0F), dx * (load(x) + load(bias)));
    }

    void store_shared(const DeltaRows& t, const float* g, float* dg) {
        const Index n = at_.n;
        F of_A_log = splat(0.0F), all = splat(0.0F);
        if (raw_) {
            alignas(64) float bias[W];
            store(bias, splat(bias_[0]));
            load_numbers(heads_.g, at_, buffer_);
            for (Index i = 0; i < n; i += W) of_A_log = of_A_log + pass(dg + i, g + i, buffer_ + i, bias, n - i);
        }
        for (Index i = 0; i < n; i += W) all = all + first_lanes(load(dg + i), n - i);
        *A_log_sum_ += static_cast<double>(sum(of_A_log));
        *gate_sum_ += static_cast<double>(sum(all));
        *bias_sums_ += static_cast<double>(sum(all));
        if (t.data != nullptr) store_numbers(dg, t, at_);
    }

    void store_channels(const DeltaRows& t, const float* g, float* dg, Index row) {
        const Index n = at_.n, channels = heads_.key_size;
        if (raw_) {
            F of_A_log = splat(0.0F);
            for (Index i = 0; i < n; ++i) {
                load_token(heads_.g, at_, i, channels, buffer_);
                for (Index m = 0; m < channels; m += W)
                    of_A_log = of_A_log + pass(dg + i * row + m, g + i * row + m, buffer_ + m, bias_ + m, channels - m);
            }
            *A_log_sum_ += static_cast<double>(sum(of_A_log));
            for (Index m = 0; m < channels; m += W) {
                F all = splat(0.0F);
                for (Index i = 0; i < n; ++i) all = all + load(dg + i * row + m);
                store(buffer_, all);
                for (Index j = 0; j < W && m + j < channels; ++j) bias_sums_[m + j] += static_cast<double>(buffer_[j]);
            }
        }
        if (t.data == nullptr) return;
        prefetch_first(t, at_, channels);
        for (Index i = 0; i < n; ++i) {
            prefetch_ahead(t, at_, i, channels);
            store_token(dg + i * row, t, at_, i, channels);
        }
    }

    const DeltaHeads& heads_;
    Tokens at_;
    bool raw_;
    double rate_;
    float *bias_, *buffer_;
    double *A_log_sum_, *gate_sum_, *bias_sums_;
};

// The gradients of a few key heads and their value heads: what is given of them is loaded, what is wanted is stored.
// ChunkGradients are those of one value head's chunk.
template <class P>
class GradientRows {
  public:
    // buffer: whole vectors of K and n floats, of n twice.
    GradientRows(const DeltaHeads& heads, const DeltaGradients& grad, const ChunkSizes<P>& sizes, float* buffer,
                 Scratch& scratch)
        : heads_(heads), grad_(grad), buffer_(buffer), row_(sizes.key_row()) {
        for (float** sum : {&dq_, &dk_, &dp_}) *sum = scratch.take<float>(sizes.rows * row_);
    }

    // dO as panels and as A; zeros when not given.
    void load_output(const Tokens& at, const ChunkGradients<P>& d) const {
        const DeltaRows& d_o = grad_.d_o;
        const Index V = heads_.value_size;
        for (Index c = 0; c < d.columns; c += W) store(d.v + c, splat(0.0F));
        prefetch_first(d_o, at, V);
        for (Index i = 0; i < at.n; ++i) {
            prefetch_ahead(d_o, at, i, V);
            if (d_o.data != nullptr) load_token(d_o, at, i, V, d.v);
            for (Index c = 0; c < d.columns; c += NR) {
                const auto panel = d.panel(c, at.n);
                for (Index m = 0; m < panel.width; m += W) {
                    const F x = load(d.v + c + m);
                    store(panel.d_o + i * panel.width + m, x);
                    store_a(d.d_o + i * d.value_row + (c + m) / P::depth, x, P{});
                }
            }
        }
    }

    // U of the forward pass as A.
    void load_written(const DeltaRows& u, const Tokens& at, const ChunkGradients<P>& d) const {
        const Index V = heads_.value_size;
        prefetch_first(u, at, V);
        for (Index i = 0; i < at.n; ++i) {
            prefetch_ahead(u, at, i, V);
            load_token(u, at, i, V, d.v);
            for (Index c = 0; c < d.columns; c += W) store_a(d.U + i * d.value_row + c / P::depth, load(d.v + c), P{});
        }
    }

    // dR as A, dv = β∘dR, and the part of dβ in β∘v.
    void store_values(const Tokens& at, const float* beta, const ChunkGradients<P>& d) const {
        const DeltaRows &v = heads_.v, &dv = grad_.dv;
        const Index V = heads_.value_size;
        prefetch_first(v, at, V);
        prefetch_first(dv, at, V);
        for (Index i = 0; i < at.n; ++i) {
            prefetch_ahead(v, at, i, V);
            prefetch_ahead(dv, at, i, V);
            load_token(v, at, i, V, d.v);
            F along = splat(0.0F);
            for (Index c = 0; c < d.columns; c += NR) {
                const auto panel = d.panel(c, at.n);
                for (Index m = 0; m < panel.width; m += W) {
                    const F x = load(panel.dR + i * panel.width + m);
                    store_a(d.dR + i * d.value_row + (c + m) / P::depth, x, P{});
                    along = fma(x, load(d.v + c + m), along);
                    store(d.v + c + m, splat(beta[i]) * x);
                }
            }
            d.dbeta[i] = sum(along);
            if (dv.data != nullptr) store_token(d.v, dv, at, i, V);
        }
    }

    // Where the first value head of a group makes dq and dk: nothing is added to them yet.
    float* first_dq() const { return dq_; }
    float* first_dk() const { return dk_; }

    // The gradients of a chunk of a value head, first: of its group. dβ gets its part in the key that erases.
    void add_chunk(Index n, const KeyChunk<P>& keys, const float* beta, bool first, const ChunkGradients<P>& d) const {
        const Index columns = round_up(heads_.key_size, W);
        for (Index i = 0; i < n; ++i) {
            const Index row = i * d.key_row;
            for (Index m = 0; !first && m < columns; m += W) {
                store(dq_ + row + m, load(dq_ + row + m) + load(d.dq + row + m));
                store(dk_ + row + m, load(dk_ + row + m) + load(d.dk + row + m));
            }
            if (!heads_.erases()) continue;
            d.dbeta[i] += dot(keys.p + i * keys.row, d.de + row, columns);
            float* dp = heads_.rule.own_p ? dp_ : dk_;
            const bool starts = heads_.rule.own_p && first;
            for (Index m = 0; m < columns; m += W) {
                const F x = splat(beta[i]) * load(d.de + row + m);
                store(dp + row + m, starts ? x : load(dp + row + m) + x);
            }
        }
    }

    // The same of tokens that the token form has run; their dv is stored.
    void add_tokens(const Tokens& at, bool first, const TokenBackward<P>& tokens, const ChunkGradients<P>& d) const {
        const Index K = heads_.key_size;
        const auto add = [first](double x, float& to) {
            to = static_cast<float>(first ? x : x + static_cast<double>(to));
        };
        for (Index i = 0; i < at.n; ++i) {
            const Index row = i * row_;
            for (Index m = K; m < round_up(K, W); ++m)  // whole vectors are read
                dq_[row + m] = dk_[row + m] = dp_[row + m] = 0;
            double dg = 0;  // of all channels
            for (Index m = 0; m < K; ++m) {
                add(tokens.dq(i)[m], dq_[row + m]);
                add(heads_.rule.own_p ? tokens.dk(i)[m] : tokens.dk(i)[m] + tokens.dp(i)[m], dk_[row + m]);
                if (heads_.rule.own_p) add(tokens.dp(i)[m], dp_[row + m]);
                dg += tokens.dg(i)[m];
                if (heads_.has_channel_gate()) d.dg[i * d.key_row + m] = static_cast<float>(tokens.dg(i)[m]);
            }
            if (!heads_.has_channel_gate()) d.dg[i] = static_cast<float>(dg);
            d.dbeta[i] = static_cast<float>(tokens.dbeta(i));
            if (grad_.dv.data != nullptr) store_token(tokens.dv(i), grad_.dv, at, i, heads_.value_size);
        }
    }

    // dβ and dg of a value head's chunk, through the logits of β and the raw gate.
    void store_gates(const Tokens& at, const GateChunk& gates, const ChunkGradients<P>& d) const {
        store_beta(at, gates.beta, d.dbeta);
        GateAdjoint(heads_, at, gates.bias, buffer_, grad_.gate_sums + at.head * gate_sums(heads_.channels()))
            .store_to(grad_.dg, gates.g, d.dg, d.key_row);
    }

    // The sums over value heads of the units before, and those that the next one goes on from.
    void take_sums(const Tokens& at) const {
        for_each_sum(at, [](float* own, const float* relayed) { store(own, load(relayed)); });
    }
    void pass_sums(const Tokens& at) const {
        for_each_sum(at, [](const float* own, float* relayed) { store(relayed, load(own)); });
    }

    // dq, dk and dp of a key head's tokens, summed over its value heads.
    void store_keys(const Tokens& at, const KeyChunk<P>& keys) const {
        store_key(at, keys.q, keys.q_factor, keys.row, grad_.dq, dq_);
        store_key(at, keys.k, keys.k_factor, keys.row, grad_.dk, dk_);
        if (heads_.rule.own_p) store_key(at, keys.p, keys.p_factor, keys.row, grad_.dp, dp_);
    }

  private:
    // call(own, relayed): a vector of each.
    template <class Call>
    void for_each_sum(const Tokens& at, const Call& call) const {
        const DeltaRelay& relay = grad_.relay;
        float *const own[] = {dq_, dk_, dp_}, *const relayed[] = {relay.dq, relay.dk, relay.dp};
        for (Index sum = 0; sum < (heads_.rule.own_p ? 3 : 2); ++sum)
            for (Index i = 0; i < at.n; ++i)
                for (Index m = 0; m < heads_.key_size; m += W)
                    call(own[sum] + i * row_ + m, relayed[sum] + (at.begin + i) * relay.row + m);
    }

    // β = c σ(x): dx = dβ·β·σ(−x), where 1 − σ(x) would lose its digits.
    void store_beta(const Tokens& at, const float* beta, float* dbeta) const {
        if (grad_.dbeta.data == nullptr) return;
        if (heads_.raw_beta != core::RawBeta::none) {
            load_numbers(heads_.beta, at, buffer_);
            alignas(64) const float zero[W] = {};
            float* rest = buffer_ + round_up(at.n, W);
            for (Index i = 0; i < at.n; i += W) {
                in_double(
                    buffer_ + i, zero, [](D x) { return sigmoid(D(0.0) - x); }, rest + i, nullptr);
                store(dbeta + i, load(dbeta + i) * load(beta + i) * load(rest + i));
            }
        }
        store_numbers(dbeta, grad_.dbeta, at);
    }

    // What leads from dy to dx through y = x r, r = (Σx² + 1e-6)^-1/2, where y was rounded to f32 and made with factor
    // f instead of r. For x = y/f it is, with t = Σy² + 1e-6 f²,
    //     dx = f/√t (dy − y/t Σ dy∘y)
    // The difference may vanish: 1/t Σ dy∘y is kept in two parts.
    struct NormAdjoint {
        float factor, first, second;
    };
    static NormAdjoint through_norm(const float* y, float f, const float* dy, Index columns) {
        const RowSums sums = sums_in_double(y, dy, columns);
        const double own = static_cast<double>(f);
        const double sum = sums.square + 1e-6 * own * own;
        const double t = sum < 1e-300 ? 1e-300 : sum;  // 0 where f is: Σx² was beyond f32
        const double along = sums.along / t;
        const auto part = static_cast<float>(along);
        return {static_cast<float>(own / __builtin_sqrt(t)), -part,
                static_cast<float>(static_cast<double>(part) - along)};
    }

    // y: rows as they were multiplied, with l2norm by factors. dy [n, K] is overwritten.
    void store_key(const Tokens& at, const float* y, const float* factors, Index y_row, const DeltaRows& dx,
                   float* dy) const {
        if (dx.data == nullptr) return;
        const Index K = heads_.key_size, columns = round_up(K, W);
        prefetch_first(dx, at, K);
        NormAdjoint norm[largest_chunk];
        for (Index i = 0; heads_.l2norm && i < at.n; ++i)
            norm[i] = through_norm(y + i * y_row, factors[i], dy + i * row_, columns);
        for (Index i = 0; i < at.n; ++i) {
            float* d = dy + i * row_;
            prefetch_ahead(dx, at, i, K);
            if (heads_.l2norm) {
                const F factor = splat(norm[i].factor), first = splat(norm[i].first), second = splat(norm[i].second);
                for (Index m = 0; m < columns; m += W) {
                    const F own = load(y + i * y_row + m);
                    store(d + m, factor * fma(own, second, fma(own, first, load(d + m))));
                }
            }
            store_token(d, dx, at, i, K);
        }
    }

    const DeltaHeads& heads_;
    const DeltaGradients& grad_;
    float* buffer_;
    Index row_;
    float *dq_ = nullptr, *dk_ = nullptr, *dp_ = nullptr;  // [n, K] of a key head, summed over its value heads
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

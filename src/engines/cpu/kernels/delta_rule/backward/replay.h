// The states within a segment once more, from the one that enters it and the rows U that the forward pass kept:
//     S' = state_decay∘S + write_keyᵀ U
// Transposed at once, as the gradients of a chunk read them:
//     Uᵀ [V, n] · write_key [n, K] + S ᵀ with decayed columns → S'ᵀ [V, K]
// U is not made from these states: what is rounded here is not erased later, but decays with the gates alone. Where
// erasing makes states much smaller, that would be most of them:
//     |S| 10⁹ → 10⁵ → 1, each to a part in 10⁷; with U alone the last would be wrong by 10⁹·10⁻⁷
// Tokens then follow each other to the end of the segment, in gradients too: U has the rounding of the forward pass's
// own states, as many digits, and belongs to those alone.
#pragma once

#include "engines/cpu/kernels/delta_rule/backward/operands.h"
#include "engines/cpu/kernels/delta_rule/chunk/channel_gate.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Rows of a panel of keys: to ← decay∘from + A·B.
template <class P, int rows, int vectors>
[[gnu::noinline]] void replay_tile(MatrixA<P> a, const Element<P>* b, Index depth, const float* decay,
                                   const float* from, float* to) {
    F sums[rows][vectors];
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) sums[i][n] = splat(0.0F);
    accumulate_product<P, rows, vectors>(sums, a, b, depth);
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; ++n) {
            const Index at = (i * vectors + n) * W;
            store(to + at, fma(load(decay + n * W), load(from + at), sums[i][n]));
        }
}

template <class P>
using ReplayTile = void (*)(MatrixA<P>, const Element<P>*, Index, const float*, const float*, float*);

template <class P, int vectors, std::size_t... rows>
constexpr std::array<ReplayTile<P>, MR> replay_tiles(std::index_sequence<rows...>) {
    return {replay_tile<P, static_cast<int>(rows) + 1, vectors>...};
}

template <class P>
class Replay {
  public:
    Replay(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& scratch)
        : heads_(heads),
          columns_(round_up(heads.key_size, W)),
          values_(sizes.value_columns()),
          write_key_(scratch.take<Element<P>>(depth_of<P>(sizes.rows) * columns_)),
          U_(scratch.take<Element<P>>(depth_of<P>(sizes.rows) * values_)),
          rows_(scratch.take<float>(2 * values_)),
          decays_(scratch.take<float>(sizes.rows * W)),
          state_decay_(scratch.take<float>(columns_)),
          rounded_(scratch.take<float>(heads.group)) {}

    // A segment begins: the transposed state of a value head of the group.
    void begin(Index head_of_group, const float* state) { rounded_[head_of_group] = largest(state); }

    // After run() to a state: whether it is much smaller than what was rounded in this segment.
    bool loses_digits(Index head_of_group, const float* to) {
        const float left = largest(to);
        float& rounded = rounded_[head_of_group];
        rounded = max(rounded * largest_decay(), left);
        return heads_.erases() && rounded > most_lost * left;
    }

    // from, to: the transposed states before and after the tokens. k: their keys, normalised. `between` is called
    // between register tiles.
    template <class Between>
    void run(const Tokens& at, const KeyChunk<P>& keys, const GateChunk& gates, const DeltaRows& u, const float* from,
             float* to, Between&& between) {
        load_written(u, at);
        if (heads_.has_channel_gate())
            fold_channels(at.n, keys, gates);
        else
            fold_shared(at.n, keys, gates);
        static constexpr auto wide = replay_tiles<P, 2>(std::make_index_sequence<MR>{});
        static constexpr auto narrow = replay_tiles<P, 1>(std::make_index_sequence<MR>{});
        const Index V = heads_.value_size, depth = depth_of<P>(at.n);
        for (Index m = 0; m < columns_; m += NR) {
            const Index width = micropanel_width(m, columns_);
            const float *decay = state_decay_ + m, *before = from + m * V;
            const Element<P>* right = write_key_ + m * depth;
            float* after = to + m * V;
            if constexpr (P::Tiles::exist) {
                for (Index v = 0; v < V; ++v)
                    for (Index j = 0; j < width; j += W)
                        store(after + v * width + j, load(decay + j) * load(before + v * width + j));
                product<P>(V, width, {U_, 1, values_}, {right, depth}, {after, width, Start::add}, nullptr, nullptr,
                           between);
            } else {
                for (Index v = 0; v < V; v += MR) {
                    between();
                    const auto height = static_cast<std::size_t>(min(V - v, Index{MR}));
                    (width == W ? narrow : wide)[height - 1]({U_ + v, 1, values_}, right, depth, decay,
                                                             before + v * width, after + v * width);
                }
            }
        }
    }

  private:
    // Times the state that is left: 3 of the 24 bits of a float.
    static constexpr float most_lost = 8;

    // Of a transposed state.
    float largest(const float* state) const {
        constexpr Index chains = 4;
        const Index n = columns_ * heads_.value_size;
        F most[chains] = {splat(0.0F), splat(0.0F), splat(0.0F), splat(0.0F)};
        Index i = 0;
        for (; i + chains * W <= n; i += chains * W)
            for (Index c = 0; c < chains; ++c) most[c] = max(abs(load(state + i + c * W)), most[c]);
        for (; i < n; i += W) most[0] = max(abs(load(state + i)), most[0]);
        return maximum(max(max(most[0], most[1]), max(most[2], most[3])));
    }
    float largest_decay() const {
        float most = 0;
        for (Index m = 0; m < heads_.key_size; ++m) most = max(most, state_decay_[m]);
        return most;
    }

    // U of the tokens, depth along them.
    void load_written(const DeltaRows& u, const Tokens& at) const {
        const Index V = heads_.value_size;
        prefetch_first(u, at, V);
        for (Index i = 0; i < at.n; i += P::depth) {
            for (Index j = 0; j < P::depth; ++j) {
                prefetch_ahead(u, at, i + j, V);
                float* row = P::depth == 1 ? reinterpret_cast<float*>(U_) + i * values_ : rows_ + j * values_;
                if (i + j < at.n)
                    load_token(u, at, i + j, V, row);
                else
                    for (Index c = 0; c < values_; c += W) store(row + c, splat(0.0F));
            }
            if constexpr (P::depth == 2) round_to_pairs(2, values_, rows_, U_ + i / 2 * values_);
        }
    }

    // write(j, m): a vector of row j of write_key, 0 behind the last row.
    template <class Write>
    SOFTDELTA_INLINE void store_write_key(Index n, Index m, const Write& write) const {
        const Index panel = m / NR * NR, width = micropanel_width(panel, columns_);
        Element<P>* to = write_key_ + panel * depth_of<P>(n) + (m - panel);
        for (Index j = 0; j < n; j += P::depth)
            store_neighbours(to + j / P::depth * width, write(j), j + 1 < n ? write(j + 1) : splat(0.0F), P{});
    }

    void fold_shared(Index n, const KeyChunk<P>& keys, const GateChunk& gates) const {
        sum_gates(n, gates);
        make_row_decays(heads_.scale, n, gates);
        const F decay = exp_of_sum(splat(gates.G[n - 1]), splat(gates.G_rest[n - 1]));
        for (Index m = 0; m < columns_; m += W) {
            store_write_key(n, m,
                            [&](Index j) { return load(keys.k + j * keys.row + m) * splat(gates.write_decay[j]); });
            store(state_decay_ + m, decay);
        }
    }

    void fold_channels(Index n, const KeyChunk<P>& keys, const GateChunk& gates) const {
        const ChannelGates all(gates, columns_);
        for (Index m = 0; m < columns_; m += W) {
            store(state_decay_ + m, all.walk_down(m, 0, n, decays_));
            store_write_key(n, m, [&](Index j) { return load(keys.k + j * keys.row + m) * load(decays_ + j * W); });
        }
    }

    const DeltaHeads& heads_;
    Index columns_, values_;
    Element<P>*write_key_, *U_;  // [n, K] as B; Uᵀ [V, n] as A
    float* rows_;                // [2, V]
    float* decays_;              // [n, W]
    float* state_decay_;         // [K]
    float* rounded_;             // [value heads of a group] what states were as large as, decayed since
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

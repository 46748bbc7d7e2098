// How fast this machine can be: multiply-adds between registers, and reading memory.
#pragma once

#include <utility>

#include "engines/cpu/kernels/gemm/pairs.h"
#include "engines/cpu/kernels/table.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Independent sums, enough to hide an instruction's latency; they and the two operands fit the registers.
inline constexpr Index chains = 2 * MR;

// A number that the compiler knows nothing about, so that it cannot merge the chains.
SOFTDELTA_INLINE float opaque(float x) {
    const volatile float y = x;
    return y;
}

// sum = step(sum) in every chain, repeats times. The results are read once, so that they are computed.
template <class Step, Index... i>
SOFTDELTA_INLINE void run_chains(Index repeats, Step step, std::integer_sequence<Index, i...>) {
    F sums[] = {splat(opaque(static_cast<float>(i)))...};
    for (Index r = 0; r < repeats; ++r) ((sums[i] = step(sums[i])), ...);
    F total = splat(0.0F);
    ((total = total + sums[i]), ...);
    opaque(sum(total));
}

inline void run_f32(Index repeats) {
    const F a = splat(opaque(0.5F)), b = splat(opaque(1.0F));
    // The chain runs through a factor: a product of constants would be computed once.
    run_chains(
        repeats, [=](F x) { return fma(x, a, b); }, std::make_integer_sequence<Index, chains>());
}
inline constexpr Ceiling multiply_add_f32{run_f32, chains * 2 * W};

// Four sums hide the latency of a matrix tile.
template <class Tiles>
void run_tiles(Index repeats) {
    const Tiles tiles;
    Tiles::template clear<4>();
    Tiles::template clear<5>();
    for (Index r = 0; r < repeats; ++r) {
        Tiles::template multiply_add<0, 4, 5>();
        Tiles::template multiply_add<1, 4, 5>();
        Tiles::template multiply_add<2, 4, 5>();
        Tiles::template multiply_add<3, 4, 5>();
    }
}

template <class P>
void run_bf16(Index repeats) {
    if constexpr (P::Tiles::exist) return run_tiles<typename P::Tiles>(repeats);
    const F a = splat(opaque(0.5F)), b = splat(opaque(1.0F));
    const auto step = [=](F x) { return P::multiply_add(a, b, x); };
    run_chains(repeats, step, std::make_integer_sequence<Index, chains>());
}

template <class P>
constexpr Ceiling bf16_ceiling() {
    if constexpr (!has_bf16_products)
        return {};
    else
        return {run_bf16<P>, P::Tiles::exist ? 4 * tile_size * W * tile_size * 4 : chains * 4 * W};
}
inline constexpr Ceiling multiply_add_bf16 = bf16_ceiling<PairProduct>();

// Eight loads at a time are enough for the memory behind them.
inline void read_memory(const float* data, Index count) {
    F sums[8];
    for (F& x : sums) x = splat(0.0F);
    for (Index at = 0; at < count; at += 8 * W)
        for (Index i = 0; i < 8; ++i) sums[i] = sums[i] + load(data + at + i * W);
    for (Index i = 1; i < 8; ++i) sums[0] = sums[0] + sums[i];
    opaque(sum(sums[0]));
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

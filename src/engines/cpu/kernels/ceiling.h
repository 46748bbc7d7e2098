// How fast this machine can be: multiply-adds between registers, and reading memory.
#pragma once

#include <iterator>
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

inline constexpr Index tile_product_flops = tile_size * tile_size * tile_size * 4;

// Products of numbers: two sums, as of the kernels, that share an operand. What cleared tiles reach is no limit, for
// some processors multiply zeros faster (softdelta bench --loops).
template <class Tiles>
class TileLoops {
  public:
    static void cleared(Index repeats) {
        const Tiles tiles;
        clear(std::make_integer_sequence<int, 8>{});
        four_sums(repeats);
    }
    static void four_registers(Index repeats) {
        const Operands x;
        read(x, std::make_integer_sequence<int, 8>{});
        four_sums(repeats);
    }
    static void two_registers(Index repeats) {
        const Operands x;
        Tiles::template read_whole<2, 0>(x.a);
        Tiles::template read_whole<3, 0>(x.b);
        for (Index r = 0; r < repeats; ++r) {
            Tiles::template multiply_add<0, 2, 3>();
            Tiles::template multiply_add<1, 2, 3>();
            Tiles::template multiply_add<0, 2, 3>();
            Tiles::template multiply_add<1, 2, 3>();
        }
    }
    static void four_sums_cached(Index repeats) {
        const Operands x;
        for (Index r = 0; r < repeats; ++r) {
            const std::uint32_t *a = x.a + r % 4 * 2 * words, *b = x.b + r % 4 * 2 * words;
            Tiles::template read_whole<4, 0>(a);
            Tiles::template read_whole<6, 0>(b);
            Tiles::template multiply_add<0, 4, 6>();
            Tiles::template read_whole<7, 1>(b);
            Tiles::template multiply_add<1, 4, 7>();
            Tiles::template read_whole<5, 1>(a);
            Tiles::template multiply_add<2, 5, 6>();
            Tiles::template multiply_add<3, 5, 7>();
        }
    }
    static void two_sums_cached(Index repeats) {
        const Operands x;
        for (Index r = 0; r < repeats; ++r) {
            const std::uint32_t *a = x.a + r % 4 * 2 * words, *b = x.b + r % 8 * words;
            Tiles::template read_whole<3, 0>(b);
            Tiles::template read_whole<2, 0>(a);
            Tiles::template multiply_add<0, 2, 3>();
            Tiles::template read_whole<2, 1>(a);
            Tiles::template multiply_add<1, 2, 3>();
        }
    }
    static void reads_of_eight(Index repeats) {
        const Operands x;
        for (Index r = 0; r < repeats; ++r) read(x, std::make_integer_sequence<int, 8>{});
    }
    static void reads_of_two(Index repeats) {
        const Operands x;
        for (Index r = 0; r < repeats; ++r) {
            Tiles::template read_whole<2, 0>(x.a);
            Tiles::template read_whole<3, 1>(x.a);
        }
    }
    static void writes(Index repeats) {
        Operands x;
        read(x, std::make_integer_sequence<int, 8>{});
        auto* out = reinterpret_cast<float*>(x.b);
        for (Index r = 0; r < repeats; ++r) {
            Tiles::template write_whole<0, 0>(out);
            Tiles::template write_whole<1, 1>(out);
        }
    }
    // Of a row of 64 scores, as the forward pass of attention rounds and sums them.
    static void exponentials(Index repeats) {
        Operands x;
        const auto* scores = reinterpret_cast<const float*>(x.a);
        F sum = splat(0.0F);
        const F base = splat(opaque(1.0F)), fall = splat(opaque(-0.5F)), rise = splat(opaque(0.0F));
        for (Index r = 0; r < repeats; ++r) {
            F p[4];
            for (Index i = 0; i < 4; ++i)
                p[i] = exp2_for_bf16(fma(base - load(scores + (r % 32 * 4 + i) * W), fall, rise));
            sum = sum + ((p[0] + p[1]) + (p[2] + p[3]));
            for (Index i = 0; i < 2; ++i) store(x.b + (r % 32 * 2 + i) * W, bf16_pairs(p[2 * i], p[2 * i + 1]));
        }
        opaque(::softdelta::kernels::SOFTDELTA_ISA_NAMESPACE::sum(sum));
    }

    static constexpr Loop all[] = {
        {"products of cleared tiles", cleared, 4, Loop::Products::idle},
        {"products, 4 sums, 2 A, 2 B in registers", four_registers, 4, Loop::Products::registers},
        {"products, 2 sums, 1 A, 1 B in registers", two_registers, 4, Loop::Products::registers},
        {"products, 4 sums, 2 A, 2 B, read from L1", four_sums_cached, 4, Loop::Products::cached},
        {"products, 2 sums, 1 A, 1 B, read from L1", two_sums_cached, 2, Loop::Products::cached},
        {"reads of a tile from L1, 8 registers", reads_of_eight, 8, Loop::Products::none},
        {"reads of a tile from L1, 2 registers", reads_of_two, 2, Loop::Products::none},
        {"writes of a tile", writes, 2, Loop::Products::none},
        {"64 exponentials, rounded and summed", exponentials, 1, Loop::Products::none},
    };

  private:
    static constexpr Index words = tile_size * tile_size;

    // A thread's tiles, and numbers near 1 for them, as f32 and as pairs of bf16.
    struct Operands {
        Tiles tiles;
        alignas(64) std::uint32_t a[8 * words], b[8 * words];
        Operands() {
            for (Index i = 0; i < 8 * words; ++i)
                a[i] = b[i] = 0x3f803f80U ^ (static_cast<std::uint32_t>(i) * 2654435761U & 0x803f803fU);
        }
    };

    template <int... i>
    static void clear(std::integer_sequence<int, i...> /*tiles*/) {
        (Tiles::template clear<i>(), ...);
    }
    template <int... i>
    SOFTDELTA_INLINE static void read(const Operands& x, std::integer_sequence<int, i...> /*tiles*/) {
        (Tiles::template read_whole<i, i>(x.a), ...);
    }
    static void four_sums(Index repeats) {
        for (Index r = 0; r < repeats; ++r) {
            Tiles::template multiply_add<0, 4, 6>();
            Tiles::template multiply_add<1, 4, 7>();
            Tiles::template multiply_add<2, 5, 6>();
            Tiles::template multiply_add<3, 5, 7>();
        }
    }
};

struct LoopList {
    const Loop* data;
    Index count;
};
template <class P>
constexpr LoopList loops_of_tiles() {
    if constexpr (!P::Tiles::exist) {
        return {nullptr, 0};
    } else {
        using Loops = TileLoops<typename P::Tiles>;
        return {Loops::all, static_cast<Index>(std::size(Loops::all))};
    }
}
inline constexpr LoopList tile_loops = loops_of_tiles<PairProduct>();

template <class P>
void run_bf16(Index repeats) {
    if constexpr (P::Tiles::exist) return TileLoops<typename P::Tiles>::two_registers(repeats);
    const F a = splat(opaque(0.5F)), b = splat(opaque(1.0F));
    const auto step = [=](F x) { return P::multiply_add(a, b, x); };
    run_chains(repeats, step, std::make_integer_sequence<Index, chains>());
}

template <class P>
constexpr Ceiling bf16_ceiling() {
    if constexpr (!has_bf16_products)
        return {};
    else
        return {run_bf16<P>, P::Tiles::exist ? 4 * tile_product_flops : chains * 4 * W};
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

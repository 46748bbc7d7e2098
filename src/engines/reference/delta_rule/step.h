// One token of a delta rule on 16 columns of the state. A rule is two facts here: whether the decay comes before or
// after the erasure, and whether it erases at all.
//
//     E = decay∘S  or  S            e = v − Eᵀp  or  v
//     S ← E  or  decay∘E,  + k (β e)ᵀ            o = Sᵀq
//
// Columns of the state are independent, so a tile of them runs through the tokens alone and stays in the L1 cache.
// Sums over columns are added up tile by tile, in order.
#pragma once

#include <array>

#include "core/delta_rule.h"

namespace softdelta::reference {

using core::Index;

inline constexpr Index tile_columns = 16;

constexpr Index tile_count(Index V) {
    return (V + tile_columns - 1) / tile_columns;
}

using Columns = std::array<double, static_cast<std::size_t>(tile_columns)>;

// Operands of one token.
struct Token {
    const double* q;      // [K] times scale
    const double* k;      // [K]
    const double* p;      // [K]
    const double* decay;  // [K] e^g
    const double* v;      // [16]
    double beta;
};

// Gradients of one token; all but v are added to, since tiles and, for q, k and p, the heads of a group sum.
struct TokenGradients {
    double* q;     // [K]
    double* k;     // [K]
    double* p;     // [K]
    double* g;     // [K]
    double* v;     // [16]
    double* beta;  // [1]
};

// The passes over a tile of the state, for one rule.
struct Steps {
    // S [K, 16] takes in one token, which writes u [16]; o [16] is read out.
    void (*forward)(Index K, const Token& token, double* S, double* o, double* u);
    // The same without o; keeps E [K, 16] and e for the adjoint.
    void (*forward_and_keep)(Index K, const Token& token, double* S, double* E, Columns& e);
    // dS [K, 16] comes in as the gradient of S after the token, less what o contributes, and leaves as that of S
    // before.
    void (*adjoint)(Index K, const Token& token, const double* E, const Columns& e, const double* d_o, double* dS,
                    const TokenGradients& d);
};

const Steps& steps_of(core::Erase erase);

}  // namespace softdelta::reference

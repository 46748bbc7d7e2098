#include "engines/reference/delta_rule/step.h"

#include <algorithm>

namespace softdelta::reference {

using core::Erase;

namespace {

constexpr bool decays_first(Erase erase) {
    return erase != Erase::from_previous_state;
}

Columns times(double factor, Columns x) {
    for (double& a : x) a *= factor;
    return x;
}

// E = decay∘S or S, which may be one memory; returns e = v − Eᵀp or v.
template <Erase erase>
Columns decay_and_erase(Index K, const Token& token, const double* S, double* E) {
    Columns seen{};  // Eᵀp
    for (Index i = 0; i < K; ++i) {
        const double before = decays_first(erase) ? token.decay[i] : 1;
        const double p = token.p[i];
        const double* from = S + i * tile_columns;
        double* row = E + i * tile_columns;
#pragma omp simd
        for (std::size_t j = 0; j < seen.size(); ++j) {
            const double x = before * from[j];
            row[j] = x;
            if constexpr (erase != Erase::nothing) seen[j] += p * x;
        }
    }
    Columns e;
    for (std::size_t j = 0; j < e.size(); ++j) e[j] = token.v[j] - seen[j];
    return e;
}

// S = E or decay∘E, + k writtenᵀ; returns o = Sᵀq where it is wanted.
template <Erase erase, bool reads_out>
Columns write(Index K, const Token& token, const Columns& written, const double* E, double* S) {
    Columns o{};
    for (Index i = 0; i < K; ++i) {
        const double after = decays_first(erase) ? 1 : token.decay[i];
        const double k = token.k[i], q = token.q[i];
        const double* from = E + i * tile_columns;
        double* row = S + i * tile_columns;
#pragma omp simd
        for (std::size_t j = 0; j < o.size(); ++j) {
            const double x = after * from[j] + k * written[j];
            row[j] = x;
            if constexpr (reads_out) o[j] += q * x;
        }
    }
    return o;
}

template <Erase erase>
void step_adjoint(Index K, const Token& token, const double* E, const Columns& e, const double* d_o, double* dS,
                  const TokenGradients& d) {
    const Columns written = times(token.beta, e);
    double o_written = 0;  // d_o · written
    for (std::size_t j = 0; j < e.size(); ++j) o_written += d_o[j] * written[j];

    // o = Sᵀq and S = E or decay∘E, + k writtenᵀ
    Columns dwritten{};
    for (Index i = 0; i < K; ++i) {
        const double q = token.q[i], k = token.k[i];
        const double* row = E + i * tile_columns;
        double* drow = dS + i * tile_columns;
        double dq = 0, dk = 0;
#pragma omp simd reduction(+ : dq, dk)
        for (std::size_t j = 0; j < e.size(); ++j) {
            const double x = drow[j] + q * d_o[j];
            drow[j] = x;
            dwritten[j] += k * x;
            dk += x * written[j];
            dq += row[j] * d_o[j];
        }
        d.q[i] += (decays_first(erase) ? 1 : token.decay[i]) * dq + k * o_written;
        d.k[i] += dk;
    }

    // written = β e, e = v − Eᵀp or v
    const Columns de = times(token.beta, dwritten);
    double dbeta = 0;
    for (std::size_t j = 0; j < e.size(); ++j) {
        d.v[j] = de[j];
        dbeta += dwritten[j] * e[j];
    }
    *d.beta += dbeta;

    // E = decay∘S or S
    for (Index i = 0; i < K; ++i) {
        const double before = decays_first(erase) ? token.decay[i] : 1,
                     after = decays_first(erase) ? 1 : token.decay[i];
        const double p = token.p[i];
        const double* row = E + i * tile_columns;
        double* drow = dS + i * tile_columns;
        double dp = 0, dg = 0;
#pragma omp simd reduction(+ : dp, dg)
        for (std::size_t j = 0; j < e.size(); ++j) {
            const double decayed = after * drow[j];
            const double x = erase == Erase::nothing ? decayed : decayed - p * de[j];
            if constexpr (erase != Erase::nothing) dp -= row[j] * de[j];
            dg += row[j] * (decays_first(erase) ? x : decayed);
            drow[j] = before * x;
        }
        d.p[i] += dp;
        d.g[i] += dg;
    }
}

template <Erase erase>
void step(Index K, const Token& token, double* S, double* o, double* u) {
    const Columns e = decay_and_erase<erase>(K, token, S, S);
    const Columns written = times(token.beta, e);
    const Columns read = write<erase, true>(K, token, written, S, S);
    std::copy(read.begin(), read.end(), o);
    std::copy(written.begin(), written.end(), u);
}

template <Erase erase>
void step_and_keep(Index K, const Token& token, double* S, double* E, Columns& e) {
    e = decay_and_erase<erase>(K, token, S, E);
    write<erase, false>(K, token, times(token.beta, e), E, S);
}

template <Erase erase>
constexpr Steps steps{step<erase>, step_and_keep<erase>, step_adjoint<erase>};

}  // namespace

const Steps& steps_of(Erase erase) {
    switch (erase) {
        case Erase::from_decayed_state:
            return steps<Erase::from_decayed_state>;
        case Erase::from_previous_state:
            return steps<Erase::from_previous_state>;
        case Erase::nothing:
            break;
    }
    return steps<Erase::nothing>;
}

}  // namespace softdelta::reference

// From gradients of what the walks folded to gradients of the operands: sums over slabs of columns, the value heads of
// a group and tokens, each in one order; the adjoints of the l2 norm, of β and of gates.
#pragma once

#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/delta_rule/tokens/gradients.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

// What the functions below read and write.
struct TokenUnfold {
    const DeltaCall& call;
    const GradientViews& grad;
    const GradientMemory& memory;
    const int lane = static_cast<int>(threadIdx.x) % 32;

    // dq, dk or dp (kind 0, 1, 2) of token t and a key head by a warp: of so many rows of memory, the i-th is row(i).
    template <class Row>
    __device__ void keys(int kind, const Sequence& s, Index t, int head, int count, const Row& row) const {
        constexpr int most_parts = 8;  // elements of a row for each lane
        const View& to = kind == 0 ? grad.dq : kind == 1 ? grad.dk : grad.dp;
        if (!to) return;
        const auto each = [&](const auto& use) {
            unrolled<most_parts>([&](int n) {
                if (lane + 32 * n < call.key_size) use(n, lane + 32 * n);
            });
        };
        double d[most_parts] = {};
        const auto add = [&](const float* parts) {
            for (int slab = 0; slab < memory.slabs; ++slab)
                for (int i = 0; i < count; ++i) {
                    const float* from = parts + (slab * memory.rows * memory.heads + row(i)) * call.key_size;
                    each([&](int n, int m) { d[n] += static_cast<double>(from[m]); });
                }
        };
        if (kind < 2) add(kind == 0 ? memory.dq : memory.dk);
        if (call.erase != core::Erase::nothing && kind == (call.own_p ? 2 : 1)) add(memory.dp);

        const double factor = kind == 0 ? static_cast<double>(call.scale) : 1.0;
        unrolled<most_parts>([&](int n) { d[n] *= factor; });
        if (call.l2norm) {  // y = x r: dx = r (dy − y Σ dy∘y)
            const View& from = kind == 0 ? call.q : kind == 1 ? call.k : call.p;
            const Index at = s.row(from, t, head);
            double y[most_parts] = {}, squares = 0, along = 0;
            each([&](int n, int m) {
                y[n] = static_cast<double>(load(from, at + m * from.stride[3]));
                squares += y[n] * y[n];
            });
            const double r = 1 / sqrt(sum_of_warp(squares) + 1e-6);
            unrolled<most_parts>([&](int n) { along += d[n] * (y[n] *= r); });
            along = sum_of_warp(along);
            unrolled<most_parts>([&](int n) { d[n] = r * (d[n] - y[n] * along); });
        }
        const Index at = s.row(to, t, head);
        each([&](int n, int m) { store(to, at + m * to.stride[3], static_cast<float>(d[n])); });
    }

    // dv and dβ of token t and a value head by a warp; row: of memory.
    __device__ void values(const Sequence& s, Index t, int hv, Index row) const {
        const float given = call.beta ? load(call.beta, s.row(call.beta, t, hv)) : 1.0F;
        const double beta = call.beta ? exact_beta(call, given) : 1.0;
        double dbeta = 0;
        for (int j = lane; j < call.value_size; j += 32) {
            const double dw = memory.dwritten[row * call.value_size + j];
            dbeta = fma(dw, memory.erased[row * call.value_size + j], dbeta);
            if (const View& v = grad.dv) store(v, s.row(v, t, hv) + j * v.stride[3], static_cast<float>(beta * dw));
        }
        if (!grad.dbeta) return;
        dbeta = sum_of_warp(dbeta);
        if (lane == 0)
            store(grad.dbeta, s.row(grad.dbeta, t, hv), static_cast<float>(beta_adjoint(call, given, dbeta)));
    }

    // dg of a chunk's rows from `first` on, of one channel: from its end backwards,
    //     dg_t = rowsum(S∘dS)_end + Σ_{s ≥ t} (q∘dq − k∘dk + p∘dp)_s,   t: a token's first row
    // erasing from the previous state: without p∘dp of row t itself. Shares of the gradients of bias or g_gamma and
    // of A_log, so far apart, where they are wanted.
    __device__ void gates(const Sequence& s, Index first, int hv, int channel, const TokenRows& rows, double* share,
                          Index apart) const {
        const HeadGate head(call, hv);
        const double dt = head.bias_of(call, hv, channel);
        const Index slab_rows = memory.rows * memory.heads, slab_chunks = memory.slots * memory.heads;
        const bool erases = call.erase != core::Erase::nothing;
        GateSweep of{0};
        for (int slab = 0; slab < memory.slabs; ++slab)
            of.dg += memory.ends[(slab * slab_chunks + rows.chunk_of(first)) * memory.channels + channel];
        for (Index row = min(s.count * call.steps, first + chunk_rows); row-- > first;) {
            double written = 0, erased = 0;
            for (int slab = 0; slab < memory.slabs; ++slab) {
                const Index at = (slab * slab_rows + rows.token(row)) * memory.channels + channel;
                written += memory.written[at];
                if (erases) erased += memory.erase[at];
            }
            if (!call.begins_token(row)) {
                of.dg += written + erased;
                continue;
            }
            const auto place = [&](const View& v) {
                return s.row(v, call.token(row), hv) + (call.gate == core::Gate::channel ? channel * v.stride[3] : 0);
            };
            const double dx = of.take(call, head, call.g ? load(call.g, place(call.g)) : 0.0F, dt, written, erased);
            if (call.g && grad.dg) store(grad.dg, place(grad.dg), static_cast<float>(dx));
        }
        if (share == nullptr) return;
        *share = of.sum;
        share[apart] = of.dA_log;
    }
};

}  // namespace softdelta::cuda

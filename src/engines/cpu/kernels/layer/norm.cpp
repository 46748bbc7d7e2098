// The gated norm. A row is in L1 from its sum of squares to its result.
//
//     n = x r,  r = 1/√(mean x² + ε),  y = w n f(z)
//     dn = dy w f(z),  dx = r (dn − n mean(dn n)),  dz = dy w n f'(z),  dw = Σ dy n f(z)
#include "engines/cpu/kernels/isa_unit.h"

#include <cmath>

#include "engines/cpu/kernels/layer/activation.h"
#include "engines/cpu/kernels/layer/rows.h"
#include "engines/cpu/kernels/scratch.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

constexpr Index float_rows = 32;  // whose gradients of weight are summed in f32 before they are added to a sum in f64

struct NormBuffers {
    float *weight, *x, *z, *dy, *dz, *sums;

    NormBuffers(Scratch& memory, Index channels) {
        const Index n = round_up(channels, W);
        for (float** row : {&weight, &x, &z, &dy, &dz, &sums}) *row = memory.take<float>(n);
    }
};

void load_weight(const NormRows& in, float* out) {
    if (in.weight.data != nullptr) return load_layer_row(in.weight, 0, in.channels, out);
    for (Index c = 0; c < in.channels; c += W) store(out + c, splat(1.0F));
}

// Two sums of vectors at a time: an addition waits for the one before it.
template <class Term>
SOFTDELTA_INLINE float sum_of_vectors(Index n, const Term& term) {
    F even = splat(0.0F), odd = splat(0.0F);
    Index c = 0;
    for (; c + W < n; c += 2 * W) {
        even = even + term(c);
        odd = odd + term(c + W);
    }
    if (c < n) even = even + term(c);
    return sum(even + odd);
}

// 1/√(mean x² + ε) of a row, in two factors; the row has been multiplied by `scale`.
struct InverseRoot {
    float of_row, scale;
    float product() const { return of_row * scale; }
};

// Squares that f32 does not hold are summed in f64; the root of such a row may be beyond f32, or lose its digits there.
InverseRoot inverse_root(const NormRows& in, float* x) {
    auto squares = static_cast<double>(sum_of_vectors(in.channels, [&](Index c) { return load(x + c) * load(x + c); }));
    float scale = 1;
    if (!(squares > 1e-30 && squares < 1e38)) {
        squares = 0;
        for (Index c = 0; c < in.channels; ++c) squares += static_cast<double>(x[c]) * static_cast<double>(x[c]);
        scale = squares > 1 ? 0x1p-64F : 0x1p64F;
        for (Index c = 0; c < in.channels; ++c) x[c] *= scale;
    }
    const double root = 1 / std::sqrt(squares / static_cast<double>(in.channels) + in.epsilon);
    return {static_cast<float>(root / static_cast<double>(scale)), scale};
}

template <Activation gate>
void forward_rows(const NormRows& in, const NormBuffers& at, const LayerRows& y) {
    for (Index i = 0; i < in.rows; ++i) {
        load_layer_row(in.x, i, in.channels, at.x);
        if constexpr (gate != Activation::none) load_layer_row(in.z, i, in.channels, at.z);
        const F r = splat(inverse_root(in, at.x).of_row);
        for (Index c = 0; c < in.channels; c += W) {
            F result = load(at.x + c) * r * load(at.weight + c);
            if constexpr (gate != Activation::none) result = result * activate<gate>(load(at.z + c));
            store(at.x + c, result);
        }
        store_layer_row(at.x, in.channels, y, i);
    }
}

template <Activation gate>
void backward_rows(const NormRows& in, const NormBuffers& at, const NormGradients& grad) {
    for (Index i = 0; i < in.rows; ++i) {
        load_layer_row(in.x, i, in.channels, at.x);
        load_layer_row(grad.dy, i, in.channels, at.dy);
        if constexpr (gate != Activation::none) load_layer_row(in.z, i, in.channels, at.z);
        const InverseRoot root = inverse_root(in, at.x);
        const F r = splat(root.of_row);
        const float product = sum_of_vectors(in.channels, [&](Index c) {
            const F n = load(at.x + c) * r, dy = load(at.dy + c), w = load(at.weight + c);
            F gated = dy;
            if constexpr (gate != Activation::none) {
                const F z = load(at.z + c);
                gated = dy * activate<gate>(z);
                store(at.dz + c, dy * w * n * derivative<gate>(z));
            }
            store(at.sums + c, fma(gated, n, load(at.sums + c)));
            const F dn = gated * w;
            store(at.x + c, n);
            store(at.dy + c, dn);
            return dn * n;
        });
        const F mean = splat(product / static_cast<float>(in.channels));
        if (gate != Activation::none && grad.dz.data != nullptr) store_layer_row(at.dz, in.channels, grad.dz, i);
        if (grad.dx.data != nullptr) {
            const F whole = splat(root.product());
            for (Index c = 0; c < in.channels; c += W)
                store(at.x + c, whole * (load(at.dy + c) - load(at.x + c) * mean));
            store_layer_row(at.x, in.channels, grad.dx, i);
        }
        if ((i + 1) % float_rows != 0 && i + 1 < in.rows) continue;
        for (Index c = 0; c < in.channels; ++c) {
            if (grad.sums != nullptr) grad.sums[c] += static_cast<double>(at.sums[c]);
            at.sums[c] = 0;
        }
    }
}

std::size_t norm_scratch_bytes(Index channels) {
    Scratch scratch(nullptr);
    const NormBuffers buffers(scratch, channels);
    return scratch.used();
}

void run_forward(const NormRows& in, std::byte* memory, const LayerRows& y) {
    Scratch scratch(memory);
    const NormBuffers at(scratch, in.channels);
    load_weight(in, at.weight);
    if (in.gate == Activation::none) forward_rows<Activation::none>(in, at, y);
    if (in.gate == Activation::silu) forward_rows<Activation::silu>(in, at, y);
    if (in.gate == Activation::sigmoid) forward_rows<Activation::sigmoid>(in, at, y);
}

void run_backward(const NormRows& in, std::byte* memory, const NormGradients& grad) {
    Scratch scratch(memory);
    const NormBuffers at(scratch, in.channels);
    load_weight(in, at.weight);
    for (Index c = 0; c < in.channels; c += W) store(at.sums + c, splat(0.0F));
    if (in.gate == Activation::none) backward_rows<Activation::none>(in, at, grad);
    if (in.gate == Activation::silu) backward_rows<Activation::silu>(in, at, grad);
    if (in.gate == Activation::sigmoid) backward_rows<Activation::sigmoid>(in, at, grad);
}

}  // namespace

const NormKernels norm_kernels = {norm_scratch_bytes, run_forward, run_backward};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

// Four tokens of a vector of channels at a time. What came before them is a history of W − 1 rows in f32:
//
//     history   tokens          y_t = act(b + w0 v_t + w1 v_t+1 + w2 v_t+2 + w3 v_t+3)       W = 4
//     v0 v1 v2  v3 v4 v5 v6     the new history is v4 v5 v6
//
// The backward pass walks the same way. dz_t = dy_t act'(z_t) has a history too, and a token's gradient is complete
// W − 1 tokens later: dx_{t−W+1} = Σ_i w_i dz_{t−i}.
#include "engines/cpu/kernels/layer/convolution.h"

#include <cstdint>
#include <utility>

#include "engines/cpu/kernels/layer/activation.h"
#include "engines/cpu/kernels/layer/columns.h"
#include "engines/cpu/kernels/layer/rows.h"
#include "engines/cpu/kernels/range.h"
#include "engines/cpu/kernels/scratch.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

constexpr Index most_width = 8, most_channels = 512;
constexpr Index block = 4;          // tokens
constexpr Index float_tokens = 32;  // that are summed in f32 before they are added to a sum in f64

// Rows of most_channels floats.
struct Buffers {
    float *weights, *history, *slopes, *sums, *x, *dy, *result;

    explicit Buffers(Scratch& memory)
        : weights(memory.take<float>((most_width + 1) * most_channels)),  // the last row is the bias
          history(memory.take<float>((most_width - 1) * most_channels)),
          slopes(memory.take<float>((most_width - 1) * most_channels)),  // history of dz
          sums(memory.take<float>((most_width + 1) * most_channels)),
          x(memory.take<float>(block * most_channels)),
          dy(memory.take<float>(block * most_channels)),
          result(memory.take<float>(block * most_channels)) {}
};

// Token t of the sequence, one of the state where it is before the first.
void load_token(const ConvolutionChannels& in, Index t, float* out) {
    if (t >= 0) return load_layer_row(in.x, t, in.channels, out);
    load_layer_row(in.initial_state, in.kept + t, in.channels, out);
}

// Weights, and the tokens before `begin`.
void load_start(const ConvolutionChannels& in, Index begin, const Buffers& to) {
    load_layer_rows(in.weight, in.width, in.channels, to.weights, most_channels);
    load_layer_row(in.bias, 0, in.channels, to.weights + in.width * most_channels);
    if (begin == 0 && lies_side_by_side(in.initial_state, in.kept)) {  // the state, whose last tokens are the history
        load_layer_rows(in.initial_state, in.kept, in.channels, to.x, most_channels);
        const float* last = to.x + (in.kept - in.width + 1) * most_channels;
        for (Index j = 0; j < in.width - 1; ++j)
            for (Index c = 0; c < in.channels; c += W)
                store(to.history + j * most_channels + c, load(last + j * most_channels + c));
        return;
    }
    for (Index j = 0; j < in.width - 1; ++j) load_token(in, begin - in.width + 1 + j, to.history + j * most_channels);
}

// Tokens and results of a strip of channels, whole vectors; rows in elements.
template <class T>
struct Strip {
    const T* x;
    Index x_row;
    T* y;
    Index y_row;
    Index tokens, channels;
    const float* weights;
    float* history;
};

// `count` tokens of one vector.
template <class T, int width, Activation activation, int count>
SOFTDELTA_INLINE void convolve_vector(const Strip<T>& s, const T* x, T* y, Index c) {
    F v[width - 1 + count], w[width];
    for (int j = 0; j < width - 1; ++j) v[j] = load(s.history + j * most_channels + c);
    for (int t = 0; t < count; ++t) v[width - 1 + t] = load(x + t * s.x_row + c);
    for (int i = 0; i < width; ++i) w[i] = load(s.weights + i * most_channels + c);
    const F bias = load(s.weights + width * most_channels + c);
    for (int t = 0; t < count; ++t) {
        F z = bias;
        for (int i = 0; i < width; ++i) z = fma(w[i], v[t + i], z);
        store(y + t * s.y_row + c, activate<activation>(z));
    }
    for (int j = 0; j < width - 1; ++j) store(s.history + j * most_channels + c, v[count + j]);
}

template <class T, int width, Activation activation>
void convolve(const Strip<T>& s) {
    constexpr Index line = 64 / static_cast<Index>(sizeof(T));
    Index t = 0;
    for (; t + block <= s.tokens; t += block) {
        const T* x = s.x + t * s.x_row;
        T* y = s.y + t * s.y_row;
        const Index ahead = min(block, s.tokens - t - block);  // rows of the next block
        for (Index c = 0; c < s.channels; c += W) {
            if (c % line == 0)
                for (Index i = 0; i < ahead; ++i) prefetch_line(x + (block + i) * s.x_row + c);
            convolve_vector<T, width, activation, block>(s, x, y, c);
        }
    }
    for (; t < s.tokens; ++t)
        for (Index c = 0; c < s.channels; c += W)
            convolve_vector<T, width, activation, 1>(s, s.x + t * s.x_row, s.y + t * s.y_row, c);
}

template <class T>
using Convolve = void (*)(const Strip<T>&);

template <class T, int... i>
Convolve<T> pick(Index width, bool silu, std::integer_sequence<int, i...> /*widths*/) {
    static constexpr Convolve<T> all[][2] = {
        {convolve<T, i + 1, Activation::none>, convolve<T, i + 1, Activation::silu>}...};
    return all[width - 1][silu ? 1 : 0];
}

template <class T>
void convolve_strip(const ConvolutionChannels& in, const Strip<T>& strip) {
    pick<T>(in.width, in.silu, std::make_integer_sequence<int, most_width>{})(strip);
}

// Channels from `first` on by way of floats.
void convolve_copies(const ConvolutionChannels& in, Index first, Range tokens, const Buffers& at, const LayerRows& y) {
    const Index n = in.channels - first;
    const auto from = [&](const LayerRows& t) {
        LayerRows part = t;
        part.data = static_cast<std::byte*>(t.data) + first * t.column * static_cast<Index>(core::size_of(t.dtype));
        return part;
    };
    const LayerRows x_part = from(in.x), y_part = from(y);
    for (Index t = tokens.begin; t < tokens.end; t += block) {
        const Index count = min(block, tokens.end - t);
        for (Index i = 0; i < count; ++i) load_layer_row(x_part, t + i, n, at.x + i * most_channels);
        convolve_strip<float>(in, {at.x, most_channels, at.result, most_channels, count, round_up(n, W),
                                   at.weights + first, at.history + first});
        for (Index i = 0; i < count; ++i) store_layer_row(at.result + i * most_channels, n, y_part, t + i);
    }
}

// Whole vectors where they lie.
template <class T>
Index convolve_in_place(const ConvolutionChannels& in, Range tokens, const Buffers& at, const LayerRows& y) {
    const Index channels = in.channels / W * W;
    const T* from = static_cast<const T*>(in.x.data) + tokens.begin * in.x.row;
    T* to = static_cast<T*>(y.data) + tokens.begin * y.row;
    if (channels > 0)
        convolve_strip<T>(in, {from, in.x.row, to, y.row, tokens.end - tokens.begin, channels, at.weights, at.history});
    return channels;
}

void run_forward(const ConvolutionChannels& in, Index begin, Index end, std::byte* memory, const LayerRows& y) {
    Scratch scratch(memory);
    const Buffers at(scratch);
    load_start(in, begin, at);
    const Range tokens{begin, end};
    Index done = 0;
    if (in.x.column == 1 && y.column == 1 && in.x.dtype == y.dtype) {
        if (y.dtype == core::DType::f32) done = convolve_in_place<float>(in, tokens, at, y);
        if (y.dtype == core::DType::bf16) done = convolve_in_place<core::bf16>(in, tokens, at, y);
        if (y.dtype == core::DType::f16) done = convolve_in_place<core::f16>(in, tokens, at, y);
    }
    if (done < in.channels) convolve_copies(in, done, tokens, at, y);
}

// Slot j takes what is T slots behind it, or a token. In place, a slot is read before it is written.
void run_final_state(const ConvolutionChannels& in, std::byte* memory, const LayerRows& to) {
    Scratch scratch(memory);
    float* row = Buffers(scratch).x;
    const bool in_place = to.data == in.initial_state.data;
    if (in.tokens == 0 && in_place) return;
    const bool same = in.x.column == 1 && in.x.dtype == to.dtype;
    if (in.tokens == 1 && in_place && same && lies_side_by_side(to, in.kept))
        return to.dtype == core::DType::f32 ? shift<std::uint32_t>(to, in.kept, in.x.data, in.channels)
                                            : shift<std::uint16_t>(to, in.kept, in.x.data, in.channels);
    for (Index j = 0; j < in.kept; ++j) {
        load_token(in, in.tokens - in.kept + j, row);
        store_layer_row(row, in.channels, to, j);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

template <int width, Activation activation, int count>
SOFTDELTA_INLINE void differentiate_vector(const Buffers& at, bool summed, Index c) {
    F v[width - 1 + count], dz[width - 1 + count], w[width];
    for (int j = 0; j < width - 1; ++j) {
        v[j] = load(at.history + j * most_channels + c);
        dz[j] = load(at.slopes + j * most_channels + c);
    }
    for (int t = 0; t < count; ++t) v[width - 1 + t] = load(at.x + t * most_channels + c);
    for (int i = 0; i < width; ++i) w[i] = load(at.weights + i * most_channels + c);
    const F bias = load(at.weights + width * most_channels + c);
    for (int t = 0; t < count; ++t) {
        F slope = load(at.dy + t * most_channels + c);
        if constexpr (activation != Activation::none) {
            F z = bias;
            for (int i = 0; i < width; ++i) z = fma(w[i], v[t + i], z);
            slope = slope * derivative<activation>(z);
        }
        dz[width - 1 + t] = slope;
        F dx = w[0] * slope;
        for (int i = 1; i < width; ++i) dx = fma(w[i], dz[width - 1 + t - i], dx);
        store(at.result + t * most_channels + c, dx);
    }
    for (int j = 0; j < width - 1; ++j) {
        store(at.history + j * most_channels + c, v[count + j]);
        store(at.slopes + j * most_channels + c, dz[count + j]);
    }
    if (!summed) return;
    for (int i = 0; i <= width; ++i) {
        F sum = load(at.sums + i * most_channels + c);
        for (int t = 0; t < count; ++t)
            sum = i < width ? fma(dz[width - 1 + t], v[t + i], sum) : sum + dz[width - 1 + t];
        store(at.sums + i * most_channels + c, sum);
    }
}

template <int width, Activation activation, int count>
void differentiate(const Buffers& at, Index channels, bool summed) {
    for (Index c = 0; c < channels; c += W) differentiate_vector<width, activation, count>(at, summed, c);
}

using Differentiate = void (*)(const Buffers&, Index, bool);

template <int count, int... i>
Differentiate pick_gradient(Index width, bool silu, std::integer_sequence<int, i...> /*widths*/) {
    static constexpr Differentiate all[][2] = {
        {differentiate<i + 1, Activation::none, count>, differentiate<i + 1, Activation::silu, count>}...};
    return all[width - 1][silu ? 1 : 0];
}

class Backward {
  public:
    Backward(const ConvolutionChannels& in, const ConvolutionGradients& grad, std::byte* memory)
        : in_(in), grad_(grad), scratch_(memory), at_(scratch_) {}

    // dx of tokens [begin, end) and sums over them.
    void run(Index begin, Index end) {
        const auto done = [&](Index s, float* dx) {
            if (s >= begin && grad_.dx.data != nullptr) finish(s, grad_.dx, s, dx);
        };
        start(begin);
        Index t = begin, since = 0;  // tokens in the sums of f32
        while (t < end) {
            const Index count = end - t < block ? 1 : block;
            advance(t, count, true, done);
            t += count;
            since += count;
            if (since >= float_tokens || t == end) flush(), since = 0;
        }
        for (; t < end + in_.width - 1; ++t) advance(t, 1, false, done);  // what gradients of the last tokens need
    }

    // Gradients of the state's tokens. The convolution reaches the last W − 1 of them.
    void run_state() {
        const Index kept = grad_.kept, before = in_.width - 1;
        for (Index s = -kept; s < -before; ++s) {
            clear(at_.result, 1);
            finish(s, grad_.dinitial_state, kept + s, at_.result);
        }
        start(0);
        for (Index t = 0; t < before; ++t)
            advance(t, 1, false, [&](Index s, float* dx) { finish(s, grad_.dinitial_state, kept + s, dx); });
    }

  private:
    void start(Index begin) {
        load_start(in_, begin, at_);
        clear(at_.slopes, in_.width - 1);
        clear(at_.sums, in_.width + 1);
    }

    // `count` tokens from t on: 1 or a block. done(s, dx of token s).
    template <class Done>
    void advance(Index t, Index count, bool summed, const Done& done) {
        constexpr auto widths = std::make_integer_sequence<int, most_width>{};
        const bool given = t < in_.tokens && grad_.dy.data != nullptr;  // otherwise dz is 0, whatever x is
        for (Index i = 0; i < count; ++i) {
            float *x = at_.x + i * most_channels, *dy = at_.dy + i * most_channels;
            if (t < in_.tokens)
                load_layer_row(in_.x, t + i, in_.channels, x);
            else
                clear(x, 1);
            if (given)
                load_layer_row(grad_.dy, t + i, in_.channels, dy);
            else
                clear(dy, 1);
        }
        const bool silu = in_.silu && given;
        const auto walk = count == 1 ? pick_gradient<1>(in_.width, silu, widths)
                                     : pick_gradient<static_cast<int>(block)>(in_.width, silu, widths);
        walk(at_, columns(), summed && given);
        for (Index i = 0; i < count; ++i) done(t + i - in_.width + 1, at_.result + i * most_channels);
    }

    // The gradient of token s is complete with that of the final state, which may hold it.
    void finish(Index s, const LayerRows& to, Index row, float* dx) {
        const Index slot = s - (in_.tokens - grad_.kept);
        if (grad_.dfinal_state.data != nullptr && slot >= 0) {
            load_layer_row(grad_.dfinal_state, slot, in_.channels, at_.dy);
            for (Index c = 0; c < columns(); c += W) store(dx + c, load(dx + c) + load(at_.dy + c));
        }
        store_layer_row(dx, in_.channels, to, row);
    }

    void flush() {
        for (Index i = 0; grad_.sums != nullptr && i <= in_.width; ++i)
            for (Index c = 0; c < in_.channels; ++c)
                grad_.sums[i * grad_.columns + c] += static_cast<double>(at_.sums[i * most_channels + c]);
        clear(at_.sums, in_.width + 1);
    }

    void clear(float* rows, Index count) const {
        for (Index i = 0; i < count; ++i)
            for (Index c = 0; c < columns(); c += W) store(rows + i * most_channels + c, splat(0.0F));
    }
    Index columns() const { return round_up(in_.channels, W); }

    const ConvolutionChannels& in_;
    const ConvolutionGradients& grad_;
    Scratch scratch_;
    const Buffers at_;
};

void run_backward(const ConvolutionChannels& in, Index begin, Index end, std::byte* memory,
                  const ConvolutionGradients& grad) {
    Backward(in, grad, memory).run(begin, end);
}

void run_initial_state(const ConvolutionChannels& in, std::byte* memory, const ConvolutionGradients& grad) {
    Backward(in, grad, memory).run_state();
}

constexpr std::size_t scratch_bytes =
    (2 * (most_width + 1) + 2 * (most_width - 1) + 3 * block) * most_channels * sizeof(float);

}  // namespace

const ConvolutionKernels convolution_kernels = {most_width,      most_channels, scratch_bytes,    run_forward,
                                                run_final_state, run_backward,  run_initial_state};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

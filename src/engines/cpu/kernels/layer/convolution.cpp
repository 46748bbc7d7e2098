// Four tokens of a vector of channels at a time. What came before them is a history of W − 1 rows in f32:
//
//     history   tokens          y_t = act(b + w0 v_t + w1 v_t+1 + w2 v_t+2 + w3 v_t+3)       W = 4
//     v0 v1 v2  v3 v4 v5 v6     the new history is v4 v5 v6
//
// The backward pass walks the same way. dz_t = dy_t act'(z_t) has a history too, and a token's gradient is complete
// W − 1 tokens later: dx_{t−W+1} = Σ_i w_i dz_{t−i}.
#include "engines/cpu/kernels/isa_unit.h"

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
constexpr Index block = 4;                       // tokens of a step
constexpr Index copied = W > block ? W : block;  // that are copied at once: channels that come first are transposed
constexpr Index float_tokens = 32;               // that are summed in f32 before they are added to a sum in f64

// Rows of most_channels floats.
struct Buffers {
    float *weights, *history, *slopes, *sums, *x, *dy, *result;

    explicit Buffers(Scratch& memory)
        : weights(memory.take<float>((most_width + 1) * most_channels)),  // the last row is the bias
          history(memory.take<float>((most_width - 1) * most_channels)),
          slopes(memory.take<float>((most_width - 1) * most_channels)),  // history of dz
          sums(memory.take<float>((most_width + 1) * most_channels)),
          x(memory.take<float>(copied * most_channels)),
          dy(memory.take<float>(copied * most_channels)),
          result(memory.take<float>(copied * most_channels)) {}

    // Those of the tokens from i on.
    Buffers from(Index i) const {
        Buffers b = *this;
        for (float** rows : {&b.x, &b.dy, &b.result}) *rows += i * most_channels;
        return b;
    }
};

// Token t of the sequence, one of the state where it is before the first.
void load_token(const ConvolutionChannels& in, Index t, float* out) {
    if (t >= 0) return load_layer_row(in.x, t, in.channels, out);
    load_layer_row(in.initial_state, in.kept + t, in.channels, out);
}

void load_weights(const ConvolutionChannels& in, std::byte* memory) {
    Scratch scratch(memory);
    const Buffers to(scratch);
    load_layer_rows(in.weight, in.width, in.channels, to.weights, most_channels);
    load_layer_row(in.bias, 0, in.channels, to.weights + in.width * most_channels);
}

// The tokens before `begin`.
void load_history(const ConvolutionChannels& in, Index begin, const Buffers& to) {
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

// By way of floats.
void convolve_copies(const ConvolutionChannels& in, Range tokens, const Buffers& at, const LayerRows& y) {
    for (Index t = tokens.begin; t < tokens.end; t += copied) {
        const Index count = min(copied, tokens.end - t);
        load_token_rows(in.x, t, count, in.channels, at.x, most_channels);
        convolve_strip<float>(in, {at.x, most_channels, at.result, most_channels, count, round_up(in.channels, W),
                                   at.weights, at.history});
        store_token_rows(at.result, most_channels, in.channels, y, t, count);
    }
}

// Whole vectors where they lie. The last channels, where they fill none, are a vector with some of those before them.
template <class T>
bool convolve_in_place(const ConvolutionChannels& in, Range tokens, const Buffers& at, const LayerRows& y) {
    if (in.channels < W) return false;
    const T* from = static_cast<const T*>(in.x.data) + tokens.begin * in.x.row;
    T* to = static_cast<T*>(y.data) + tokens.begin * y.row;
    const auto strip = [&](Index first, Index channels) {
        convolve_strip<T>(in, {from + first, in.x.row, to + first, y.row, tokens.end - tokens.begin, channels,
                               at.weights + first, at.history + first});
    };
    if (const Index last = in.channels - W; last % W != 0) {
        F history[most_width - 1];
        for (Index j = 0; j < in.width - 1; ++j) history[j] = load(at.history + j * most_channels + last);
        strip(last, W);
        for (Index j = 0; j < in.width - 1; ++j) store(at.history + j * most_channels + last, history[j]);
    }
    strip(0, in.channels / W * W);
    return true;
}

void run_forward(const ConvolutionChannels& in, Index begin, Index end, std::byte* memory, const LayerRows& y) {
    Scratch scratch(memory);
    const Buffers at(scratch);
    load_history(in, begin, at);
    const Range tokens{begin, end};
    bool done = false;
    // Where y is x, the last vector would be read again when it has been written.
    const bool apart = in.x.data != y.data || in.channels % W == 0;
    if (apart && in.x.column == 1 && y.column == 1 && in.x.dtype == y.dtype) {
        if (y.dtype == core::DType::f32) done = convolve_in_place<float>(in, tokens, at, y);
        if (y.dtype == core::DType::bf16) done = convolve_in_place<core::bf16>(in, tokens, at, y);
        if (y.dtype == core::DType::f16) done = convolve_in_place<core::f16>(in, tokens, at, y);
    }
    if (!done) convolve_copies(in, tokens, at, y);
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
        start(begin);
        Index since = 0;  // tokens in the sums of f32
        for (Index t = begin, count = 0; t < end + in_.width - 1; t += count) {
            const bool summed = t < end;  // what comes behind, gradients of the last tokens need
            count = summed ? min(copied, end - t) : 1;
            advance(t, count, summed);
            const Index first = t - in_.width + 1, skipped = first < begin ? begin - first : 0;
            if (grad_.dx.data != nullptr && skipped < count)
                finish(first + skipped, grad_.dx, first + skipped, count - skipped, skipped);
            if (!summed) continue;
            since += count;
            if (since >= float_tokens || t + count == end) flush(), since = 0;
        }
    }

    // Gradients of the state's tokens. The convolution reaches the last W − 1 of them.
    void run_state() {
        const Index kept = grad_.kept, before = in_.width - 1;
        for (Index s = -kept; s < -before; ++s) {
            clear(at_.result, 1);
            finish(s, grad_.dinitial_state, kept + s, 1, 0);
        }
        start(0);
        for (Index t = 0; t < before; ++t) {
            advance(t, 1, false);
            finish(t - before, grad_.dinitial_state, kept + t - before, 1, 0);
        }
    }

  private:
    void start(Index begin) {
        load_history(in_, begin, at_);
        clear(at_.slopes, in_.width - 1);
        clear(at_.sums, in_.width + 1);
    }

    // `count` tokens from t on, at most `copied`: result i is dx of token t + i − W + 1.
    void advance(Index t, Index count, bool summed) {
        constexpr auto widths = std::make_integer_sequence<int, most_width>{};
        const bool given = t < in_.tokens && grad_.dy.data != nullptr;  // otherwise dz is 0, whatever x is
        if (t < in_.tokens)
            load_token_rows(in_.x, t, count, in_.channels, at_.x, most_channels);
        else
            clear(at_.x, count);
        if (given)
            load_token_rows(grad_.dy, t, count, in_.channels, at_.dy, most_channels);
        else
            clear(at_.dy, count);
        const bool silu = in_.silu && given;
        for (Index i = 0; i < count;) {
            const bool whole = count - i >= block;
            const auto walk = whole ? pick_gradient<static_cast<int>(block)>(in_.width, silu, widths)
                                    : pick_gradient<1>(in_.width, silu, widths);
            walk(at_.from(i), columns(), summed && given);
            i += whole ? block : 1;
        }
    }

    // Tokens from s on, whose gradients begin at result `from`, are complete with those of the final state, which may
    // hold them.
    void finish(Index s, const LayerRows& to, Index row, Index count, Index from) {
        float* dx = at_.from(from).result;
        const Index slot = s - (in_.tokens - grad_.kept);
        for (Index i = slot < 0 ? -slot : 0; grad_.dfinal_state.data != nullptr && i < count; ++i) {
            load_layer_row(grad_.dfinal_state, slot + i, in_.channels, at_.dy);
            for (Index c = 0; c < columns(); c += W) {
                float* x = dx + i * most_channels + c;
                store(x, load(x) + load(at_.dy + c));
            }
        }
        store_token_rows(dx, most_channels, in_.channels, to, row, count);
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
    load_weights(in, memory);
    Backward(in, grad, memory).run_state();
}

constexpr std::size_t scratch_bytes =
    (2 * (most_width + 1) + 2 * (most_width - 1) + 3 * copied) * most_channels * sizeof(float);

}  // namespace

const ConvolutionKernels convolution_kernels = {most_width,  most_channels,   scratch_bytes, load_weights,
                                                run_forward, run_final_state, run_backward,  run_initial_state};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

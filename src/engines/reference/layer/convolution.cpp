// The causal convolution: one channel after another, all sequences of it, token by token.
#include <vector>

#include "core/parallel.h"
#include "engines/reference/layer/activation.h"
#include "engines/reference/reference.h"
#include "engines/work.h"

namespace softdelta::reference {

namespace {

using core::Index;
using core::Tensor;
using Numbers = std::vector<double>;

// One channel of one sequence. Position t is token t; below 0 it is in the state.
class Channel {
  public:
    Channel(const core::ConvolutionInputs& in, core::Activation activation) : in_(in), activation_(activation) {}

    void load(const core::ConvolutionSequence& sequence, Index channel) {
        sequence_ = sequence;
        channel_ = channel;
        weight_.resize(static_cast<std::size_t>(in_.weight.shape[1]));
        core::load_row(in_.weight, in_.weight.offset({channel}), 1, width(), weight_.data());
        bias_ = in_.bias ? core::load(in_.bias, in_.bias.offset({channel})) : 0;
        x_ = rows(in_.x);
        state_.clear();
        if (in_.initial_state && sequence_.state >= 0) state_ = state(in_.initial_state, sequence_.state);
    }

    Index width() const { return in_.weight.shape[1]; }
    Index tokens() const { return sequence_.count; }
    double weight(Index i) const { return weight_[static_cast<std::size_t>(i)]; }

    double x(Index t) const {
        const auto kept = static_cast<Index>(state_.size());
        if (t >= 0) return x_[static_cast<std::size_t>(t)];
        return t + kept >= 0 ? state_[static_cast<std::size_t>(t + kept)] : 0;
    }
    // Before the activation.
    double sum(Index t) const {
        double z = bias_;
        for (Index i = 0; i < width(); ++i) z += weight(i) * x(t - width() + 1 + i);
        return z;
    }
    double y(Index t) const { return activate(activation_, sum(t)); }
    double slope(Index t) const { return derivative(activation_, sum(t)); }

    // Of a tensor [B, T, C] the tokens, of a tensor [N, C, S] the state.
    Numbers rows(const Tensor& t) const {
        Numbers numbers(static_cast<std::size_t>(tokens()));
        core::load_row(t, first(t), 1, tokens(), numbers.data());
        return numbers;
    }
    Numbers state(const Tensor& t, Index entry) const {
        Numbers numbers(static_cast<std::size_t>(t.shape[2]));
        core::load_row(t, t.offset({entry, channel_}), 2, t.shape[2], numbers.data());
        return numbers;
    }
    Numbers final_state(const Tensor& t) const { return state(t, sequence_.final_state); }
    void store_rows(const Tensor& t, const Numbers& numbers) const {
        core::store_row(t, first(t), 1, tokens(), numbers.data());
    }
    void store_state(const Tensor& t, const Numbers& numbers) const {
        if (sequence_.final_state < 0) return;
        core::store_row(t, t.offset({sequence_.final_state, channel_}), 2, t.shape[2], numbers.data());
    }

  private:
    Index first(const Tensor& t) const {
        return tokens() > 0 ? t.offset({sequence_.batch, sequence_.begin, channel_}) : 0;
    }

    const core::ConvolutionInputs& in_;
    core::Activation activation_;
    core::ConvolutionSequence sequence_{};
    Index channel_ = 0;
    Numbers weight_, x_, state_;
    double bias_ = 0;
};

class Forward {
  public:
    Forward(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
            const core::ConvolutionOutputs& out)
        : in_(in), out_(out), channel_(in, options.activation) {}

    void operator()(Index c) {
        for (Index n = 0; n < core::sequence_count(in_); ++n) {
            const core::ConvolutionSequence sequence = core::sequence(in_, n);
            if (sequence.is_padding)
                clear(sequence, c);
            else
                run(sequence, c);
        }
    }

  private:
    void clear(const core::ConvolutionSequence& sequence, Index c) const {
        for (Index t = 0; out_.y && t < sequence.count; ++t)
            core::store(out_.y, out_.y.offset({sequence.batch, sequence.begin + t, c}), 0);
    }

    void run(const core::ConvolutionSequence& sequence, Index c) {
        channel_.load(sequence, c);
        if (out_.y) {
            Numbers y(static_cast<std::size_t>(sequence.count));
            for (Index t = 0; t < sequence.count; ++t) y[static_cast<std::size_t>(t)] = channel_.y(t);
            channel_.store_rows(out_.y, y);
        }
        if (out_.final_state) {
            Numbers state(static_cast<std::size_t>(out_.final_state.shape[2]));
            const Index first = sequence.count - out_.final_state.shape[2];
            for (std::size_t j = 0; j < state.size(); ++j) state[j] = channel_.x(first + static_cast<Index>(j));
            channel_.store_state(out_.final_state, state);
        }
    }

    const core::ConvolutionInputs& in_;
    const core::ConvolutionOutputs& out_;
    Channel channel_;
};

class Backward {
  public:
    Backward(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
             const core::ConvolutionGradients& grad)
        : in_(in), grad_(grad), channel_(in, options.activation) {}

    void operator()(Index c) {
        dweight_.assign(static_cast<std::size_t>(in_.weight.shape[1]), 0);
        dbias_ = 0;
        for (Index n = 0; n < core::sequence_count(in_); ++n) run(core::sequence(in_, n), c);
        if (grad_.dweight)
            core::store_row(grad_.dweight, grad_.dweight.offset({c}), 1, in_.weight.shape[1], dweight_.data());
        if (grad_.dbias) core::store(grad_.dbias, grad_.dbias.offset({c}), dbias_);
    }

  private:
    void run(const core::ConvolutionSequence& sequence, Index c) {
        channel_.load(sequence, c);
        const Index W = channel_.width(), T = sequence.count, before = kept();
        Numbers dx(static_cast<std::size_t>(before + T));  // from the first token of the state on
        if (grad_.dy) {
            const Numbers dy = channel_.rows(grad_.dy);
            for (Index t = 0; t < T; ++t) {
                const double dz = dy[static_cast<std::size_t>(t)] * channel_.slope(t);
                dbias_ += dz;
                for (Index i = 0; i < W; ++i) {
                    const Index s = t - W + 1 + i;
                    dweight_[static_cast<std::size_t>(i)] += dz * channel_.x(s);
                    if (s + before >= 0) dx[static_cast<std::size_t>(s + before)] += dz * channel_.weight(i);
                }
            }
        }
        if (grad_.dfinal_state) {
            const Numbers dfinal = channel_.final_state(grad_.dfinal_state);
            for (std::size_t j = 0; j < dfinal.size(); ++j) dx[dx.size() - dfinal.size() + j] += dfinal[j];
        }
        if (grad_.dinitial_state) channel_.store_state(grad_.dinitial_state, Numbers(dx.begin(), dx.begin() + before));
        if (grad_.dx) channel_.store_rows(grad_.dx, Numbers(dx.begin() + before, dx.end()));
    }

    // Tokens of a state.
    Index kept() const {
        if (grad_.dinitial_state) return grad_.dinitial_state.shape[2];
        return grad_.dfinal_state ? grad_.dfinal_state.shape[2] : 0;
    }

    const core::ConvolutionInputs& in_;
    const core::ConvolutionGradients& grad_;
    Channel channel_;
    Numbers dweight_;
    double dbias_ = 0;
};

}  // namespace

void convolution_forward(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
                         const core::Execution& execution, const core::ConvolutionOutputs& out) {
    const core::Work work = engines::work_of(in, engines::Direction::forward);
    core::parallel_units(core::useful_threads(execution.threads, work), in.x.shape[2],
                         [&] { return Forward(in, options, out); });
}

void convolution_backward(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
                          const core::Execution& execution, const core::ConvolutionGradients& grad) {
    const core::Work work = engines::work_of(in, engines::Direction::backward);
    core::parallel_units(core::useful_threads(execution.threads, work), in.x.shape[2],
                         [&] { return Backward(in, options, grad); });
}

}  // namespace softdelta::reference

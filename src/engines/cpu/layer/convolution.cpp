// Units of the causal convolution: a range of tokens, all batch rows one after the other, of some channels. A range may
// hold parts of several sequences. The sums for dweight and dbias are one for each range, added in order. States are
// written when all tokens are done, since a state may be updated in place.
#include "core/parallel.h"
#include "engines/cpu/layer/layer.h"
#include "engines/cpu/layer/ranges.h"
#include "engines/cpu/machine/isa.h"
#include "engines/work.h"

namespace softdelta::cpu {

namespace {

using kernels::LayerRows;

// A sequence's row and column pointers for some channels.
class Call {
  public:
    Call(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options)
        : in_(in), silu_(options.activation == core::Activation::silu), kernel_(*selected_kernels().convolution) {}

    const kernels::ConvolutionKernels& kernel() const { return kernel_; }
    Index tokens() const { return in_.x.shape[0] * in_.x.shape[1]; }
    Index channels() const { return in_.x.shape[2]; }
    Index width() const { return in_.weight.shape[1]; }
    Index sequences() const { return core::sequence_count(in_); }
    Index parts() const { return (channels() + kernel_.most_channels - 1) / kernel_.most_channels; }
    kernels::Range part(Index i) const {
        return {i * kernel_.most_channels, std::min((i + 1) * kernel_.most_channels, channels())};
    }

    // Where the tokens of a sequence begin among all.
    Index begin(const core::ConvolutionSequence& s) const { return s.batch * in_.x.shape[1] + s.begin; }

    // visit(sequence, begin, end) for the tokens of this range: those of each sequence in it. The weights of
    // this part of the channels are in the scratch memory then.
    template <class Visit>
    void for_each_sequence(kernels::Range range, kernels::Range part, std::byte* scratch, const Visit& visit) const {
        kernel_.load_weights(of({}, part), scratch);
        for (Index n = first_sequence(range.begin); n < sequences(); ++n) {
            const core::ConvolutionSequence s = core::sequence(in_, n);
            const Index first = begin(s);
            if (first >= range.end) return;
            const Index from = std::max(range.begin - first, Index{0}), to = std::min(range.end - first, s.count);
            if (from < to) visit(s, from, to);
        }
    }

    kernels::ConvolutionChannels of(const core::ConvolutionSequence& s, kernels::Range part) const {
        kernels::ConvolutionChannels c;
        c.tokens = s.count;
        c.channels = part.end - part.begin;
        c.width = width();
        c.silu = silu_;
        c.x = rows(in_.x, s, part.begin);
        c.weight = {at(in_.weight, in_.weight.offset({part.begin})), in_.weight.dtype, in_.weight.stride[1],
                    in_.weight.stride[0]};
        if (in_.bias) c.bias = {at(in_.bias, in_.bias.offset({part.begin})), in_.bias.dtype, 0, in_.bias.stride[0]};
        c.initial_state = states(in_.initial_state, s.state, part.begin);
        c.kept = in_.initial_state && s.state >= 0 ? in_.initial_state.shape[2] : 0;
        return c;
    }

    // Of a tensor [B, T, C].
    static LayerRows rows(const Tensor& t, const core::ConvolutionSequence& s, Index channel) {
        if (!t || s.count == 0) return {};
        return {at(t, t.offset({s.batch, s.begin, channel})), t.dtype, t.stride[1], t.stride[2]};
    }
    // Of a tensor [N, C, S].
    static LayerRows states(const Tensor& t, Index entry, Index channel) {
        if (!t || t.shape[2] == 0 || entry < 0) return {};
        return {at(t, t.offset({entry, channel})), t.dtype, t.stride[2], t.stride[1]};
    }

    // Of the states of a part's channels.
    std::size_t state_bytes(const Tensor& states) const {
        return static_cast<std::size_t>(states.shape[2] * kernel_.most_channels) * sizeof(double);
    }

    // Bytes and flops from shapes: the exponential of an activation counts for as much as it costs.
    core::Work work(Index passes) const {
        const double elements = static_cast<double>(tokens()) * static_cast<double>(channels());
        core::Work work;
        work.bytes = static_cast<double>(passes) * engines::bytes_of(in_.x);
        work.flops = elements * static_cast<double>(passes * width() + (silu_ ? engines::exponential_flops : 0));
        return work;
    }

  private:
    // The first sequence that ends behind this token.
    Index first_sequence(Index token) const {
        if (!in_.cu_seqlens) return token / std::max<Index>(in_.x.shape[1], 1);
        Index low = 0, high = sequences();
        while (low < high) {
            const Index middle = (low + high) / 2;
            const core::ConvolutionSequence s = core::sequence(in_, middle);
            if (s.begin + s.count > token)
                high = middle;
            else
                low = middle + 1;
        }
        return low;
    }

    const core::ConvolutionInputs& in_;
    bool silu_;
    const kernels::ConvolutionKernels& kernel_;
};

class Forward {
  public:
    Forward(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
            const core::Execution& execution, const core::ConvolutionOutputs& out)
        : in_(in),
          out_(out),
          call_(in, options),
          in_place_(out.y && out.y.data == in.x.data),
          ranges_(call_.tokens(), in_place_ ? std::max<Index>(call_.tokens(), 1) : 256, 4096),
          threads_(core::useful_threads(execution.threads, call_.work(2))),
          scratch_(core::Team(threads_, units()),
                   call_.kernel().scratch + (in_place_ && out.final_state ? call_.state_bytes(out.final_state) : 0)) {}

    std::size_t bytes() const { return scratch_.bytes(); }

    void run(std::byte* memory) const {
        if (in_place_) return run_in_place(memory);
        if (out_.y)
            each(ranges_.count(), memory, [this](Index i, kernels::Range part, std::byte* scratch) {
                call_.for_each_sequence(ranges_[i], part, scratch,
                                        [&](const core::ConvolutionSequence& s, Index begin, Index end) {
                                            if (s.is_padding) return clear(s, begin, end, part);
                                            call_.kernel().forward(call_.of(s, part), begin, end, scratch,
                                                                   Call::rows(out_.y, s, part.begin));
                                        });
            });
        if (out_.final_state && out_.final_state.shape[2] > 0)
            each(call_.sequences(), memory, [this](Index n, kernels::Range part, std::byte* scratch) {
                const core::ConvolutionSequence s = core::sequence(in_, n);
                if (s.is_padding || s.final_state < 0) return;
                kernels::ConvolutionChannels channels = call_.of(s, part);
                channels.kept = out_.final_state.shape[2];
                call_.kernel().final_state(channels, scratch,
                                           Call::states(out_.final_state, s.final_state, part.begin));
            });
    }

  private:
    // y is x: a unit has all tokens of its channels, and takes the states that leave before it writes y.
    void run_in_place(std::byte* memory) const {
        each(std::min<Index>(call_.sequences(), 1), memory, [this](Index, kernels::Range part, std::byte* scratch) {
            call_.kernel().load_weights(call_.of({}, part), scratch);
            const Tensor& states = out_.final_state;
            for (Index n = 0; n < call_.sequences(); ++n) {
                const core::ConvolutionSequence s = core::sequence(in_, n);
                if (s.is_padding) {
                    clear(s, 0, s.count, part);
                    continue;
                }
                const bool writes = states && states.shape[2] > 0 && s.final_state >= 0;
                const LayerRows kept{scratch + call_.kernel().scratch, states.dtype, kernel_columns(), 1};
                if (writes) {
                    kernels::ConvolutionChannels channels = call_.of(s, part);
                    channels.kept = states.shape[2];
                    call_.kernel().final_state(channels, scratch, kept);
                }
                if (s.count > 0)
                    call_.kernel().forward(call_.of(s, part), 0, s.count, scratch, Call::rows(out_.y, s, part.begin));
                if (writes) store_states(s, part, kept);
            }
        });
    }
    Index kernel_columns() const { return call_.kernel().most_channels; }
    void store_states(const core::ConvolutionSequence& s, kernels::Range part, const LayerRows& kept) const {
        const Tensor& to = out_.final_state;
        Tensor from;
        from.data = kept.data;
        from.dtype = kept.dtype;
        for (Index j = 0; j < to.shape[2]; ++j)
            for (Index c = part.begin; c < part.end; ++c)
                core::store(to, to.offset({s.final_state, c, j}), core::load(from, j * kept.row + c - part.begin));
    }

    // At most this many at once.
    Index units() const { return std::max(ranges_.count(), call_.sequences()) * call_.parts(); }

    template <class Work>
    void each(Index count, std::byte* memory, const Work& work) const {
        core::parallel_shares(scratch_.team, count * call_.parts(), [&](int thread) {
            std::byte* scratch = scratch_.of(memory, thread);
            return [&, scratch](Index unit) { work(unit / call_.parts(), call_.part(unit % call_.parts()), scratch); };
        });
    }

    // Where there is no sequence y is 0.
    void clear(const core::ConvolutionSequence& s, Index begin, Index end, kernels::Range part) const {
        for (Index t = begin; t < end; ++t)
            for (Index c = part.begin; c < part.end; ++c)
                core::store(out_.y, out_.y.offset({s.batch, s.begin + t, c}), 0);
    }

    const core::ConvolutionInputs& in_;
    const core::ConvolutionOutputs& out_;
    const Call call_;
    const bool in_place_;
    const Ranges ranges_;
    const int threads_;
    const ThreadMemory scratch_;
};

class Backward {
  public:
    Backward(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
             const core::Execution& execution, const core::ConvolutionGradients& grad)
        : in_(in),
          grad_(grad),
          call_(in, options),
          ranges_(call_.tokens(), 512, 64),
          threads_(core::useful_threads(execution.threads, call_.work(6))),
          scratch_(core::Team(threads_, units()), call_.kernel().scratch) {}

    std::size_t bytes() const {
        return scratch_.bytes() + static_cast<std::size_t>(ranges_.count() * range_sums()) * sizeof(double);
    }

    void run(std::byte* memory) const {
        auto* sums = reinterpret_cast<double*>(memory + scratch_.bytes());
        each(ranges_.count(), memory, [&](Index i, kernels::Range part, std::byte* scratch) {
            double* own = sums + i * range_sums() + part.begin;
            for (Index row = 0; row <= call_.width(); ++row)
                std::fill_n(own + row * call_.channels(), part.end - part.begin, 0.0);
            call_.for_each_sequence(ranges_[i], part, scratch,
                                    [&](const core::ConvolutionSequence& s, Index begin, Index end) {
                                        kernels::ConvolutionGradients g = gradients(s, part);
                                        g.sums = own;
                                        g.columns = call_.channels();
                                        call_.kernel().backward(call_.of(s, part), begin, end, scratch, g);
                                    });
        });
        store_sums(sums);
        if (grad_.dinitial_state && grad_.dinitial_state.shape[2] > 0)
            each(call_.sequences(), memory, [this](Index n, kernels::Range part, std::byte* scratch) {
                const core::ConvolutionSequence s = core::sequence(in_, n);
                call_.kernel().initial_state(call_.of(s, part), scratch, gradients(s, part));
            });
    }

  private:
    Index units() const { return std::max(ranges_.count(), call_.sequences()) * call_.parts(); }
    Index range_sums() const { return (call_.width() + 1) * call_.channels(); }

    kernels::ConvolutionGradients gradients(const core::ConvolutionSequence& s, kernels::Range part) const {
        kernels::ConvolutionGradients g;
        g.dy = Call::rows(grad_.dy, s, part.begin);
        g.dfinal_state = Call::states(grad_.dfinal_state, s.state, part.begin);
        g.dx = Call::rows(grad_.dx, s, part.begin);
        g.dinitial_state = Call::states(grad_.dinitial_state, s.state, part.begin);
        const Tensor& states = grad_.dfinal_state ? grad_.dfinal_state : grad_.dinitial_state;
        g.kept = states ? states.shape[2] : 0;
        return g;
    }

    template <class Work>
    void each(Index count, std::byte* memory, const Work& work) const {
        core::parallel_units(scratch_.team, count * call_.parts(), [&](int thread) {
            std::byte* scratch = scratch_.of(memory, thread);
            return [&, scratch](Index unit) { work(unit / call_.parts(), call_.part(unit % call_.parts()), scratch); };
        });
    }

    void store_sums(const double* sums) const {
        const auto total = [&](Index row, Index c) {
            double sum = 0;
            for (Index i = 0; i < ranges_.count(); ++i) sum += sums[i * range_sums() + row * call_.channels() + c];
            return sum;
        };
        for (Index i = 0; grad_.dweight && i < call_.width(); ++i)
            for (Index c = 0; c < call_.channels(); ++c)
                core::store(grad_.dweight, grad_.dweight.offset({c, i}), total(i, c));
        for (Index c = 0; grad_.dbias && c < call_.channels(); ++c)
            core::store(grad_.dbias, grad_.dbias.offset({c}), total(call_.width(), c));
    }

    const core::ConvolutionInputs& in_;
    const core::ConvolutionGradients& grad_;
    const Call call_;
    const Ranges ranges_;
    const int threads_;
    const ThreadMemory scratch_;
};

}  // namespace

std::string refuse_width(const core::ConvolutionInputs& in) {
    const Index most = selected_kernels().convolution->most_width;
    if (in.weight.shape[1] <= most) return "";
    return "weight: dimension 1 is " + std::to_string(in.weight.shape[1]) + ", expected at most " +
           std::to_string(most) + ": name the engine reference for wider ones";
}

void convolution_forward(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
                         const core::Execution& execution, const core::ConvolutionOutputs& out) {
    const Forward forward(in, options, execution, out);
    const Workspace workspace(execution, forward.bytes());
    forward.run(workspace.data());
}

void convolution_backward(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
                          const core::Execution& execution, const core::ConvolutionGradients& grad) {
    const Backward backward(in, options, execution, grad);
    const Workspace workspace(execution, backward.bytes());
    backward.run(workspace.data());
}

std::size_t convolution_forward_workspace(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
                                          const core::Execution& execution, const core::ConvolutionOutputs& out) {
    return Workspace::with_alignment(Forward(in, options, execution, out).bytes());
}

std::size_t convolution_forward_bound(const core::ConvolutionInputs& in, const core::Execution& execution) {
    const core::Team all(execution.threads, core::all_threads(execution.threads));
    const Call call(in, {});
    const std::size_t state = in.initial_state ? call.state_bytes(in.initial_state) : 0;
    return Workspace::with_alignment(ThreadMemory(all, call.kernel().scratch + state).bytes());
}

std::size_t convolution_backward_workspace(const core::ConvolutionInputs& in, const core::ConvolutionOptions& options,
                                           const core::Execution& execution, const core::ConvolutionGradients& grad) {
    return Workspace::with_alignment(Backward(in, options, execution, grad).bytes());
}

}  // namespace softdelta::cpu

// Units of the backward pass: a few key heads of a sequence with their value heads.
#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>

#include "core/parallel.h"
#include "engines/cpu/delta_rule/call.h"
#include "engines/cpu/delta_rule/delta_rule.h"
#include "engines/cpu/delta_rule/split_backward.h"
#include "engines/cpu/kernels/scratch.h"
#include "engines/cpu/machine/isa.h"
#include "engines/cpu/machine/thresholds.h"
#include "engines/cpu/machine/workspace.h"
#include "engines/cpu/work.h"

namespace softdelta::cpu {

namespace {

class Backward {
  public:
    Backward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
             const core::DeltaGradients& grad, const kernels::Table& table)
        : Backward(in, DeltaCall(in, options, execution, table), execution, grad, table) {}

  private:
    Backward(const core::DeltaInputs& in, const DeltaCall& call, const core::Execution& execution,
             const core::DeltaGradients& grad, const kernels::Table& table)
        : grad_(grad),
          kernel_(*table.delta_backward),
          threads_(core::useful_threads(execution.threads, delta_work(call, in, Direction::backward))),
          is_shared_(DeltaSplitBackward::pays(call.in_parts(threads_), threads_)),
          call_(is_shared_ ? call : call.in_parts(threads_)),
          key_heads_(is_shared_ ? 1 : unit_key_heads()),
          units_(call_.sequences() * units_of_sequence()),
          sums_size_(2 + call_.largest(1).channels()),
          team_(threads_, units_) {
        if (is_shared_) split_.emplace(call_, *table.delta_backward_split, grad, sums_size_, threads_);
    }

  public:
    std::size_t bytes() {
        kernels::Scratch count(nullptr);
        take(count);
        return count.used();
    }

    void run(std::byte* memory) {
        kernels::Scratch scratch(memory);
        take(scratch);
        if (relayed_chunks_ != nullptr) std::uninitialized_value_construct_n(relayed_chunks_, units_);
        if (is_shared_) split_->run(memory_, sums_, left_);
        if (!is_shared_ || std::count(left_, left_ + units_, 0) < units_) run_units();
        store_gate_sums();
    }

  private:
    void run_units() {
        core::parallel_units(team_, units_, [&](int thread) {
            std::byte* own = memory_ + static_cast<std::size_t>(thread) * thread_bytes_;
            return [&, own](Index unit) {
                if (is_shared_ && left_[unit] == 0) return;
                const Index n = unit / units_of_sequence(), h = unit % units_of_sequence() * key_heads_;
                kernels::DeltaGradients g = call_.gradients(grad_, n, h);
                g.gate_sums = sums(n, h * call_.group());
                if (call_.parts() > 1) g.relay = relay(unit);
                kernel_.run(call_.heads(n, h, key_heads_), own, g);
            };
        });
    }

    // Between the parts of a key head, which are units one after the other.
    kernels::DeltaRelay relay(Index unit) const {
        const Index parts = call_.parts(), part = unit % parts, tokens = call_.largest(1).tokens;
        kernels::DeltaRelay relay{nullptr, nullptr, nullptr, relayed_row(), nullptr, nullptr, core::wait_until};
        float** sum[] = {&relay.dq, &relay.dk, &relay.dp};
        for (Index i = 0; i < 3; ++i) *sum[i] = relayed_ + (unit / parts * 3 + i) * tokens * relayed_row();
        if (part > 0) relay.before = relayed_chunks_ + unit - 1;
        if (part + 1 < parts) relay.done = relayed_chunks_ + unit;
        return relay;
    }
    Index relayed_row() const { return (call_.largest(1).key_size + 15) / 16 * 16; }

    // Memory that grows with the sequence, for states that the forward pass did not keep, bounds how many there are.
    Index unit_key_heads() const {
        const int most = core::thread_count(threads_, call_.sequences() * call_.key_heads());
        const Index many = call_.unit_key_heads(most);
        if (call_.keeps(grad_)) return many;
        const bool fits = static_cast<std::size_t>(most) * thread_bytes(many) <= thresholds::most_kept_memory;
        return fits ? many : call_.unit_key_heads();
    }
    Index units_of_sequence() const { return call_.key_heads() / key_heads_; }
    std::size_t thread_bytes(Index key_heads) const {
        return whole_pages(kernel_.scratch(call_.largest(key_heads), call_.keeps(grad_) ? call_.state_interval() : 0));
    }

    void take(kernels::Scratch& memory) {
        sums_ = memory.take<double>(call_.sequences() * call_.value_heads() * sums_size_);
        if (call_.parts() > 1) {
            relayed_ = memory.take<float>(units_ / call_.parts() * 3 * call_.largest(1).tokens * relayed_row());
            relayed_chunks_ = memory.take<std::atomic<Index>>(units_);
        }
        thread_bytes_ = thread_bytes(key_heads_);
        std::size_t bytes = static_cast<std::size_t>(team_.workers) * thread_bytes_;
        if (is_shared_) bytes = std::max(bytes, split_->bytes()), left_ = memory.take<Index>(units_);
        memory_ = memory.take<std::byte>(static_cast<Index>(bytes));
    }

    double* sums(Index n, Index place) const { return sums_ + (n * call_.value_heads() + place) * sums_size_; }

    // Of what gates are made with: over the sequences, in order.
    void store_gate_sums() const {
        const auto store_sum = [&](const Tensor& t, Index at, Index hv, Index which) {
            double total = 0;
            for (Index n = 0; n < call_.sequences(); ++n) total += sums(n, call_.place_of(hv))[which];
            if (t) store(t, t.offset({at}), total);
        };
        const core::GateParameters to = core::gate_parameters(grad_);
        for (Index hv = 0; hv < call_.value_heads(); ++hv) {
            store_sum(to.A_log, hv, hv, 0);
            store_sum(grad_.dg_gamma, hv, hv, 1);
            const Index channels = sums_size_ - 2;
            for (Index m = 0; m < channels; ++m) store_sum(to.bias, hv * channels + m, hv, 2 + m);
        }
    }

    const core::DeltaGradients& grad_;
    const kernels::DeltaBackward& kernel_;
    const int threads_;
    const bool is_shared_;  // heads, by threads
    const DeltaCall call_;
    const Index key_heads_, units_, sums_size_;
    const core::Team team_;
    double* sums_ = nullptr;    // [sequences, value heads, 2 + channels]
    float* relayed_ = nullptr;  // [sequences, key heads, 3, tokens, K] of key heads whose value heads are several units
    std::atomic<Index>* relayed_chunks_ = nullptr;  // [units]
    std::size_t thread_bytes_ = 0;
    std::byte* memory_ = nullptr;  // of the threads, and of the pass that shares heads: one after the other
    std::optional<DeltaSplitBackward> split_;
    Index* left_ = nullptr;  // [units] 1 where that pass has left one
};

}  // namespace

std::size_t delta_backward_workspace(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                     const core::Execution& execution, const core::DeltaGradients& grad) {
    return Workspace::with_alignment(Backward(in, options, execution, grad, selected_kernels()).bytes());
}

void delta_backward(const core::DeltaInputs& in, const core::DeltaOptions& options, const core::Execution& execution,
                    const core::DeltaGradients& grad) {
    Backward backward(in, options, execution, grad, selected_kernels());
    const Workspace workspace(execution, backward.bytes());
    backward.run(workspace.data());
}

}  // namespace softdelta::cpu

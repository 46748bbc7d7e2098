// Units of the gated norm: ranges of rows. The sums for dweight are one for each range, added in order.
#include "core/parallel.h"
#include "engines/cpu/layer/layer.h"
#include "engines/cpu/layer/ranges.h"
#include "engines/cpu/machine/isa.h"
#include "engines/work.h"

namespace softdelta::cpu {

namespace {

using kernels::LayerRows;

class Call {
  public:
    Call(const core::NormInputs& in, const core::NormOptions& options) : in_(in), options_(options) {}

    Index rows() const { return in_.x.shape[0] * in_.x.shape[1] * in_.x.shape[2]; }
    Index channels() const { return in_.x.shape[3]; }

    // visit(first row, count): runs of rows whose distance is one and the same, those of one token's heads.
    template <class Visit>
    void for_each_run(kernels::Range range, const Visit& visit) const {
        const Index heads = in_.x.shape[2];
        for (Index row = range.begin; row < range.end;) {
            const Index count = std::min(heads - row % heads, range.end - row);
            visit(row, count);
            row += count;
        }
    }

    // The rows of a tensor [B, T, H, D] from `row` on.
    LayerRows rows_of(const Tensor& t, Index row) const {
        if (!t) return {};
        const Index T = t.shape[1], H = t.shape[2];
        return {at(t, t.offset({row / (H * T), row / H % T, row % H})), t.dtype, t.stride[2], t.stride[3]};
    }

    kernels::NormRows of(Index row, Index count) const {
        kernels::NormRows rows;
        rows.rows = count;
        rows.channels = channels();
        rows.x = rows_of(in_.x, row);
        rows.z = rows_of(in_.z, row);
        if (in_.weight) rows.weight = {in_.weight.data, in_.weight.dtype, 0, in_.weight.stride[0]};
        rows.gate = options_.gate;
        rows.epsilon = options_.epsilon;
        return rows;
    }

    core::Work work(Index passes) const {
        core::Work work;
        work.bytes = static_cast<double>(passes) * (engines::bytes_of(in_.x) + engines::bytes_of(in_.z));
        work.flops = static_cast<double>(in_.x.count()) * (in_.z ? 24 : 8);
        return work;
    }

  private:
    const core::NormInputs& in_;
    const core::NormOptions& options_;
};

class Forward {
  public:
    Forward(const core::NormInputs& in, const core::NormOptions& options, const core::Execution& execution,
            const core::NormOutputs& out)
        : out_(out),
          call_(in, options),
          kernel_(*selected_kernels().norm),
          ranges_(call_.rows(), 64, 4096),
          scratch_(core::Team(core::useful_threads(execution.threads, call_.work(2)), ranges_.count()),
                   kernel_.scratch(call_.channels())) {}

    std::size_t bytes() const { return scratch_.bytes(); }

    void run(std::byte* memory) const {
        core::parallel_shares(scratch_.team, ranges_.count(), [&](int thread) {
            std::byte* scratch = scratch_.of(memory, thread);
            return [&, scratch](Index i) {
                call_.for_each_run(ranges_[i], [&](Index row, Index count) {
                    kernel_.forward(call_.of(row, count), scratch, call_.rows_of(out_.y, row));
                });
            };
        });
    }

  private:
    const core::NormOutputs& out_;
    const Call call_;
    const kernels::NormKernels& kernel_;
    const Ranges ranges_;
    const ThreadMemory scratch_;
};

class Backward {
  public:
    Backward(const core::NormInputs& in, const core::NormOptions& options, const core::Execution& execution,
             const core::NormGradients& grad)
        : grad_(grad),
          call_(in, options),
          kernel_(*selected_kernels().norm),
          ranges_(call_.rows(), 512, 256),
          scratch_(core::Team(core::useful_threads(execution.threads, call_.work(3)), ranges_.count()),
                   kernel_.scratch(call_.channels())) {}

    std::size_t bytes() const {
        return scratch_.bytes() + static_cast<std::size_t>(ranges_.count() * call_.channels()) * sizeof(double);
    }

    void run(std::byte* memory) const {
        auto* sums = reinterpret_cast<double*>(memory + scratch_.bytes());
        core::parallel_units(scratch_.team, ranges_.count(), [&](int thread) {
            std::byte* scratch = scratch_.of(memory, thread);
            return [&, scratch](Index i) {
                double* own = sums + i * call_.channels();
                std::fill_n(own, call_.channels(), 0.0);
                call_.for_each_run(ranges_[i], [&](Index row, Index count) {
                    const kernels::NormGradients g{call_.rows_of(grad_.dy, row), call_.rows_of(grad_.dx, row),
                                                   call_.rows_of(grad_.dz, row), own};
                    kernel_.backward(call_.of(row, count), scratch, g);
                });
            };
        });
        for (Index c = 0; grad_.dweight && c < call_.channels(); ++c) {
            double total = 0;
            for (Index i = 0; i < ranges_.count(); ++i) total += sums[i * call_.channels() + c];
            core::store(grad_.dweight, grad_.dweight.offset({c}), total);
        }
    }

  private:
    const core::NormGradients& grad_;
    const Call call_;
    const kernels::NormKernels& kernel_;
    const Ranges ranges_;
    const ThreadMemory scratch_;
};

}  // namespace

void norm_forward(const core::NormInputs& in, const core::NormOptions& options, const core::Execution& execution,
                  const core::NormOutputs& out) {
    const Forward forward(in, options, execution, out);
    const Workspace workspace(execution, forward.bytes());
    forward.run(workspace.data());
}

void norm_backward(const core::NormInputs& in, const core::NormOptions& options, const core::Execution& execution,
                   const core::NormGradients& grad) {
    const Backward backward(in, options, execution, grad);
    const Workspace workspace(execution, backward.bytes());
    backward.run(workspace.data());
}

std::size_t norm_forward_workspace(const core::NormInputs& in, const core::NormOptions& options,
                                   const core::Execution& execution, const core::NormOutputs& out) {
    return Workspace::with_alignment(Forward(in, options, execution, out).bytes());
}

std::size_t norm_forward_bound(const core::NormInputs& in, const core::Execution& execution) {
    const core::Team all(execution.threads, core::all_threads(execution.threads));
    return Workspace::with_alignment(ThreadMemory(all, selected_kernels().norm->scratch(in.x.shape[3])).bytes());
}

std::size_t norm_backward_workspace(const core::NormInputs& in, const core::NormOptions& options,
                                    const core::Execution& execution, const core::NormGradients& grad) {
    return Workspace::with_alignment(Backward(in, options, execution, grad).bytes());
}

}  // namespace softdelta::cpu

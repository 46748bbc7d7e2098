// Attention forward: a unit of work is a query head of a sequence.
#include "core/execution.h"
#include "core/parallel.h"
#include "engines/stages/attention/head.h"
#include "engines/stages/attention/intermediates.h"
#include "engines/stages/attention/rounding.h"
#include "engines/stages/stages.h"
#include "engines/work.h"

namespace softdelta::stages {

namespace attention {

namespace {

template <class T>
class ForwardWorker {
  public:
    ForwardWorker(const core::AttentionInputs& in, const core::AttentionOptions& options,
                  const core::Execution& execution, const core::AttentionOutputs& out, const Intermediates& stages)
        : in_(in), execution_(execution), out_(out), stages_(stages), head_(in, options, execution) {}

    void operator()(Index unit) {
        const Index heads = in_.q.shape[2];
        head_.enter(unit / heads, unit % heads);
        Rounding rounding = make_rounding<T>(in_, execution_, RoundedPass::forward, unit);
        for (Index i = 0; i < head_.sequence().q_count; i += head_.chunk_size()) {
            head_.enter_queries(i);
            Tile<T> o = tile_in(o_, head_.query_count(), in_.v.shape[3]), lse = tile_in(lse_, head_.query_count(), 1);
            head_.attend(rounding, out_.o ? out_.o.dtype : in_.q.dtype, out_.lse ? out_.lse.dtype : core::DType::f32, o,
                         lse);
            if (out_.o) head_.store_rows(out_.o, o);
            for (const Tensor& t : {out_.lse, stages_.lse})
                if (t) head_.store_lse(t, lse);
        }
    }

  private:
    const core::AttentionInputs& in_;
    const core::Execution& execution_;
    const core::AttentionOutputs& out_;
    const Intermediates& stages_;
    Head<T> head_;
    Buffer<T> o_, lse_;
};

}  // namespace

}  // namespace attention

template <class T>
void attention_forward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                       const core::Execution& execution, const core::AttentionOutputs& out) {
    const attention::Intermediates stages = attention::find_intermediates(in, execution);
    const core::Work work = engines::work_of(in, options, engines::Direction::forward);
    core::parallel_units(core::useful_threads(execution.threads, work), core::sequence_count(in) * in.q.shape[2],
                         [&] { return attention::ForwardWorker<T>(in, options, execution, out, stages); });
}

template void attention_forward<double>(const core::AttentionInputs&, const core::AttentionOptions&,
                                        const core::Execution&, const core::AttentionOutputs&);
template void attention_forward<float>(const core::AttentionInputs&, const core::AttentionOptions&,
                                       const core::Execution&, const core::AttentionOutputs&);

}  // namespace softdelta::stages

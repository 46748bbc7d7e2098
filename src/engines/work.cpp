#include "engines/work.h"

#include <algorithm>
#include <cstdlib>

namespace softdelta::engines {

namespace {

using core::Index;
using core::Tensor;

double number(Index n) {
    return static_cast<double>(n);
}

core::Work with_bytes(double flops, std::initializer_list<Tensor> read, Direction direction) {
    core::Work work{0, flops};
    for (const Tensor& t : read) work.bytes += bytes_of(t);
    work.bytes *= 2;  // results are as large
    return direction == Direction::forward ? work : core::Work{2 * work.bytes, 2.5 * work.flops};
}

// Keys between the first and the last that position leaves to any query.
Index keys_in_reach(const core::AttentionOptions& options, const core::AttentionSequence& s) {
    const bool causal = options.causal != core::Causal::none;
    const Index diagonal = options.shift + (options.causal == core::Causal::top_left ? 0 : s.k_count - s.q_count);
    const Index far = s.q_count + s.k_count + std::abs(options.shift);
    const Index left = options.window_left < 0 ? far : std::min(options.window_left, far);
    const Index right = causal ? 0 : options.window_right < 0 ? far : std::min(options.window_right, far);
    const Index first = std::clamp<Index>(diagonal - left, 0, s.k_count);
    const Index keys = std::clamp<Index>(diagonal + s.q_count + right, first, s.k_count) - first;
    return std::min(keys, left + right + 1);
}

}  // namespace

double bytes_of(const Tensor& t) {
    return t ? number(t.count()) * number(static_cast<Index>(core::size_of(t.dtype))) : 0;
}

core::Work score_work(const core::AttentionInputs& in, double scores, Direction direction) {
    const double products = number(2 * (in.q.shape[3] + in.v.shape[3]) + exponential_flops);
    return with_bytes(scores * products, {}, direction);
}

core::Work work_of(const core::AttentionInputs& in, const core::AttentionOptions& options, Direction direction) {
    core::Work work = with_bytes(0, {in.q, in.k, in.v}, direction);
    for (Index n = 0; n < core::sequence_count(in) && !core::worth_a_team(work); ++n) {
        const core::AttentionSequence s = core::sequence(in, n);
        work +=
            score_work(in, number(in.q.shape[2]) * number(s.q_count) * number(keys_in_reach(options, s)), direction);
    }
    return work;
}

core::Work work_of(const core::DeltaInputs& in, Direction direction) {
    const double state = number(in.q.shape[3]) * number(in.v.shape[3]), heads = number(in.v.shape[2]);
    core::Work work =
        with_bytes(6 * number(in.q.shape[0]) * number(in.q.shape[1]) * heads * state, {in.q, in.k, in.v}, direction);
    work.bytes += number(core::sequence_count(in)) * heads * state * number(2 * sizeof(float));
    return work;
}

core::Work work_of(const core::ConvolutionInputs& in, Direction direction) {
    return with_bytes(2 * number(in.x.count()) * number(in.weight.shape[1] + exponential_flops), {in.x}, direction);
}

core::Work work_of(const core::NormInputs& in, Direction direction) {
    return with_bytes(number(in.x.count()) * number(exponential_flops), {in.x, in.z}, direction);
}

}  // namespace softdelta::engines

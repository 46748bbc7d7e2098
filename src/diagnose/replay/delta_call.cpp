#include "diagnose/replay/delta_call.h"

#include "core/parallel.h"
#include "diagnose/replay/decay.h"
#include "diagnose/replay/delta_results.h"

namespace softdelta::diagnose {

namespace {

using M = Mistake;

}  // namespace

DeltaCall::DeltaCall(const io::Call& call, int threads)
    : in_(call), right_(static_cast<std::size_t>(in_.value_heads())) {
    core::parallel_units(threads, in_.value_heads(), [&] {
        return [&](Index hv) {
            const Mistakes none;
            Changer changer(none, in_.scale, group());
            const DeltaKernel kernel{in_.rule, in_.scale, none, changer};
            Head& head = right_[static_cast<std::size_t>(hv)];
            head.operands = load(hv, kernel);
            run_forward(kernel, hv, head.operands, head);
            if (in_.d_o || in_.dfinal_state) run_backward(kernel, hv, head.operands, head.forward, head);
        };
    });
}

std::vector<DeltaOperands> DeltaCall::load(Index hv, const DeltaKernel& kernel) const {
    std::vector<DeltaOperands> operands;
    for (const Place& at : in_.chunks()) operands.push_back(in_.operands(at, hv, kernel.mistakes, kernel.at));
    return operands;
}

void DeltaCall::run_forward(const DeltaKernel& kernel, Index hv, const std::vector<DeltaOperands>& operands,
                            Head& out) const {
    const std::vector<Place>& chunks = in_.chunks();
    out.forward.resize(chunks.size());
    std::size_t i = 0;
    Matrix S;
    for (Index n = 0; n < in_.sequence_count(); ++n) {
        kernel.at.restart();
        if (n == 0 || !kernel.has(M::state_leaks))
            S = in_.state(kernel.has(M::initial_state_ignored) ? Dense() : in_.initial_state,
                          kernel.has(M::initial_state_of_first) ? 0 : n, hv);
        for (; i < chunks.size() && chunks[i].sequence == n; ++i) forward(kernel, operands[i], S, out.forward[i]);
        out.final_states.push_back(S);
    }
}

void DeltaCall::run_backward(const DeltaKernel& kernel, Index hv, const std::vector<DeltaOperands>& operands,
                             const std::vector<DeltaForward>& kept, Head& out) const {
    const std::vector<Place>& chunks = in_.chunks();
    out.backward.resize(chunks.size());
    out.initial_gradients.resize(static_cast<std::size_t>(in_.sequence_count()));
    std::size_t i = chunks.size();
    for (Index n = in_.sequence_count(); n-- > 0;) {
        kernel.at.restart();
        Matrix dS = in_.state(kernel.has(M::dfinal_state_ignored) ? Dense() : in_.dfinal_state, n, hv);
        for (; i > 0 && chunks[i - 1].sequence == n; --i) {
            DeltaBackward& chunk = out.backward[i - 1];
            backward(kernel, operands[i - 1], kept[i - 1], dS, chunk);
            if (chunks[i - 1].first && kernel.has(M::dinitial_state_without_decay)) {
                const Matrix decay = decay_rows(operands[i - 1].G.bottomRows(1), dS.rows()).transpose();
                chunk.dS += dS - decay.col(0).asDiagonal() * dS;
            }
            dS = chunk.dS;
        }
        out.initial_gradients[static_cast<std::size_t>(n)] = dS;
    }
}

Results DeltaCall::run(const Mistakes& mistakes, Phase from) const {
    Changer changer(mistakes, in_.scale, group());
    const double scale = mistakes.has(M::value_size_in_delta_scale) ? in_.scale_of_value_size : in_.scale;
    const DeltaKernel kernel{in_.rule, changer.value("scale", scale), mistakes, changer};
    DeltaResults results(in_, mistakes);
    for (Index hv = 0; hv < in_.value_heads(); ++hv) {
        changer.restart();
        const Head& right = right_[static_cast<std::size_t>(hv)];
        Head head;
        if (from <= Phase::operands) head.operands = load(hv, kernel);
        const auto& operands = from <= Phase::operands ? head.operands : right.operands;
        if (from <= Phase::forward) run_forward(kernel, hv, operands, head);
        const auto& kept = from <= Phase::forward ? head : right;
        const bool gradients = !right.backward.empty();
        if (gradients && from <= Phase::backward) run_backward(kernel, hv, operands, kept.forward, head);
        const auto& done = from <= Phase::backward ? head : right;

        for (Index n = 0; n < in_.sequence_count(); ++n) {
            const auto at = static_cast<std::size_t>(n);
            results.set_state("final_state", n, hv, kept.final_states[at]);
            if (gradients) results.set_state("dinitial_state", n, hv, done.initial_gradients[at]);
        }
        for (std::size_t i = in_.chunks().size(); i-- > 0;) {
            results.set_output(in_.chunks()[i], hv, kept.forward[i].o);
            if (gradients) results.add_gradients(in_.chunks()[i], hv, done.backward[i]);
        }
    }
    Results finished = results.finish();
    changer.written(in_.call, finished);
    return finished;
}

}  // namespace softdelta::diagnose

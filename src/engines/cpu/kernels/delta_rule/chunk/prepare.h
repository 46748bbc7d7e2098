// What comes before the scan of a chunk: rows of a key head, gates and β of a value head, and their fold.
#pragma once

#include "engines/cpu/kernels/delta_rule/chunk/channel_gate.h"
#include "engines/cpu/kernels/delta_rule/chunk/keys.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

template <class P>
class Preparation {
  public:
    Preparation(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& scratch)
        : Preparation(heads, sizes, scratch, scratch) {}

    // kept: for what is loaded; with the same memory and heads it is there again.
    Preparation(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& kept, Scratch& scratch)
        : heads_(&heads),
          keys_(sizes, heads.rule, kept),
          pairs_(sizes, scratch),
          gates_(sizes, heads.has_channel_gate(), heads.rule.erase == core::Erase::from_previous_state, kept,
                 heads.raw_gate != core::RawGate::none) {}

    // The same heads from now on, with or without q. Without q nothing is read from the state, and its rows are left
    // out.
    void use(const DeltaHeads& heads) { heads_ = &heads; }

    // The key head that another one has loaded.
    void share_keys(const Preparation& other) { keys_ = other.keys_; }

    void load_key_head(const Tokens& at) { load_keys<P>(*heads_, at, keys_, pairs_); }

    // Their keys alone: what writes.
    void load_written_keys(const Tokens& at) {
        load_key_rows(heads_->k, at, heads_->key_size, heads_->l2norm, keys_.row, keys_.k, keys_.k_factor);
    }

    // Whether all gates are steady: if not, the tokens are for the token form.
    bool load_value_head(const Tokens& at) {
        falls_ = load_gates(*heads_, at, gates_.row, gates_.bias, gates_.g, gates_.g_rest);
        load_beta(*heads_, at, gates_.beta);
        return count_steady(0, at.n) == at.n;
    }

    // How many of the tokens [first, first + n) come before one at which gates are not steady. What these give does
    // not depend on the later ones, not even on the form that those need.
    Index count_steady(Index first, Index n) const {
        if (falls_) return n;
        const bool channel = heads_->has_channel_gate();
        return kernels::SOFTDELTA_ISA_NAMESPACE::count_steady(*heads_, gates_.from(first, channel).g, gates_.row, n);
    }

    const KeyChunk<P>& keys() const { return keys_; }
    const GateChunk& gates() const { return gates_; }
    const float* beta(Index i) const { return gates_.beta + i; }

    // Rows [first, first + n) of those loaded.
    void fold(Index first, Index n, Folded<P>& folded) {
        const KeyChunk<P> keys = keys_.from(first);
        const GateChunk gates = gates_.from(first, heads_->has_channel_gate());
        folded.n = n;
        if (heads_->has_channel_gate())
            ChannelFold<P>(*heads_, keys, gates, pairs_, folded).run();
        else
            fold_shared_gate(*heads_, keys, gates, folded);
    }

  private:
    const DeltaHeads* heads_;
    KeyChunk<P> keys_;
    PairScratch<P> pairs_;
    GateChunk gates_;
    bool falls_ = false;  // no gate is positive or NaN
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

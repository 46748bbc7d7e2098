// The forward pass: units of the plan, then the partial softmaxes of ranges of keys are combined. Blocks of rows may
// share packed keys: then threads stay with a head, whose keys stay in their caches, and pack them before its blocks.
#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "core/parallel.h"
#include "engines/cpu/attention/attention.h"
#include "engines/cpu/attention/head.h"
#include "engines/cpu/attention/plan.h"
#include "engines/cpu/kernels/scratch.h"
#include "engines/cpu/machine/isa.h"
#include "engines/cpu/machine/thresholds.h"
#include "engines/cpu/machine/workspace.h"
#include "engines/cpu/work.h"

namespace softdelta::cpu {

namespace {

// The heads of a worker's units of decode. Each is made once, for a call of many short sequences would spend more time
// on that than on their keys.
class UnitHeads {
  public:
    UnitHeads() {}  // not "= default": that would clear all of them

    // `count` heads of a sequence from key head hk on.
    const kernels::AttentionHead* place(const AttentionHeads& heads, const core::AttentionSequence& s, Index hk,
                                        Index count) {
        for (; made_ < count; ++made_) new (memory_.head + made_) kernels::AttentionHead(heads.decode_head());
        heads.place(memory_.head[0], s, heads.outline(s), hk);
        for (Index i = 1; i < count; ++i) heads.place_next(memory_.head[i], memory_.head[i - 1], s, hk + i);
        return memory_.head;
    }

  private:
    union Memory {
        Memory() {}
        kernels::AttentionHead head[thresholds::most_unit_heads];
    } memory_;
    Index made_ = 0;
};

class Forward {
  public:
    Forward(const core::AttentionInputs& in, const core::AttentionOptions& options, const core::Execution& execution)
        : table_(selected_kernels()),
          heads_(in, options, execution, table_),
          plan_(heads_, table_,
                core::useful_threads(execution.threads, attention_work(heads_, in, Direction::forward))),
          partial_row_(kernel_.partial_row(heads_.largest())),
          packed_bytes_(kernel_.packed_keys(heads_.largest())) {
        if (packed_bytes_ > 0 && plan_.has_blocks())
            slots_ = std::clamp<Index>(thresholds::most_packed_memory / static_cast<Index>(packed_bytes_), 1, heads());
    }

    std::size_t bytes() {
        kernels::Scratch count(nullptr);
        take(count);
        return count.used();
    }

    // Of all calls within limits.
    std::size_t bound(const core::Limits& limits, int threads) const {
        const AttentionPlan::Bound most = plan_.bound(heads_.largest(), table_, limits);
        kernels::Scratch count(nullptr);
        count.take<AttentionCut>(limits.sequences);
        count.take<Index>(2 * limits.sequences);
        count.take<Index>(limits.sequences);
        count.take<float>(heads_.key_heads() * head_floats(most.partial_rows));
        kernels::AttentionHead head = heads_.largest();
        head.keys = limits.keys;
        if (const auto one = static_cast<Index>(kernel_.packed_keys(head)); one > 0 && limits.tokens > 0) {
            const Index heads = limits.sequences * heads_.key_heads();
            count.take<std::byte>(std::min(heads * one, std::max(thresholds::most_packed_memory, one)));
            count.take<Progress>(heads);
        }
        count.take<std::byte>(core::all_threads(threads) * static_cast<Index>(most.thread_bytes));
        return count.used();
    }

    // Once, in memory of so many bytes.
    void place(std::byte* memory) {
        kernels::Scratch pieces(memory);
        take(pieces);
        place_units();
    }

    void run(const core::AttentionOutputs& out) {
        out_ = out;
        const Index sequences = heads_.sequences();
        if (sequences == 0) return;
        for (Index first = 0; slots_ > 0 && first < heads(); first += slots_)
            share_heads(first, std::min(first + slots_, heads()));
        core::parallel_units(plan_.team(), ends_[2 * sequences - 1], [&](int thread) {
            return [&, scratch = thread_memory(thread), place = Index{0}, group = UnitHeads()](Index unit) mutable {
                while (ends_[place] <= unit) ++place;  // a worker's units ascend
                unit -= begin(place);
                place < sequences ? block(place, unit, scratch) : range(place - sequences, unit, scratch, group);
            };
        });
        if (!plan_.combines()) return;
        core::parallel_units(plan_.team(), sequences * heads_.key_heads(), [&] {
            return [&](Index unit) {
                const Index n = unit / heads_.key_heads(), hk = unit % heads_.key_heads();
                if (!cuts_[n].by_keys || cuts_[n].pieces == 1) return;
                const core::AttentionSequence s = heads_.sequence(n);
                combine(n, heads_.head(s, hk), hk, output(s, hk));
            };
        });
    }

  private:
    void take(kernels::Scratch& memory) {
        cuts_ = memory.take<AttentionCut>(heads_.sequences());
        ends_ = memory.take<Index>(2 * heads_.sequences());
        partial_rows_ = memory.take<Index>(heads_.sequences());
        partials_ = memory.take<float>(heads_.key_heads() * head_floats(plan_.partial_rows()));
        packed_ = memory.take<std::byte>(slots_ * static_cast<Index>(packed_bytes_));
        progress_ = memory.take<Progress>(slots_);
        threads_ = memory.take<std::byte>(plan_.team().workers * static_cast<Index>(plan_.thread_bytes()));
    }

    std::byte* thread_memory(int thread) const {
        return threads_ + static_cast<std::size_t>(thread) * plan_.thread_bytes();
    }

    // Units are numbered by place. Places 0 … N − 1 are the sequences that are cut into blocks of rows: their units are
    // the longest and begin first. Places N … 2N − 1 are those cut into ranges of keys. A sequence has units in one
    // place only.
    void place_units() {
        const Index sequences = heads_.sequences();
        Index end = 0, rows = 0;
        for (Index n = 0; n < sequences; ++n) {
            cuts_[n] = plan_.cut(heads_.outline(n));
            ends_[n] = end += cuts_[n].by_keys || slots_ > 0 ? 0 : plan_.units(cuts_[n]);
        }
        for (Index n = 0; n < sequences; ++n) {
            const AttentionCut& cut = cuts_[n];
            partial_rows_[n] = rows;
            ends_[sequences + n] = end += cut.by_keys ? plan_.units(cut) : 0;
            rows += cut.by_keys ? cut.pieces * cut.rows : 0;
        }
    }
    Index begin(Index place) const { return place == 0 ? 0 : ends_[place - 1]; }

    void block(Index n, Index unit, std::byte* scratch) const {
        const core::AttentionSequence s = heads_.sequence(n);
        const Index hk = unit / cuts_[n].pieces;
        run_block(n, s, heads_.head(s, hk), hk, unit % cuts_[n].pieces, nullptr, scratch);
    }

    void run_block(Index n, const core::AttentionSequence& s, const kernels::AttentionHead& head, Index hk, Index unit,
                   std::byte* packed, std::byte* scratch) const {
        const AttentionCut& cut = cuts_[n];
        // With a causal mask later rows see more keys: the last block, the longest unit, begins first.
        const Index first = (cut.pieces - 1 - unit) * cut.size;
        const Index last = std::min(first + cut.size, cut.rows);
        if (first < last) kernel_.run(head, first, last, packed, scratch, output(s, hk));
    }

    // What threads have begun and done of a head; each has a cache line of its own.
    struct alignas(64) Progress {
        std::atomic<Index> pack{0}, packed{0}, block{0};
    };

    // Heads [first, last), which have memory for packed keys. Threads begin at different heads, and go on where work is
    // left.
    void share_heads(Index first, Index last) {
        std::uninitialized_value_construct_n(progress_, last - first);
        core::run_threads(plan_.team(), [&](const core::Member& member, const std::atomic<bool>& /*failed*/) {
            std::byte* scratch = thread_memory(member.number);
            const Index home = member.number * (last - first) / member.team;
            for (Index i = 0; i < last - first; ++i) {
                const Index slot = (home + i) % (last - first), h = first + slot;
                const Index n = h / heads_.key_heads(), hk = h % heads_.key_heads();
                const AttentionCut& cut = cuts_[n];
                Progress& progress = progress_[slot];
                if (cut.by_keys || cut.rows == 0 || progress.block.load(std::memory_order_relaxed) >= cut.pieces)
                    continue;
                const core::AttentionSequence s = heads_.sequence(n);
                const kernels::AttentionHead head = heads_.head(s, hk);
                std::byte* packed = packed_ + slot * static_cast<Index>(packed_bytes_);
                const Index packs = ceil_divide(cut.seen.end - cut.seen.begin, thresholds::packed_keys);
                for (Index unit = 0; (unit = progress.pack++) < packs;
                     progress.packed.fetch_add(1, std::memory_order_release)) {
                    const Index key = cut.seen.begin + unit * thresholds::packed_keys;
                    kernel_.pack_keys(head, key, std::min(key + thresholds::packed_keys, cut.seen.end), packed,
                                      scratch);
                }
                core::wait_until(progress.packed, packs);
                for (Index unit = 0; (unit = progress.block++) < cut.pieces;)
                    run_block(n, s, head, hk, unit, packed, scratch);
            }
        });
    }

    Index heads() const { return heads_.sequences() * heads_.key_heads(); }

    // A unit is a range of keys of several heads: their keys are neighbours in memory.
    void range(Index n, Index unit, std::byte* scratch, UnitHeads& unit_heads) const {
        const AttentionCut& cut = cuts_[n];
        const Index part = unit < plan_.key_groups() ? 0 : unit / plan_.key_groups();
        const Index hk = (unit - part * plan_.key_groups()) * plan_.unit_heads();
        const Index heads = std::min(plan_.unit_heads(), heads_.key_heads() - hk);
        const Index first = cut.first + part * cut.size, last = first + cut.size;
        const core::AttentionSequence s = heads_.sequence(n);
        if (cut.decode) {
            const kernels::AttentionHead* group = unit_heads.place(heads_, s, hk, heads);
            table_.attention_decode->run(group, heads, first, std::min(last, group->keys), scratch,
                                         partial(n, part, hk), head_floats(cut.rows));
            if (cut.pieces > 1) return;
            kernels::AttentionOutput out = output(s, hk);
            for (Index i = 0; i < heads; ++i) {
                combine(n, group[i], hk + i, out);
                next_head(out);
            }
            return;
        }
        for (Index h = hk; h < hk + heads; ++h) {
            const kernels::AttentionHead head = heads_.head(s, h);
            kernel_.run_partial(head, 0, cut.rows, first, std::min(last, head.keys), scratch, partial(n, part, h));
        }
    }

    void combine(Index n, const kernels::AttentionHead& head, Index hk, const kernels::AttentionOutput& out) const {
        const AttentionCut& cut = cuts_[n];
        kernel_.combine(head, 0, cut.rows, partial(n, 0, hk), cut.pieces, heads_.key_heads() * head_floats(cut.rows),
                        out);
    }

    kernels::AttentionOutput output(const core::AttentionSequence& s, Index hk) const {
        return {heads_.query_rows(out_.o, s, hk), heads_.row_values(out_.lse, s, hk)};
    }

    // Of the next key head.
    void next_head(kernels::AttentionOutput& out) const {
        const auto step = [&](void*& data, core::DType dtype, Index stride) {
            if (data != nullptr)
                data =
                    static_cast<std::byte*>(data) + heads_.group() * stride * static_cast<Index>(core::size_of(dtype));
        };
        step(out.o.data, out.o.dtype, out.o.head);
        step(out.lse.data, out.lse.dtype, out.lse.head);
    }

    // So many rows of partial o, their maxima and sums. Ranges of a sequence lie one after the other, in each its
    // heads.
    Index head_floats(Index rows) const { return rows * (partial_row_ + 2); }
    kernels::PartialSoftmax partial(Index n, Index part, Index hk) const {
        const Index rows = cuts_[n].rows;
        float* o =
            partials_ + heads_.key_heads() * head_floats(partial_rows_[n] + part * rows) + hk * head_floats(rows);
        return {o, o + rows * partial_row_, o + rows * (partial_row_ + 1)};
    }

    const kernels::Table& table_;
    const kernels::AttentionForward& kernel_ = *table_.attention_forward;
    AttentionHeads heads_;
    AttentionPlan plan_;
    Index partial_row_;         // floats of a row of partial o
    std::size_t packed_bytes_;  // of a head's keys and values that blocks share; 0: they pack them
    Index slots_ = 0;           // heads that have memory for them
    core::AttentionOutputs out_{};
    AttentionCut* cuts_ = nullptr;   // [N]
    Index* ends_ = nullptr;          // [2N] where the units of each place end
    Index* partial_rows_ = nullptr;  // [N] rows of a head in the ranges of earlier sequences
    float* partials_ = nullptr;
    std::byte* packed_ = nullptr;
    Progress* progress_ = nullptr;  // [slots]
    std::byte* threads_ = nullptr;
};

}  // namespace

std::size_t attention_forward_workspace(const core::AttentionInputs& in, const core::AttentionOptions& options,
                                        const core::Execution& execution) {
    return Workspace::with_alignment(Forward(in, options, execution).bytes());
}

std::size_t attention_forward_bound(const core::AttentionInputs& in, const core::AttentionOptions& options,
                                    const core::Execution& execution, const core::Limits& limits) {
    return Workspace::with_alignment(Forward(in, options, execution).bound(limits, execution.threads));
}

void attention_forward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                       const core::Execution& execution, const core::AttentionOutputs& out) {
    Forward forward(in, options, execution);
    const Workspace workspace(execution, forward.bytes());
    forward.place(workspace.data());
    forward.run(out);
}

std::unique_ptr<engines::Prepared> prepare_attention_forward(const engines::AttentionForward& call) {
    struct Layers final : engines::Prepared {
        const core::AttentionOutputs& out;
        Forward forward;
        Workspace workspace;

        explicit Layers(const engines::AttentionForward& c)
            : out(c.out), forward(c.in, c.options, c.execution), workspace(c.execution, forward.bytes()) {
            forward.place(workspace.data());
        }
        void run() override { forward.run(out); }
    };
    return std::make_unique<Layers>(call);
}

}  // namespace softdelta::cpu

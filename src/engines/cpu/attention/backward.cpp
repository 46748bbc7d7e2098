// The backward pass in tile steps of a block of query rows and a block of keys. In the phase of shift s every block of
// keys j is paired with the block of rows (j + s) mod n. So no two steps of a phase add to the same sums:
//
//     key block   shift 0   shift 1   shift 2        n = 3
//         0       rows 0    rows 1    rows 2
//         1       rows 1    rows 2    rows 0
//         2       rows 2    rows 0    rows 1
//
// Only shifts in which some row may see a key have a phase. A step waits for those of earlier phases that have its keys
// or its rows: every sum is taken in the order of phases, whatever the number of threads. Heads are taken in batches.
// Heads or sequences that share an accumulator of dbias are one unit in each step. One thought: what
// a step reads, waits for, clears and stores is decided from the same phases.
#include <algorithm>
#include <atomic>
#include <memory>

#include "core/parallel.h"
#include "engines/cpu/attention/attention.h"
#include "engines/cpu/attention/bias_gradient.h"
#include "engines/cpu/attention/head.h"
#include "engines/cpu/kernels/range.h"
#include "engines/cpu/kernels/scratch.h"
#include "engines/cpu/machine/isa.h"
#include "engines/cpu/machine/thresholds.h"
#include "engines/cpu/machine/workspace.h"
#include "engines/cpu/work.h"

namespace softdelta::cpu {

namespace {

using kernels::Range;

constexpr Index store_distance = 8;  // rows from the one that is stored to the one that is fetched

class Backward {
  public:
    Backward(const core::AttentionInputs& in, const core::AttentionOptions& options, const core::Execution& execution,
             const core::AttentionGradients& grad, const kernels::Table& table)
        : in_(in),
          grad_(grad),
          kernel_(*table.attention_backward),
          heads_(in, options, execution, table, &grad.d_o),
          bias_(in, grad, heads_),
          all_heads_(heads_.sequences() * heads_.key_heads()),
          rows_(heads_.most_rows()),
          keys_(in.cu_seqlens_k ? heads_.longest_keys() : in.k.shape[1]),
          wants_tiles_(grad.dq || grad.dk || grad.dv || bias_.by_tiles()),
          packs_(grad.dq && grad.dk && grad.dv && !in.mask && !in.bias && !in.alibi_slopes && options.softcap == 0 &&
                 options.top_w < 0 && kernel_.packed_rows(heads_.largest()) > 0),
          row_block_(block_size(rows_, kernel_.query_block)),
          key_block_(block_size(keys_, kernel_.key_block)),
          row_blocks_(ceil_divide(rows_, row_block_)),
          key_blocks_(std::max<Index>(1, ceil_divide(keys_, key_block_))),
          shift_count_(std::max(row_blocks_, key_blocks_)),
          batch_(std::clamp<Index>(ceil_divide(thresholds::backward_phase_units, key_blocks_), 1,
                                   std::max<Index>(1, all_heads_))),
          team_(core::useful_threads(execution.threads, attention_work(heads_, in, Direction::backward)),
                batch_ * shift_count_),
          together_(ceil_divide(thresholds::units_in_flight * team_.workers, key_blocks_)),
          slots_(bias_.shared() ? batch_ : std::min(batch_, team_.workers == 1 ? together_ : 2 * together_)) {}

    std::size_t bytes() {
        kernels::Scratch count(nullptr);
        take(count);
        return count.used();
    }

    void run(std::byte* memory) {
        kernels::Scratch scratch(memory);
        take(scratch);
        find_phases();
        bias_.clear(team_.threads);
        if (grad_.dsink) std::fill_n(dsink_, in_.q.shape[2], 0.0);
        for (Index first = 0; first < all_heads_; first += batch_)
            run_batch(first, std::min(first + batch_, all_heads_));
        bias_.finish(kernel_, team_.threads);
        store_dsink();
    }

  private:
    // Of packed rows or keys: as few blocks as can be, of about one size.
    Index block_size(Index n, Index most) const {
        const Index group = kernel_.packed_group, groups = ceil_divide(n, group);
        return packs_ && n > 0 ? ceil_divide(groups, ceil_divide(n, most)) * group : most;
    }

    void take(kernels::Scratch& memory) {
        const Index D = kernel_.row_length(in_.q.shape[3]), Dv = kernel_.row_length(in_.v.shape[3]);
        const kernels::AttentionHead largest = heads_.largest();
        maximum_ = memory.take<float>(batch_ * rows_);
        lse_ = memory.take<float>(batch_ * rows_);
        delta_ = memory.take<float>(batch_ * rows_);
        if (in_.sink) sink_share_ = memory.take<float>(batch_ * rows_);
        if (bias_.by_rows() && in_.sink && grad_.dlse) row_bias_ = memory.take<float>(batch_ * rows_);
        if (largest.top_w >= 0) {
            bound_ = memory.take<float>(batch_ * rows_);
            last_tie_ = memory.take<Index>(batch_ * rows_);
        }
        if (grad_.dq) dq_ = memory.take<float>(slots_ * rows_ * D);
        if (grad_.dk) dk_ = memory.take<float>(slots_ * keys_ * D);
        if (grad_.dv) dv_ = memory.take<float>(slots_ * keys_ * Dv);
        packed_rows_bytes_ = packs_ ? kernel_.packed_rows(largest) : 0;
        packed_keys_bytes_ = packs_ ? kernel_.packed_keys(largest) : 0;
        if (packed_rows_bytes_ > 0) packed_rows_ = memory.take<std::byte>(slots_ * packed_rows_bytes_);
        if (packed_keys_bytes_ > 0) packed_keys_ = memory.take<std::byte>(slots_ * packed_keys_bytes_);
        if (grad_.dsink) dsink_ = memory.take<double>(in_.q.shape[2]);
        shifts_ = memory.take<Index>(shift_count_);
        done_ = memory.take<std::atomic<Index>>(accumulators(batch_) * key_blocks_);
        bias_.take(memory);
        thread_bytes_ = whole_pages(std::max(kernel_.prepare_scratch(largest), kernel_.scratch(largest)));
        thread_memory_ = memory.take<std::byte>(team_.workers * static_cast<Index>(thread_bytes_));
    }

    // Heads of a batch that share a gradient of their bias have one accumulator; else each has its own.
    Index accumulators(Index heads) const { return bias_.shared() ? bias_.accumulators() : heads; }

    std::byte* scratch(int thread) const { return thread_memory_ + static_cast<std::size_t>(thread) * thread_bytes_; }

    Index sequence(Index u) const { return u / heads_.key_heads(); }
    Index key_head(Index u) const { return u % heads_.key_heads(); }
    core::AttentionSequence place(Index u) const { return heads_.sequence(sequence(u)); }
    kernels::AttentionHead head(Index u) const { return heads_.head(place(u), key_head(u)); }

    // Head u as number b of its batch.
    kernels::AttentionGradient gradient(Index u, Index b) const {
        const Index D = kernel_.row_length(in_.q.shape[3]), Dv = kernel_.row_length(in_.v.shape[3]);
        const auto part = [b](auto* data, Index size) { return data == nullptr ? nullptr : data + b * size; };
        kernels::AttentionGradient g;
        g.d_o = heads_.query_rows(grad_.d_o, place(u), key_head(u));
        g.maximum = part(maximum_, rows_);
        g.lse = part(lse_, rows_);
        g.delta = part(delta_, rows_);
        g.sink_share = part(sink_share_, rows_);
        g.row_bias = part(row_bias_, rows_);
        g.bound = part(bound_, rows_);
        g.last_tie = part(last_tie_, rows_);
        const auto slot = [b, this](auto* data, Index size) {
            return data == nullptr ? nullptr : data + b % slots_ * size;
        };
        g.packed_rows = slot(packed_rows_, packed_rows_bytes_);
        g.packed_keys = slot(packed_keys_, packed_keys_bytes_);
        g.dq = slot(dq_, rows_ * D);
        g.dk = slot(dk_, keys_ * D);
        g.dv = slot(dv_, keys_ * Dv);
        g.dbias = bias_.plane(sequence(u), key_head(u));
        g.bias_mode = bias_.mode();
        return g;
    }

    // Units of an accumulator in the order of phases, a few accumulators at a time: what they share stays in the
    // caches.
    void run_batch(Index first, Index last) {
        const Index count = last - first;
        const Index accumulator_units = phase_count_ * key_blocks_;
        const Index together = std::min(accumulators(count), together_);
        std::uninitialized_value_construct_n(done_, accumulators(count) * key_blocks_);
        core::parallel_units(team_, accumulators(count) * accumulator_units, [&](int thread) {
            return [&, memory = scratch(thread)](Index unit) {
                const Index first_of = unit / (together * accumulator_units) * together;
                const Index size = std::min(together, accumulators(count) - first_of);
                unit -= first_of * accumulator_units;
                const Index phase = unit / (size * key_blocks_);
                const Index accumulator = first_of + unit / key_blocks_ % size;
                const TileStep step{unit % key_blocks_, phase};
                std::atomic<Index>* done = done_ + accumulator * key_blocks_;
                core::wait_until(done[step.key_block], phase);
                if (phase == 0 && accumulator >= slots_ && !bias_.shared())
                    for (Index j = 0; j < key_blocks_; ++j)
                        core::wait_until(done_[(accumulator - slots_) * key_blocks_ + j], phase_count_);
                if (const TileStep before = same_rows(step, -1); before.phase >= 0)
                    core::wait_until(done[before.key_block], before.phase + 1);
                for (Index b = 0; b < count; ++b)
                    if (accumulator_of(first, b) == accumulator) run_step(first + b, b, step, memory);
                done[step.key_block].store(phase + 1, std::memory_order_release);
            };
        });
        if (grad_.dsink || bias_.by_rows()) add_row_gradients(first, count);
    }

    // The accumulator of head first + b, number b of the batch.
    Index accumulator_of(Index first, Index b) const {
        return bias_.shared() ? bias_.accumulator(sequence(first + b), key_head(first + b)) : b;
    }

    // The shifts s, ascending: those in which some rows (j + s) mod shift_count_ may see keys of block j by position,
    // and those that give every block of rows a step at all. Where each tile has its part of dbias, all shifts. Sums
    // are taken in this order.
    void find_phases() {
        Index* needed = shifts_;
        for (Index s = 0; s < shift_count_; ++s) needed[s] = bias_.by_tiles() || s % key_blocks_ == 0 ? 1 : 0;
        for (Index n = 0; n < heads_.sequences(); ++n) {
            const kernels::AttentionHead h = heads_.head(n, 0);
            for (Index r = 0, end = 0; r < h.rows(); r = end) {  // rows of one block and one head
                const Index i = r / row_block_;
                end = std::min((i + 1) * row_block_, (r / h.queries + 1) * h.queries);
                const Range keys = seen_blocks(h, {r % h.queries, (end - 1) % h.queries + 1});
                for (Index j = keys.begin; j < keys.end; ++j) needed[(i - j + shift_count_) % shift_count_] = 1;
            }
        }
        phase_count_ = 0;
        for (Index s = 0; s < shift_count_; ++s)
            if (needed[s] != 0) shifts_[phase_count_++] = s;  // in place: writes do not overtake reads
    }

    // Blocks of keys of which some of these queries may see some by position.
    Range seen_blocks(const kernels::AttentionHead& h, Range queries) const {
        const Index begin = std::max<Index>(0, queries.begin + h.left), end = std::min(h.keys, queries.end + h.right);
        return {begin / key_block_, begin < end ? ceil_divide(end, key_block_) : 0};
    }

    // A block of keys in a phase, and with it a block of rows.
    struct TileStep {
        Index key_block, phase;
    };
    Index row_block(TileStep step) const { return (step.key_block + shifts_[step.phase]) % shift_count_; }

    // The step of the same rows in the nearest phase before (direction −1) or after (1); its phase is outside
    // [0, phase_count_) where there is none.
    TileStep same_rows(TileStep step, Index direction) const {
        const Index row = row_block(step);
        TileStep other{0, step.phase + direction};
        for (; other.phase >= 0 && other.phase < phase_count_; other.phase += direction) {
            other.key_block = (row - shifts_[other.phase] + shift_count_) % shift_count_;
            if (other.key_block < key_blocks_) break;
        }
        return other;
    }

    // Sums are set by the first unit that has them, and stored by the last.
    void run_step(Index u, Index b, TileStep step, std::byte* memory) const {
        const kernels::AttentionHead h = head(u);
        const kernels::AttentionGradient g = gradient(u, b);
        const Index row_begin = row_block(step) * row_block_, key_begin = step.key_block * key_block_;
        const Range rows{row_begin, std::min(row_begin + row_block_, h.rows())};
        const Range keys{key_begin, std::min(key_begin + key_block_, h.keys)};
        const Range stored{key_begin, std::min(key_begin + key_block_, in_.cu_seqlens_k ? h.keys : keys_)};
        const bool fresh_rows = same_rows(step, -1).phase < 0, fresh_keys = step.phase == 0,
                   computes = wants_tiles_ && !rows.empty() && !keys.empty();
        if (fresh_rows && !rows.empty()) {
            kernel_.prepare(h, saved(u), dlse(u), rows.begin, rows.end, memory, g);
            kernel_.pack_rows(h, g, rows.begin, rows.end);
            if (!computes) clear(g.dq, rows, in_.q.shape[3]);
        }
        if (fresh_keys) {
            if (!keys.empty()) kernel_.pack_keys(h, g, keys.begin, keys.end);
            const Range rest{computes ? std::max(keys.end, stored.begin) : stored.begin, stored.end};
            clear(g.dk, rest, in_.q.shape[3]);
            clear(g.dv, rest, in_.v.shape[3]);
        }
        if (computes) kernel_.tile(h, g, rows, keys, fresh_rows, fresh_keys, memory);
        if (same_rows(step, 1).phase >= phase_count_ && !rows.empty()) {
            kernel_.finish_rows(h, g, rows, memory);
            store_rows(u, g.dq, rows);
        }
        if (step.phase == phase_count_ - 1) {
            if (!keys.empty()) kernel_.finish_keys(h, g, keys, memory);
            store_keys(u, grad_.dk, g.dk, stored, in_.q.shape[3]);
            store_keys(u, grad_.dv, g.dv, stored, in_.v.shape[3]);
        }
    }

    void clear(float* sums, Range rows, Index size) const {
        const Index length = kernel_.row_length(size);
        if (sums != nullptr && !rows.empty()) std::fill(sums + rows.begin * length, sums + rows.end * length, 0.0F);
    }

    void store_rows(Index u, const float* sums, Range rows) const {
        if (!grad_.dq) return;
        const Index D = in_.q.shape[3], queries = head(u).queries;
        const kernels::QueryRows t = heads_.query_rows(grad_.dq, place(u), key_head(u));
        const auto row = [&](Index r) { return at(t.data, t.dtype, r / queries * t.head + r % queries * t.row); };
        for (Index r = rows.begin; r < rows.end; ++r) {
            if (r + store_distance < rows.end) prefetch(row(r + store_distance), D, t.dtype, t.column);
            kernel_.store(sums + r * kernel_.row_length(D), D, row(r), t.dtype, t.column);
        }
    }

    void store_keys(Index u, const Tensor& gradient, const float* sums, Range keys, Index size) const {
        if (!gradient) return;
        const kernels::KeyRows t = heads_.key_rows(gradient, place(u), key_head(u));
        for (Index j = keys.begin; j < keys.end; ++j) {
            if (j + store_distance < keys.end)
                prefetch(at(t.data, t.dtype, (j + store_distance) * t.row), size, t.dtype, t.column);
            kernel_.store(sums + j * kernel_.row_length(size), size, at(t.data, t.dtype, j * t.row), t.dtype, t.column);
        }
    }

    // Fetches a row that is stored soon; each lies in a page of its own.
    static void prefetch(void* data, Index n, core::DType dtype, Index step) {
        const Index bytes = step == 1 ? n * static_cast<Index>(core::size_of(dtype)) : 0;
        for (Index i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<char*>(data) + i, 1);
    }

    kernels::AttentionOutput saved(Index u) const {
        return {heads_.query_rows(grad_.o, place(u), key_head(u)), heads_.row_values(grad_.lse, place(u), key_head(u))};
    }
    kernels::Plane dlse(Index u) const { return heads_.row_values(grad_.dlse, place(u), key_head(u)); }

    // Sums over rows, head after head.
    void add_row_gradients(Index first, Index count) {
        for (Index b = 0; b < count; ++b) {
            const Index u = first + b;
            const kernels::AttentionHead h = head(u);
            const kernels::AttentionGradient g = gradient(u, b);
            for (Index r = 0; r < h.rows(); ++r) {
                const kernels::RowGradient row = kernel_.row_gradient(h, dlse(u), g, r);
                if (grad_.dsink) dsink_[key_head(u) * h.group + r / h.queries] += static_cast<double>(row.sink);
                if (bias_.by_rows())
                    bias_.add_row(sequence(u), key_head(u) * h.group + r / h.queries, r % h.queries, row.bias);
            }
        }
    }

    void store_dsink() const {
        for (Index h = 0; grad_.dsink && h < in_.q.shape[2]; ++h)
            core::store(grad_.dsink, h * grad_.dsink.stride[0], dsink_[h]);
    }

    static void* at(void* data, core::DType dtype, Index offset) {
        return static_cast<std::byte*>(data) + offset * static_cast<Index>(core::size_of(dtype));
    }

    const core::AttentionInputs& in_;
    const core::AttentionGradients& grad_;
    const kernels::AttentionBackward& kernel_;
    AttentionHeads heads_;
    AttentionBiasGradient bias_;
    Index all_heads_, rows_, keys_;
    bool wants_tiles_, packs_;
    Index row_block_, key_block_, row_blocks_, key_blocks_, shift_count_;
    Index batch_;
    core::Team team_;
    // Heads whose units alternate, and those that have memory for sums: head b takes that of head b − slots, which is
    // done. It stays in the caches.
    Index together_, slots_;
    float *maximum_ = nullptr, *lse_ = nullptr, *delta_ = nullptr, *sink_share_ = nullptr, *row_bias_ = nullptr;
    float* bound_ = nullptr;
    Index* last_tie_ = nullptr;
    Index* shifts_ = nullptr;  // [shift_count_] the shifts that have a phase, phase_count_ of them
    Index phase_count_ = 0;
    Index packed_rows_bytes_ = 0, packed_keys_bytes_ = 0;  // of a head
    std::byte *packed_rows_ = nullptr, *packed_keys_ = nullptr;
    float *dq_ = nullptr, *dk_ = nullptr, *dv_ = nullptr;
    double* dsink_ = nullptr;
    std::atomic<Index>* done_ = nullptr;  // [accumulators, key blocks] phases that are done
    std::size_t thread_bytes_ = 0;
    std::byte* thread_memory_ = nullptr;
};

}  // namespace

std::size_t attention_backward_workspace(const core::AttentionInputs& in, const core::AttentionOptions& options,
                                         const core::Execution& execution, const core::AttentionGradients& grad) {
    return Workspace::with_alignment(Backward(in, options, execution, grad, selected_kernels()).bytes());
}

void attention_backward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                        const core::Execution& execution, const core::AttentionGradients& grad) {
    Backward backward(in, options, execution, grad, selected_kernels());
    const Workspace workspace(execution, backward.bytes());
    backward.run(workspace.data());
}

}  // namespace softdelta::cpu

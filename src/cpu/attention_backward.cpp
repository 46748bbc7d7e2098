// The backward pass in tiles of query rows × keys. Heads are taken in batches; in phase s of a batch every block of
// keys j meets the block of rows (j + s) mod n, so that no two units of a phase add to the same sums, whatever the
// number of threads, and every sum is taken in the order of phases. A gradient of the bias that heads or sequences
// share is added to by one unit for all of them.
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "core/parallel.h"
#include "cpu/attention.h"
#include "cpu/attention_bias_gradient.h"
#include "cpu/attention_head.h"
#include "cpu/isa.h"
#include "cpu/workspace.h"
#include "kernels/scratch.h"

namespace softdelta::cpu {

namespace {

constexpr Index wanted_units = 128;  // of a phase

constexpr Index ceil_divide(Index a, Index b) {
    return (a + b - 1) / b;
}

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
          row_blocks_(ceil_divide(rows_, kernel_.query_block)),
          key_blocks_(ceil_divide(keys_, kernel_.key_block)),
          batch_(std::clamp<Index>(ceil_divide(wanted_units, std::max<Index>(1, key_blocks_)), 1,
                                   std::max<Index>(1, all_heads_))),
          threads_(
              core::thread_count(execution.threads, std::max<Index>(1, batch_ * std::max(row_blocks_, key_blocks_)))) {}

    std::size_t bytes() {
        kernels::Scratch count(nullptr);
        take(count);
        return count.used();
    }

    void run(std::byte* memory) {
        kernels::Scratch scratch(memory);
        take(scratch);
        bias_.clear(threads_);
        if (grad_.dsink) std::fill_n(dsink_, in_.q.shape[2], 0.0);
        for (Index first = 0; first < all_heads_; first += batch_)
            run_batch(first, std::min(first + batch_, all_heads_));
        bias_.finish(kernel_, threads_);
        store_dsink();
    }

  private:
    void take(kernels::Scratch& memory) {
        const Index D = kernel_.row_length(in_.q.shape[3]), Dv = kernel_.row_length(in_.v.shape[3]);
        const kernels::AttentionHead largest = heads_.largest();
        lse_ = memory.take<float>(batch_ * rows_);
        delta_ = memory.take<float>(batch_ * rows_);
        if (largest.top_w >= 0) {
            bound_ = memory.take<float>(batch_ * rows_);
            last_tie_ = memory.take<Index>(batch_ * rows_);
        }
        if (grad_.dq) dq_ = memory.take<float>(batch_ * rows_ * D);
        if (grad_.dk) dk_ = memory.take<float>(batch_ * keys_ * D);
        if (grad_.dv) dv_ = memory.take<float>(batch_ * keys_ * Dv);
        if (grad_.dsink) dsink_ = memory.take<double>(in_.q.shape[2]);
        bias_.take(memory);
        thread_bytes_ = (std::max(kernel_.prepare_scratch(largest), kernel_.scratch(largest)) + 4095) / 4096 * 4096;
        thread_memory_ = memory.take<std::byte>(threads_ * static_cast<Index>(thread_bytes_));
    }

    std::byte* scratch() const {
        return thread_memory_ + static_cast<std::size_t>(omp_get_thread_num()) * thread_bytes_;
    }

    Index sequence(Index u) const { return u / heads_.key_heads(); }
    Index key_head(Index u) const { return u % heads_.key_heads(); }
    kernels::AttentionHead head(Index u) const { return heads_.head(sequence(u), key_head(u)); }

    // Head u as number b of its batch.
    kernels::AttentionGradient gradient(Index u, Index b) const {
        const Index D = kernel_.row_length(in_.q.shape[3]), Dv = kernel_.row_length(in_.v.shape[3]);
        const auto part = [b](auto* data, Index size) { return data == nullptr ? nullptr : data + b * size; };
        kernels::AttentionGradient g;
        g.d_o = heads_.query_rows(grad_.d_o, sequence(u), key_head(u));
        g.lse = part(lse_, rows_);
        g.delta = part(delta_, rows_);
        g.bound = part(bound_, rows_);
        g.last_tie = part(last_tie_, rows_);
        g.dq = part(dq_, rows_ * D);
        g.dk = part(dk_, keys_ * D);
        g.dv = part(dv_, keys_ * Dv);
        g.dbias = bias_.plane(sequence(u), key_head(u));
        g.bias_mode = bias_.mode();
        return g;
    }

    void run_batch(Index first, Index last) {
        const Index count = last - first;
        prepare(first, count);
        if (grad_.dsink || bias_.by_rows()) add_row_gradients(first, count);
        if (grad_.dq || grad_.dk || grad_.dv || bias_.by_tiles()) {
            const Index phases = std::max(row_blocks_, key_blocks_);
            const Index lanes = bias_.shared() ? bias_.lanes() : count;
            for (Index phase = 0; phase < phases; ++phase) {
                core::parallel_units(threads_, lanes * key_blocks_, [&] {
                    return [&, memory = scratch()](Index unit) {
                        const Index lane = unit / key_blocks_, j = unit % key_blocks_;
                        const Index i = (j + phase) % phases;
                        if (!bias_.shared()) return tile(first + lane, lane, i, j, memory);
                        for (Index b = 0; b < count; ++b)
                            if (bias_.lane(sequence(first + b), key_head(first + b)) == lane)
                                tile(first + b, b, i, j, memory);
                    };
                });
            }
        }
        store(first, count);
    }

    void prepare(Index first, Index count) const {
        const Index blocks = std::max<Index>(1, row_blocks_);
        const Index D = kernel_.row_length(in_.q.shape[3]), Dv = kernel_.row_length(in_.v.shape[3]);
        core::parallel_units(threads_, count * blocks, [&] {
            return [&, memory = scratch()](Index unit) {
                const Index b = unit / blocks, i = unit % blocks, u = first + b;
                const auto clear = [&](float* sums, Index n, Index length) {
                    const Index begin = n * i / blocks, end = n * (i + 1) / blocks;
                    if (sums != nullptr && end > begin)
                        std::memset(sums + (b * n + begin) * length, 0,
                                    static_cast<std::size_t>((end - begin) * length) * sizeof(float));
                };
                clear(dq_, rows_, D);
                clear(dk_, keys_, D);
                clear(dv_, keys_, Dv);
                const kernels::AttentionHead h = head(u);
                const Index begin = i * kernel_.query_block, end = std::min(begin + kernel_.query_block, h.rows());
                if (begin < end) kernel_.prepare(h, saved(u), dlse(u), begin, end, memory, gradient(u, b));
            };
        });
    }

    kernels::AttentionOutput saved(Index u) const {
        return {heads_.query_rows(grad_.o, sequence(u), key_head(u)),
                heads_.row_values(grad_.lse, sequence(u), key_head(u))};
    }
    kernels::Plane dlse(Index u) const { return heads_.row_values(grad_.dlse, sequence(u), key_head(u)); }

    void tile(Index u, Index b, Index i, Index j, std::byte* memory) const {
        const kernels::AttentionHead h = head(u);
        const Index begin = i * kernel_.query_block, end = std::min(begin + kernel_.query_block, h.rows());
        const Index first = j * kernel_.key_block, last = std::min(first + kernel_.key_block, h.keys);
        if (begin < end && first < last) kernel_.tile(h, gradient(u, b), begin, end, first, last, memory);
    }

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

    // The sums of a batch, rounded once.
    void store(Index first, Index count) const {
        const Index D = in_.q.shape[3], Dv = in_.v.shape[3];
        constexpr Index step = 64;  // rows of a unit
        const Index blocks = ceil_divide(std::max(rows_, keys_), step);
        core::parallel_units(threads_, count * blocks, [&] {
            return [&](Index unit) {
                const Index b = unit / blocks, u = first + b, n = sequence(u), hk = key_head(u);
                const Index begin = unit % blocks * step;
                const kernels::AttentionHead h = head(u);
                const auto row = [&](const float* sums, Index all, Index r, Index size) {
                    return sums + (b * all + r) * kernel_.row_length(size);
                };
                if (grad_.dq) {
                    const kernels::QueryRows t = heads_.query_rows(grad_.dq, n, hk);
                    for (Index r = begin; r < std::min(begin + step, h.rows()); ++r)
                        kernel_.store(row(dq_, rows_, r, D), D,
                                      at(t.data, t.dtype, r / h.queries * t.head + r % h.queries * t.row), t.dtype,
                                      t.column);
                }
                const Index keys = in_.cu_seqlens_k ? h.keys : keys_;
                const auto store_keys = [&](const Tensor& gradient, const float* sums, Index size) {
                    if (!gradient) return;
                    const kernels::KeyRows t = heads_.key_rows(gradient, n, hk);
                    for (Index j = begin; j < std::min(begin + step, keys); ++j)
                        kernel_.store(row(sums, keys_, j, size), size, at(t.data, t.dtype, j * t.row), t.dtype,
                                      t.column);
                };
                store_keys(grad_.dk, dk_, D);
                store_keys(grad_.dv, dv_, Dv);
            };
        });
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
    Index all_heads_, rows_, keys_, row_blocks_, key_blocks_, batch_;
    int threads_;
    float *lse_ = nullptr, *delta_ = nullptr, *bound_ = nullptr;
    Index* last_tie_ = nullptr;
    float *dq_ = nullptr, *dk_ = nullptr, *dv_ = nullptr;
    double* dsink_ = nullptr;
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

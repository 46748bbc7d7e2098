// Forward pass: full-row softmax of a block of query rows at a time; every block is a unit of work of its own.
#include <algorithm>

#include "core/parallel.h"
#include "engines/reference/attention/rows.h"
#include "engines/reference/reference.h"
#include "engines/work.h"

namespace softdelta::reference {

namespace {

struct Block {
    const KeyHead* head;
    Range rows, keys;
};

std::vector<Block> cut_blocks(const std::vector<KeyHead>& heads) {
    constexpr Index most_rows = 128, least_rows = 4, most_scores = Index{1} << 22;
    std::vector<Block> blocks;
    for (const KeyHead& head : heads) {
        const Index fit = most_scores / std::max<Index>(head.sequence.k_count, 1);
        const Index step = std::clamp(fit, least_rows, most_rows);
        for (Index r = 0; r < head.rows(); r += step) {
            const Range rows{r, std::min(r + step, head.rows())};
            blocks.push_back({&head, rows, head.keys(rows)});
        }
    }
    return blocks;
}

struct BlockScratch {
    BlockScratch(const core::AttentionInputs& in, Index rows, Index keys, Index scores)
        : D(in.q.shape[3]),
          Dv(in.v.shape[3]),
          q(static_cast<std::size_t>(rows * D)),
          o(static_cast<std::size_t>(rows * Dv)),
          x(static_cast<std::size_t>(scores)),
          row(in, keys) {}
    Index D, Dv;
    std::vector<double> q;  // [rows, D] times scale
    std::vector<double> o;  // [rows, Dv]
    std::vector<double> x;  // [rows, keys] scores, then probabilities
    RowScratch row;
};

void compute_block(const Block& block, const core::AttentionOutputs& out, BlockScratch& scratch) {
    const KeyHead& head = *block.head;
    const Range rows = block.rows, keys = block.keys;
    const Matrix q{scratch.q.data(), scratch.D}, o{scratch.o.data(), scratch.Dv}, x{scratch.x.data(), keys.count()};

    load_queries(head, head.in->q, rows, head.options->scale, q);
    dot_keys(head, head.in->k, keys, rows.count(), q, x, scratch.row);
    for (Index r = rows.begin; r < rows.end; ++r) {
        const Softmax softmax = softmax_row(head, r, keys, x.row(r - rows.begin), nullptr, scratch.row);
        if (out.lse) core::store(out.lse, head.lse_offset(out.lse, r), softmax.lse);
    }
    if (!out.o) return;
    sum_keys(head, head.in->v, keys, rows.count(), x, o, scratch.row);
    for (Index r = rows.begin; r < rows.end; ++r)
        core::store_row(out.o, head.query_offset(out.o, r), 3, scratch.Dv, o.row(r - rows.begin));
}

}  // namespace

void attention_forward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                       const core::Execution& execution, const core::AttentionOutputs& out) {
    const std::vector<KeyHead> heads = key_heads(in, options, execution.float_scores);
    const std::vector<Block> blocks = cut_blocks(heads);
    Index rows = 0, keys = 0, scores = 0;
    for (const Block& block : blocks) {
        rows = std::max(rows, block.rows.count());
        keys = std::max(keys, block.keys.count());
        scores = std::max(scores, block.rows.count() * block.keys.count());
    }
    const core::Work work = engines::work_of(in, options, engines::Direction::forward);
    core::parallel_units(core::useful_threads(execution.threads, work), static_cast<Index>(blocks.size()), [&] {
        return [&, scratch = BlockScratch(in, rows, keys, scores)](Index unit) mutable {
            compute_block(blocks[static_cast<std::size_t>(unit)], out, scratch);
        };
    });
}

}  // namespace softdelta::reference

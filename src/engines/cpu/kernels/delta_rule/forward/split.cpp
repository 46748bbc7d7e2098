// One head for many threads: chunks folded side by side, then the scan by panels of value columns.
#include "engines/cpu/kernels/isa_unit.h"

#include "engines/cpu/kernels/delta_rule/forward/chunk.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

// A folded chunk of a value head in memory that the fold writes and the scan reads.
template <class P>
struct StoredChunk {
    enum Kind : Index { chunk, by_tiles };
    Index* kind;
    Index* n;          // of its tokens; what else there is goes token by token
    Scratch operands;  // one of these two:
    float* beta;       // [n]
    Folded<P> folded;
    TileChunk tiles;

    StoredChunk(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch scratch)
        : StoredChunk(heads, sizes, scratch, scratch.take<Index>(2)) {}

    std::size_t bytes() const { return bytes_; }

  private:
    StoredChunk(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& first, Index* of)
        : kind(of),
          n(of + 1),
          operands(first),
          beta(first.take<float>(sizes.pair_row())),
          folded(sizes, first),
          tiles(fits_tiles<P>(heads) ? heads.key_size : 0, operands),
          bytes_(first.used() > operands.used() ? first.used() : operands.used()) {}

    std::size_t bytes_;
};

template <class P>
struct Memory {
    ChunkSizes<P> sizes;
    Preparation<P> prepared;
    ForwardChunk<P> chunk;
    TileFold<P> tile_fold;

    Memory(const DeltaHeads& heads, Scratch& scratch)
        : sizes(forward_sizes<P>(heads)),
          prepared(heads, sizes, scratch),
          chunk(heads, sizes, scratch),
          tile_fold(heads, scratch) {}
};

template <class P>
DeltaSplitSizes sizes_of(const DeltaHeads& heads) {
    const ChunkSizes<P> sizes = forward_sizes<P>(heads);
    Scratch scratch(nullptr), state(nullptr);
    const Memory<P> memory(heads, scratch);
    const StoredChunk<P> folded(heads, sizes, Scratch(nullptr));
    const StatePanels<P> panels({sizes.keys, NR, sizes.rows}, 1, state);
    return {sizes.rows, NR, W, scratch.used(), folded.bytes(), state.used(), fits_tiles<P>(heads)};
}

// Tokens of key head `at.head`, folded for each of its value heads.
template <class P>
void fold_chunk(const DeltaHeads& heads, const Tokens& at, std::byte* scratch, std::byte* out, std::size_t stride) {
    if (is_walked<P>(heads)) return;  // by the scan alone
    Scratch pieces(scratch);
    Memory<P> memory(heads, pieces);
    bool is_loaded = false;
    for (Index i = 0; i < heads.group; ++i) {
        using Stored = StoredChunk<P>;
        Stored stored(heads, memory.sizes, Scratch(out + static_cast<std::size_t>(i) * stride));
        const Tokens own{at.head * heads.group + i, at.begin, at.n};
        *stored.kind = Stored::chunk;
        const Index n = *stored.n = memory.prepared.load_value_head(own) ? at.n : memory.prepared.count_steady(0, at.n);
        if (n == 0) continue;
        if (memory.tile_fold.fits(at.n, n, memory.prepared.gates()) &&
            memory.tile_fold.run({own.head, own.begin, n}, memory.prepared.gates(), false, stored.tiles)) {
            *stored.kind = Stored::by_tiles;
            continue;
        }
        if (!is_loaded) memory.prepared.load_key_head(at);
        is_loaded = true;
        memory.prepared.fold(0, n, stored.folded);
        stored.folded.prepare_write(heads.key_size);
        for (Index j = 0; j < n; ++j) stored.beta[j] = memory.prepared.beta(0)[j];
    }
}

// Value head `all.head` over `all` tokens, chunk by chunk.
template <class P>
void scan_chunks(const DeltaHeads& heads, const Tokens& all, std::byte* scratch, const std::byte* folded,
                 std::size_t stride, std::byte* state_memory, const DeltaOutput& out) {
    const Index K = heads.key_size, V = heads.value_size;
    Scratch pieces(scratch), state_pieces(state_memory);
    Memory<P> memory(heads, pieces);
    const StatePanels<P> state(memory.sizes, 1, state_pieces);
    const Range part = memory.chunk.all_columns();
    if (all.begin == 0) load_state(heads.initial_state, all.head, K, V, memory.chunk.buffer(), state, part);
    bool is_rounded = false;
    for (Index begin = all.begin; begin < all.begin + all.n; begin += memory.sizes.rows, folded += stride) {
        const Tokens at{all.head, begin, min(memory.sizes.rows, all.begin + all.n - begin)};
        if (out.states.data != nullptr && begin % out.state_interval == 0)
            if (const DeltaStates t = states_at(out.states, begin / out.state_interval, out.entries); t.data != nullptr)
                store_state(t, all.head, K, V, memory.chunk.buffer(), state, part);
        using Stored = StoredChunk<P>;
        Stored stored(heads, memory.sizes, Scratch(const_cast<std::byte*>(folded)));
        Prefetch none;
        if constexpr (P::depth == 1)
            if (is_walked<P>(heads)) {
                memory.prepared.load_key_head({at.head / heads.group, at.begin, at.n});
                const Index n = memory.prepared.load_value_head(at) ? at.n : memory.prepared.count_steady(0, at.n);
                memory.chunk.run_walk(at, n, memory.prepared, part, state, out, none);
                continue;
            }
        const Tokens steady{at.head, at.begin, *stored.n};
        const bool are_all = steady.n == at.n;
        if (*stored.kind == Stored::by_tiles) {
            stored.tiles.set_rows(steady.n);
            memory.chunk.run_tiles(steady, stored.tiles, part, state, out, none, are_all, is_rounded);
        } else if (steady.n > 0) {
            stored.folded.n = steady.n;
            memory.chunk.run(steady, stored.folded, stored.beta, part, state, out, none, are_all);
        }
        is_rounded = are_all && *stored.kind == Stored::by_tiles;
        if (are_all) continue;
        memory.prepared.load_key_head({at.head / heads.group, at.begin, at.n});
        memory.prepared.load_value_head(at);
        memory.chunk.run_tokens(at, steady.n, memory.prepared, part, state, out);
    }
    if (all.begin + all.n == heads.tokens && out.final_state.data != nullptr)
        store_state(out.final_state, all.head, K, V, memory.chunk.buffer(), state, part);
}

DeltaSplitSizes split_sizes(const DeltaHeads& heads) {
    return with_product(heads.bf16_products, [&](auto p) { return sizes_of<decltype(p)>(heads); });
}

void fold(const DeltaHeads& heads, Index h, Index begin, Index n, std::byte* scratch, std::byte* out,
          std::size_t stride) {
    compute_with(heads.bf16_products, [&](auto p) {
        return fold_chunk<decltype(p)>(heads, {h, begin, n}, scratch, out, stride);
    });
}

// The columns are the whole head of a smaller scan.
void scan_columns(const DeltaHeads& heads, const DeltaColumns& at, std::byte* scratch, const std::byte* folded,
                  std::size_t stride, std::byte* state, const DeltaOutput& out) {
    DeltaHeads part = heads;
    DeltaOutput part_out = out;
    part.value_size = at.last_column - at.first_column;
    move_columns(at.first_column, part.v);
    move_columns(at.first_column, part.initial_state);
    move_columns(at.first_column, part_out.o);
    move_columns(at.first_column, part_out.final_state);
    move_columns(at.first_column, part_out.states);
    move_columns(at.first_column, part_out.u);
    compute_with(heads.bf16_products, [&](auto p) {
        return scan_chunks<decltype(p)>(part, {at.head, at.begin, at.n}, scratch, folded, stride, state, part_out);
    });
}

}  // namespace

const DeltaSplit delta_split = {split_sizes, fold, scan_columns};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

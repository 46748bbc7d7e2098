// The backward pass of one key head for many threads, for the table.
#include "engines/cpu/kernels/isa_unit.h"

#include "engines/cpu/kernels/delta_rule/backward/chunk.h"
#include "engines/cpu/kernels/delta_rule/backward/replay.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

namespace {

// A folded chunk of a value head, and its operands as the backward scan reads them: in memory that the fold writes, and
// the scan and the end read.
template <class P>
struct Stored {
    FoldedChunk<P> chunk;
    Reversed<P> reversed;
    float* fall;

    Stored(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& kept, Scratch& scratch)
        : chunk(heads, sizes, kept, scratch), reversed(sizes, kept), fall(kept.take<float>(1)) {}

    // What the fold has stored of n tokens.
    void read(Index n) { chunk.folded.n = n, chunk.folded.fall = *fall; }
};

// What the scan leaves of a chunk of a value head.
template <class P>
struct Scanned {
    Index row;
    float* dstate;  // [V, K] the transposed gradient of the leaving state
    float* dR;      // [n, V]

    Scanned(const ChunkSizes<P>& sizes, Scratch& scratch)
        : row(sizes.value_columns()),
          dstate(scratch.take<float>(transposed_state(sizes))),
          dR(scratch.take<float>(sizes.rows * row)) {}
};

template <class P>
Saved<P> saved_in(const ChunkSizes<P>& sizes, bool is_kept, Scratch& scratch) {
    Saved<P> saved{scratch.take<float>(transposed_state(sizes)), nullptr};
    if (!is_kept) saved.U = scratch.take<Element<P>>(sizes.rows * a_row_length<P>(sizes.values));
    return saved;
}

// call(vector, row, column) for dR in its panels.
template <class P, class Call>
void for_each_vector(const ChunkGradients<P>& d, Index n, const Call& call) {
    for (Index c = 0; c < d.columns; c += NR) {
        const auto panel = d.panel(c, n);
        for (Index i = 0; i < n; ++i)
            for (Index m = 0; m < panel.width; m += W) call(panel.dR + i * panel.width + m, i, c + m);
    }
}

std::byte* chunk_of(const DeltaChunkMemory& memory, Index chunk) {
    return memory.first + static_cast<std::size_t>(chunk) * memory.stride;
}

// A thread's memory for a range of value columns.
template <class P>
struct SweepMemory {
    StatePanels<P> state;
    float* buffer;

    SweepMemory(const ChunkSizes<P>& sizes, Scratch& state_memory, Scratch& scratch)
        : state(sizes, 1, state_memory), buffer(scratch.take<float>(sizes.value_columns())) {}
};

template <class P>
struct ScanMemory {
    ChunkGradients<P> d;
    GradientRows<P> rows;

    ScanMemory(const DeltaHeads& heads, const DeltaGradients& grad, const ChunkSizes<P>& sizes, Scratch& scratch)
        : d(sizes, heads.has_channel_gate(), scratch), rows(heads, grad, sizes, nullptr, scratch) {}
};

template <class P>
struct ReplayMemory {
    Preparation<P> prepared;
    StatePanels<P> state;
    float* buffer;
    Replay<P> replay;

    ReplayMemory(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& scratch)
        : prepared(heads, sizes, scratch),
          state(sizes, 1, scratch),
          buffer(scratch.take<float>(sizes.value_columns())),
          replay(heads, sizes, scratch) {}
};

// Value columns as a head of their own.
DeltaHeads part_of(DeltaHeads heads, const DeltaColumns& at) {
    heads.value_size = at.last_column - at.first_column;
    move_columns(at.first_column, heads.v);
    move_columns(at.first_column, heads.initial_state);
    return heads;
}
DeltaGradients part_of(DeltaGradients grad, const DeltaColumns& at) {
    move_columns(at.first_column, grad.d_o);
    move_columns(at.first_column, grad.dfinal_state);
    move_columns(at.first_column, grad.dinitial_state);
    return grad;
}

template <class P>
DeltaBackwardSplitSizes sizes_of(const DeltaHeads& heads, bool is_kept) {
    const ChunkSizes<P> sizes = backward_sizes<P>(heads);
    const DeltaGradients none;
    const auto bytes = [](const auto& take) {
        Scratch scratch(nullptr);
        take(scratch);
        return scratch.used();
    };
    const auto most = [](std::size_t a, std::size_t b) { return a > b ? a : b; };
    Scratch folded(nullptr), of_all(nullptr), elsewhere(nullptr);
    const Stored<P> stored(heads, sizes, folded, of_all);
    const std::size_t finish = bytes([&](Scratch& s) { BackwardChunk<P>(heads, none, sizes, s); });
    const std::size_t sweep = bytes([&](Scratch& s) { SweepMemory<P>(sizes, elsewhere, s); });
    const std::size_t scan = bytes([&](Scratch& s) { ScanMemory<P>(heads, none, sizes, s); });
    const std::size_t replay = bytes([&](Scratch& s) { ReplayMemory<P>(heads, sizes, s); });
    return {sizes.rows,
            NR,
            W,
            of_all.used() + most(most(finish, sweep), most(scan, replay)),
            folded.used(),
            bytes([&](Scratch& s) { Scanned<P>(sizes, s); }),
            bytes([&](Scratch& s) { saved_in(sizes, is_kept, s); }),
            most(bytes([&](Scratch& s) {
                     StatePanels<P>({sizes.keys, NR, sizes.rows}, 1, s);
                 }),
                 bytes([&](Scratch& s) {
                     StateOnly({sizes.keys, NR, 0}, 1, s);
                 }))};
}

template <class P>
bool fold_chunk(const DeltaHeads& heads, Index begin, Index n, bool reads, std::byte* scratch,
                const DeltaChunkMemory& folded) {
    const ChunkSizes<P> sizes = backward_sizes<P>(heads);
    const DeltaHeads writing = writing_heads(heads);
    Scratch pieces(scratch), place(folded.first);
    const Stored<P> first(heads, sizes, place, pieces);
    for (Index h = 0; h < heads.group; ++h) {
        Scratch own_pieces(scratch), own_place(chunk_of(folded, h));
        Stored<P> stored(heads, sizes, own_place, own_pieces);
        Preparation<P>& prepared = stored.chunk.prepared;
        if (!reads) prepared.use(writing);
        if (h == 0)
            prepared.load_key_head({0, begin, n});
        else
            prepared.share_keys(first.chunk.prepared);
        if (!prepared.load_value_head({h, begin, n})) return false;
        prepared.fold(0, n, stored.chunk.folded);
        *stored.fall = stored.chunk.folded.fall;
        if (reads)
            stored.reversed.copy(stored.chunk.folded);
        else
            stored.chunk.folded.prepare_write(heads.key_size);
    }
    return true;
}

template <class P>
void sweep_columns(const DeltaHeads& heads, const DeltaColumns& at, std::byte* scratch, const DeltaChunkMemory& folded,
                   std::byte* state_memory, const DeltaChunkMemory& saved) {
    const ChunkSizes<P> sizes = backward_sizes<P>(heads);
    const DeltaHeads part = part_of(heads, at);
    const Index K = part.key_size, V = part.value_size;
    Scratch pieces(scratch), state_pieces(state_memory);
    const SweepMemory<P> memory({K, V, sizes.rows}, state_pieces, pieces);
    if (at.begin == 0) load_state(part.initial_state, at.head, K, V, memory.buffer, memory.state);
    for (Index i = 0, chunk = 0; i < at.n; i += sizes.rows, ++chunk) {
        const Tokens tokens{at.head, at.begin + i, min(sizes.rows, at.n - i)};
        Scratch own_pieces = pieces, folded_place(chunk_of(folded, chunk)), saved_place(chunk_of(saved, chunk));
        Stored<P> stored(heads, sizes, folded_place, own_pieces);
        const Saved<P> save = saved_in(sizes, false, saved_place);
        stored.read(tokens.n);
        transpose_columns(K, V, memory.state, heads.value_size, at.first_column, save.state);
        Prefetch none;
        advance_state(part, stored.chunk.folded, stored.chunk.prepared.beta(0), tokens, memory.buffer, memory.state,
                      save.U + at.first_column / P::depth, a_row_length<P>(heads.value_size), none, 0);
    }
}

template <class P>
bool replay_segment(const DeltaHeads& heads, const DeltaColumns& at, std::byte* scratch, const DeltaGradients& grad,
                    const DeltaChunkMemory& saved) {
    const ChunkSizes<P> sizes = backward_sizes<P>(heads);
    const Index K = heads.key_size, V = heads.value_size;
    Scratch pieces(scratch);
    ReplayMemory<P> memory(heads, sizes, pieces);
    const auto state = [&](Index chunk) {
        Scratch place(chunk_of(saved, chunk));
        return saved_in(sizes, true, place).state;
    };
    load_state(states_at(grad.states, at.begin / grad.state_interval), at.head, K, V, memory.buffer, memory.state);
    transpose_state(K, V, memory.state, state(0));
    memory.replay.begin(at.head, state(0));
    for (Index i = 0, chunk = 0; i + sizes.rows < at.n; i += sizes.rows, ++chunk) {
        memory.prepared.load_written_keys({0, at.begin + i, sizes.rows});
        const Tokens tokens{at.head, at.begin + i, sizes.rows};
        if (!memory.prepared.load_value_head(tokens)) return false;
        memory.replay.run(tokens, memory.prepared.keys(), memory.prepared.gates(), grad.u, state(chunk),
                          state(chunk + 1), NoPrefetch{});
        if (memory.replay.loses_digits(at.head, state(chunk + 1))) return false;
    }
    return true;
}

template <class P>
void scan_columns(const DeltaHeads& heads, const DeltaColumns& at, std::byte* scratch, const DeltaChunkMemory& folded,
                  std::byte* state_memory, const DeltaGradients& grad, const DeltaChunkMemory& scanned) {
    const ChunkSizes<P> sizes = backward_sizes<P>(heads);
    const DeltaHeads part = part_of(heads, at);
    const DeltaGradients part_grad = part_of(grad, at);
    const Index K = part.key_size, V = part.value_size;
    Scratch pieces(scratch), state_pieces(state_memory);
    const ScanMemory<P> memory(part, part_grad, {K, V, sizes.rows}, pieces);
    const ChunkGradients<P>& d = memory.d;
    const StateOnly dstate({K, V, 0}, 1, state_pieces);
    if (at.begin + at.n == heads.tokens) load_state(part_grad.dfinal_state, at.head, K, V, d.v, dstate);
    for (Index chunk = at.n == 0 ? 0 : (at.n + sizes.rows - 1) / sizes.rows; chunk-- > 0;) {
        const Index i = chunk * sizes.rows;
        const Tokens tokens{at.head, at.begin + i, min(sizes.rows, at.n - i)};
        Scratch own_pieces = pieces, folded_place(chunk_of(folded, chunk)), scanned_place(chunk_of(scanned, chunk));
        Stored<P> stored(heads, sizes, folded_place, own_pieces);
        const Scanned<P> out(sizes, scanned_place);
        stored.read(tokens.n);
        memory.rows.load_output(tokens, d);
        transpose_columns(K, V, dstate, heads.value_size, at.first_column, out.dstate);
        scan_backward(heads.erases(), stored.reversed.operands(stored.chunk.folded), K, dstate, d, NoPrefetch{});
        for_each_vector(d, tokens.n, [&](const float* dR, Index row, Index column) {
            store(out.dR + row * out.row + at.first_column + column, load(dR));
        });
    }
    if (at.begin == 0 && grad.dinitial_state.data != nullptr)
        store_state(part_grad.dinitial_state, at.head, K, V, d.v, dstate);
}

template <class P>
void finish_chunk(const DeltaHeads& heads, Index begin, Index n, std::byte* scratch, const DeltaChunkMemory& folded,
                  const DeltaChunkMemory& saved, const DeltaChunkMemory& scanned, const DeltaGradients& grad) {
    const ChunkSizes<P> sizes = backward_sizes<P>(heads);
    Scratch pieces(scratch), place(folded.first);
    const Stored<P> first(heads, sizes, place, pieces);
    BackwardChunk<P> chunk(heads, grad, sizes, pieces);
    for (Index i = 0; i < heads.group * gate_sums(heads.channels()); ++i) grad.gate_sums[i] = 0;
    for (Index h = 0; h < heads.group; ++h) {
        const Tokens at{h, begin, n};
        Scratch own_pieces(scratch), folded_place(chunk_of(folded, h));
        Scratch saved_place(chunk_of(saved, h)), scanned_place(chunk_of(scanned, h));
        Stored<P> stored(heads, sizes, folded_place, own_pieces);
        const Scanned<P> given(sizes, scanned_place);
        stored.read(n);
        stored.chunk.prepared.share_keys(first.chunk.prepared);
        ChunkGradients<P> d = chunk.begin(h == 0);
        d.dstate = given.dstate;
        chunk.rows.load_output(at, d);
        for_each_vector(
            d, n, [&](float* dR, Index row, Index column) { store(dR, load(given.dR + row * given.row + column)); });
        chunk.finish(at, h == 0, stored.chunk, saved_in(sizes, grad.states.data != nullptr, saved_place), d,
                     NoPrefetch{});
        chunk.rows.store_gates(at, stored.chunk.prepared.gates(), d);
    }
    chunk.rows.store_keys({0, begin, n}, first.chunk.prepared.keys());
}

DeltaBackwardSplitSizes split_sizes(const DeltaHeads& heads, bool is_kept) {
    return with_product(heads.bf16_products, [&](auto p) { return sizes_of<decltype(p)>(heads, is_kept); });
}

bool fold(const DeltaHeads& heads, Index begin, Index n, bool reads, std::byte* scratch,
          const DeltaChunkMemory& folded) {
    return compute_with(heads.bf16_products,
                        [&](auto p) { return fold_chunk<decltype(p)>(heads, begin, n, reads, scratch, folded); });
}

void sweep(const DeltaHeads& heads, const DeltaColumns& at, std::byte* scratch, const DeltaChunkMemory& folded,
           std::byte* state, const DeltaChunkMemory& saved) {
    compute_with(heads.bf16_products,
                 [&](auto p) { sweep_columns<decltype(p)>(heads, at, scratch, folded, state, saved); });
}

bool replay(const DeltaHeads& heads, const DeltaColumns& at, std::byte* scratch, const DeltaGradients& grad,
            const DeltaChunkMemory& saved) {
    return compute_with(heads.bf16_products,
                        [&](auto p) { return replay_segment<decltype(p)>(heads, at, scratch, grad, saved); });
}

void scan(const DeltaHeads& heads, const DeltaColumns& at, std::byte* scratch, const DeltaChunkMemory& folded,
          std::byte* state, const DeltaGradients& grad, const DeltaChunkMemory& scanned) {
    compute_with(heads.bf16_products,
                 [&](auto p) { scan_columns<decltype(p)>(heads, at, scratch, folded, state, grad, scanned); });
}

void finish(const DeltaHeads& heads, Index begin, Index n, std::byte* scratch, const DeltaChunkMemory& folded,
            const DeltaChunkMemory& saved, const DeltaChunkMemory& scanned, const DeltaGradients& grad) {
    compute_with(heads.bf16_products,
                 [&](auto p) { finish_chunk<decltype(p)>(heads, begin, n, scratch, folded, saved, scanned, grad); });
}

}  // namespace

const DeltaBackwardSplit delta_backward_split = {split_sizes, fold, sweep, replay, scan, finish};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

// A delta rule over a few key heads of one sequence and the value heads that read them: operands as the kernels see
// them, and what kernels do with them. Formulas and names are those of docs/math.md, "The chunk form".
#pragma once

#include <atomic>
#include <cstddef>

#include "core/dtype.h"
#include "core/rule.h"
#include "core/tensor.h"

namespace softdelta::kernels {

using core::DType;
using core::Index;

// Rows of one tensor: head h, token i, column c at data + h·head + i·row + c·column, in elements; key heads for q, k
// and p, value heads for all others. What is per head alone has row 0. Null: not given.
//
// Where a token has several steps, kernels take each step for a token of its own: q and o have a row of a token's last
// step alone, g of its first. A row that a tensor does not have is 0 where it is read, and not stored.
struct DeltaRows {
    void* data = nullptr;
    DType dtype = DType::f32;
    Index head = 0, row = 0, column = 0;
    Index steps = 1, step = 0;  // row i is there if i % steps is `step`, as row i / steps

    bool has(Index i) const { return steps == 1 || i % steps == step; }
};

// States [K, V]: value head h, key channel m, value column c at data + h·head + m·key + c·value; of the
// states at intervals, the i-th lies i·interval further.
struct DeltaStates {
    void* data = nullptr;
    DType dtype = DType::f32;
    Index head = 0, key = 0, value = 0, interval = 0;
};

// States at intervals that go to entries of a pool: the i-th is entry i of a list, −1: it is not wanted. No list: i.
struct StateEntries {
    const void* list = nullptr;
    Index stride = 0;
    bool wide = false;  // i64, else i32
};

struct DeltaHeads {
    core::Rule rule{};
    Index tokens = 0;                    // T
    Index key_heads = 1, group = 1;      // value heads [h·group, (h + 1)·group) read key head h
    Index key_size = 0, value_size = 0;  // K, V
    DeltaRows q, k, p;                   // [key heads, T, K]; p only when the rule has its own
    DeltaRows v;                         // [heads, T, V]
    DeltaRows g;                         // [heads, T, K|1]
    DeltaRows g_gamma, A_log;            // [heads]
    DeltaRows gate_bias;                 // [heads, K|1]
    DeltaRows beta;                      // [heads, T]
    DeltaStates initial_state;           // [heads, K, V]
    float scale = 1;
    double lower_bound = 0;
    core::RawGate raw_gate = core::RawGate::none;
    core::RawBeta raw_beta = core::RawBeta::none;
    bool l2norm = false;
    bool bf16_products = false;  // q, k, p, v are bf16 and multiplied as such

    Index heads() const { return key_heads * group; }
    Index channels() const { return has_channel_gate() ? key_size : 1; }  // of a gate
    bool has_channel_gate() const { return rule.has_channel_gate(); }
    bool reads() const { return q.data != nullptr; }  // not while states alone are wanted
    bool erases() const { return rule.erases(); }
};

struct DeltaOutput {
    DeltaRows o;              // [heads, T, V]
    DeltaStates final_state;  // [heads, K, V]
    DeltaStates states;       // [heads, intervals, K, V]
    DeltaRows u;              // [heads, T, V]; here, above: null where not wanted
    Index state_interval = 0;
    StateEntries entries;  // of states
};

// A few heads for many threads. Chunks are folded, each by itself; then value columns are scanned, a range of them by
// itself, chunk after chunk.
struct DeltaSplitSizes {
    Index chunk_rows;
    Index columns, least_columns;        // value columns of a range: as many, or as few where threads are left over
    std::size_t scratch, folded, state;  // bytes: of a thread; of a folded chunk, and of the state of a range
    bool by_tiles;                       // on matrix tiles, of which more are read for a few columns
};

// Value columns [first_column, last_column) of a value head over tokens [begin, begin + n).
struct DeltaColumns {
    Index head, begin, n;
    Index first_column, last_column;
};

struct DeltaSplit {
    DeltaSplitSizes (*sizes)(const DeltaHeads& heads);
    // Tokens [begin, begin + n) of key head h; its value heads' chunks lie `stride` bytes apart.
    void (*fold)(const DeltaHeads& heads, Index h, Index begin, Index n, std::byte* scratch, std::byte* folded,
                 std::size_t stride);
    // From the head's first folded chunk on, `stride` bytes between them. The state stays between calls.
    void (*scan)(const DeltaHeads& heads, const DeltaColumns& at, std::byte* scratch, const std::byte* folded,
                 std::size_t stride, std::byte* state, const DeltaOutput& out);
};

// A few tokens at once on states that stay in the caller's memory: decode.
struct DeltaStep {
    // Whether it does this.
    bool (*fits)(const DeltaHeads& heads, const DeltaOutput& out);
    std::size_t (*scratch)(const DeltaHeads& heads);
    void (*run)(const DeltaHeads& heads, std::byte* scratch, const DeltaOutput& out);
    Index most_tokens;
};

struct DeltaForward {
    // Bytes of scratch memory.
    std::size_t (*scratch)(const DeltaHeads& head);
    // The whole sequence.
    void (*run)(const DeltaHeads& head, std::byte* scratch, const DeltaOutput& out);
};

// Where the value heads of a key head are several units, each goes on from the sums of the one before, chunk by chunk
// from the last to the first: no sum has another order than in one unit.
struct DeltaRelay {
    float *dq, *dk, *dp;                         // [T, K] of the key head, in rows of whole vectors
    Index row = 0;                               // floats from one to the next
    const std::atomic<Index>* before = nullptr;  // chunks that the unit before has done; null: this is the first one
    std::atomic<Index>* done = nullptr;          // chunks that this one has done; null: it is the last one
    void (*wait)(const std::atomic<Index>&, Index);  // until there are so many
};

struct DeltaGradients {
    DeltaRows d_o;                // [heads, T, V]; null: 0
    DeltaStates dfinal_state;     // [heads, K, V]; null: 0
    DeltaRows dq, dk, dp;         // [key heads, T, K]; here and below, null: not wanted
    DeltaRows dv;                 // [heads, T, V]
    DeltaRows dg;                 // [heads, T, K|1]
    DeltaRows dbeta;              // [heads, T]
    DeltaStates dinitial_state;   // [heads, K, V]
    double* gate_sums = nullptr;  // [heads, 2 + K|1] over the tokens: dA_log, dg_gamma, of the bias
    DeltaStates states;           // of the forward pass, [heads, intervals, K, V],
    DeltaRows u;                  // and [heads, T, V]; null: both are made anew
    Index state_interval = 0;     // tokens between these states, at most most_kept_interval
    DeltaRelay relay{};           // of dq, dk and dp
};

// Rows of a forward pass, for products of bf16; others divide it. With 32, 2 of 800 drawn calls exceeded their limit of
// error: simple_gla with gates of both signs (6e-4 for 1e-6), and, not explained, comba with one key channel.
inline constexpr Index longest_chunk = 64;

// The most tokens between states that a backward pass takes from the forward pass: it keeps those of all chunks between
// them in cache.
inline constexpr Index most_kept_interval = 512;

struct DeltaBackward {
    // Bytes of scratch memory. kept: the interval of the states that the forward pass kept; 0: none are given, and
    // there is memory for them.
    std::size_t (*scratch)(const DeltaHeads& heads, Index kept);
    // The whole sequence.
    void (*run)(const DeltaHeads& heads, std::byte* scratch, const DeltaGradients& grad);
};

// One key head with its value heads for many threads, segment by segment. Chunks of a segment begin every chunk_rows
// tokens. What its chunks have in memory lies `stride` bytes apart, chunk after chunk of a value head.
struct DeltaBackwardSplitSizes {
    Index chunk_rows;
    Index columns, least_columns;  // value columns of a range: a multiple, or as few where threads are left over
    std::size_t scratch;           // bytes: of a thread,
    std::size_t folded, scanned;   // of a value head's chunk folded, and of what the scan leaves,
    std::size_t saved;             // of what the forward sweep or the replay leaves,
    std::size_t state;             // and of the state of `columns`
};

struct DeltaChunkMemory {
    std::byte* first;
    std::size_t stride;
};

struct DeltaBackwardSplit {
    // is_kept: whether the forward pass kept states and u.
    DeltaBackwardSplitSizes (*sizes)(const DeltaHeads& heads, bool is_kept);
    // A chunk of all value heads, whose memory is here `stride` bytes apart; reads: with q. Gives whether gates are
    // steady; if not, this pass cannot do the key head.
    bool (*fold)(const DeltaHeads& heads, Index begin, Index n, bool reads, std::byte* scratch,
                 const DeltaChunkMemory& folded);
    // From the first chunk to the last: the states that enter chunks, and U. The state stays between calls.
    void (*sweep)(const DeltaHeads& heads, const DeltaColumns& at, std::byte* scratch, const DeltaChunkMemory& folded,
                  std::byte* state, const DeltaChunkMemory& saved);
    // The same states from the one that was kept; of all value columns. Gives whether they have all their digits; if
    // not, this pass cannot do the key head.
    bool (*replay)(const DeltaHeads& heads, const DeltaColumns& at, std::byte* scratch, const DeltaGradients& grad,
                   const DeltaChunkMemory& saved);
    // From the last chunk to the first: dR, and dS that enters each from behind. The state stays between calls.
    void (*scan)(const DeltaHeads& heads, const DeltaColumns& at, std::byte* scratch, const DeltaChunkMemory& folded,
                 std::byte* state, const DeltaGradients& grad, const DeltaChunkMemory& scanned);
    // What is left of a chunk: all value heads, whose memory is here `stride` bytes apart. gate_sums are the chunk's.
    void (*finish)(const DeltaHeads& heads, Index begin, Index n, std::byte* scratch, const DeltaChunkMemory& folded,
                   const DeltaChunkMemory& saved, const DeltaChunkMemory& scanned, const DeltaGradients& grad);
};

}  // namespace softdelta::kernels

// Attention of one key head of one sequence: its operands as the kernels see them, and what kernels do with them.
// The query heads of the group are rows of one operand: row r is query r % queries of head r / queries of the group.
#pragma once

#include <cstddef>

#include "core/dtype.h"
#include "core/tensor.h"
#include "engines/cpu/kernels/quantised.h"
#include "engines/cpu/kernels/range.h"

namespace softdelta::kernels {

using core::DType;
using core::Index;

// Rows of q, o, do, dq: element (row r, column c) at data + head(r)·head + position(r)·row + c·column.
struct QueryRows {
    void* data = nullptr;
    DType dtype = DType::f32;
    Index head = 0, row = 0, column = 0;  // strides in elements
};

// Rows of k, v, dk, dv, one after the other or in the blocks of a table.
struct KeyRows {
    void* data = nullptr;
    DType dtype = DType::f32;
    Index row = 0, column = 0;
    const void* table = nullptr;  // block of rows [i·block_rows, …) is table[i·table_stride]; i32, or i64 when wide
    bool wide_table = false;
    Index table_stride = 0, block_rows = 0, block = 0;  // block: stride between blocks in elements
    void* scale = nullptr;                              // of quantised numbers, by the same rows and blocks
    Index scale_row = 0, scale_block = 0;
    Scales scales{};
};

// Mask, bias, lse and the like: a value for each (row, key) or each row.
struct Plane {
    void* data = nullptr;
    DType dtype = DType::f32;
    Index head = 0, row = 0, column = 0;
};

struct AttentionHead {
    Index queries = 0, keys = 0, group = 1;  // Lq, Lk, query heads
    Index size = 0, value_size = 0;          // D, Dv
    QueryRows q;                             // [group, queries, D]
    KeyRows k, v;                            // [keys, D], [keys, Dv]
    Plane mask, bias;                        // [group, queries, keys]
    Plane sink;                              // [group]
    Plane bias_slope, alibi_slope;           // [group] slope·bias and −slope·|i + Lk − Lq − j|; no data: none
    Index left = 0, right = 0;               // query i sees keys [i + left, i + right]
    Index top_w = -1;                        // dynamic mask: keys of largest bias that a row keeps; −1: all
    float scale = 1, softcap = 0;            // softcap 0: off
    float empty_lse = 0;                     // lse of a row that sees nothing
    bool bf16_products = false;              // q, k, v are multiplied as bf16; k, v may be quantised beside tiles
    bool fetches_to_second_cache = false;    // decode

    Index rows() const { return group * queries; }
};

struct AttentionOutput {
    QueryRows o;  // [group, queries, Dv]
    Plane lse;    // [group, queries]
};

// A softmax over some of the keys, without the sink: o is Σ v·e^(s − m), sum is Σ e^(s − m). m is the largest score s;
// `maximum` is m as scores.h keeps it.
struct PartialSoftmax {
    float* o;              // [rows, partial_row] not divided by the sum
    float *maximum, *sum;  // [rows]
};

struct AttentionForward {
    Index block_rows;  // most query rows of one call of run: they share packed keys
    // Rows of a group, which share tiles and steps: a block has a multiple of them, so that every block leaves the same
    // rows together, and results the same bits. A head's last block may have fewer.
    Index (*tile_rows)(bool bf16_products);
    // Floats between rows of a PartialSoftmax.
    Index (*partial_row)(const AttentionHead& head);
    // Bytes of scratch memory for `rows` query rows.
    std::size_t (*scratch)(const AttentionHead& head, Index rows);
    // Bytes of a head's keys and values, packed once for all its rows; 0: each call of run packs them.
    std::size_t (*packed_keys)(const AttentionHead& head);
    // Packs keys [first, last); first is a multiple of key_step, and so is last, or it is the last of all.
    static constexpr Index key_step = 128;
    void (*pack_keys)(const AttentionHead& head, Index first, Index last, std::byte* packed, std::byte* scratch);
    // Rows [begin, end) of the head. packed: all keys that they may see by position, or null.
    void (*run)(const AttentionHead& head, Index begin, Index end, std::byte* packed, std::byte* scratch,
                const AttentionOutput& out);
    // The same over keys [first, last) alone; `out` begins with row `begin`.
    void (*run_partial)(const AttentionHead& head, Index begin, Index end, Index first, Index last, std::byte* scratch,
                        const PartialSoftmax& out);
    // Rows [begin, end) from `parts` partial results that lie `stride` floats apart, in their order.
    void (*combine)(const AttentionHead& head, Index begin, Index end, const PartialSoftmax& first, Index parts,
                    Index stride, const AttentionOutput& out);
};

// The forward pass of few rows over many keys, for several key heads of a sequence that lie beside each other.
struct AttentionDecode {
    Index most_rows;  // of a head; for more AttentionForward is faster
    std::size_t (*scratch)(const AttentionHead& head, Index heads);
    // All rows of `count` heads over keys [first, last), without top_w; head h's result lies h·stride floats behind
    // `out`.
    void (*run)(const AttentionHead* heads, Index count, Index first, Index last, std::byte* scratch,
                const PartialSoftmax& out, Index stride);
};

// Data of a head in the backward pass besides its operands; every array belongs to the caller.
struct AttentionGradient {
    QueryRows d_o;  // [group, queries, Dv]
    // [rows] a probability is 2^((score − maximum)·log2 e − lse). lse is the log of the sum of exponentials under the
    // maximum, times log2 e; +∞ where a row sees nothing, or its sink is +∞
    float *maximum = nullptr, *lse = nullptr;
    float* delta = nullptr;       // [rows] rowsum(do∘o) − dlse
    float* sink_share = nullptr;  // [rows] probability of the sink; needed with a sink
    // [rows] what a row adds to the gradient of a bias that is one number for all its keys. Needed with sink and dlse
    float* row_bias = nullptr;
    float* bound = nullptr;  // [rows] with top_w
    Index* last_tie = nullptr;
    std::byte *packed_rows = nullptr, *packed_keys = nullptr;  // of the head; null: none
    float *dq = nullptr, *dk = nullptr, *dv = nullptr;         // f32 sums, row_length of a row; null: not wanted
    Plane dbias;                                               // [group, queries, keys]; no data: not wanted
    enum class Bias { write, add } bias_mode = Bias::write;    // write: every element once; add: to f32 sums
};

struct RowGradient {
    float sink, bias;
};

struct AttentionBackward {
    Index query_block, key_block;  // a tile has at most so many rows and keys
    // Floats of a row of n in dq, dk, dv.
    Index (*row_length)(Index n);
    std::size_t (*prepare_scratch)(const AttentionHead& head);
    std::size_t (*scratch)(const AttentionHead& head);
    // Fills the arrays of rows [begin, end), at most query_block, from the given o and lse. A forward pass makes them
    // where they are not given, where row_bias is wanted, and for rows whose lse is too large: its rounding error
    // would be that of the probabilities.
    void (*prepare)(const AttentionHead& head, const AttentionOutput& saved, const Plane& dlse, Index begin, Index end,
                    std::byte* scratch, const AttentionGradient& gradient);
    // Bytes of a head's rows and keys packed for all its tile steps, in such groups; 0: nothing is packed.
    Index packed_group;
    Index (*packed_rows)(const AttentionHead& head);
    Index (*packed_keys)(const AttentionHead& head);
    // Packs rows [begin, end) of a tile, after prepare, and keys [first, last).
    void (*pack_rows)(const AttentionHead& head, const AttentionGradient& gradient, Index begin, Index end);
    void (*pack_keys)(const AttentionHead& head, const AttentionGradient& gradient, Index first, Index last);
    // A tile step: adds the parts of dq, dk, dv and dbias that come from these rows and keys. Fresh: the first step of
    // the rows or keys, which sets their sums.
    void (*tile)(const AttentionHead& head, const AttentionGradient& gradient, Range rows, Range keys, bool fresh_rows,
                 bool fresh_keys, std::byte* scratch);
    // After the last step of rows or keys: their sums become rows, one after the other.
    void (*finish_rows)(const AttentionHead& head, const AttentionGradient& gradient, Range rows, std::byte* scratch);
    void (*finish_keys)(const AttentionHead& head, const AttentionGradient& gradient, Range keys, std::byte* scratch);
    // What row r adds to the gradients of its sink and of a bias that is one number for all its keys.
    RowGradient (*row_gradient)(const AttentionHead& head, const Plane& dlse, const AttentionGradient& gradient,
                                Index r);
    // Rounds n floats to a row of storage; reads up to row_length(n).
    void (*store)(const float* row, Index n, void* data, DType dtype, Index step);
};

}  // namespace softdelta::kernels

// Fold and unfold: the only places that know a rule (docs/math.md, "Fold" and "Unfold"). The fold works gates, scale
// and β into keys and scores; the unfold is its adjoint.
#pragma once

#include "engines/stages/delta_rule/heads.h"

namespace softdelta::stages::delta {

// The rule of a call as the fold knows it.
template <class T>
struct FoldRule {
    T scale;
    bool erases;
    bool before_decay;  // erases from the state before its decay: E is the exclusive sum of the gates
    bool shortcuts;     // near rows of a channel gate are products of the storage type, where their gates allow it
};

// n consecutive tokens of a head.
template <class T>
struct Chunk {
    Rows<T> q, k, p;    // [n, K]; p is k unless the rule has its own
    Rows<T> v;          // [n, V]
    Numbers<T> beta;    // [n]
    Rows<double> G, E;  // [n, K|1] inclusive gate sums; exponents of erasing, G or the exclusive sums

    Chunk(const KeyHead<T>& key, const ValueHead<T>& value, const Piece& piece);
    Index rows() const { return q.rows(); }
    bool erases_like_reading() const { return E.data() == G.data(); }
};

// What the scan sees of a chunk.
template <class T>
struct Folded {
    Tile<T> read_query;               // [n, K] scale·q∘e^G
    Tile<T> erase_key;                // [n, K] β·p∘e^E
    Tile<T> write_key;                // [n, K] k∘e^(G_last − G)
    Column<T> state_decay;            // [K] e^G_last
    Tile<T> score;                    // [n, n] scale·Σ q_i k_j e^(G_i − G_j), i ≥ j
    Tile<T> erase_score;              // [n, n] β_i·Σ p_i k_j e^(E_i − G_j), i > j
    Tile<T> read_decay, erase_decay;  // [n, K|1] e^G, e^E
    Tile<T> write_decay;              // [n, K|1] e^(G_last − G)
};

// Gradients of what the scan sees.
template <class T>
struct FoldedGradients {
    Tile<T> read_query, erase_key, write_key;  // [n, K]
    Column<T> state_decay;                     // [K]
    Tile<T> score, erase_score;                // [n, n]
};

// Gradients of a chunk's operands, each in the part that comes through the states and the part within the chunk.
template <class T>
struct Unfolded {
    Tile<T> dq_state, dq_intra;  // [n, K]
    Tile<T> dk_state, dk_intra;  // [n, K] without the path through p
    Tile<T> e_state, e_intra;    // [n, K] dp = β e
    Tile<T> dg;                  // [n, K|1] as sums of the terms that a gate spans: no subtraction
};

// Tiles that fold and unfold need for a moment; one set per thread.
template <class T>
struct FoldScratch {
    Tile<T> decay, erase_decay, left, erase_left, right, pair, erase_pair, product, terms, beta_p;
    Tile<T> near_q, near_k, near_p;
    Line<T> sum, erase_sum;
};

template <class T>
void fold(const FoldRule<T>& rule, const Chunk<T>& c, Rounding& rounding, FoldScratch<T>& scratch, Folded<T>& f);
template <class T>
void unfold(const FoldRule<T>& rule, const Chunk<T>& c, const Folded<T>& f, FoldedGradients<T>& d, Rounding& rounding,
            FoldScratch<T>& scratch, Unfolded<T>& u);

// The pairs of rows i ≥ j within a chunk. All channels share a gate: one product, then decays. A gate per channel:
// sub-blocks of rows, each pair of blocks factored at the row before the later one, within a block pair by pair
// (docs/math.md, "Safe exponentials").
template <class T>
void fold_shared_pairs(const FoldRule<T>& rule, const Chunk<T>& c, FoldScratch<T>& scratch, Folded<T>& f);
template <class T>
void fold_channel_pairs(const FoldRule<T>& rule, const Chunk<T>& c, Rounding& rounding, FoldScratch<T>& scratch,
                        Folded<T>& f);
template <class T>
void unfold_shared_pairs(const FoldRule<T>& rule, const Chunk<T>& c, const Folded<T>& f, FoldedGradients<T>& d,
                         Rounding& rounding, FoldScratch<T>& scratch, Unfolded<T>& u);
template <class T>
void unfold_channel_pairs(const FoldRule<T>& rule, const Chunk<T>& c, FoldedGradients<T>& d, Rounding& rounding,
                          FoldScratch<T>& scratch, Unfolded<T>& u);

}  // namespace softdelta::stages::delta

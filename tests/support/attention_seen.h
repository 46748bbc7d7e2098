// Which keys the rows of a drawn call see, pair by pair from the contract, and junk in all that nobody sees.
#pragma once

#include <vector>

#include "support/random_attention.h"

namespace softdelta::test {

// A query row of a sequence and head, and what it may see.
struct SeenRow {
    Index sequence, head, key_head, query;  // query counts within the sequence
    Index row;                              // of [B·Lq]
    Index diagonal;                         // the key at which ALiBi is 0
    std::vector<Index> keys;                // within the sequence
    std::vector<Index> key_rows;            // where each lies: of [B·Lk], or of the rows of all blocks
};

std::vector<SeenRow> seen_rows(const RandomAttention& call);

// The element of a mask or bias for a row and a key; of no array: 0.
double plane_value(const RandomAttention& call, const Array& a, const SeenRow& row, Index key);

// What is added to the score of a row and a key: bias_slope·bias − alibi_slope·|i + Lk − Lq − j|. With a far bias as
// f32 keeps it.
double addend_of(const RandomAttention& call, const SeenRow& row, Index key);

// Puts `junk` into keys and values that no query row sees, and into q of rows that see no key. Where the call has no
// sinks, into their d_o and dlse too. None of it may change a result.
void fill_unseen(const RandomAttention& call, double junk);

}  // namespace softdelta::test

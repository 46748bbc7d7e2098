// What a decode step takes together: the rows of a head, and heads whose keys lie beside each other in memory.
#pragma once

#include <cstdlib>

#include "engines/cpu/kernels/attention/blocks.h"
#include "engines/cpu/kernels/attention/decode/products.h"
#include "engines/cpu/kernels/attention/head.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Slots of a head: its rows, rounded up to what one call of the products takes.
inline Index rows_at_once(Index rows) {
    return rows > 2 ? most_product_rows : max(rows, 1);
}
inline Index slots_of(const AttentionHead& head) {
    return round_up(head.rows(), rows_at_once(head.rows()));
}

// Whether the next key of a head is nearer in memory than the same key of the next head.
inline bool lie_apart(const KeyRows& head, const KeyRows& next) {
    const Index distance = static_cast<const std::byte*>(next.data) - static_cast<const std::byte*>(head.data);
    return std::abs(distance) > std::abs(head.row) * static_cast<Index>(core::size_of(head.dtype));
}

// Whether `count` heads leave the first-level cache between two tiles of keys: their queries, sums, keys and values.
template <class P>
bool leave_cache(const AttentionHead& head, Index count) {
    const auto floats = static_cast<Index>(sizeof(float));
    const Index row = (a_row_length<P>(head.size) + round_up(head.value_size, W)) * floats;
    const auto bytes = [](const KeyRows& t, Index n) {
        return t.dtype == DType::u8 ? n / 2 : n * static_cast<Index>(core::size_of(t.dtype));  // u8: 4 bits an element
    };
    const Index key = bytes(head.k, head.size) + bytes(head.v, head.value_size);
    const bool position_alone = head.mask.data == nullptr && head.bias.data == nullptr;
    return count * (slots_of(head) * row + slot_keys * key) >
           (position_alone ? decode_blocks::cache_bytes : decode_blocks::cache_bytes_of_masks);
}

// Heads that are read together: all, where those of a key lie beside each other. Else one after the other, if all would
// leave the cache and the rows of one fill a vector of scores: its memory is then read from begin to end. A head's
// results are the same bits in any company.
template <class P>
Index heads_at_once(const AttentionHead* heads, Index count) {
    const bool apart = count > 1 && lie_apart(heads[0].k, heads[1].k) && lie_apart(heads[0].v, heads[1].v);
    return apart && slots_of(*heads) * slot_keys >= W && leave_cache<P>(*heads, count) ? 1 : count;
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

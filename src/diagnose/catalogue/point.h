// A place of a pipeline and what a kernel does wrong there.
#pragma once

#include <string_view>

namespace softdelta::diagnose {

enum class Change {
    // factors; `missing` stands for all of them until it has been seen that one may explain a dump
    missing,
    doubled,
    halved,
    negated,
    times_scale,
    over_scale,
    times_ln2,
    over_ln2,
    times_group,
    over_group,
    times_beta,
    over_beta,
    // rows
    row_before,
    row_after,
    two_rows_before,
    tail_lost,
    first_row_lost,
    last_row_lost,
    last_warp_lost,
    last_of_16_lost,
    stale,
    // products of rows with rows, states
    transposed,
    without_diagonal,
    unmasked,
    first_tile_lost,
    last_tile_lost,
    bf16,
    // exponents
    undecayed,
    twice,
    base_2,
    base_over_ln2,
    decay_of_row_before,
    decay_of_row_after,
    // sums over tiles, heads
    last_only,
    first_only,
    unsummed,
    summed_by_tile,
    // operands
    one,
    squashed,
    cumulated,
    not_rescaled,
    swapped,
    always,
    head_before,
    head_after,
    first_head,
    first_sequence,
    modulo,
    not_a_number,
    count
};

// Factors of a place all have the pattern of its loss.
constexpr bool is_factor(Change c) {
    return c <= Change::over_beta;
}

// Counts tiles of keys from the first key on.
constexpr bool is_of_tiles(Change c) {
    return c == Change::first_tile_lost || c == Change::last_tile_lost || c == Change::not_rescaled ||
           c == Change::last_only || c == Change::first_only || c == Change::stale;
}

// What decays to nothing may be large when it decays otherwise.
constexpr bool is_of_exponent(Change c) {
    return (c >= Change::undecayed && c <= Change::decay_of_row_after) || c == Change::unsummed ||
           c == Change::summed_by_tile;
}

// Changes some rows or tiles only, or all of them little: what comes of the others may be right.
constexpr bool is_partial(Change c) {
    return (c >= Change::row_before && c <= Change::stale) || c == Change::first_only || is_of_tiles(c) ||
           c == Change::bf16 || is_of_exponent(c);
}

struct Point {
    std::string_view place;
    Change change = Change::count;

    bool operator==(const Point&) const = default;
};

}  // namespace softdelta::diagnose

// Numbers of the plan that machines decide, in one place: how calls are cut into units, and how memory is kept. The
// order of every sum comes from these and from shapes, never from the number of threads, so that results do not depend
// on it. How much work is worth a team of threads is core::worth_a_team; the sizes of a kernel's blocks are in the
// kernels' tables.
#pragma once

#include <cstddef>

#include "core/tensor.h"

namespace softdelta::cpu::thresholds {

using core::Index;

// Forward attention, blocks of rows. No sum runs over rows, so that their number may follow the threads: several for
// each, for threads are not equally fast, and with a causal mask blocks are not equally long. But every block packs its
// keys itself, which takes a fifth of the time and more where it has at most short_block rows: so there are fewer of
// these.
inline constexpr Index blocks_of_thread = 4, short_blocks_of_thread = 2;
inline constexpr Index short_block = 192;
inline constexpr Index block_step = 64;  // blocks become shorter by so many rows

// Blocks that share packed keys are cheap to begin, and at most so long: their rows stay in the second-level cache
// beside a block of keys, of two threads that share it.
inline constexpr Index sharing_blocks_of_thread = 16, sharing_block = 256;

// Keys of a head that are packed at once, and memory for packed keys in bytes, unless one head needs more.
inline constexpr Index packed_keys = 256;
inline constexpr Index most_packed_memory = Index{32} << 20;

// Ranges of keys (decode) of one sequence: fewer leave processors without work where it is alone.
inline constexpr Index range_units = 32;

// A head with at most so many rows is cut by keys (decode): its rows alone are one block.
inline constexpr Index decode_rows = 64;

// A range of keys has at least so many keys, a multiple of range_step, so that combining the results of ranges stays a
// small part of the work.
inline constexpr Index shortest_range = 512;
inline constexpr Index range_step = 64;  // a block of keys of the decode kernel

// Key heads of a decode unit: their keys are neighbours in memory and are read together.
inline constexpr Index most_unit_heads = 16;

// Backward attention: units of a phase. Many, so that a thread seldom waits for the step before its own.
inline constexpr Index backward_phase_units = 128;

// Units in flight for each thread: heads beyond these are left for later, and what is in flight stays in the caches.
inline constexpr Index units_in_flight = 4;

// Delta rules. A unit takes up to so many key heads, whose rows are neighbours in memory. But so many units must be
// left, and the states of a unit, in bytes, must fit a core's cache.
inline constexpr Index delta_unit_key_heads = 4;
inline constexpr Index delta_units = 16;
inline constexpr Index delta_unit_states = 512 * 1024;

// A pass of so many tokens or more, in sequences of one length, takes more heads while a thread has still so many
// units: eight rows of 128 floats are a page of memory, which is looked up once for all of them. In shorter ones
// that many states cost more than it saves.
inline constexpr Index delta_long_sequence = 512;
inline constexpr Index delta_long_key_heads = 8;
inline constexpr Index delta_units_of_thread = 2;

// Fewer heads than these may leave processors without work: a forward pass of so many tokens or more then shares chunks
// and value columns. In shorter ones synchronisation costs more than the work. The folded chunks of a window, so many
// tokens of all heads, stay in the caches. Backward, windows of 512 to 3072 tokens differ by less than 6 %.
inline constexpr Index delta_heads = 16;
inline constexpr Index shortest_split = 128;
inline constexpr Index window_tokens = 1024;

// How many times as long all threads together take for heads that they share as for whole ones: 1.3 to 2 where it was
// measured.
inline constexpr double split_time = 1.6, split_time_by_tiles = 2;

// A backward pass shares heads where the longest is the last to end, and a third of the threads' time or more would be
// lost. They are at most so many key heads for each thread, for what is saved of them is kept all at once.
inline constexpr Index most_split_units = 2;

// Memory of this size and more comes in huge pages where the system has them. Touching it for the first time in small
// pages took a tenth of a backward pass.
inline constexpr std::size_t huge_page = std::size_t{2} << 20;

// Scratch memory up to this size is kept between calls. Taking it from the system and clearing it anew took a sixth of
// a long backward pass.
inline constexpr std::size_t most_kept_memory = std::size_t{128} << 20;

}  // namespace softdelta::cpu::thresholds

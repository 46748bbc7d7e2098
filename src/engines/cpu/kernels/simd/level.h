// The level that is compiled, of one instruction set or emulated for tests: cmake/isa_levels.cmake names its file. That
// says
//     vector_registers     how many vectors the registers hold: they bound a register tile
//     fma_rounds_once      whether fma is one operation
// and has the functions that need its instructions: fma, at_least, at_most, round_to_nearest, scale_by_power_of_two,
// as_words, as_floats, load_u16, store_u16, load_u8, load_i8, halves_to_floats, load and store of f16, splat_four,
// lanes_of, lanes_of_f16, load_double, load_partial of words, nonzero_bytes, transpose, sum, maximum, reduce_rows,
// prefetch_line, prefetch_for_write, FlushSubnormals. portable.h has some of them for a level without an instruction.
// Where a level has a better exp2 or exp2_for_bf16, products of bf16 or matrix tiles, it defines them, and
// SOFTDELTA_LEVEL_HAS_….
#pragma once

#include SOFTDELTA_ISA_HEADER

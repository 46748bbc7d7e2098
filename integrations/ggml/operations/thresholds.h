// From which sizes on the library is faster than ggml's own CPU backend. Measured by `scripts/llama`; docs/llama.md has
// the table. SOFTDELTA_GGML_TAKE=all leaves them out.
#pragma once

#include <cstdint>

namespace softdelta_ggml {

// GATED_DELTA_NET, tokens of a sequence. For one token both wait for the state in memory.
inline constexpr std::int64_t delta_tokens = 2;

// Up to how many tokens, and in steps of how many, few tokens go through the library's form for steps, whose time grows
// with tokens: with 32 heads of 128 and 2 cores 0.025 ms a token. Chunks take 1 ms at least.
inline constexpr std::int64_t delta_step_tokens = 8, delta_stepped_tokens = 40;

// SSM_SCAN, tokens of a sequence. RWKV_WKV7 and GATED_LINEAR_ATTN stay with ggml: heads of 64 and f32 leave little to
// gain over its loops. RWKV-7 takes 0.8 of ggml's time before its operands are copied into steps and its decays made
// gates.
inline constexpr std::int64_t scan_tokens = 16;

// SSM_CONV and the CONCAT before it, tokens of a sequence.
inline constexpr std::int64_t convolution_tokens = 8;

// FLASH_ATTN_EXT, multiply-adds: queries × keys × heads × (D + Dv). Below, the gain is less than 5 µs, and about that
// is lost where ggml's graph is cut.
inline constexpr std::int64_t attention_work = 1 << 17;

// From how many queries on a mask is looked at: whether it hides by position alone.
inline constexpr std::int64_t causal_queries = 16;

// Rows of queries that share a key head, where keys and values are of a type that the library does not read as it lies:
// all of them become floats first, in memory.
inline constexpr std::int64_t attention_rows_expanded = 4;

// How many such floats there are at most, 4 MB: they stay near the processor, and the library still takes all threads.
// 65536 keys took 48 ms of CPU time for a token, 57 with 16 MB and 67 all at once. A range of keys is a multiple of 64.
inline constexpr std::int64_t expanded_numbers = 1 << 20, key_block = 64;

// Where a model says how many keys a row sees at most (sparse attention): with fewer queries than these, and more keys
// for each that is seen, ggml is faster. It goes key by key; the library reads a block of 64 to see one of them.
inline constexpr std::int64_t sparse_queries = 16, sparse_keys = 4;

}  // namespace softdelta_ggml

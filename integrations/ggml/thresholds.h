// From which sizes on the library is faster than ggml's own CPU backend. Measured by `scripts/llama`; docs/llama.md has
// the table. SOFTDELTA_GGML_TAKE=all leaves them out.
#pragma once

#include <cstdint>

namespace softdelta_ggml {

// Tokens of a sequence. The chunk form starts to pay where a chunk has a few rows.
inline constexpr std::int64_t delta_tokens = 2;

// Rows of queries that share a key head. Below, the call waits for memory, as ggml's does.
inline constexpr std::int64_t attention_rows = 4;

// The same for quantised keys and values, each of which is made into a float first.
inline constexpr std::int64_t attention_rows_quantised = 64;

}  // namespace softdelta_ggml

// Attention on the GPU against the truth: drawn calls of every option, whose tensors the library copies to the GPU and
// back.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many.
#include <gtest/gtest.h>

#include <cstring>

#include "engines/cuda/gpu_test.h"
#include "support/fast_attention.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

class CudaAttention : public OnGpuTest {};

bool is_refused(const FastAttention& call, bool gradients) {
    const AttentionInputs& in = call.call().attention;
    return in.q.shape(3) > 256 || in.v.shape(3) > 256 || call.call().attention_options.top_w >= 0 || in.k_scale ||
           in.v_scale || (gradients && in.block_table);
}

TEST_F(CudaAttention, ForwardIsRight) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(300)); ++seed) {
        const FastAttention call = draw_fast_attention(seed);
        const Names names = call.some(call.forward_names());
        if (is_refused(call, false)) {
            EXPECT_THROW(call.forward(names, cuda()), Unsupported);
            continue;
        }
        const Results results = call.forward(names, cuda());
        EXPECT_EQ(judge_results(call, results), "") << "SOFTDELTA_SEED=" << seed;
        expect_same_bits(results, call.forward(names, cuda()), seed);
    }
}

TEST_F(CudaAttention, BackwardIsRight) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(300)); ++seed) {
        const FastAttention call = draw_fast_attention(seed);
        const Names names = call.some(call.gradient_names());
        if (names.empty()) continue;
        if (is_refused(call, true)) {
            EXPECT_THROW(call.backward(names, {}, cuda()), Unsupported);
            continue;
        }
        const Results all = call.forward(call.forward_names(), cuda());
        Results saved;
        if (seed / 3 % 4 != 0) saved.insert(*all.find("o"));
        if (seed / 3 % 4 < 3) saved.insert(*all.find("lse"));
        const Results gradients = call.backward(names, saved, cuda());
        EXPECT_EQ(judge_gradients(call, gradients), "") << "SOFTDELTA_SEED=" << seed;
        expect_same_bits(gradients, call.backward(names, saved, cuda()), seed);
    }
}

}  // namespace
}  // namespace softdelta::test

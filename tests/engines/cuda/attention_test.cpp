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
    const std::int64_t most = gradients ? 256 : 576;
    return in.q.shape(3) > most || in.v.shape(3) > most || in.k_scale || in.v_scale || (gradients && in.block_table);
}

using DrawCall = FastAttention (*)(std::uint64_t seed);

void expect_right_forward(DrawCall draw, bool all = false, std::int64_t calls = call_count(300)) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(calls); ++seed) {
        const FastAttention call = draw(seed);
        const Names names = all ? call.forward_names() : call.some(call.forward_names());
        if (is_refused(call, false)) {
            EXPECT_THROW(call.forward(names, cuda()), Unsupported);
            continue;
        }
        const Results results = call.forward(names, cuda());
        EXPECT_EQ(judge_results(call, results), "") << "SOFTDELTA_SEED=" << seed;
        expect_same_bits(results, call.forward(names, cuda()), seed);
    }
}

void expect_right_backward(DrawCall draw) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(300)); ++seed) {
        const FastAttention call = draw(seed);
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

TEST_F(CudaAttention, ForwardIsRight) {
    expect_right_forward(draw_fast_attention);
}
TEST_F(CudaAttention, BackwardIsRight) {
    expect_right_backward(draw_fast_attention);
}
TEST_F(CudaAttention, ForwardOfUnitsIsRight) {
    expect_right_forward(draw_unit_attention);
}
TEST_F(CudaAttention, ForwardOfFewQueriesIsRight) {
    expect_right_forward(draw_step_attention, true);
}
TEST_F(CudaAttention, ForwardOverManyRangesIsRight) {
    expect_right_forward(draw_long_step_attention, true, 1);
}
TEST_F(CudaAttention, BackwardOfUnitsIsRight) {
    expect_right_backward(draw_unit_attention);
}

// Tensors on the GPU, in a workspace of exactly the bytes needed, between guard bytes: the bits are those of the
// library's own memory.
class CallersMemory {
  public:
    explicit CallersMemory(std::size_t bytes)
        : memory_(GpuTensor::result(Tensor(nullptr, DType::boolean, {static_cast<std::int64_t>(bytes)}))),
          bytes_(bytes) {}

    template <class Run>
    void run(Execution execution, const Run& pass) const {
        execution.workspace = {static_cast<std::byte*>(memory_.view().data()), bytes_};
        pass(execution);
        memory_.check_guards();
    }

  private:
    GpuTensor memory_;
    std::size_t bytes_;
};

TEST_F(CudaAttention, WorksInTheCallersMemory) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + static_cast<std::uint64_t>(call_count(20)); ++seed) {
        const FastAttention call = draw_unit_attention(seed);
        if (is_refused(call, true)) continue;
        std::map<std::string, GpuTensor> given, memory;
        AttentionInputs in;
        for (const auto& field : fields_of<AttentionInputs>)
            in.*field.tensor =
                given.emplace(field.name, GpuTensor::input(call.call().attention.*field.tensor)).first->second.view();
        in.cu_seqlens_q = call.call().attention.cu_seqlens_q;  // on the host: a mask's shape is checked by them
        in.cu_seqlens_k = call.call().attention.cu_seqlens_k;
        const GpuTensor d_o = GpuTensor::input(call.call().d_o);
        Results results;
        for (const char* name : {"o", "lse", "dq", "dk", "dv"}) {
            io::OwnedTensor host(io::output_dtype(call.call(), name), io::output_shape(call.call(), name));
            memory.emplace(name, GpuTensor::result(host.view()));
            results.emplace(name, host);
        }
        const AttentionOptions& options = call.call().attention_options;
        const AttentionOutputs out{.o = memory.at("o").view(), .lse = memory.at("lse").view()};
        CallersMemory(attention_forward_workspace(in, out, options, cuda())).run(cuda(), [&](const Execution& e) {
            attention_forward(in, out, options, e);
        });
        AttentionGradients grad;
        grad.d_o = d_o.view();
        grad.dq = memory.at("dq").view(), grad.dk = memory.at("dk").view(), grad.dv = memory.at("dv").view();
        CallersMemory(attention_backward_workspace(in, grad, options, cuda())).run(cuda(), [&](const Execution& e) {
            attention_backward(in, grad, options, e);
        });
        for (const auto& [name, host] : results) memory.at(name).copy_to(host.view());
        Results own = call.forward({"o", "lse"}, cuda());
        own.merge(call.backward({"dq", "dk", "dv"}, {}, cuda()));
        if (call.call().dlse) {  // which this test leaves out
            for (const char* name : {"dq", "dk", "dv"}) results.erase(name);
        }
        expect_same_bits(results, own, seed);
    }
}

}  // namespace
}  // namespace softdelta::test

// A call that is given a workspace allocates nothing, and one whose workspace is too small does nothing.
#include <gtest/gtest.h>

#include <cstring>

#include "support/allocations.h"
#include "support/fast_attention.h"
#include "support/levels.h"
#include "support/teams.h"

namespace softdelta::test {
namespace {

// A drawn call with all its results, ready to run.
class Pass {
  public:
    explicit Pass(std::uint64_t seed) : call_(draw_fast_attention(seed)) {
        for (const std::string& name : io::output_names(call_.call())) {
            const io::OwnedTensor result(io::output_dtype(call_.call(), name), io::output_shape(call_.call(), name));
            std::memset(result.data(), 0xff, result.bytes());
            results_.emplace(name, result);
        }
        outputs_ = {.o = view("o"), .lse = view("lse")};
        gradients_ = {.d_o = call_.call().d_o,
                      .dlse = call_.call().dlse,
                      .dq = view("dq"),
                      .dk = view("dk"),
                      .dv = view("dv"),
                      .dbias = view("dbias"),
                      .dsink = view("dsink")};
    }

    bool has_gradients() const { return results_.count("dq") != 0; }
    std::string describe() const { return call_.describe(); }

    std::size_t workspace(bool forward, const Execution& e) const {
        const io::Call& c = call_.call();
        return forward ? attention_forward_workspace(c.attention, outputs_, c.attention_options, e)
                       : attention_backward_workspace(c.attention, gradients_, c.attention_options, e);
    }
    void run(bool forward, const Execution& e) const {
        const io::Call& c = call_.call();
        forward ? attention_forward(c.attention, outputs_, c.attention_options, e)
                : attention_backward(c.attention, gradients_, c.attention_options, e);
    }
    bool nothing_is_written() const {
        for (const auto& [name, t] : results_)
            for (std::size_t i = 0; i < t.bytes(); ++i)
                if (static_cast<std::byte*>(t.data())[i] != std::byte{0xff}) return false;
        return true;
    }

  private:
    Tensor view(const std::string& name) const {
        const auto found = results_.find(name);
        return found == results_.end() ? Tensor() : found->second.view();
    }
    FastAttention call_;
    Results results_;
    AttentionOutputs outputs_;
    AttentionGradients gradients_;
};

// Calls test(pass, forward, execution, workspace) for both passes of drawn calls on every level.
template <class Test>
void for_each_pass(const Test& test) {
    for_each_level([&](const std::string& level) {
        for (std::uint64_t seed = first_seed(); seed < first_seed() + 60; ++seed) {
            const Pass pass(seed);
            SCOPED_TRACE(level + ", " + pass.describe());
            for (const bool forward : {true, false}) {
                if (!forward && !pass.has_gradients()) continue;
                Execution execution;
                execution.engine = "fast";
                execution.threads = 2;
                std::vector<std::byte> workspace(pass.workspace(forward, execution));
                execution.workspace = workspace;
                test(pass, forward, execution);
            }
        }
    });
}

TEST(AttentionFastWorkspace, IsAllThatACallNeeds) {
    if (count_allocations() < 0) GTEST_SKIP() << "allocations are not counted here";
    for_each_pass([](const Pass& pass, bool forward, const Execution& execution) {
        if (execution.workspace.empty()) return;  // nothing to compute
        pass.run(forward, execution);             // OpenMP starts its threads
        const int before = count_allocations();
        pass.run(forward, execution);
        EXPECT_EQ(count_allocations() - before, 0) << (forward ? "forward" : "backward");
    });
    Execution execution;
    execution.engine = "fast";
    const int before = count_allocations();
    Pass(1).run(true, execution);
    EXPECT_GT(count_allocations() - before, 0) << "allocations are counted";
}

TEST(AttentionFastWorkspace, ThatIsTooSmallIsAnError) {
    for_each_pass([](const Pass& pass, bool forward, Execution execution) {
        const std::size_t needed = execution.workspace.size();
        if (needed == 0) return;
        execution.workspace = execution.workspace.first(needed - 1);
        try {
            pass.run(forward, execution);
            ADD_FAILURE() << "a byte is missing";
        } catch (const std::invalid_argument& e) {
            EXPECT_EQ(e.what(), "execution.workspace_size: " + std::to_string(needed - 1) + ", expected " +
                                    std::to_string(needed) + " or more");
        }
        EXPECT_TRUE(pass.nothing_is_written());
    });
}

}  // namespace
}  // namespace softdelta::test

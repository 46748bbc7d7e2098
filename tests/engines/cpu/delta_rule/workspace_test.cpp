// A call of the delta rules that is given a workspace allocates nothing, whether threads share heads or not.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/allocations.h"
#include "support/levels.h"
#include "support/teams.h"

namespace softdelta::test {
namespace {

// KDA of heads of 40 channels on drawn numbers, both passes.
class Pass {
  public:
    Pass(std::int64_t heads, std::int64_t tokens)
        : heads_(heads), tokens_(tokens), rows_(static_cast<std::size_t>(10 * tokens * heads * size)) {
        for (std::size_t i = 0; i < rows_.size(); ++i) rows_[i] = 0.05F * static_cast<float>(i * 37 % 23) - 0.5F;
        beta_.assign(static_cast<std::size_t>(2 * tokens * heads), 0.5F);
        options_.rule = Rule::kda;
        options_.use_qk_l2norm_in_kernel = true;
        for (std::size_t i = 0; i < static_cast<std::size_t>(tokens * heads * size); ++i) row(3)[i] = -0.1F;
        in_ = {.q = rows(0), .k = rows(1), .v = rows(2), .g = rows(3), .beta = beta(0)};
        outputs_ = {.o = rows(4)};
        gradients_ = {.d_o = rows(5), .dq = rows(6), .dk = rows(7), .dv = rows(8), .dg = rows(9), .dbeta = beta(1)};
    }

    std::size_t workspace(bool forward, const Execution& e) const {
        return forward ? delta_forward_workspace(in_, outputs_, options_, e)
                       : delta_backward_workspace(in_, gradients_, options_, e);
    }
    void run(bool forward, const Execution& e) const {
        forward ? delta_forward(in_, outputs_, options_, e) : delta_backward(in_, gradients_, options_, e);
    }

  private:
    static constexpr std::int64_t size = 40;

    float* row(std::int64_t i) { return rows_.data() + i * tokens_ * heads_ * size; }
    Tensor rows(std::int64_t i) { return Tensor(row(i), DType::f32, {1, tokens_, heads_, size}); }
    Tensor beta(std::int64_t i) {
        return Tensor(beta_.data() + i * tokens_ * heads_, DType::f32, {1, tokens_, heads_});
    }

    std::int64_t heads_, tokens_;
    std::vector<float> rows_, beta_;
    DeltaOptions options_;
    DeltaInputs in_;
    DeltaOutputs outputs_;
    DeltaGradients gradients_;
};

TEST(DeltaFastWorkspace, IsAllThatACallNeeds) {
    if (count_allocations() < 0) GTEST_SKIP() << "allocations are not counted here";
    for_each_level([&](const std::string& level) {
        for (const std::int64_t heads : {1, 3, 20})
            for (const std::int64_t tokens : {1, 50, 2600})
                for (const bool forward : {true, false}) {
                    const Pass pass(heads, tokens);
                    Execution execution;
                    execution.engine = "fast";
                    execution.threads = 8;
                    std::vector<std::byte> workspace(pass.workspace(forward, execution));
                    execution.workspace = workspace;
                    pass.run(forward, execution);  // OpenMP starts its threads
                    const int before = count_allocations();
                    pass.run(forward, execution);
                    EXPECT_EQ(count_allocations() - before, 0) << level << ", " << heads << " heads, " << tokens
                                                               << (forward ? " tokens" : " tokens, backward");
                }
    });
    Execution execution;
    execution.engine = "fast";
    const int before = count_allocations();
    Pass(1, 50).run(true, execution);
    EXPECT_GT(count_allocations() - before, 0) << "allocations are counted";
}

}  // namespace
}  // namespace softdelta::test

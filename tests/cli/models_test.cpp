// Every layer of every model that `softdelta bench` knows is a call that the fast engine takes.
#include <gtest/gtest.h>

#include <algorithm>

#include "cli/bench/models.h"

namespace softdelta::cli {
namespace {

TEST(BenchModels, AllLayersAreComputed) {
    Execution execution;
    execution.engine = "fast";
    execution.threads = 1;
    for (const std::string& name : model_names())
        for (const ModelRow& row : model_rows(name, 1, 6)) {
            const Problem problem = row.make();
            EXPECT_GT(problem.work, 0) << name << ": " << row.name;
            EXPECT_GE(row.layers, row.timed);
            try {
                problem.call(execution);
            } catch (const Unsupported& e) {
                EXPECT_TRUE(std::ranges::none_of(isa_levels(), &IsaLevel::available))
                    << name << ": " << row.name << ": " << e.what();
            }
        }
}

}  // namespace
}  // namespace softdelta::cli

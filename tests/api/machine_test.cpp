// Instruction sets and measured ceilings, as a program that links the library sees them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "softdelta/judge.hpp"

namespace {

using softdelta::Ceiling;
using softdelta::IsaLevel;

class Machine : public testing::Test {
  protected:
    void SetUp() override { unsetenv("SOFTDELTA_ISA"); }  // before it is read
    void TearDown() override { softdelta::select_isa_level(""); }
};

std::vector<std::string> selected_names() {
    std::vector<std::string> names;
    for (const IsaLevel& level : softdelta::isa_levels())
        if (level.selected) names.push_back(level.name);
    return names;
}

TEST_F(Machine, TheHeaderHasTheVersionOfTheLibrary) {
    EXPECT_STREQ(softdelta_version(),
                 (std::to_string(SOFTDELTA_VERSION_MAJOR) + "." + std::to_string(SOFTDELTA_VERSION_MINOR) + "." +
                  std::to_string(SOFTDELTA_VERSION_PATCH))
                     .c_str());
}

TEST_F(Machine, TheLastLevelAvailableIsSelected) {
    std::vector<std::string> last;
    for (const IsaLevel& level : softdelta::isa_levels()) {
        EXPECT_TRUE(level.compiled || !level.available) << level.name;
        if (level.available) last = {level.name};
    }
    EXPECT_EQ(selected_names(), last);
}

TEST_F(Machine, ALevelIsSelectedByItsName) {
    const std::vector<std::string> last = selected_names();
    for (const IsaLevel& level : softdelta::isa_levels()) {
        const std::vector<std::string> before = selected_names();
        if (level.available)
            EXPECT_NO_THROW(softdelta::select_isa_level(level.name));
        else
            EXPECT_THROW(softdelta::select_isa_level(level.name), softdelta::Unsupported) << level.name;
        EXPECT_EQ(selected_names(), level.available ? std::vector<std::string>{level.name} : before);
    }
    try {
        softdelta::select_isa_level("neon2");
        ADD_FAILURE() << "a level that does not exist";
    } catch (const softdelta::Unsupported& e) {
        EXPECT_EQ(std::string(e.what()).rfind("name is neon2, no instruction set that is known here; available: ", 0),
                  0u)
            << e.what();
    }
    softdelta::select_isa_level("");
    EXPECT_EQ(selected_names(), last);
}

// The speed of an emulated level says nothing: it is for tests.
bool emulated([[maybe_unused]] const std::string& level) {
#if defined(SOFTDELTA_EMULATED_TILES)
    return level == "amxbf16";
#else
    return false;
#endif
}

// A neighbour on the machine makes a loop slower, never faster: of several measurements the first that exceeds `floor`.
double ceiling_above(double floor, Ceiling ceiling) {
    double flops = 0;
    for (int i = 0; i < 8 && flops <= floor; ++i) flops = std::max(flops, softdelta::measure_ceiling(ceiling, 1));
    return flops;
}

// Loose, for machines are busy: a wider vector is not slower, and no loop was optimised away.
TEST_F(Machine, CeilingsArePlausible) {
    double narrower = 1e8;
    for (const IsaLevel& level : softdelta::isa_levels()) {
        if (!level.available || emulated(level.name)) continue;
        softdelta::select_isa_level(level.name);
        const double f32 = ceiling_above(0.3 * narrower, Ceiling::f32);
        EXPECT_GT(f32, 0.3 * narrower) << level.name;
        EXPECT_LT(f32, 1e12) << level.name;
        narrower = f32;
        if (std::string(level.name).find("bf16") == std::string::npos) {
            EXPECT_THROW(softdelta::measure_ceiling(Ceiling::bf16, 1), softdelta::Unsupported) << level.name;
        } else {
            const double bf16 = ceiling_above(0.3 * f32, Ceiling::bf16);
            EXPECT_GT(bf16, 0.3 * f32) << level.name;
            EXPECT_GT(ceiling_above(0.3 * bf16, Ceiling::bf16_registers), 0.3 * bf16) << level.name;
            for (const softdelta_loop& loop : softdelta::measure_loops(1)) EXPECT_GT(loop.seconds, 1e-10) << loop.name;
            EXPECT_EQ(softdelta_loop_count() > 0, level.name == "amxbf16");
        }
    }
    if (narrower == 1e8) GTEST_SKIP() << "no level is available";
    const double bandwidth = softdelta::measure_bandwidth(2);
    EXPECT_GT(bandwidth, 1e8);
    EXPECT_LT(bandwidth, 1e13);
}

TEST_F(Machine, ArgumentsAreChecked) {
    double result = 0;
    EXPECT_EQ(softdelta_measure_ceiling(SOFTDELTA_CEILING_F32, -1, &result), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_STREQ(softdelta_last_error(), "threads is -1, expected 0 or more");
    EXPECT_EQ(softdelta_measure_ceiling(3, 1, &result), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_EQ(softdelta_measure_ceiling(SOFTDELTA_CEILING_F32, 1, nullptr), SOFTDELTA_INVALID_ARGUMENT);
    softdelta_loop loop{};
    EXPECT_EQ(softdelta_measure_loop(-1, 1, &loop), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_EQ(softdelta_measure_loop(softdelta_loop_count(), 1, &loop), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_EQ(softdelta_measure_bandwidth(-1, &result), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_EQ(softdelta_measure_bandwidth(1, nullptr), SOFTDELTA_INVALID_ARGUMENT);
    softdelta_isa_level level = softdelta_isa_level_default();
    EXPECT_EQ(softdelta_get_isa_level(-1, &level), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_EQ(softdelta_get_isa_level(softdelta_isa_level_count(), &level), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_EQ(softdelta_get_isa_level(0, nullptr), SOFTDELTA_INVALID_ARGUMENT);
    level.size = 1;
    EXPECT_EQ(softdelta_get_isa_level(0, &level), SOFTDELTA_INVALID_ARGUMENT);
    EXPECT_EQ(level.name, nullptr) << "nothing is written";
}

}  // namespace

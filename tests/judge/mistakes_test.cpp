// Every deliberate mistake is flagged, in the result that it spoils; the same kernel without it is judged right.
#include "judge/mistakes.h"

#include <gtest/gtest.h>

#include <cctype>

#include "judge/verdicts.h"

namespace softdelta::test {

namespace {

class MistakeTest : public testing::TestWithParam<Mistake> {};

TEST_P(MistakeTest, IsFlagged) {
    const Mistake& mistake = GetParam();
    const io::CaseFile file = io::make_case(mistake.inputs);
    const io::Call call = io::call_of(file);

    const std::vector<judge::Finding> right = judge_results(call, mistake.right(call));
    EXPECT_FALSE(any_wrong(right)) << "without the mistake \"" << mistake.name << "\":\n" << Table{right};

    const std::vector<judge::Finding> mistaken = judge_results(call, mistake.run(call));
    EXPECT_TRUE(is_wrong(mistaken, mistake.result)) << mistake.name << ", expected in " << mistake.result << ":\n"
                                                    << Table{mistaken};
}

std::string name_of(const testing::TestParamInfo<Mistake>& info) {
    std::string name = info.param.name;
    for (char& c : name)
        if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
    return name;
}

INSTANTIATE_TEST_SUITE_P(Delta, MistakeTest, testing::ValuesIn(delta_mistakes()), name_of);
INSTANTIATE_TEST_SUITE_P(Attention, MistakeTest, testing::ValuesIn(attention_mistakes()), name_of);

}  // namespace

}  // namespace softdelta::test

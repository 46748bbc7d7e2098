// A dump made with a mistake by an independent small kernel, at the storage type's rounding noise: the catalogue's
// entry of that name ranks first.
#include <gtest/gtest.h>

#include <cctype>

#include "diagnose/rank.h"
#include "judge/mistakes.h"

namespace softdelta::test {

namespace {

diagnose::Ranking diagnose_results(const io::Call& call, const Results& results) {
    judge::Options options;
    options.threads = 1;
    const std::map<std::string, Tensor> actual = views(results);
    const diagnose::Observation observation(judge::examine(call, actual, options), actual);
    return diagnose::rank(call, observation, 1, {});
}

std::string table(const diagnose::Ranking& ranking) {
    std::string text;
    for (std::size_t i = 0; i < std::min<std::size_t>(ranking.singles.size(), 6); ++i) {
        const diagnose::Candidate& c = ranking.singles[i];
        text += std::string("  ") + c.entries.front()->name + ": cost " + std::to_string(c.left.cost) +
                ", worst block " + std::to_string(c.left.worst_block) + ", effect " + std::to_string(c.effect) +
                ", left " + std::to_string(c.left.results.at(c.left.worst_result())) + " in " + c.left.worst_result() +
                "\n";
    }
    return text;
}

class NamedTest : public testing::TestWithParam<Mistake> {};

TEST_P(NamedTest, RanksFirst) {
    const Mistake& mistake = GetParam();
    const io::CaseFile file = io::make_case(mistake.inputs);
    const io::Call call = io::call_of(file, mistake.name);
    const diagnose::Ranking ranking = diagnose_results(call, mistake.run(call));
    ASSERT_FALSE(ranking.singles.empty());
    const diagnose::Candidate& best = ranking.singles.front();
    EXPECT_TRUE(best.equal.empty()) << "equal to " << best.equal.front()->name;
    EXPECT_STREQ(best.entries.front()->name, mistake.entry) << table(ranking);
    EXPECT_TRUE(best.explains()) << table(ranking);
}

std::string name_of(const testing::TestParamInfo<Mistake>& info) {
    std::string name = info.param.name;
    for (char& c : name)
        if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
    return name;
}

INSTANTIATE_TEST_SUITE_P(Delta, NamedTest, testing::ValuesIn(delta_mistakes()), name_of);
INSTANTIATE_TEST_SUITE_P(Attention, NamedTest, testing::ValuesIn(attention_mistakes()), name_of);

}  // namespace

}  // namespace softdelta::test

// One wrong row of one head among 131072 is found, and nothing else.
//
// SOFTDELTA_WRONG_ROW_SIZE: K = V (default 32).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "io/call/make_case.h"
#include "judge/verify.h"

namespace softdelta::test {

namespace {

constexpr std::int64_t heads = 32, wrong_head = 17, wrong_token = 2600;

io::CaseFile make_inputs() {
    const char* size = std::getenv("SOFTDELTA_WRONG_ROW_SIZE");
    io::MakeOptions options;
    options.tokens = 4096;
    options.heads = options.value_heads = heads;
    options.key_size = options.value_size = size != nullptr ? std::atoll(size) : 32;
    options.gradients = false;
    return io::make_case(options);
}

// o [1, T, HV, V] as a right kernel has it.
io::OwnedTensor run_right_kernel(const io::Call& call) {
    io::OwnedTensor o(DType::bf16, io::output_shape(call, "o"));
    Execution execution;
    execution.engine = "stages_f32";
    execution.rounding.seed = 1000;
    io::execute(call, {{"o", o.view()}}, execution);
    return o;
}

// The row becomes that of the next token.
void repeat_next_row(const io::OwnedTensor& o) {
    const std::int64_t size = o.shape()[3];
    auto* row = static_cast<std::uint16_t*>(o.data()) + (wrong_token * heads + wrong_head) * size;
    std::copy_n(row + heads * size, size, row);
}

TEST(WrongRow, IsFound) {
    const io::CaseFile file = make_inputs();
    const io::Call call = io::call_of(file);
    const io::OwnedTensor o = run_right_kernel(call);
    repeat_next_row(o);
    const std::vector<judge::Finding> findings = judge::verify(call, {{"o", o.view()}}, {});
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].verdict, judge::Verdict::wrong);
    EXPECT_LT(findings[0].ratio, findings[0].limit) << "as a whole the tensor is right";
    EXPECT_NE(findings[0].note.find("1 of 2048 blocks; worst head 17, tokens 2560-2623"), std::string::npos)
        << findings[0].note;
}

}  // namespace

}  // namespace softdelta::test

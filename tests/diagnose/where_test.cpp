// Errors of known shape are described as such.
#include <gtest/gtest.h>

#include <functional>

#include "core/tensor.h"
#include "diagnose/diagnose.h"
#include "io/call/make_case.h"
#include "judge/floats.h"
#include "judge/small_delta.h"

namespace softdelta::test {

namespace {

io::MakeOptions inputs() {
    io::MakeOptions o;
    o.op = "gated_delta_rule";
    o.tokens = 150;
    o.heads = 2, o.value_heads = 4;
    o.key_size = o.value_size = 32;
    o.gate = "uniform", o.gate_value = -0.02;
    return o;
}

// What is said of the truth with one result spoilt: `spoil` gets it in f32.
std::string where(const io::MakeOptions& options, const std::string& result,
                  const std::function<void(Floats&)>& spoil) {
    const io::CaseFile file = io::make_case(options);
    const io::Call call = io::call_of(file);
    Results results;
    for (const std::string& name : io::output_names(call))
        results.emplace(name, io::OwnedTensor(io::output_dtype(call, name), io::output_shape(call, name)));
    Execution execution;
    execution.engine = "reference";
    execution.threads = 1;
    io::execute(call, views(results), execution);
    Floats spoilt(results.at(result).view());
    spoil(spoilt);
    results.at(result) = spoilt.stored(io::output_dtype(call, result));
    diagnose::Options quiet;
    quiet.threads = 1;
    const diagnose::Diagnosis diagnosis = diagnose::diagnose(call, views(results), {}, quiet);
    EXPECT_EQ(diagnosis.where.size(), 1u);
    return diagnosis.where.empty() ? "" : diagnosis.where.front();
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Where, AHeadOfZeros) {
    const std::string text = where(inputs(), "dv", [](Floats& dv) { dv.rows(0, 0, 150, 1).setZero(); });
    EXPECT_SAYS(text, "dv: 150 of 600 rows");
    EXPECT_SAYS(text, "only heads 1 of 0-3");
    EXPECT_SAYS(text, "100 % of the wrong rows are zero");
}

TEST(Where, AConstantFactor) {
    const std::string text = where(inputs(), "dq", [](Floats& dq) {
        for (Index h = 0; h < 2; ++h) dq.rows(0, 0, 150, h) /= std::sqrt(32.0f);
    });
    EXPECT_SAYS(text, "times 0.177, the scale");
}

// Of an ordinary call and of a packed one whose beta comes as a logit.
TEST(Where, BetaAsAFactor) {
    for (const bool packed : {false, true}) {
        io::MakeOptions o = inputs();
        if (packed) o.lengths = {70, 0, 17, 63}, o.beta_logits = true;
        const io::CaseFile file = io::make_case(o);
        const Floats beta(io::call_of(file).delta.beta);
        for (const bool times : {true, false}) {
            const std::string text = where(o, "dv", [&](Floats& dv) {
                for (Index h = 0; h < 4; ++h)
                    for (Index t = 0; t < 150; ++t) {
                        const float given = beta.rows(0, t, 1, h)(0, 0);
                        const float b = packed ? 1 / (1 + std::exp(-given)) : given;
                        dv.rows(0, t, 1, h) *= times ? b : 1 / b;
                    }
            });
            EXPECT_SAYS(text, times ? "each wrong row is the right one times its beta"
                                    : "each wrong row is the right one divided by its beta");
        }
    }
}

TEST(Where, ATransposedState) {
    const std::string text = where(inputs(), "final_state", [](Floats& S) {
        for (Index h = 0; h < 4; ++h) S.block(0, h).transposeInPlace();
    });
    EXPECT_SAYS(text, "the last two dimensions are swapped");
}

TEST(Where, RowsOfChunks) {
    const auto spoil_rows = [](const std::function<bool(Index)>& which) {
        return [which](Floats& o) {
            for (Index t = 0; t < 150; ++t)
                for (Index h = 0; which(t) && h < 4; ++h) o.rows(0, t, 1, h).array() += 1.0f;
        };
    };
    EXPECT_SAYS(where(inputs(), "o", spoil_rows([](Index t) { return t % 64 == 0; })),
                "only the first row of each chunk");
    EXPECT_SAYS(where(inputs(), "o", spoil_rows([](Index t) { return t % 64 == 63 || t == 149; })),
                "only the last row of each chunk");
    EXPECT_SAYS(where(inputs(), "o", spoil_rows([](Index t) { return t >= 128; })), "only tails");
    EXPECT_SAYS(where(inputs(), "o", spoil_rows([](Index t) { return t >= 64; })),
                "only rows from 64 on: what goes from chunk to chunk");
    EXPECT_SAYS(where(inputs(), "o", spoil_rows([](Index t) { return t >= 37; })), "only rows from 37 on (");
}

io::MakeOptions small() {
    io::MakeOptions o = inputs();
    o.heads = 1, o.value_heads = 2;
    o.key_size = o.value_size = 16;
    return o;
}

TEST(Where, RowsOfAPeriod) {
    const auto spoil_rows = [](const std::function<bool(Index)>& which) {
        return [which](Floats& o) {
            for (Index t = 0; t < 150; ++t)
                for (Index h = 0; which(t) && h < 2; ++h) o.rows(0, t, 1, h).array() += 1.0f;
        };
    };
    EXPECT_SAYS(where(small(), "o", spoil_rows([](Index t) { return t % 16 == 15; })), "only row 15 of every 16");
    EXPECT_SAYS(where(small(), "o", spoil_rows([](Index t) { return t % 64 >= 48 || t == 3; })),
                "only rows 48 to 63 of every 64");
    EXPECT_SAYS(where(small(), "o", spoil_rows([](Index t) { return t == 5 || t == 77 || t == 78; })),
                "rows 5, 77-78, in no pattern");
}

TEST(Where, Channels) {
    const std::string text = where(small(), "dv", [](Floats& dv) { dv.rows(0, 0, 150, 1).middleCols(4, 4).setZero(); });
    EXPECT_SAYS(text, "only channels 4-7 of 16");
}

TEST(Where, OneSequence) {
    io::MakeOptions packed = inputs();
    packed.lengths = {70, 0, 17, 63};
    const std::string text = where(packed, "o", [](Floats& o) {
        for (Index h = 0; h < 4; ++h) o.rows(0, 70, 17, h).array() += 1.0f;
    });
    EXPECT_SAYS(text, "only packed sequences 2 of 0, 2-3");
}

TEST(Where, GroupsInTurn) {
    const std::string text = where(inputs(), "dv", [](Floats& dv) {
        for (const Index h : {1, 2}) dv.rows(0, 0, 150, h).array() += 1.0f;
    });
    EXPECT_SAYS(text, "only heads 1-2 of 0-3, those whose h mod 2 is not h / 2: the order of groups");
}

TEST(Where, GrowthAlongTheSequence) {
    const std::string text = where(inputs(), "o", [](Floats& o) {
        for (Index t = 0; t < 150; ++t)
            for (Index h = 0; h < 4; ++h)
                o.rows(0, t, 1, h).array() +=
                    (t % 2 == 0 ? 0.2f : -0.2f) * (1 - std::exp(-static_cast<float>(t) / 100));
    });
    EXPECT_SAYS(text, "the error grows along the sequence");
}

TEST(Where, RowsWithoutAKey) {
    const std::string path = SOFTDELTA_TEST_DATA "/attn_boolmask_rows_dead.safetensors";
    const io::CaseFile file = io::read_case(path);
    const io::Call call = io::call_of(file);
    std::map<std::string, Tensor> results;
    for (const std::string& name : call.outputs) results[name] = file.tensors.at(name).view();
    const diagnose::Diagnosis diagnosis = diagnose::diagnose(call, results, {}, {});
    std::string all;
    for (const std::string& sentence : diagnosis.where) all += sentence + "\n";
    EXPECT_SAYS(
        all, "o: 256 of 768 rows are wrong; 256 rows are NaN or infinite, and all of them are rows that have no key");
    EXPECT_SAYS(all, "dq: 256 of 768 rows are wrong; only rows after a tile of 64 rows without a key");
    EXPECT_TRUE(diagnosis.ranking.explained_by_two());
    const std::vector<const diagnose::Entry*> named = diagnosis.ranking.named();
    EXPECT_STREQ(named[0]->name, "rows_lost_after_dead_tile");
    EXPECT_STREQ(named[1]->name, "dead_row_nan");
}

}  // namespace

}  // namespace softdelta::test

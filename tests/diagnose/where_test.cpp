// Errors of known shape are described as such.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>

#include "core/tensor.h"
#include "diagnose/diagnose.h"
#include "diagnose/sampling/select.h"
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

io::MakeOptions small() {
    io::MakeOptions o = inputs();
    o.heads = 1, o.value_heads = 2;
    o.key_size = o.value_size = 16;
    return o;
}

// The truth with one result spoilt: `spoil` gets it in f32.
diagnose::Diagnosis diagnose_spoilt(const io::MakeOptions& options, const std::string& result,
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
    quiet.work = 75 * diagnose::work_of(call);  // the whole call; which mistake it is matters little here
    return diagnose::diagnose(call, views(results), {}, quiet);
}

// What is said of it.
std::string where(const io::MakeOptions& options, const std::string& result,
                  const std::function<void(Floats&)>& spoil) {
    const diagnose::Diagnosis diagnosis = diagnose_spoilt(options, result, spoil);
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

// Some rows of both heads.
std::function<void(Floats&)> spoil_rows(const std::function<bool(Index)>& which) {
    return [which](Floats& o) {
        for (Index t = 0; t < 150; ++t)
            for (Index h = 0; which(t) && h < 2; ++h) o.rows(0, t, 1, h).array() += 1.0f;
    };
}

TEST(Where, RowsOfChunks) {
    EXPECT_SAYS(where(small(), "o", spoil_rows([](Index t) { return t % 64 == 0; })),
                "only the first row of each chunk");
    EXPECT_SAYS(where(small(), "o", spoil_rows([](Index t) { return t % 64 == 63 || t == 149; })),
                "only the last row of each chunk");
    EXPECT_SAYS(where(small(), "o", spoil_rows([](Index t) { return t >= 128; })), "only tails");
    EXPECT_SAYS(where(small(), "o", spoil_rows([](Index t) { return t >= 64; })),
                "only rows from 64 on: what goes from chunk to chunk");
    EXPECT_SAYS(where(small(), "o", spoil_rows([](Index t) { return t >= 37; })), "only rows from 37 on (");
}

TEST(Where, RowsOfAPeriod) {
    EXPECT_SAYS(where(small(), "o", spoil_rows([](Index t) { return t % 16 == 15; })), "only row 15 of every 16");
    EXPECT_SAYS(where(small(), "o", spoil_rows([](Index t) { return t % 64 >= 48 || t == 3; })),
                "only rows 48 to 63 of every 64");
    EXPECT_SAYS(where(small(), "o", spoil_rows([](Index t) { return t == 5 || t == 77 || t == 78; })),
                "rows 5, 77-78, in no pattern");
    EXPECT_SAYS(where(small(), "o", spoil_rows([](Index t) { return t % 2 == 1; })), "only row 1 of every 2 (");
}

TEST(Where, OneRow) {
    EXPECT_SAYS(where(inputs(), "o", [](Floats& o) { o.rows(0, 125, 1, 2).setConstant(9); }), "only row 125 (");
}

TEST(Where, RowsOfAState) {
    const std::string text = where(inputs(), "final_state", [](Floats& S) {
        for (Index h = 0; h < 4; ++h) S.block(0, h).middleRows(8, 8).array() += 1.0f;
    });
    EXPECT_SAYS(text, "only rows 8 to 15 (");
}

// Of an error that all rows have, noise decides which are beyond their limit: that is no race.
TEST(Where, NoRaceWhereAllRowsErr) {
    const std::string text = where(small(), "o", [](Floats& o) {
        for (Index t = 0; t < 150; ++t)
            for (Index h = 0; h < 2; ++h) o.rows(0, t, 1, h) *= 1 + 1 / static_cast<float>(1 + t);
    });
    EXPECT_EQ(text.find("race"), std::string::npos) << text;
}

// Some product of two factors of one result comes near any number: they are no explanation.
TEST(Where, TwoFactorsOfOneResultExplainNothing) {
    io::MakeOptions o;
    o.op = "attention";
    o.heads = 6, o.key_heads = 2, o.queries = o.keys = 80;
    o.key_size = o.value_size = 16;
    o.sink = true;
    const diagnose::Diagnosis d = diagnose_spoilt(o, "dsink", [](Floats& dsink) {
        for (Index h = 0; h < 6; ++h) dsink[h] *= 0.375f;
    });
    EXPECT_TRUE(d.wrong());
    for (const std::string& line : d.conclusion)
        EXPECT_EQ(line.find("more than one mistake"), std::string::npos) << line;
}

// Races, memory that nothing wrote, wrong addresses: no pipeline with a change has them. They are located, and no
// mistake is named.
TEST(Where, WhatNoMistakeExplains) {
    struct Planted {
        const char* result;
        std::function<void(Floats&)> spoil;
        const char* says;
    };
    const auto garbage = [](std::set<Index> rows, std::set<Index> heads, float size) {
        return [=](Floats& x) {
            for (const Index t : rows)
                for (const Index h : heads)
                    for (Index c = 0; c < x.size(3); ++c)
                        x.rows(0, t, 1, h)(0, c) = size * std::sin(static_cast<float>(7 * t + 3 * h + 5 * c + 1));
        };
    };
    const auto span = [](Index begin, Index end, Index step = 1) {
        std::set<Index> rows;
        for (; begin < end; begin += step) rows.insert(begin);
        return rows;
    };
    const std::vector<Planted> all = {
        {"o", garbage({3, 40, 41, 77, 101, 120}, {0, 1}, 1), "rows 3, 40-41, 77, 101, 120, in no pattern"},
        {"dv", garbage({9, 90}, {1}, NAN), "2 rows are NaN or infinite; only heads 1 of 0-1; rows 9, 90"},
        {"dq", garbage({11, 12, 70}, {0}, 1e30f), "rows 11-12, 70, in no pattern"},
        {"o", garbage(span(100, 150), {0, 1}, 1), "only rows from 100 on"},
        {"o", garbage(span(64, 80), {1}, 1), "only heads 1 of 0-1; only rows 64 to 79"},
        {"dk", garbage(span(15, 150, 16), {0}, 1), "only row 15 of every 16"},
        {"dv", garbage(span(48, 64), {0, 1}, 1), "only rows 48 to 63"},
        {"dv",
         [](Floats& x) {
             const Matrix a = x.rows(0, 32, 16, 0);
             x.rows(0, 32, 16, 0) = x.rows(0, 32, 16, 1);
             x.rows(0, 32, 16, 1) = a;
         },
         "only rows 32 to 47"},
        {"o", garbage(span(128, 150), {0, 1}, 1), "only tails"},
        {"o",
         [](Floats& x) {
             for (Index t = 0; t < 150; ++t) x.rows(0, t, 1, 0)(0, t % 16) += 1;
         },
         "only heads 0"},
        {"dbeta",
         [](Floats& x) {
             for (Index t = 64; t < 128; ++t) x.rows(0, t, 1, 1)(0, 0) += std::sin(static_cast<float>(t));
         },
         "only rows 64 to 127"},
        {"final_state",
         [](Floats& x) {
             for (Index i = 0; i < 16; ++i) x.block(0, 1)(i, 5) += std::sin(static_cast<float>(3 * i));
         },
         "only channels 5 of 16"},
    };
    for (const Planted& p : all) {
        const diagnose::Diagnosis d = diagnose_spoilt(small(), p.result, p.spoil);
        EXPECT_FALSE(d.ranking.explained() || d.ranking.explained_by_two()) << d.conclusion[0] << d.conclusion[1];
        std::string text;
        for (const std::string& sentence : d.where) text += sentence + "\n";
        EXPECT_SAYS(text, p.says);
    }
}

TEST(Where, Channels) {
    const std::string text = where(small(), "dv", [](Floats& dv) { dv.rows(0, 0, 150, 1).middleCols(4, 4).setZero(); });
    EXPECT_SAYS(text, "only channels 4-7 of 16");
}

TEST(Where, ChannelsOfAPeriod) {
    EXPECT_SAYS(where(inputs(), "o",
                      [](Floats& o) {
                          for (std::int64_t i = 1; i < 150 * 4 * 32; i += 4) o[i] *= -1;
                      }),
                "only channel 1 of every 4");
}

TEST(Where, RowsInWrongPlaces) {
    const std::string shifted = where(inputs(), "o", [](Floats& o) {
        for (int head = 0; head < 4; ++head) o.rows(0, 69, 81, head) = o.rows(0, 64, 81, head).eval();
    });
    EXPECT_SAYS(shifted, "they hold what belongs to row −5");
    const std::string reversed = where(inputs(), "dv", [](Floats& dv) {
        for (int head = 0; head < 2; ++head) dv.rows(0, 0, 150, head).swap(dv.rows(0, 0, 150, 3 - head));
    });
    EXPECT_SAYS(reversed, "they hold what belongs to other rows: row 0 of head 0 that of row 0 of head 3");
    const std::string scaled = where(inputs(), "dv", [](Floats& dv) { dv.rows(0, 0, 150, 1) *= 1.5f; });
    EXPECT_EQ(scaled.find("belongs"), std::string::npos) << scaled;
}

TEST(Where, ChannelsInWrongPlaces) {
    const std::string text = where(inputs(), "dv", [](Floats& dv) {
        for (int head = 0; head < 4; ++head)
            dv.rows(0, 0, 150, head).leftCols(8).swap(dv.rows(0, 0, 150, head).middleCols(8, 8));
    });
    EXPECT_SAYS(text, "they hold what belongs to other channels: channel 0 that of channel 8, channel 1");
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
    diagnose::Options options;
    options.work = 50 * diagnose::work_of(call);
    const diagnose::Diagnosis diagnosis = diagnose::diagnose(call, results, {}, options);
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

// The program as a person uses it: commands, messages, exit statuses.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "io/file/case_file.h"
#include "io/file/text.h"

namespace {

const std::string data = SOFTDELTA_TEST_DATA "/";

struct Outcome {
    int status;
    std::string out, err;
};

class Program : public testing::Test {
  protected:
    void SetUp() override {
        std::string pattern = (std::filesystem::temp_directory_path() / "softdelta-XXXXXX").string();
        ASSERT_NE(mkdtemp(pattern.data()), nullptr);
        folder_ = pattern + "/";
    }
    void TearDown() override { std::filesystem::remove_all(folder_); }

    Outcome run(const std::string& arguments) const {
        const std::string command = std::string(SOFTDELTA_PROGRAM) + " " + arguments + " 2>" + folder_ + "err";
        FILE* pipe = popen(command.c_str(), "r");
        std::string out;
        std::array<char, 4096> buffer;
        while (const std::size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe)) out.append(buffer.data(), n);
        const int status = pclose(pipe);
        std::ifstream err(folder_ + "err");
        return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, out, {std::istreambuf_iterator<char>(err), {}}};
    }
    std::string path(const std::string& name) const { return folder_ + name; }

  private:
    std::string folder_;
};

std::size_t lines(const std::string& text) {
    return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

TEST_F(Program, JudgesTheDumpsOfRealKernels) {
    for (const char* name : {"attn_sdpa_cudnn", "comba_forward", "delta_fixed", "gdn_forward_gva",
                             "kda_gate_lower_bound", "kda_gate_softplus", "kda_varlen_gva", "simple_gla_forward"}) {
        const Outcome outcome = run("verify " + data + name + ".safetensors");
        EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
        EXPECT_EQ(outcome.err, "");
    }
}

TEST_F(Program, RunsAndJudgesLayers) {
    softdelta::io::CaseFile file;
    file.metadata = {{"op", "causal_convolution"}, {"activation", "silu"}};
    softdelta::io::OwnedTensor x(softdelta::DType::f32, {1, 5, 3}), weight(softdelta::DType::f32, {3, 4});
    for (int i = 0; i < 15; ++i) static_cast<float*>(x.data())[i] = static_cast<float>(i % 4) - 1.25F;
    for (int i = 0; i < 12; ++i) static_cast<float*>(weight.data())[i] = static_cast<float>(i % 5) - 2.5F;
    file.tensors = {{"x", x}, {"weight", weight}, {"dy", x}};
    softdelta::io::write_case(path("in"), file);
    Outcome outcome = run("run --engine fast " + path("in") + " -o " + path("out"));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_NE(outcome.out.find("5 results of causal_convolution"), std::string::npos) << outcome.out;
    outcome = run("verify --json " + path("out"));
    EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
    EXPECT_EQ(nlohmann::json::parse(outcome.out).at(0).at("results").size(), 5u);

    softdelta::io::CaseFile other = softdelta::io::read_case(path("out"));
    other.metadata["activation"] = "none";
    softdelta::io::write_case(path("other"), other);
    outcome = run("verify --json " + path("other"));
    EXPECT_EQ(outcome.status, 1) << outcome.out << outcome.err;
    const auto report = nlohmann::json::parse(outcome.out).at(0);
    for (const auto& result : report.at("results"))
        EXPECT_EQ(result.at("verdict"), result.at("name") == "final_state" ? "right" : "wrong") << result;
    outcome = run("diagnose " + path("other"));
    EXPECT_EQ(outcome.status, 2);
    EXPECT_EQ(lines(outcome.err), 1u);
    EXPECT_NE(outcome.err.find("is a layer, which the commands softdelta run and softdelta verify take"),
              std::string::npos)
        << outcome.err;
    outcome = run("verify " + path("in"));
    EXPECT_EQ(outcome.status, 2);
    EXPECT_NE(outcome.err.find("holds no result to judge, expected some of y, final_state, dx"), std::string::npos)
        << outcome.err;
}

TEST_F(Program, FindsTheDeadRows) {
    const Outcome outcome = run("verify --json " + data + "attn_boolmask_rows_dead.safetensors");
    EXPECT_EQ(outcome.status, 1);
    const auto report = nlohmann::json::parse(outcome.out).at(0);
    EXPECT_EQ(report.at("status"), 1);
    ASSERT_EQ(report.at("results").size(), 5u);
    for (const auto& result : report.at("results")) EXPECT_EQ(result.at("verdict"), "wrong") << result;
    EXPECT_NE(report.at("results")[0].at("note").get<std::string>().find("[0, 128, 0, 0]"), std::string::npos);
}

TEST_F(Program, SaysThatDigitsWereLost) {
    const Outcome outcome = run("verify --json " + data + "kda_uniform_g20.safetensors");
    EXPECT_EQ(outcome.status, 0);
    const auto report = nlohmann::json::parse(outcome.out).at(0);
    for (const auto& result : report.at("results"))
        EXPECT_EQ(result.at("verdict"), result.at("name") == "dg" ? "digits_lost" : "right") << result;
}

TEST_F(Program, DiagnosesTheDeadRows) {
    const std::string dead = data + "attn_boolmask_rows_dead.safetensors";
    const Outcome outcome = run("diagnose --json --plot " + path("errors.svg") + " " + dead);
    EXPECT_EQ(outcome.status, 1);
    EXPECT_EQ(outcome.err, "");
    const auto report = nlohmann::json::parse(outcome.out);
    EXPECT_EQ(report.at("explained"), 2);
    EXPECT_EQ(report.at("pairs")[0].at("mistakes"), (nlohmann::json{"rows_lost_after_dead_tile", "dead_row_nan"}));
    EXPECT_NE(report.at("where")[0].get<std::string>().find("rows that have no key"), std::string::npos);
    EXPECT_TRUE(std::filesystem::exists(path("errors.svg")));
    EXPECT_EQ(run("diagnose " + data + "simple_gla_forward.safetensors").status, 0);
    EXPECT_EQ(run("diagnose " + path("absent")).status, 2);
    EXPECT_EQ(run("diagnose").status, 2);
}

TEST_F(Program, TheWorstStatusOfSeveralFilesWins) {
    const std::string good = data + "simple_gla_forward.safetensors",
                      bad = data + "attn_boolmask_rows_dead.safetensors";
    EXPECT_EQ(run("verify " + good + " " + bad).status, 1);
    const Outcome outcome = run("verify " + good + " " + path("missing.safetensors") + " " + bad);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_EQ(lines(outcome.err), 1u) << outcome.err;
    EXPECT_NE(outcome.err.find("missing.safetensors"), std::string::npos);
    EXPECT_NE(outcome.out.find("attn_boolmask_rows_dead"), std::string::npos) << "the files after a bad one are judged";
}

TEST_F(Program, WhatRoundingDecidesCannotBeJudged) {
    const std::string good = data + "simple_gla_forward.safetensors", in = path("in"), masked = path("masked"),
                      bad = data + "attn_boolmask_rows_dead.safetensors";
    ASSERT_EQ(run("make attention --bias padding --mask-value -1e8 --type f32 --queries 90 --keys 90 -o " + in).status,
              0);
    ASSERT_EQ(run("run --engine reference " + in + " -o " + masked).status, 0);
    const Outcome outcome = run("verify --json " + masked);
    EXPECT_EQ(outcome.status, 3) << outcome.out;
    const auto report = nlohmann::json::parse(outcome.out).at(0);
    EXPECT_EQ(report.at("status"), 3);
    for (const auto& result : report.at("results"))
        EXPECT_EQ(result.at("verdict"),
                  result.at("name") == "dk" || result.at("name") == "dv" || result.at("name") == "dbias"
                      ? "cannot_be_judged"
                      : "right")
            << result;
    EXPECT_NE(run("verify " + masked).out.find("masked: cannot be judged"), std::string::npos);
    EXPECT_EQ(run("verify " + good + " " + masked).status, 3);
    EXPECT_EQ(run("verify " + masked + " " + bad).status, 1);
    EXPECT_EQ(run("verify " + masked + " " + path("missing") + " " + bad).status, 2);
    EXPECT_EQ(run("diagnose " + masked).status, 3);
    EXPECT_EQ(run("verify --limit o=0.7 " + good).status, 3);
}

TEST_F(Program, LimitsCanBeGiven) {
    const std::string file = data + "simple_gla_forward.safetensors";
    EXPECT_EQ(run("verify --limit o=1e-6 " + file).status, 1);
    EXPECT_EQ(run("verify --limit o=0.5 " + data + "attn_sdpa_cudnn.safetensors").status, 0);
    for (const char* nonsense : {"o", "o=", "=1", "o=-1", "o=x", "o=1x", "o=nan", "o=inf", "o=1e999"}) {
        const Outcome outcome = run("verify --limit " + std::string(nonsense) + " " + file);
        EXPECT_EQ(outcome.status, 2) << nonsense;
        EXPECT_EQ(lines(outcome.err), 1u) << outcome.err;
    }
}

TEST_F(Program, WhatItRunsItFindsRight) {
    for (const char* call :
         {"attention --mask dead_rows --bias key_head -H 4",
          "attention --lengths 70,0,1,33 --causal bottom_right --sink",
          "attention --bias row --top-w 20 --queries 100",
          "attention --window-left 40 --window-right 0 --softcap 5 -V 32",
          "attention --lengths 40,1,0,1 --key-lengths 60,70,5,1 --block-rows 16 --causal bottom_right --mask random",
          "attention --queries 3 --block-rows 48 -B 2",
          "attention --alibi --bias row --bias-slopes",
          "attention --quantised q8_0 --queries 3 --block-rows 48",
          "attention --quantised q4_0 --type f32",
          "attention --quantised i8 --queries 2",
          "attention --quantised f8",
          "delta_rule --no-l2norm",
          "gated_delta_rule --value-heads 6 --tiled-heads",
          "gated_delta_rule --value-heads 4 --raw-gate softplus --beta-logits",
          "kda --gate steep --lengths 65,0,1,100",
          "kda --raw-gate lower_bound",
          "comba --gate wipe --state-v-first",
          "simple_gla --gate constant",
          "simple_gla --gate none --type f32",
          "gla --raw-gate softplus",
          "gdn2 --type f32",
          "dplr --steps 2",
          "rule:channel:previous:k --raw-gate softplus",
          "rule:head:decayed:p --steps 3 --type f32",
          "rule:none:nothing"}) {
        const Outcome made = run("make " + std::string(call) + " -T 100 -o " + path("in"));
        ASSERT_EQ(made.status, 0) << call << made.err;
        for (const char* engine : {"fast", "reference", "stages_f64", "stages_f32"}) {
            ASSERT_EQ(run("run --engine " + std::string(engine) + " " + path("in") + " -o " + path("out")).status, 0)
                << call;
            const Outcome verified = run("verify " + path("out"));
            EXPECT_EQ(verified.status, 0) << call << ", " << engine << "\n" << verified.out << verified.err;
            EXPECT_EQ(run("verify --engine " + std::string(engine) + " " + path("in")).status, 0)
                << call << ", " << engine;
        }
    }
}

TEST_F(Program, JudgesResultsWithoutElements) {
    // Without queries or keys the others are 0, which judges nothing.
    for (const auto& [call, status] : {std::pair{"kda -T 0", 0},
                                       {"attention --queries 0", 3},
                                       {"attention --keys 0 --bias row", 3},
                                       {"attention --lengths 0,0", 0},
                                       {"comba --lengths 0,0", 0},
                                       {"gated_delta_rule -B 0", 0}}) {
        ASSERT_EQ(run("make " + std::string(call) + " -o " + path("in")).status, 0) << call;
        ASSERT_EQ(run("run " + path("in") + " -o " + path("out")).status, 0) << call;
        const Outcome verified = run("verify " + path("out"));
        EXPECT_EQ(verified.status, status) << call << "\n" << verified.out << verified.err;
        EXPECT_EQ(verified.out.find("wrong"), std::string::npos) << call << "\n" << verified.out;
    }
}

TEST_F(Program, ManyThreadsAreNoFailure) {
    ASSERT_EQ(
        run("make delta_rule -B 30000 -H 1 --value-heads 1 -K 1 -V 1 -T 1 --no-gradients -o " + path("in")).status, 0);
    EXPECT_EQ(run("run --threads 25000 " + path("in") + " -o " + path("out")).status, 0);
}

TEST_F(Program, OutputThatCannotBeWrittenIsAFailure) {
    EXPECT_EQ(run("info >/dev/full").status, 2);
}

TEST_F(Program, MakeIsReproducible) {
    ASSERT_EQ(run("make kda --seed 7 -o " + path("a")).status, 0);
    ASSERT_EQ(run("make kda --seed 7 -o " + path("b")).status, 0);
    ASSERT_EQ(run("make kda --seed 8 -o " + path("c")).status, 0);
    EXPECT_EQ(std::system(("cmp -s " + path("a") + " " + path("b")).c_str()), 0);
    EXPECT_NE(std::system(("cmp -s " + path("a") + " " + path("c")).c_str()), 0);
}

TEST_F(Program, NonsenseIsOneLineAndStatusTwo) {
    ASSERT_EQ(run("make kda -o " + path("in")).status, 0);
    std::ofstream(path("junk")) << "this is not a case file";
    for (const std::string& arguments :
         {std::string("verify ") + path("in"),
          "verify " + path("junk"),
          std::string("verify /"),
          std::string("run ") + path("junk") + " -o " + path("out"),
          "run " + path("in") + " -o " + path("no/such/folder"),
          "make attention --heads 3 --key-heads 2 -o " + path("out"),
          "make kda -H 0 -o " + path("out"),
          "make attention --lengths 5,6 --key-lengths 5 -o " + path("out"),
          "make attention --top-w 3 -o " + path("out"),
          "make attention --softcap -1 -o " + path("out"),
          "make attention --block-rows -1 -o " + path("out"),
          "make kda --gate steep --raw-gate softplus -o " + path("out"),
          "make kda -T -1 -o " + path("out"),
          "make kda --lengths 9223372036854775807,1 -o " + path("out"),
          "make attention --lengths 9223372036854775807,1 -o " + path("out"),
          "make attention --lengths 1,1 --key-lengths 9223372036854775807,1 -o " + path("out"),
          "make attention --queries 0 --keys 9223372036854775807 -B 3 --block-rows 2 -o " + path("out"),
          "make attention --keys 9223372036854775807 --block-rows 9223372036854775806 -o " + path("out"),
          "make kda -T 0 -K 9223372036854775807 --raw-gate softplus -o " + path("out"),
          "make attention --quantised q8_0 --keys 9223372036854775807 -B 9 -o " + path("out")}) {
        const Outcome outcome = run(arguments);
        EXPECT_EQ(outcome.status, 2) << arguments << "\n" << outcome.out;
        EXPECT_EQ(lines(outcome.err), 1u) << arguments << "\n" << outcome.err;
        EXPECT_EQ(outcome.err.rfind("softdelta: ", 0), 0u) << outcome.err;
    }
    EXPECT_FALSE(std::filesystem::exists(path("out")));
    EXPECT_EQ(run("").status, 2);
    EXPECT_EQ(run("frobnicate").status, 2);
    EXPECT_EQ(run("verify").status, 2);
    EXPECT_EQ(run("--help").status, 0);
    EXPECT_EQ(run("--version").status, 0);
}

TEST_F(Program, MakeTakesNumbersAndNothingElse) {
    for (const std::string option : {"attention --mask-value", "kda --gate uniform --gate-value",
                                     "kda --raw-gate lower_bound --lower-bound", "kda --scale", "attention --softcap"})
        for (const char* number : {"nan", "inf", "-inf", "1e400", "-1e400"}) {
            const bool hides_for_good = option == "attention --mask-value" && number[0] == '-';
            const Outcome outcome = run("make " + option + " " + number + " -o " + path("out"));
            EXPECT_EQ(outcome.status, hides_for_good ? 0 : 2) << option << " " << number;
            EXPECT_EQ(std::filesystem::exists(path("out")), hides_for_good) << option << " " << number;
            std::filesystem::remove(path("out"));
        }
    const Outcome rises = run("make kda --raw-gate lower_bound --lower-bound 1 -o " + path("in"));
    EXPECT_EQ(rises.status, 2);
    EXPECT_NE(rises.err.find("lower bound: 1.000000 given, expected 0 or a negative number"), std::string::npos)
        << rises.err;
    ASSERT_EQ(run("make attention --bias padding --mask-value -inf -o " + path("in")).status, 0);
    EXPECT_EQ(run("verify --engine reference " + path("in")).status, 0);
}

TEST_F(Program, MakeRefusesWhatReadersRefuse) {
    for (const char* option : {"kda --scale 1e300", "attention --scale 1e300", "attention --softcap 1e-300"}) {
        const Outcome outcome = run(std::string("make ") + option + " -o " + path("out"));
        EXPECT_EQ(outcome.status, 2) << option;
        EXPECT_EQ(lines(outcome.err), 1u) << outcome.err;
        EXPECT_FALSE(std::filesystem::exists(path("out"))) << option;
    }
}

TEST_F(Program, RequiredResultsThatAreMissingMakeItIncomplete) {
    ASSERT_EQ(run("make gated_delta_rule --tokens 20 -K 8 -V 8 -o " + path("in")).status, 0);
    ASSERT_EQ(run("run " + path("in") + " -o " + path("all")).status, 0);
    EXPECT_EQ(run("verify --require all " + path("all")).status, 0);
    softdelta::io::CaseFile file = softdelta::io::read_case(path("all"));
    for (const char* name : {"dq", "dg"}) file.tensors.erase(name);
    softdelta::io::write_case(path("some"), file);
    EXPECT_EQ(run("verify " + path("some")).status, 0);
    EXPECT_EQ(run("verify --require o,dk " + path("some")).status, 0);
    const Outcome outcome = run("verify --require all " + path("some"));
    EXPECT_EQ(outcome.status, 3);
    EXPECT_NE(outcome.out.find(": incomplete ("), std::string::npos) << outcome.out;
    EXPECT_NE(outcome.out.find("  dq: missing\n  dg: missing\n"), std::string::npos) << outcome.out;
    const auto json = nlohmann::json::parse(run("verify --json --require dq,o " + path("some")).out);
    EXPECT_EQ(json[0]["missing"], nlohmann::json::array({"dq"}));
    EXPECT_EQ(json[0]["status"], 3);
    EXPECT_EQ(run("verify --require dbias " + path("some")).status, 2);
}

TEST_F(Program, AFolderIsALineForEachFile) {
    const std::string plan = path("plan");
    ASSERT_EQ(run("make gated_delta_rule --plan gate --type f32 -o " + plan).status, 0);
    for (const char* name :
         {"slow", "long", "alike", "steep", "wide", "heads", "packed", "rising", "large-beta", "length-4097"})
        std::filesystem::remove(plan + "/" + name + ".safetensors");  // for time
    const Outcome right = run("verify --engine fast " + plan);
    EXPECT_EQ(right.status, 0) << right.out;
    EXPECT_EQ(lines(right.out), 6u) << right.out;
    EXPECT_NE(right.out.find("exact.safetensors: right (gated_delta_rule, 8 results)\n"), std::string::npos)
        << right.out;
    ASSERT_EQ(run("run " + plan + "/exact.safetensors -o " + plan + "/exact.safetensors").status, 0);
    softdelta::io::CaseFile file = softdelta::io::read_case(plan + "/exact.safetensors");
    static_cast<float*>(file.tensors.at("dq").data())[5] += 1;
    softdelta::io::write_case(plan + "/exact.safetensors", file);
    const Outcome wrong = run("verify " + plan);
    EXPECT_EQ(wrong.status, 2);  // the others have no results
    EXPECT_NE(wrong.out.find("exact.safetensors: wrong (dq: ratio "), std::string::npos) << wrong.out;
    EXPECT_NE(wrong.out.find("ordinary.safetensors: unusable (holds no result"), std::string::npos) << wrong.out;
    EXPECT_EQ(nlohmann::json::parse(run("verify --json " + plan).out).size(), 6u);
    std::filesystem::create_directory(path("empty"));
    EXPECT_NE(run("verify " + path("empty")).err.find("holds no case file"), std::string::npos);
}

TEST_F(Program, SaysWhatAnInputCannotShow) {
    ASSERT_EQ(run("make gated_delta_rule --tokens 20 -K 8 -V 8 --gate uniform --gate-value 0 -o " + path("in")).status,
              0);
    const Outcome outcome = run("verify --blind --engine fast " + path("in"));
    EXPECT_EQ(outcome.status, 0);
    EXPECT_NE(outcome.out.find("note: this input cannot show "), std::string::npos) << outcome.out;
    EXPECT_NE(outcome.out.find("--gate spread --gate-value -0.05"), std::string::npos) << outcome.out;
    const auto json = nlohmann::json::parse(run("verify --json --blind --engine fast " + path("in")).out);
    EXPECT_TRUE(std::ranges::find(json[0]["blind"], "state_not_decayed") != json[0]["blind"].end());
    const std::string plain = run("verify --engine fast " + path("in")).out;  // by facts alone
    EXPECT_NE(plain.find("note: this input cannot show state_not_decayed, "), std::string::npos) << plain;
    EXPECT_EQ(plain.find(" mistakes, among them "), std::string::npos) << plain;
}

// A state of 800 MB in a file of some hundred bytes.
TEST_F(Program, SaysWhatACallNeedsBeforeItComputes) {
    ASSERT_EQ(run("make delta_rule -T 0 -H 1 --value-heads 1 -K 10000 -V 10000 --no-gradients --no-initial-state -o " +
                  path("in"))
                  .status,
              0);
    for (const std::string& command : {"verify --engine reference " + path("in"), "verify --engine fast " + path("in"),
                                       "run --engine stages_f32 " + path("in") + " -o " + path("out"),
                                       "make attention --queries 20000 --keys 20000 --bias full -o " + path("out")}) {
        const Outcome outcome = run(command + " --memory 100M");
        EXPECT_EQ(outcome.status, 2) << command;
        EXPECT_EQ(lines(outcome.err), 1u) << outcome.err;
        EXPECT_NE(outcome.err.find(" of memory, and 100 MiB are allowed"), std::string::npos) << outcome.err;
    }
    EXPECT_FALSE(std::filesystem::exists(path("out")));
    const std::string good = data + "simple_gla_forward.safetensors";
    const auto report = nlohmann::json::parse(run("verify --json " + good).out).at(0);
    EXPECT_GT(report.at("memory"), 1e5);
    EXPECT_LT(report.at("memory"), 1e9);
    EXPECT_EQ(run("verify --memory 1K " + good).status, 2);
    EXPECT_EQ(run("diagnose --memory 1K " + data + "attn_boolmask_rows_dead.safetensors").status, 2);
    for (const char* nonsense : {"-1", "x", "1Q", "nan"})
        EXPECT_EQ(run("verify --memory " + std::string(nonsense) + " " + good).status, 2) << nonsense;
}

TEST_F(Program, NamesTheEngineThatItJudges) {
    const std::string file = data + "simple_gla_forward.safetensors";
    for (const char* engine : {"reference", "stages_f32"}) {
        const std::string option = "verify --engine " + std::string(engine) + " ";
        EXPECT_NE(run(option + file).out.find(std::string("engine ") + engine), std::string::npos);
        EXPECT_EQ(nlohmann::json::parse(run(option + "--json " + file).out).at(0).at("engine"), engine);
    }
    EXPECT_EQ(nlohmann::json::parse(run("verify --json " + file).out).at(0).at("engine"), nullptr);
}

// Beside a truth of 0 every limit is infinite.
TEST_F(Program, ZerosCannotBeJudged) {
    ASSERT_EQ(run("make attention --queries 40 --keys 40 -o " + path("in")).status, 0);
    for (const char* zero : {"v", "do"}) {
        softdelta::io::CaseFile file = softdelta::io::read_case(path("in"));
        for (const std::string& name : {std::string(zero), std::string("dlse")})
            std::fill_n(static_cast<char*>(file.tensors.at(name).data()), file.tensors.at(name).bytes(), '\0');
        softdelta::io::write_case(path("zero"), file);
        ASSERT_EQ(run("run " + path("zero") + " -o " + path("out")).status, 0);
        const Outcome outcome = run("verify --json " + path("out"));
        EXPECT_EQ(outcome.status, 3) << outcome.out;
        const auto report = nlohmann::json::parse(outcome.out);
        for (const auto& result : report.at(0).at("results")) {
            EXPECT_EQ(result.at("verdict"), result.at("limit").is_null() ? "cannot_be_judged" : "right") << result;
            if (result.at("limit").is_null()) {
                EXPECT_NE(result.at("note").get<std::string>().find("the truth is 0"), std::string::npos) << result;
            }
        }
    }
}

// Where a hostile file, or its name, would print a line of its own.
TEST_F(Program, NothingFromAFilePrintsALine) {
    const std::string forged =
        "x\nlie: right (kda, 0.1 s)\x1b[8m\xc2\x9b"
        "8m\xe2\x80\xae\r";
    ASSERT_EQ(run("make kda -T 20 -o " + path("in")).status, 0);
    ASSERT_EQ(run("run " + path("in") + " -o " + path("out")).status, 0);
    softdelta::io::CaseFile file = softdelta::io::read_case(path("out"));
    file.metadata["producer"] = file.metadata[forged] = forged;
    file.tensors[forged] = file.tensors.at("o");
    std::fill_n(static_cast<char*>(file.tensors.at("o").data()), file.tensors.at("o").bytes(), '\0');
    const std::string name = path("a" + forged + "b");
    softdelta::io::write_case(name, file);
    const std::string quoted =
        "\"$(printf '" + path("a") + "x\\nlie: right (kda, 0.1 s)\\033[8m\\302\\2338m\\342\\200\\256\\rb')\"";
    for (const std::string& command :
         {"verify " + quoted, "diagnose --plot " + path("svg") + " " + quoted, "run " + quoted + " -o " + path("b"),
          "run " + path("in") + " -o " + quoted + "c", "verify " + quoted + "none", "diagnose " + quoted + "none",
          "verify --limit " + quoted + " " + quoted, "frobnicate " + quoted, "make kda -T 1 -o " + quoted + "d",
          "diagnose --plot " + quoted + " " + quoted}) {
        const Outcome outcome = run(command);
        for (const std::string& text : {outcome.out, outcome.err}) {
            std::istringstream stream(text);
            for (std::string line; std::getline(stream, line);) {
                EXPECT_EQ(line, softdelta::io::printable(line)) << command;
                EXPECT_NE(line.rfind("lie: right", 0), 0u) << command;
            }
        }
    }
    for (const std::string& command : {"verify --json " + quoted, "diagnose --json " + quoted}) {
        const Outcome outcome = run(command);
        EXPECT_TRUE(std::all_of(outcome.out.begin(), outcome.out.end(), [](char c) {
            return c == '\n' || (c >= ' ' && c <= '~');
        })) << outcome.out;
        const auto report = nlohmann::json::parse(outcome.out);
        EXPECT_EQ((report.is_array() ? report.at(0) : report).at("file"), name);
    }
}

TEST_F(Program, APictureNeverReplacesItsInput) {
    const std::string dead = data + "attn_boolmask_rows_dead.safetensors";
    std::filesystem::copy(dead, path("in"));
    std::filesystem::create_hard_link(path("in"), path("link"));
    for (const char* plot : {"in", "link", "no/such/folder"}) {
        const Outcome outcome = run("diagnose --plot " + path(plot) + " " + path("in"));
        EXPECT_EQ(outcome.status, 2) << plot;
        EXPECT_EQ(lines(outcome.err), 1u) << outcome.err;
        EXPECT_EQ(outcome.out, "");
    }
    EXPECT_EQ(std::system(("cmp -s " + dead + " " + path("in")).c_str()), 0);
}

// A large file is being written when the signal comes.
TEST_F(Program, ASignalLeavesNoHalfOfAFile) {
    for (const char* signal : {"INT", "TERM", "HUP", "PIPE", "USR1", "ALRM"})
        for (int i = 0; i < 2; ++i) {
            const std::string folder = path("signal");
            std::filesystem::create_directory(folder);
            const std::string script = "cd " + folder + "; " + SOFTDELTA_PROGRAM +
                                       " make attention --queries 20000 --keys 20000 --type f64 -o out & p=$!; "
                                       "while kill -0 $p 2>/dev/null && [ -z \"$(ls -A)\" ]; do :; done; kill -" +
                                       signal + " $p 2>/dev/null; wait $p";
            std::system(("bash -c '" + script + "' >/dev/null 2>&1").c_str());
            for (const auto& entry : std::filesystem::directory_iterator(folder))
                EXPECT_EQ(entry.path().filename(), "out") << signal;
            std::filesystem::remove_all(folder);
        }
}

TEST_F(Program, InfoTellsAboutTheMachine) {
    unsetenv("SOFTDELTA_ISA");
    const Outcome outcome = run("info --json");
    ASSERT_EQ(outcome.status, 0);
    const auto info = nlohmann::json::parse(outcome.out);
    EXPECT_GE(info.at("threads"), 1);
    const auto& available = info.at("available");
    EXPECT_EQ(info.at("selected"), available.empty() ? nlohmann::json() : available.back());
    for (const auto& level : available)
        EXPECT_NE(std::find(info.at("compiled").begin(), info.at("compiled").end(), level), info.at("compiled").end());
}

TEST_F(Program, BenchTimesWhatThisBuildCanDo) {
    const Outcome outcome = run("bench --threads 1 --only 'forward window 256 f32 D64' --json");
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const auto bench = nlohmann::json::parse(outcome.out);
    ASSERT_EQ(bench.at("rows").size(), 1u);
    const auto& row = bench.at("rows").front();
    if (row.contains("unsupported")) {
        EXPECT_EQ(bench.at("isa"), "no fast kernels");
        return;
    }
    EXPECT_GT(row.at("gflops"), 0);
    EXPECT_EQ(row.at("of_limit").is_null(), row.at("disturbed"));
    if (!row.at("disturbed")) {
        EXPECT_GT(row.at("of_limit"), 0);
        EXPECT_LT(row.at("of_limit"), 1.1);
    }
    EXPECT_EQ(run("bench --only nothing").status, 2);
}

// A report has the layers of a model in all three steps; beside itself nothing has become slower.
TEST_F(Program, BenchTimesTheLayersOfAModel) {
    const Outcome outcome = run("bench --threads 1 --model gpt-oss-20b --batch 2 --context 8 --json");
    if (nlohmann::json::parse(run("info --json").out).at("available").empty()) return;
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const auto bench = nlohmann::json::parse(outcome.out);
    std::map<std::string, double> seconds;  // of all layers
    for (const auto& row : bench.at("rows")) {
        const std::string name = row.at("name");
        const double ms = row.at("ms");
        const int tokens = name.ends_with(", decode") ? 2 : 16;
        EXPECT_EQ(row.at("layers"), 12);
        EXPECT_NEAR(row.at("us_per_token").get<double>() * tokens, 1e3 * ms, 1e-6 * ms);
        seconds[name.substr(name.rfind(' ') + 1)] += 12e-3 * ms / tokens;
    }
    ASSERT_EQ(bench.at("rows").size(), 6u);
    ASSERT_EQ(seconds.size(), 3u);
    for (const auto& [step, each] : seconds)
        EXPECT_NEAR(bench.at("tokens_per_second").at(step).get<double>() * each, 1, 1e-6) << step;

    std::ofstream(path("report")) << outcome.out;
    const Outcome compared = run("bench --compare " + path("report") + " " + path("report"));
    EXPECT_EQ(compared.status, 0) << compared.err;
    EXPECT_EQ(lines(compared.out), 7u) << compared.out;
    EXPECT_NE(compared.out.find("1.00"), std::string::npos) << compared.out;
    std::ofstream(path("other")) << R"({"rows": [{"name": "another", "ms": 1}]})";
    for (const std::string arguments : {"--model gpt-oss", "--model gpt-oss-20b --context 0", "--batch 2",
                                        "--model gpt-oss-20b --only f32", "--compare"})
        EXPECT_EQ(run("bench " + arguments).status, 2) << arguments;
    for (const std::string& second : {path("none"), data, path("other"), data + "simple_gla_forward.safetensors"}) {
        const Outcome refused = run("bench --compare " + path("report") + " " + second);
        EXPECT_EQ(refused.status, 2) << second;
        EXPECT_EQ(lines(refused.err), 1u) << refused.err;
    }
}

// Two processes for each processor, which never wait.
TEST_F(Program, BenchSaysWhereOthersHadTheProcessors) {
    std::vector<pid_t> others(2 * std::thread::hardware_concurrency());
    for (pid_t& other : others)
        if ((other = fork()) == 0)
            for (std::atomic<int> i{0};; ++i) {
            }
    const Outcome outcome = run("bench --only 'gated_norm forward f32' --json");
    for (const pid_t other : others) {
        kill(other, SIGKILL);
        waitpid(other, nullptr, 0);
    }
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const auto report = nlohmann::json::parse(outcome.out);
    for (const auto& row : report.at("rows")) {
        if (row.contains("unsupported")) continue;
        EXPECT_EQ(row.at("disturbed"), true) << row;
        EXPECT_TRUE(row.at("of_limit").is_null()) << row;
    }
}

// The reader of a pipe sees the first of two rows while the second is measured.
TEST_F(Program, BenchPrintsARowWhenItIsMeasured) {
    FILE* pipe =
        popen((std::string(SOFTDELTA_PROGRAM) + " bench --threads 1 --only 'gated_norm forward'").c_str(), "r");
    using Clock = std::chrono::steady_clock;
    std::vector<Clock::time_point> rows;
    std::array<char, 400> line;
    while (std::fgets(line.data(), line.size(), pipe) != nullptr)
        if (std::string(line.data()).find("gated_norm forward") != std::string::npos) rows.push_back(Clock::now());
    EXPECT_EQ(pclose(pipe), 0);
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_GT(rows[1] - rows[0], std::chrono::milliseconds(100));
}

TEST_F(Program, AForcedInstructionSetIsNeverIgnored) {
    unsetenv("SOFTDELTA_ISA");
    const auto available = nlohmann::json::parse(run("info --json").out).at("available");
    for (const char* level : {"x86-64-v2", "avx2", "avx512", "avx512bf16", "amxbf16", "avx1024", "AVX2", "avx"}) {
        setenv("SOFTDELTA_ISA", level, 1);
        if (std::find(available.begin(), available.end(), level) != available.end()) {
            EXPECT_EQ(nlohmann::json::parse(run("info --json").out).at("selected"), level);
            continue;
        }
        for (const std::string& arguments :
             {std::string("info --json"), "verify " + data + "simple_gla_forward.safetensors"}) {
            const Outcome outcome = run(arguments);
            EXPECT_EQ(outcome.status, 2) << level << ": " << arguments;
            EXPECT_EQ(lines(outcome.err), 1u) << outcome.err;
            EXPECT_EQ(outcome.err.rfind("softdelta: SOFTDELTA_ISA is " + std::string(level) + ", ", 0), 0u)
                << outcome.err;
            for (const auto& name : available)
                EXPECT_NE(outcome.err.find(name.get<std::string>()), std::string::npos) << outcome.err;
        }
    }
    setenv("SOFTDELTA_ISA", "", 1);
    EXPECT_EQ(run("info").status, 0) << "an empty name is none";
    unsetenv("SOFTDELTA_ISA");
}

TEST_F(Program, OutputToAPipeHasNoColour) {
    EXPECT_EQ(run("verify " + data + "simple_gla_forward.safetensors").out.find('\033'), std::string::npos);
}

}  // namespace

// Dumps of the layers around the delta rules: those of plain kernels in f32 are right; each of their mistakes is found,
// in the results that it spoils and in no other.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

#include "io/call/operands.h"
#include "io/file/core_view.h"
#include "judge/layer.h"
#include "support/call_count.h"

namespace softdelta::test {

namespace {

using Index = std::int64_t;
using Names = std::set<std::string>;
using Floats = std::vector<float>;
using Dump = std::map<std::string, Floats>;

Floats read(const Tensor& t) {
    Floats all(static_cast<std::size_t>(t.count()));
    const core::Tensor from = io::core_view(t);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<float>(core::load(from, static_cast<Index>(i)));
    return all;
}

void write(const Floats& all, const Tensor& t) {
    const core::Tensor to = io::core_view(t);
    for (std::size_t i = 0; i < all.size(); ++i) core::store(to, static_cast<Index>(i), static_cast<double>(all[i]));
}

class Case {
  public:
    Case(std::string_view op, std::uint32_t seed) : random_(seed) { file_.metadata["op"] = op; }

    void set(const std::string& key, const std::string& value) { file_.metadata[key] = value; }
    void draw(const std::string& name, DType dtype, const std::vector<Index>& shape, float size = 1) {
        const io::OwnedTensor t(dtype, shape);
        Floats all(static_cast<std::size_t>(t.count()));
        std::normal_distribution<float> normal(0, size);
        for (float& x : all) x = normal(random_);
        write(all, t.view());
        file_.tensors.insert_or_assign(name, t);
    }
    void set_bounds(const std::vector<std::int32_t>& bounds) {
        const io::OwnedTensor t(DType::i32, {static_cast<Index>(bounds.size())});
        std::copy(bounds.begin(), bounds.end(), static_cast<std::int32_t*>(t.data()));
        file_.tensors.insert_or_assign("cu_seqlens", t);
    }
    Floats operator[](const std::string& name) const { return read(file_.tensors.at(name).view()); }
    DType dtype(const std::string& name) const { return file_.tensors.at(name).dtype(); }
    const std::vector<Index>& shape(const std::string& name) const { return file_.tensors.at(name).shape(); }

    // What the judge finds wrong in the dump of a kernel.
    Names wrong(const Dump& dump) const {
        const io::LayerCall call = io::call_of_layer(file_);
        std::vector<io::OwnedTensor> memory;
        std::map<std::string, Tensor> results;
        for (const std::string& name : io::output_names(call)) {
            memory.emplace_back(io::output_dtype(call, name), io::output_shape(call, name));
            EXPECT_EQ(dump.at(name).size(), static_cast<std::size_t>(memory.back().count())) << name;
            write(dump.at(name), memory.back().view());
            results[name] = memory.back().view();
        }
        judge::Options options;
        options.threads = 1;
        Names names;
        for (const judge::Finding& f : judge::verify(call, results, options))
            if (f.verdict != judge::Verdict::right) names.insert(f.name);
        return names;
    }

  private:
    io::CaseFile file_;
    std::mt19937 random_;
};

// As kernels of torch do between operations.
float round_to(DType type, float x) {
    if (type == DType::bf16) return core::to_float(core::to_bf16(static_cast<double>(x)));
    if (type == DType::f16) return core::to_float(core::to_f16(static_cast<double>(x)));
    return x;
}
float sigmoid(float x) {
    return 1 / (1 + std::exp(-x));
}
float silu(float x) {
    return x * sigmoid(x);
}
float silu_slope(float x) {
    return sigmoid(x) * (1 + x * (1 - sigmoid(x)));
}

// ---------------------------------------------------------------------------------------------------------------------

enum class Convolution {
    right,
    rounds_sums,
    sees_the_future,
    no_activation,
    state_late,
    no_slope,
    forgets_state_gradient
};

Dump convolve(const Case& c, const std::vector<Index>& bounds, Convolution mistake) {
    const Index C = c.shape("x")[2], W = c.shape("weight")[1], S = c.shape("initial_state")[2];
    const Floats x = c["x"], weight = c["weight"], bias = c["bias"], state = c["initial_state"], dy = c["dy"],
                 dfinal = c["dfinal_state"];
    const auto at = [](Index i) { return static_cast<std::size_t>(i); };
    Dump r{{"y", Floats(x.size())},        {"final_state", Floats(state.size())},
           {"dx", Floats(x.size())},       {"dweight", Floats(weight.size())},
           {"dbias", Floats(bias.size())}, {"dinitial_state", Floats(state.size())}};
    for (Index n = 0; n + 1 < static_cast<Index>(bounds.size()); ++n)
        for (Index ch = 0; ch < C; ++ch) {
            const Index first = bounds[at(n)], tokens = bounds[at(n + 1)] - first;
            const auto row = [&](Index t) { return at((first + t) * C + ch); };      // of a token
            const auto old = [&](Index t) { return at((n * C + ch) * S + S + t); };  // t < 0: of the state
            const auto token = [&](Index t) { return t < 0 ? state[old(t)] : t < tokens ? x[row(t)] : 0; };
            const Index shift = mistake == Convolution::sees_the_future ? 0 : W - 1;
            Floats slope(at(tokens));
            for (Index t = 0; t < tokens; ++t) {
                float sum = bias[at(ch)], right = bias[at(ch)];
                for (Index i = 0; i < W; ++i) {
                    sum += weight[at(ch * W + i)] * token(t - shift + i);
                    right += weight[at(ch * W + i)] * token(t - W + 1 + i);
                }
                if (mistake == Convolution::rounds_sums) sum = right = round_to(c.dtype("x"), sum);
                r["y"][row(t)] = mistake == Convolution::no_activation ? sum : silu(sum);
                slope[at(t)] = dy[row(t)] * (mistake == Convolution::no_slope ? 1 : silu_slope(right));
                if (mistake == Convolution::rounds_sums) slope[at(t)] = round_to(c.dtype("x"), slope[at(t)]);
            }
            for (Index s = 0; s < S; ++s)
                r["final_state"][old(s - S)] = token(tokens - S + s - (mistake == Convolution::state_late ? 1 : 0));
            const auto add = [&](Index t, float gradient) {
                (t < 0 ? r["dinitial_state"][old(t)] : r["dx"][row(t)]) += gradient;
            };
            for (Index t = 0; t < tokens; ++t)
                for (Index i = 0; i < W; ++i) {
                    add(t - W + 1 + i, weight[at(ch * W + i)] * slope[at(t)]);
                    r["dweight"][at(ch * W + i)] += slope[at(t)] * token(t - W + 1 + i);
                }
            for (Index s = 0; s < S && mistake != Convolution::forgets_state_gradient; ++s)
                add(tokens - S + s, dfinal[old(s - S)]);
            for (Index t = 0; t < tokens; ++t) r["dbias"][at(ch)] += slope[at(t)];
        }
    return r;
}

void judge_convolutions(DType dtype, bool packed, std::uint32_t seed) {
    Case c(io::convolution_name, seed);
    const Index B = packed ? 1 : 2, T = 130, C = 5, W = 4, S = 4, N = packed ? 3 : B;
    c.set("activation", "silu");
    c.draw("x", dtype, {B, T, C});
    c.draw("weight", DType::f32, {C, W});
    c.draw("bias", DType::f32, {C});
    c.draw("initial_state", dtype, {N, C, S});
    c.draw("dy", dtype, {B, T, C});
    c.draw("dfinal_state", dtype, {N, C, S}, 3);
    if (packed) c.set_bounds({0, 3, 3, 130});
    const std::vector<Index> bounds = packed ? std::vector<Index>{0, 3, 3, 130} : std::vector<Index>{0, 130, 260};
    const std::pair<Convolution, Names> expected[] = {
        {Convolution::right, {}},
        {Convolution::rounds_sums, {}},
        {Convolution::sees_the_future, {"y"}},
        {Convolution::no_activation, {"y"}},
        {Convolution::state_late, {"final_state"}},
        {Convolution::no_slope, {"dx", "dweight", "dbias", "dinitial_state"}},
        {Convolution::forgets_state_gradient, packed ? Names{"dx", "dinitial_state"} : Names{"dx"}}};
    for (const auto& [mistake, names] : expected)
        EXPECT_EQ(c.wrong(convolve(c, bounds, mistake)), names)
            << "mistake " << static_cast<int>(mistake) << ", seed " << seed;
}

TEST(JudgeLayer, Convolutions) {
    const auto calls = static_cast<std::uint32_t>(call_count(2));
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
        for (const bool packed : {false, true}) {
            SCOPED_TRACE(std::to_string(static_cast<int>(dtype)) + (packed ? " packed" : ""));
            for (std::uint32_t seed = 1; seed <= calls; ++seed) judge_convolutions(dtype, packed, seed);
        }
}

// ---------------------------------------------------------------------------------------------------------------------

enum class Norm {
    right,
    rounds_factors,
    epsilon_outside,
    weight_plus_one,
    no_gate,
    sigmoid_gate,
    gate_before_norm,
    no_mean,
    no_slope
};

Dump norm(const Case& c, float epsilon, Norm mistake) {
    const std::vector<Index>& shape = c.shape("x");
    const auto D = static_cast<std::size_t>(shape[3]);
    const Floats x = c["x"], z = c["z"], weight = c["weight"], dy = c["dy"];
    const bool gate_first = mistake == Norm::gate_before_norm;
    Dump r{{"y", Floats(x.size())}, {"dx", Floats(x.size())}, {"dz", Floats(x.size())}, {"dweight", Floats(D)}};
    for (std::size_t row = 0; row < x.size(); row += D) {
        float squares = 0, gated_squares = 0, dot = 0;
        for (std::size_t i = row; i < row + D; ++i) {
            squares += x[i] * x[i];
            gated_squares += x[i] * silu(z[i]) * x[i] * silu(z[i]);
        }
        const float size = static_cast<float>(D);
        const float scale = 1 / std::sqrt(squares / size + epsilon);
        const float wrong_scale = mistake == Norm::epsilon_outside ? 1 / (std::sqrt(squares / size) + epsilon)
                                  : gate_first                     ? 1 / std::sqrt(gated_squares / size + epsilon)
                                                                   : scale;
        for (std::size_t i = row; i < row + D; ++i) dot += dy[i] * weight[i - row] * silu(z[i]) * x[i] * scale / size;
        for (std::size_t i = row; i < row + D; ++i) {
            const float w = weight[i - row], n = x[i] * scale;
            const float gate = mistake == Norm::no_gate        ? 1
                               : mistake == Norm::sigmoid_gate ? sigmoid(z[i])
                                                               : silu(z[i]);
            r["y"][i] = (mistake == Norm::weight_plus_one ? w + 1 : w) * x[i] * wrong_scale * gate;
            if (mistake == Norm::rounds_factors)
                r["y"][i] = round_to(c.dtype("x"), w * round_to(c.dtype("x"), n)) * silu(z[i]);
            r["dx"][i] = scale * (dy[i] * w * silu(z[i]) - (mistake == Norm::no_mean ? 0 : n * dot));
            r["dz"][i] = dy[i] * w * n * (mistake == Norm::no_slope ? sigmoid(z[i]) : silu_slope(z[i]));
            r["dweight"][i - row] += dy[i] * n * silu(z[i]);
        }
    }
    return r;
}

void judge_norms(DType dtype, std::uint32_t seed) {
    Case c(io::norm_name, seed);
    c.set("gate", "silu");
    c.set("epsilon", "0.01");
    c.draw("x", dtype, {2, 70, 2, 16}, 0.2F);
    c.draw("z", dtype, {2, 70, 2, 16});
    c.draw("weight", DType::f32, {16});
    c.draw("dy", dtype, {2, 70, 2, 16});
    const std::pair<Norm, Names> expected[] = {{Norm::right, {}},
                                               {Norm::rounds_factors, {}},
                                               {Norm::epsilon_outside, {"y"}},
                                               {Norm::weight_plus_one, {"y"}},
                                               {Norm::no_gate, {"y"}},
                                               {Norm::sigmoid_gate, {"y"}},
                                               {Norm::gate_before_norm, {"y"}},
                                               {Norm::no_mean, {"dx"}},
                                               {Norm::no_slope, {"dz"}}};
    for (const auto& [mistake, names] : expected)
        EXPECT_EQ(c.wrong(norm(c, 0.01F, mistake)), names)
            << "mistake " << static_cast<int>(mistake) << ", seed " << seed;
}

TEST(JudgeLayer, GatedNorms) {
    const auto calls = static_cast<std::uint32_t>(call_count(2));
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        SCOPED_TRACE(static_cast<int>(dtype));
        for (std::uint32_t seed = 1; seed <= calls; ++seed) judge_norms(dtype, seed);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

template <class Change>
std::string error_of(const Change& change) {
    io::CaseFile file{"case", {{"op", std::string(io::convolution_name)}}, {}};
    file.tensors["x"] = io::OwnedTensor(DType::bf16, {1, 6, 4});
    file.tensors["weight"] = io::OwnedTensor(DType::bf16, {4, 3});
    change(file);
    try {
        const io::LayerCall call = io::call_of_layer(file);
        io::check(call, {{"y", file.tensors.at("x").view()}});
    } catch (const std::exception& e) {
        return e.what();
    }
    return "no error";
}

TEST(JudgeLayer, ContradictionsAreNamed) {
    using File = io::CaseFile;
    EXPECT_EQ(error_of([](File& f) { f.tensors.erase("weight"); }),
              "case: weight: missing, but causal_convolution needs it");
    EXPECT_EQ(error_of([](File& f) {
                  f.tensors["x"] = io::OwnedTensor(DType::f32, {6, 4});
              }),
              "case: x: shape [6, 4], expected [B, T, C]");
    EXPECT_EQ(error_of([](File& f) { f.metadata["activation"] = "gelu"; }),
              "case: metadata activation: expected none or silu, found \"gelu\"");
    EXPECT_EQ(error_of([](File& f) {
                  f.tensors["y"] = io::OwnedTensor(DType::f32, {1, 6, 3});
              }),
              "case: y: shape [1, 6, 3], expected [1, 6, 4]");
    EXPECT_EQ(error_of([](File& f) {
                  f.tensors["dfinal_state"] = io::OwnedTensor(DType::i32, {1, 4, 2});
              }),
              "case: dfinal_state: type I32, expected F64, F32, BF16 or F16");
    EXPECT_NE(error_of([](File& f) { f.tensors["bias"] = io::OwnedTensor(DType::f32, {3}); }).find("bias: dimension 0"),
              std::string::npos);
}

TEST(JudgeLayer, WhatIsUnknownIsNamed) {
    io::CaseFile file;
    file.metadata = {{"op", std::string(io::norm_name)}, {"activation", "silu"}};
    file.tensors["x"] = file.tensors["scratch"] = io::OwnedTensor(DType::bf16, {1, 6, 2, 4});
    const io::LayerCall call = io::call_of_layer(file);
    EXPECT_EQ(call.warnings,
              (std::vector<std::string>{"metadata \"activation\" is no option of gated_norm and was ignored",
                                        "tensor \"scratch\" is unknown and was ignored"}));
    EXPECT_EQ(call.norm_options.gate, Activation::none) << "there is no z";
    EXPECT_EQ(io::output_names(call), (std::vector<std::string>{"y"}));
}

}  // namespace

}  // namespace softdelta::test

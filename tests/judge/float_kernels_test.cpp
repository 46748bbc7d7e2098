// Right kernels in f32 that round elsewhere than the baseline: a recurrence token by token, a softmax in base 2 whose
// backward pass starts from lse.
#include <gtest/gtest.h>

#include <cmath>

#include "io/call/make_case.h"
#include "judge/verdicts.h"

namespace softdelta::test {

namespace {

// Gated DeltaNet's recurrence, one head; `keep` is what the state is stored as between tokens.
Results run_recurrence(const io::Call& call, DType keep) {
    const Floats q(call.delta.q), k(call.delta.k), v(call.delta.v), g(call.delta.g), beta(call.delta.beta);
    const Index T = q.size(1), K = q.size(3), V = v.size(3);
    const Floats o({1, T, 1, V}), end({1, 1, K, V});
    Matrix S = Matrix::Zero(K, V);
    const float scale = 1 / std::sqrt(static_cast<float>(K));
    for (Index t = 0; t < T; ++t) {
        const Matrix key = k.rows(0, t, 1, 0);
        S = round_to(keep, Matrix(S * std::exp(g[t])));
        S += key.transpose() * (beta[t] * (v.rows(0, t, 1, 0) - key * S));
        o.rows(0, t, 1, 0) = q.rows(0, t, 1, 0) * S * scale;
    }
    end.block(0, 0) = S;
    Results results;
    results.emplace("o", o.stored(DType::f32));
    results.emplace("final_state", end.stored(DType::f32));
    return results;
}

TEST(FloatKernels, ARecurrenceThatForgetsLittle) {
    io::MakeOptions options;
    options.dtype = DType::f32;
    options.gradients = options.l2norm = options.initial_state = false;
    options.heads = options.value_heads = 1, options.key_size = options.value_size = 8;
    options.tokens = 1500;
    options.gate = "uniform", options.gate_value = -1e-4, options.most_beta = 0.02;
    io::CaseFile file = io::make_case(options);
    const io::Call call = io::call_of(file);
    const auto right = judge_results(call, run_recurrence(call, DType::f32));
    EXPECT_TRUE(all_right(right)) << Table{right};
    bool lost = false;
    for (const judge::Finding& f : right)
        lost = lost || f.note.find("the state rounded to f32 at every token") != std::string::npos;
    EXPECT_TRUE(lost) << "no limit is needed for it: it tests nothing\n" << Table{right};
    const auto f16 = judge_results(call, run_recurrence(call, DType::f16));
    EXPECT_TRUE(is_wrong(f16, "o") && is_wrong(f16, "final_state")) << Table{f16};
}

// No mask but the bias; base 2, lse stored in f32, probabilities of the backward pass from it.
Results run_base_2(const io::Call& call) {
    const Floats q(call.attention.q), k(call.attention.k), v(call.attention.v), bias(call.attention.bias);
    const Floats d_o(call.d_o), dlse(call.dlse);
    const Index H = q.size(2), L = q.size(1), N = k.size(1), group = H / k.size(2);
    const float scale = 1 / std::sqrt(static_cast<float>(q.size(3)));
    constexpr float log2e = 1.44269504f;
    const Floats o({1, L, H, v.size(3)}), lse({1, H, L}), dq({1, L, H, q.size(3)});
    const Floats dk({1, N, k.size(2), k.size(3)}), dv({1, N, k.size(2), v.size(3)});
    for (Index h = 0; h < H; ++h) {
        const Rows Q = q.rows(0, 0, L, h), K = k.rows(0, 0, N, h / group), V = v.rows(0, 0, N, h / group);
        Matrix s = Q * K.transpose() * scale;
        s += bias.block(0, h % bias.size(1));
        s *= log2e;
        Matrix p = s;
        for (Index i = 0; i < L; ++i) {
            const float top = s.row(i).maxCoeff();
            p.row(i) = (s.row(i).array() - top).unaryExpr([](float x) { return std::exp2(x); });
            const float sum = p.row(i).sum(), log_sum = top + std::log2(sum);
            o.rows(0, i, 1, h) = p.row(i) * V / sum;
            lse[h * L + i] = log_sum / log2e;
            p.row(i) = (s.row(i).array() - log_sum).unaryExpr([](float x) { return std::exp2(x); });
        }
        const Matrix D = o.rows(0, 0, L, h).cwiseProduct(d_o.rows(0, 0, L, h)).rowwise().sum();
        Matrix ds = d_o.rows(0, 0, L, h) * V.transpose();
        for (Index i = 0; i < L; ++i)
            ds.row(i).array() = p.row(i).array() * (ds.row(i).array() - D(i, 0) + dlse[h * L + i]);
        dq.rows(0, 0, L, h) = ds * K * scale;
        dk.rows(0, 0, N, h / group) += ds.transpose() * Q * scale;
        dv.rows(0, 0, N, h / group) += p.transpose() * d_o.rows(0, 0, L, h);
    }
    Results results;
    for (const auto& [name, x] : {std::pair{"o", &o}, {"lse", &lse}, {"dq", &dq}, {"dk", &dk}, {"dv", &dv}})
        results.emplace(name, x->stored(DType::f32));
    return results;
}

TEST(FloatKernels, ScoresInBase2) {
    bool lost = false;
    for (const std::uint64_t seed : {6, 7}) {  // of which the first needs the limits of base 2
        io::MakeOptions options;
        options.op = "attention", options.dtype = DType::f32, options.seed = seed;
        options.heads = 4, options.queries = 70, options.keys = 90;
        options.key_size = 16, options.value_size = 24;
        options.bias = "full";
        io::CaseFile file = io::make_case(options);
        Floats bias(file.tensors.at("bias").view());  // keys hidden by a large number, of one row all
        for (Index i = 0; i < bias.size(1) * 70 * 90; ++i)
            bias[i] = i / 90 % 70 == 33 || i * 40503 % 65536 < 32768 ? -3e4f : 0;
        file.tensors.at("bias") = bias.stored(DType::f32);
        const io::Call call = io::call_of(file);
        Results results = run_base_2(call);
        const auto right = judge_results(call, results);
        EXPECT_TRUE(all_right(right)) << Table{right};
        for (const judge::Finding& f : right) {
            lost = lost || f.note.find("large scores in base 2") != std::string::npos;
            EXPECT_LT(f.limit, 0.01) << Table{right};
        }
        const Floats o(results.at("o").view());
        o.rows(0, 3, 1, 1) *= 1.02f;
        results.at("o") = o.stored(DType::f32);
        EXPECT_TRUE(is_wrong(judge_results(call, results), "o"));
    }
    EXPECT_TRUE(lost) << "no limit is needed for it: it tests nothing";
}

}  // namespace

}  // namespace softdelta::test

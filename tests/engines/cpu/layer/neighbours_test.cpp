// The convolution of a sequence does not depend on its neighbours: the same bits in a batch, packed, and alone.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include "support/levels.h"
#include "support/parts.h"
#include "support/random_layer.h"

namespace softdelta::test {
namespace {

constexpr Index longest = 200;

// Sequences of one token and of up to 200, packed in one row, in more than one range of tokens.
struct Mixed {
    ConvolutionOptions options;
    Index channels = 0, width = 0;
    std::vector<Index> begins{0};
    Array x, weight, bias, initial_state, dy, dfinal_state, cu_seqlens;
    std::string what;
};

Mixed draw(std::uint64_t seed) {
    Random random(seed);
    const auto between = [&](Index low, Index high) {
        return low + static_cast<Index>(random() % static_cast<std::uint64_t>(high - low + 1));
    };
    Mixed call;
    call.channels = between(1, seed % 8 == 0 ? 600 : 70), call.width = between(1, 8);
    call.options.activation = random() % 2 == 0 ? Activation::silu : Activation::none;
    for (Index n = between(1, 24); n > 0; --n)
        call.begins.push_back(call.begins.back() + (random() % 2 == 0 ? 1 : between(0, longest)));
    const auto N = static_cast<Index>(call.begins.size()) - 1, T = call.begins.back(), C = call.channels;
    constexpr DType types[] = {DType::f32, DType::bf16, DType::f16};
    const auto normal = [&](const Shape& shape) {
        const DType dtype = types[seed % std::size(types)];
        Array a = random() % 3 == 0 ? Array(dtype, shape, random) : Array(dtype, shape);
        fill_normal(a, random);
        return a;
    };
    call.x = normal({1, T, C}), call.dy = normal({1, T, C}), call.weight = normal({C, call.width});
    const Shape states{N, C, call.width - 1 + between(0, 2)};
    call.dfinal_state = normal(states);
    if (random() % 2 == 0) call.bias = normal({C});
    if (random() % 2 == 0) call.initial_state = normal(states);
    call.cu_seqlens = Array(DType::i64, {N + 1});
    for (Index n = 0; n <= N; ++n)
        call.cu_seqlens.set(n, static_cast<double>(call.begins[static_cast<std::size_t>(n)]));
    call.what = "SOFTDELTA_SEED=" + std::to_string(seed) + ", N " + std::to_string(N) + " T " + std::to_string(T) +
                " C " + std::to_string(C) + " W " + std::to_string(call.width);
    return call;
}

struct Results {
    Array y, final_state, dx, dinitial_state;
    explicit Results(const Mixed& call) {
        const auto like = [](const Array& a) {
            return Array(a.view().dtype(), {a.view().shape().begin(), a.view().shape().end()});
        };
        y = like(call.x), dx = like(call.x);
        final_state = like(call.dfinal_state), dinitial_state = like(call.dfinal_state);
    }
};

template <class Rows, class Entry>
void run(const Mixed& call, const Tensor& cu_seqlens, int threads, const Results& to, const Rows& rows,
         const Entry& entry) {
    Execution execution;
    execution.engine = "fast";
    execution.threads = threads;
    const ConvolutionInputs in{.x = rows(call.x.view()),
                               .weight = call.weight.view(),
                               .bias = call.bias.view(),
                               .initial_state = entry(call.initial_state.view()),
                               .cu_seqlens = cu_seqlens};
    causal_convolution_forward(in, {.y = rows(to.y.view()), .final_state = entry(to.final_state.view())}, call.options,
                               execution);
    causal_convolution_backward(in,
                                {.dy = rows(call.dy.view()),
                                 .dfinal_state = entry(call.dfinal_state.view()),
                                 .dx = rows(to.dx.view()),
                                 .dinitial_state = entry(to.dinitial_state.view())},
                                call.options, execution);
}

std::string check(const Mixed& call, std::uint64_t seed) {
    const Results together(call), alone(call);
    const auto all = [](const Tensor& t) { return t; };
    run(call, call.cu_seqlens.view(), seed % 2 == 0 ? 1 : 5, together, all, all);
    for (std::size_t n = 0; n + 1 < call.begins.size(); ++n)
        run(
            call, {}, 1, alone,
            [&](const Tensor& t) { return tokens_of(t, 0, call.begins[n], call.begins[n + 1] - call.begins[n]); },
            [&](const Tensor& t) { return part_of(t, 0, static_cast<Index>(n), 1); });
    std::string faults;
    const auto compare = [&](const char* name, const Array& a, const Array& b) {
        if (const Index at = first_difference(a, b); at >= 0)
            faults += call.what + ": " + name + " has other bits alone, element " + std::to_string(at) + "\n";
    };
    compare("y", together.y, alone.y);
    compare("final_state", together.final_state, alone.final_state);
    compare("dx", together.dx, alone.dx);
    compare("dinitial_state", together.dinitial_state, alone.dinitial_state);
    return faults;
}

TEST(ConvolutionNeighbours, ChangeNoBit) {
    check_calls(call_count(100), draw, check);
}

}  // namespace
}  // namespace softdelta::test

// The attention of a sequence does not depend on its neighbours: the same bits packed with others, and alone. Mixed
// batches of decode, short and long prefills, with few keys and with as many as are cut into ranges.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include "support/levels.h"
#include "support/parts.h"

namespace softdelta::test {
namespace {

struct Mixed {
    AttentionOptions options;
    std::vector<Index> queries{0}, keys{0};  // where sequences begin
    Array q, k, v, sink, d_o, cu_seqlens_q, cu_seqlens_k;
    std::string what;
};

Array indices(const std::vector<Index>& values) {
    Array a(DType::i64, {static_cast<Index>(values.size())});
    for (std::size_t i = 0; i < values.size(); ++i) a.set(static_cast<Index>(i), static_cast<double>(values[i]));
    return a;
}

Mixed draw(std::uint64_t seed, bool backward) {
    Random random(seed);
    const auto between = [&](Index low, Index high) {
        return low + static_cast<Index>(random() % static_cast<std::uint64_t>(high - low + 1));
    };
    Mixed call;
    const bool many = !backward && random() % 2 == 0;  // so many that ranges of keys need not be short for the threads
    const Index longest = backward ? 300 : many ? 2700 : between(1, 3) * 900;
    for (Index n = many ? between(40, 64) : between(1, backward ? 5 : 20); n > 0; --n) {
        constexpr Index few[] = {0, 1, 1, 1, 1, 2, 5};
        const Index rows =
            random() % 3 != 0 ? few[random() % std::size(few)] : between(1, random() % 3 == 0 ? 260 : 70);
        call.queries.push_back(call.queries.back() + rows);
        call.keys.push_back(call.keys.back() + (random() % 8 == 0 ? 0 : between(1, longest)));
    }
    const Index Hk = between(1, 3), H = Hk * between(1, 4), D = between(1, 4) * 16, Dv = between(1, 4) * 16;
    constexpr DType types[] = {DType::f32, DType::bf16, DType::f16};
    const DType dtype = types[seed % std::size(types)];
    const auto normal = [&](const Shape& shape) {
        Array a(dtype, shape);
        fill_normal(a, random);
        return a;
    };
    call.q = normal({1, call.queries.back(), H, D}), call.d_o = normal({1, call.queries.back(), H, Dv});
    call.k = normal({1, call.keys.back(), Hk, D}), call.v = normal({1, call.keys.back(), Hk, Dv});
    if (random() % 3 == 0) call.sink = normal({H});
    call.options.causal = static_cast<Causal>(random() % 3);
    if (random() % 4 == 0) call.options.window_left = between(0, longest);
    call.cu_seqlens_q = indices(call.queries), call.cu_seqlens_k = indices(call.keys);
    call.what = "SOFTDELTA_SEED=" + std::to_string(seed) + ", N " + std::to_string(call.queries.size() - 1) + " H " +
                std::to_string(H) + " Hk " + std::to_string(Hk) + " D " + std::to_string(D) + " Dv " +
                std::to_string(Dv);
    return call;
}

struct Results {
    Array o, lse, dq, dk, dv;
    explicit Results(const Mixed& call)
        : o(call.q.view().dtype(), shape(call.d_o)),
          lse(DType::f32, {1, call.q.view().shape(2), call.q.view().shape(1)}),
          dq(call.q.view().dtype(), shape(call.q)),
          dk(call.q.view().dtype(), shape(call.k)),
          dv(call.q.view().dtype(), shape(call.v)) {}
    static Shape shape(const Array& a) { return {a.view().shape().begin(), a.view().shape().end()}; }
};

// queries(t, dim), keys(t): the part of a tensor that is computed.
template <class Queries, class Keys>
void run(const Mixed& call, bool backward, const Tensor& cu_q, const Tensor& cu_k, int threads, const Results& to,
         const Queries& queries, const Keys& keys) {
    Execution execution;
    execution.engine = "fast";
    execution.threads = threads;
    const AttentionInputs in{.q = queries(call.q.view(), 1),
                             .k = keys(call.k.view()),
                             .v = keys(call.v.view()),
                             .sink = call.sink.view(),
                             .cu_seqlens_q = cu_q,
                             .cu_seqlens_k = cu_k};
    attention_forward(in, {.o = queries(to.o.view(), 1), .lse = queries(to.lse.view(), 2)}, call.options, execution);
    if (!backward) return;
    attention_backward(in,
                       {.o = queries(to.o.view(), 1),
                        .lse = queries(to.lse.view(), 2),
                        .d_o = queries(call.d_o.view(), 1),
                        .dq = queries(to.dq.view(), 1),
                        .dk = keys(to.dk.view()),
                        .dv = keys(to.dv.view())},
                       call.options, execution);
}

std::string check(const Mixed& call, std::uint64_t seed, bool backward) {
    const Results together(call), alone(call);
    constexpr int teams[] = {1, 2, 5, 16};
    run(
        call, backward, call.cu_seqlens_q.view(), call.cu_seqlens_k.view(), teams[seed % std::size(teams)], together,
        [](const Tensor& t, std::size_t) { return t; }, [](const Tensor& t) { return t; });
    for (std::size_t n = 0; n + 1 < call.queries.size(); ++n)
        run(
            call, backward, {}, {}, 1, alone,
            [&](const Tensor& t, std::size_t dim) {
                return part_of(t, dim, call.queries[n], call.queries[n + 1] - call.queries[n]);
            },
            [&](const Tensor& t) { return part_of(t, 1, call.keys[n], call.keys[n + 1] - call.keys[n]); });
    std::string faults;
    const auto compare = [&](const char* name, const Array& a, const Array& b) {
        if (const Index at = first_difference(a, b); at >= 0)
            faults += call.what + ": " + name + " has other bits alone, element " + std::to_string(at) + ": " +
                      std::to_string(a.get(at)) + ", alone " + std::to_string(b.get(at)) + "\n";
    };
    compare("o", together.o, alone.o);
    compare("lse", together.lse, alone.lse);
    if (!backward) return faults;
    compare("dq", together.dq, alone.dq);
    compare("dk", together.dk, alone.dk);
    compare("dv", together.dv, alone.dv);
    return faults;
}

TEST(AttentionNeighbours, ChangeNoBitForward) {
    check_calls(
        call_count(20), [](std::uint64_t seed) { return draw(seed, false); },
        [](const Mixed& call, std::uint64_t seed) { return check(call, seed, false); });
}

TEST(AttentionNeighbours, ChangeNoBitBackward) {
    check_calls(
        call_count(60), [](std::uint64_t seed) { return draw(seed, true); },
        [](const Mixed& call, std::uint64_t seed) { return check(call, seed, true); });
}

}  // namespace
}  // namespace softdelta::test

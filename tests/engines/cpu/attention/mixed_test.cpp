// Text as a server makes it: sequences come and grow, and every step is one call with the prompts of new sequences and
// one token of each older one, keys in blocks. The same bits as a call for each sequence, and each text is what one
// causal call gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "support/array.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

constexpr Index H = 6, Hk = 2, D = 32, Dv = 24, block_rows = 16, pages = 8, N = 4;
constexpr Index prompts[N] = {37, 5, 0, 90}, tokens[N] = {44, 12, 0, 95}, starts[N] = {0, 2, 2, 3};

class Server {
  public:
    explicit Server(DType dtype)
        : q(dtype, {N, 128, H, D}),
          k(dtype, {N, 128, Hk, D}),
          v(dtype, {N, 128, Hk, Dv}),
          o(dtype, {N, 128, H, Dv}),
          dtype_(dtype),
          block_k_(dtype, {N * pages, block_rows, Hk, D}),
          block_v_(dtype, {N * pages, block_rows, Hk, Dv}) {
        Random random(1);
        for (const Array* a : {&q, &k, &v}) fill_normal(*a, random);
        for (const Array* a : {&block_k_, &block_v_})
            for (Index i = 0; i < a->count(); ++i) a->set(i, NAN);
        std::iota(block_.begin(), block_.end(), 0);
        std::shuffle(block_.begin(), block_.end(), random);
    }

    // One call for all sequences that have tokens, against a call for each; false when all texts are done.
    bool step(Index number) {
        std::vector<Index> sequences, rows;
        for (Index n = 0; n < N; ++n) {
            if (number < starts[n] || (number > starts[n] && used_[at(n)] == tokens[n])) continue;
            sequences.push_back(n);
            rows.push_back(number == starts[n] ? prompts[n] : 1);
            for (Index i = 0; i < rows.back(); ++i) append(n);
        }
        if (sequences.empty()) return false;
        const Array all = attend(sequences, rows);
        Index row = 0;
        for (std::size_t i = 0; i < sequences.size(); ++i) {
            const Array one = attend({sequences[i]}, {rows[i]});
            const Index first = used_[at(sequences[i])] - rows[i];
            for (Index r = 0; r < rows[i]; ++r, ++row)
                for (Index h = 0; h < H; ++h)
                    for (Index c = 0; c < Dv; ++c) {
                        const double x = all.get({0, row, h, c});
                        EXPECT_EQ(x, one.get({0, r, h, c})) << "sequence " << sequences[i] << ", row " << r;
                        o.set({sequences[i], first + r, h, c}, x);
                    }
        }
        return true;
    }

    Array q, k, v, o;  // of whole texts

  private:
    static std::size_t at(Index i) { return static_cast<std::size_t>(i); }

    void append(Index n) {
        const Index j = used_[at(n)]++, block = block_[at(n * pages + j / block_rows)];
        for (Index h = 0; h < Hk; ++h) {
            for (Index c = 0; c < D; ++c) block_k_.set({block, j % block_rows, h, c}, k.get({n, j, h, c}));
            for (Index c = 0; c < Dv; ++c) block_v_.set({block, j % block_rows, h, c}, v.get({n, j, h, c}));
        }
    }

    // The last rows of some sequences.
    Array attend(const std::vector<Index>& sequences, const std::vector<Index>& rows) const {
        const auto count = static_cast<Index>(sequences.size());
        const Index all = std::accumulate(rows.begin(), rows.end(), Index{0});
        Array result(dtype_, {1, all, H, Dv});
        const Array packed(dtype_, {1, all, H, D});
        const Array sums(DType::i32, {count + 1}), used(DType::i32, {count}), table(DType::i32, {count, pages});
        Index row = 0;
        for (Index i = 0; i < count; ++i) {
            const Index n = sequences[at(i)], length = used_[at(n)];
            for (Index r = length - rows[at(i)]; r < length; ++r, ++row)
                for (Index h = 0; h < H; ++h)
                    for (Index c = 0; c < D; ++c) packed.set({0, row, h, c}, q.get({n, r, h, c}));
            sums.set(i + 1, static_cast<double>(row));
            used.set(i, static_cast<double>(length));
            for (Index page = 0; page < pages; ++page)
                table.set({i, page}, static_cast<double>(block_[at(n * pages + page)]));
        }
        AttentionOptions options;
        options.causal = Causal::bottom_right;
        Execution execution;
        execution.engine = "fast";
        attention_forward({.q = packed.view(),
                           .k = block_k_.view(),
                           .v = block_v_.view(),
                           .cu_seqlens_q = sums.view(),
                           .cache_seqlens = used.view(),
                           .block_table = table.view()},
                          {.o = result.view()}, options, execution);
        return result;
    }

    DType dtype_;
    Array block_k_, block_v_;
    std::array<Index, N * pages> block_{};  // of each page of each sequence
    std::array<Index, N> used_{};
};

// RMS of the difference to the RMS of the truth.
double error_of_texts(const Server& server) {
    const Array truth(DType::f64, {N, 128, H, Dv});
    AttentionOptions options;
    options.causal = Causal::top_left;
    Execution execution;
    execution.engine = "reference";
    attention_forward({.q = server.q.view(), .k = server.k.view(), .v = server.v.view()}, {.o = truth.view()}, options,
                      execution);
    double difference = 0, size = 0;
    for (Index n = 0; n < N; ++n)
        for (Index i = 0; i < tokens[n] * H * Dv; ++i) {
            const double x = truth.get(n * 128 * H * Dv + i), y = server.o.get(n * 128 * H * Dv + i);
            difference += (x - y) * (x - y);
            size += x * x;
        }
    return std::sqrt(difference / size);
}

TEST(AttentionFastMixed, StepsOfAServerAreCallsOfItsSequences) {
    for_each_level([](const std::string& level) {
        for (const auto& [dtype, limit] : {std::pair{DType::f32, 1e-6}, {DType::bf16, 5e-3}}) {
            SCOPED_TRACE(level);
            Server server(dtype);
            Index number = 0;
            while (server.step(number)) ++number;
            EXPECT_EQ(number, 10);
            EXPECT_LE(error_of_texts(server), limit);
        }
    });
}

}  // namespace
}  // namespace softdelta::test

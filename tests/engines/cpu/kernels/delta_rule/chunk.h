// Shared by the tests of the delta rules' kernels: one chunk of one head as the kernels see it, and what the stages in
// f64 make of the same numbers. A test gives a kernel the truth of all that comes before it, so that it fails for this
// kernel alone.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "engines/cpu/kernels/delta_rule/chunk/prepare.h"
#include "engines/cpu/kernels/tiles.h"
#include "support/random_delta.h"
#include "support/takes.h"

namespace softdelta::test {

using kernels::DeltaHeads;
using kernels::DeltaRows;
using kernels::DeltaStates;
using kernels::Scratch;

// How steep gates are: mild ones are factored about one anchor, steep ones cut the chunk into halves.
enum class Gates { none, mild, steep, wiping };

struct ChunkShape {
    core::Rule rule;
    Rule name;
    Gates gates;
    Index n, K, V;

    std::string describe() const {
        return "rule " + std::to_string(static_cast<int>(name)) + ", gates " + std::to_string(static_cast<int>(gates)) +
               ", n " + std::to_string(n) + ", K " + std::to_string(K) + ", V " + std::to_string(V);
    }
    bool erases() const { return rule.erases(); }
    bool channel_gate() const { return rule.has_channel_gate(); }
};

// Operands of one chunk: keys and queries are normalised beforehand and rounded to their type, so that kernels and
// stages see the same numbers.
class Chunk {
  public:
    Chunk(const ChunkShape& of, core::DType dtype, std::uint64_t seed) : shape(of) {
        Random random(seed);
        const DType type = dtype == core::DType::bf16 ? DType::bf16 : DType::f32;
        const auto [rule, name, gates, n, K, V] = of;
        call.sequences = 1;
        call.options.rule = name;
        call.q = normal(type, {1, n, 1, K}, random), call.k = normal(type, {1, n, 1, K}, random);
        if (takes(rule, "p")) call.p = normal(type, {1, n, 1, K}, random);
        for (const Array* rows : {&call.q, &call.k, &call.p}) normalise(*rows, K);
        call.v = normal(type, {1, n, 1, V}, random);
        call.d_o = normal(type, {1, n, 1, V}, random);
        call.initial_state = normal(DType::f32, {1, 1, K, V}, random);
        call.dfinal_state = normal(DType::f32, {1, 1, K, V}, random);
        std::uniform_real_distribution<double> part(0, 1);
        if (of.erases()) {
            call.beta = Array(DType::f32, {1, n, 1});
            for (Index i = 0; i < n; ++i) call.beta.set(i, 0.2 + 0.8 * part(random));
        }
        if (gates == Gates::none) return;
        call.g = Array(DType::f32, of.channel_gate() ? Shape{1, n, 1, K} : Shape{1, n, 1});
        for (Index i = 0; i < call.g.count(); ++i) {
            const double x = part(random);
            const double steep = gates == Gates::wiping && random() % 5 == 0 ? -1000 : -20 * x * x;
            call.g.set(i, gates == Gates::mild ? -x : steep);
        }
    }

    DeltaHeads heads() const {
        DeltaHeads heads;
        heads.rule = shape.rule;
        heads.tokens = shape.n, heads.key_size = shape.K, heads.value_size = shape.V;
        heads.q = rows(call.q), heads.k = rows(call.k), heads.p = rows(call.p), heads.v = rows(call.v);
        heads.g = rows(call.g), heads.beta = rows(call.beta);
        heads.scale = static_cast<float>(scale());
        heads.initial_state = {call.initial_state.view().data(), core::DType::f32, 0, shape.V, 1, 0};
        return heads;
    }
    double scale() const { return static_cast<double>(static_cast<float>(1 / std::sqrt(shape.K))); }

    ChunkShape shape;
    RandomDelta call;

  private:
    static Array normal(DType type, const Shape& shape, Random& random) {
        Array a(type, shape);
        fill_normal(a, random);
        return a;
    }
    static void normalise(const Array& rows, Index K) {
        for (Index i = 0; i < rows.count(); i += K) {
            double square = 0;
            for (Index m = 0; m < K; ++m) square += rows.get(i + m) * rows.get(i + m);
            for (Index m = 0; m < K; ++m) rows.set(i + m, rows.get(i + m) / std::sqrt(square));
        }
    }
    static DeltaRows rows(const Array& a) {
        if (a.count() == 0) return {};
        const Tensor& t = a.view();
        const auto dtype = t.dtype() == DType::bf16 ? core::DType::bf16 : core::DType::f32;
        return {t.data(), dtype, 0, t.stride()[1], t.rank() > 3 ? t.stride()[3] : 0};
    }
};

// A matrix in f64.
class Matrix {
  public:
    Matrix(Index rows, Index columns) : columns_(columns), x_(static_cast<std::size_t>(rows * columns)) {}
    // The first columns of rows of a dense tensor.
    Matrix(const Array& a, Index rows, Index columns, Index row_length) : Matrix(rows, columns) {
        for (Index i = 0; i < rows; ++i)
            for (Index j = 0; j < columns; ++j) (*this)(i, j) = a.get(i * row_length + j);
    }
    double& operator()(Index i, Index j) { return x_[static_cast<std::size_t>(i * columns_ + j)]; }
    double operator()(Index i, Index j) const { return x_[static_cast<std::size_t>(i * columns_ + j)]; }
    Index columns() const { return columns_; }
    Index rows() const { return columns_ == 0 ? 0 : static_cast<Index>(x_.size()) / columns_; }

  private:
    Index columns_;
    std::vector<double> x_;
};

// What the stages in f64 make of a chunk.
class Truth {
  public:
    explicit Truth(const Chunk& chunk) : chunk_(chunk) {
        Execution execution;
        execution.engine = "stages_f64";
        const auto [rule, name, gates, n, K, V] = chunk.shape;
        want("Aqk", {1, n, 1, 64}, execution);
        for (const char* rows : {"qg", "kg"}) want(rows, {1, n, 1, K}, execution);
        want("v_new", {1, n, 1, V}, execution);
        if (chunk.shape.erases()) {
            want("L", {1, n, 1, 64}, execution);
            want("A", {1, n, 1, 64}, execution);
        }
        RandomDelta call = dense_copy(chunk.call);
        call.options.scale = chunk.scale();
        results_ = forward_results(call, execution);
    }

    Matrix score() const { return {stages_.at("Aqk"), n(), n(), 64}; }
    Matrix erase_score() const { return erases() ? Matrix(stages_.at("L"), n(), n(), 64) : Matrix(n(), n()); }
    Matrix read_query() const {
        Matrix x(stages_.at("qg"), n(), K(), K());
        for (Index i = 0; i < n(); ++i)
            for (Index m = 0; m < K(); ++m) x(i, m) *= chunk_.scale();
        return x;
    }
    Matrix write_key() const { return {stages_.at("kg"), n(), K(), K()}; }
    // β p e^E, from the gates: no intermediate of the stages is it alone.
    Matrix erase_key() const {
        Matrix x(n(), K());
        const RandomDelta& call = chunk_.call;
        const Array& p = takes(chunk_.shape.rule, "p") ? call.p : call.k;
        const bool before = chunk_.shape.rule.erase == core::Erase::from_previous_state;
        for (Index i = 0; erases() && i < n(); ++i)
            for (Index m = 0; m < K(); ++m)
                x(i, m) = call.beta.get(i) * p.get(i * K() + m) * std::exp(gate_sum(before ? i : i + 1, m));
        return x;
    }
    // e^G of the last row
    std::vector<double> state_decay() const {
        std::vector<double> x;
        for (Index m = 0; m < K(); ++m) x.push_back(std::exp(gate_sum(n(), m)));
        return x;
    }
    Matrix inverse() const { return {stages_.at("A"), n(), n(), 64}; }
    Matrix U() const { return {stages_.at("v_new"), n(), V(), V()}; }
    Matrix o() const { return {results_.at("o"), n(), V(), V()}; }
    Matrix final_state() const { return {results_.at("final_state"), K(), V(), V()}; }

  private:
    // Of rows before `end`.
    double gate_sum(Index end, Index m) const {
        const Array& g = chunk_.call.g;
        double sum = 0;
        for (Index i = 0; g.count() > 0 && i < end; ++i) sum += g.get(chunk_.shape.channel_gate() ? i * K() + m : i);
        return sum;
    }
    Index n() const { return chunk_.shape.n; }
    Index K() const { return chunk_.shape.K; }
    Index V() const { return chunk_.shape.V; }
    bool erases() const { return chunk_.shape.erases(); }
    void want(const std::string& name, const Shape& shape, Execution& execution) {
        stages_[name] = Array(DType::f64, shape);
        execution.stages.wanted.push_back({name, stages_[name].view()});
    }

    const Chunk& chunk_;
    Results stages_, results_;
};

// The same chunk with the sizes of its numbers: its scores are the sums of the sizes of their terms.
inline Chunk with_sizes(const Chunk& chunk, core::DType dtype, std::uint64_t seed) {
    Chunk sizes(chunk.shape, dtype, seed);
    for (const Array* a : {&sizes.call.q, &sizes.call.k, &sizes.call.p})
        for (Index i = 0; i < a->count(); ++i) a->set(i, std::abs(a->get(i)));
    return sizes;
}

// An object that cuts its memory from a Scratch, with that memory: NaN until it is written, an unreadable page after
// it.
template <class T>
class Scratched {
  public:
    template <class... Arguments>
    explicit Scratched(const Arguments&... arguments)
        : memory_(bytes(arguments...), Side::end), scratch_(memory_.data()), object_(arguments..., scratch_) {}

    T& operator*() { return object_; }
    T* operator->() { return &object_; }
    void clear() { std::memset(memory_.data(), 0, memory_.size()); }

  private:
    template <class... Arguments>
    static std::size_t bytes(const Arguments&... arguments) {
        Scratch scratch(nullptr);
        const T object(arguments..., scratch);
        return scratch.used();
    }

    GuardedMemory memory_;
    Scratch scratch_;
    T object_;
};

// Number k of a row of elements, which may be the half of a word.
inline void put(float* row, Index k, double x) {
    row[k] = static_cast<float>(x);
}
inline void put(std::uint32_t* row, Index k, double x) {
    const Index half = 16 * (k % 2);
    row[k / 2] = (row[k / 2] & ~(0xffffU << half)) | std::uint32_t{core::to_bf16(x).bits} << half;
}

// Row i, column m of elements that pair rows i and i + 1.
template <class P>
double in_rows(const Element<P>* rows, Index length, Index i, Index m) {
    return static_cast<double>(part(rows[i / P::depth * length + m], i % P::depth));
}
inline void put_in_rows(float* rows, Index length, Index i, Index m, double x) {
    rows[i * length + m] = static_cast<float>(x);
}
inline void put_in_rows(std::uint32_t* rows, Index length, Index i, Index m, double x) {
    put(rows + i / 2 * length + m, i % 2, x);
}

// The truth of the fold, packed for the scan.
template <class P>
void pack_folded(const Chunk& chunk, const Truth& truth, Scratched<Folded<P>>& folded) {
    folded.clear();
    Folded<P>& f = *folded;
    const Index n = chunk.shape.n, K = chunk.shape.K, first_score = depth_of<P>(K) * P::depth;
    const Matrix read = truth.read_query(), score = truth.score(), write = truth.write_key(), erase = truth.erase_key(),
                 erase_score = truth.erase_score();
    f.n = n;
    for (Index i = 0; i < n; ++i) {
        for (Index m = 0; m < K; ++m) {
            put(f.read + i * f.row, m, read(i, m));
            put(f.erase + i * f.row, m, -erase(i, m));
            put_in_rows(f.write_key, f.write_row, i, m, write(i, m));
        }
        for (Index j = 0; j < n; ++j) {
            put(f.read + i * f.row, first_score + j, score(i, j));
            put(f.erase + i * f.row, first_score + j, -erase_score(i, j));
            f.erase_score[i * f.erase_score_row + j] = static_cast<float>(-erase_score(i, j));
        }
    }
    const std::vector<double> decay = truth.state_decay();
    for (Index m = 0; m < K; ++m) f.state_decay[m] = static_cast<float>(decay[static_cast<std::size_t>(m)]);
}

// A state [K, V] and rows [n, V] in panels, zeros beyond them.
template <class P>
void pack_panels(const Matrix& state, const Matrix& rows, Scratched<StatePanels<P>>& panels) {
    panels.clear();
    for (Index c = 0; c < state.columns(); ++c) {
        const auto panel = panels->panel(c / NR * NR);
        const Index at = c % NR;
        for (Index m = 0; m < state.rows(); ++m) {
            panel.state[m * panel.width + at] = static_cast<float>(state(m, c));
            put_in_rows(panel.operand, panel.width, m, at, state(m, c));
        }
        for (Index i = 0; i < rows.rows(); ++i) panel.rows[i * panel.width + at] = static_cast<float>(rows(i, c));
    }
}

// a b, and the same of their sizes: what a product's roundings are measured by.
inline Matrix operator*(const Matrix& a, const Matrix& b) {
    Matrix x(a.rows(), b.columns());
    for (Index i = 0; i < a.rows(); ++i)
        for (Index k = 0; k < a.columns(); ++k)
            for (Index j = 0; j < b.columns(); ++j) x(i, j) += a(i, k) * b(k, j);
    return x;
}
inline Matrix operator+(Matrix a, const Matrix& b) {
    for (Index i = 0; i < a.rows(); ++i)
        for (Index j = 0; j < a.columns(); ++j) a(i, j) += b(i, j);
    return a;
}
inline Matrix transposed(const Matrix& a) {
    Matrix x(a.columns(), a.rows());
    for (Index i = 0; i < a.rows(); ++i)
        for (Index j = 0; j < a.columns(); ++j) x(j, i) = a(i, j);
    return x;
}
inline Matrix sizes(Matrix a) {
    for (Index i = 0; i < a.rows(); ++i)
        for (Index j = 0; j < a.columns(); ++j) a(i, j) = std::abs(a(i, j));
    return a;
}
inline Matrix rows_times(const std::vector<double>& factor, Matrix a) {
    for (Index i = 0; i < a.rows(); ++i)
        for (Index j = 0; j < a.columns(); ++j) a(i, j) *= factor[static_cast<std::size_t>(i)];
    return a;
}

// Every element within what rounding costs where its terms have this size: some ulp of f32, and of pairs both
// factors of every term are rounded to bf16.
template <class P, class Actual>
void expect_rounded(const Matrix& truth, const Matrix& size, const std::string& what, const Actual& actual) {
    const double unit = P::depth == 1 ? 0x1p-23 * 32 : 0x1p-7 * 1.1;
    for (Index i = 0; i < truth.rows(); ++i)
        for (Index j = 0; j < truth.columns(); ++j)
            ASSERT_NEAR(actual(i, j), truth(i, j), unit * size(i, j) + 0x1p-120)
                << what << " [" << i << ", " << j << "]";
}

// Calls test(P{}, shape) for each kind of product with every rule, steepness and tail.
template <class Test>
void for_each_chunk(const Test& test) {
    for_each_product([&](auto product_kind) {
        [[maybe_unused]] const typename decltype(product_kind)::Tiles tiles;
        for (const Rule name : {Rule::delta_rule, Rule::gated_delta_rule, Rule::kda, Rule::comba, Rule::simple_gla})
            for (const Gates gates : {Gates::none, Gates::mild, Gates::steep, Gates::wiping}) {
                if ((name == Rule::delta_rule) != (gates == Gates::none)) continue;
                Index which = 0;
                for (const Index n : {1, 3, 5, 8, 13, 16, 31, 48, 64}) {
                    const Index K = std::array<Index, 3>{16, 40, 7}[static_cast<std::size_t>(which % 3)];
                    const Index V = std::array<Index, 4>{16, 5, 33, 48}[static_cast<std::size_t>(which % 4)];
                    ++which;
                    test(product_kind, ChunkShape{core::rules[static_cast<std::size_t>(name)], name, gates, n, K, V});
                    if (testing::Test::HasFatalFailure()) return;
                }
            }
    });
}

template <class P>
constexpr core::DType stored_as = P::depth == 1 ? core::DType::f32 : core::DType::bf16;

}  // namespace softdelta::test

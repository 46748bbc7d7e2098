// New keys and values of a cache: each number within half a step of what was given, every other byte as before.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "support/array.h"
#include "support/error_of.h"

namespace softdelta::test {
namespace {

enum class Kind { f32, bf16, i8_rows, i8_blocks, halves, f8_of_heads };
constexpr Kind kinds[] = {Kind::f32, Kind::bf16, Kind::i8_rows, Kind::i8_blocks, Kind::halves, Kind::f8_of_heads};

// A cache of one of k and v, [entries, rows, Hk, D] and what belongs to it.
struct Cache {
    Kind kind;
    Index rows, heads, D;
    std::vector<std::uint8_t> memory;
    Tensor numbers;
    Array scale;

    Cache(Kind of, Index entries, Index rows_of_entry, Index Hk, Index size, DType scale_type)
        : kind(of), rows(rows_of_entry), heads(Hk), D(size) {
        const std::size_t count = static_cast<std::size_t>(entries * rows * Hk * D);
        memory.assign(count * 4, 0x5a);
        if (kind == Kind::f32 || kind == Kind::bf16)
            numbers = Tensor(memory.data(), kind == Kind::f32 ? DType::f32 : DType::bf16, {entries, rows, Hk, D});
        if (kind == Kind::i8_rows) {
            numbers = Tensor(memory.data(), DType::i8, {entries, rows, Hk, D});
            scale = Array(scale_type, {entries, rows, Hk, 1});
        }
        if (kind == Kind::i8_blocks || kind == Kind::halves) {
            const bool halves = kind == Kind::halves;
            numbers =
                Tensor(memory.data(), halves ? DType::u8 : DType::i8, {entries, rows, Hk, D / 32, halves ? 16 : 32});
            scale = Array(scale_type, {entries, rows, Hk, D / 32});
        }
        if (kind == Kind::f8_of_heads) {
            numbers = Tensor(memory.data(), DType::f8, {entries, rows, Hk, D});
            scale = Array(scale_type, {1, 1, Hk, 1});
            for (Index h = 0; h < Hk; ++h) scale.set(h, 0.25 + static_cast<double>(h));
        }
    }

    // A number and the farthest that it may be from x.
    std::pair<double, double> get(Index entry, Index row, Index h, Index c, double x) const {
        const Index place = (entry * rows + row) * heads + h, at = place * D + c;
        const auto byte = [&](Index i) { return memory[static_cast<std::size_t>(i)]; };
        switch (kind) {
            case Kind::f32: {
                float value = 0;
                std::memcpy(&value, memory.data() + 4 * at, 4);
                return {static_cast<double>(value), 0};
            }
            case Kind::bf16: {
                core::bf16 value{};
                std::memcpy(&value, memory.data() + 2 * at, 2);
                return {static_cast<double>(core::to_float(value)), std::abs(x) * 0x1p-8};
            }
            case Kind::i8_rows: {
                const double s = scale.get(place);
                return {s * static_cast<std::int8_t>(byte(at)), 0.57 * s};
            }
            case Kind::i8_blocks: {
                const double s = scale.get(place * (D / 32) + c / 32);
                return {s * static_cast<std::int8_t>(byte(at)), 0.57 * s};
            }
            case Kind::halves: {
                const double s = scale.get(place * (D / 32) + c / 32);
                const int both = byte(place * (D / 2) + c / 32 * 16 + c % 16);
                return {s * ((c % 32 < 16 ? both & 15 : both >> 4) - 8), 1.01 * std::abs(s)};
            }
            case Kind::f8_of_heads: {
                const double s = scale.get(h);
                const double kept = std::min(std::abs(x), 448 * s);  // beyond it, the largest
                return {s * static_cast<double>(core::to_float(core::f8{byte(at)})),
                        kept * 0x1p-4 + s * 0x1p-10 + std::abs(x) - kept};
            }
        }
        return {};
    }
};

void check(std::uint64_t seed) {
    Random random(seed);
    const Kind kind = kinds[seed % std::size(kinds)];
    const bool packed = random() % 2 == 0, paged = random() % 2 == 0;
    const Index N = 1 + static_cast<Index>(random() % 4), Hk = 1 + static_cast<Index>(random() % 3);
    const Index D = 32 * (1 + static_cast<Index>(random() % 3)), Dv = 32 * (1 + static_cast<Index>(random() % 3));
    const Index rows = paged ? 1 + static_cast<Index>(random() % 20) : 90, blocks = (90 + rows - 1) / rows;
    std::vector<Index> counts, first;
    for (Index n = 0; n < N; ++n) {
        counts.push_back(packed || n == 0 ? static_cast<Index>(random() % 40) : counts[0]);
        first.push_back(static_cast<Index>(random() % 50));
    }
    const Index total = packed ? std::accumulate(counts.begin(), counts.end(), Index{0}) : counts[0];
    const DType dtype = random() % 2 == 0 ? DType::f32 : DType::bf16;
    const Shape of_k{packed ? 1 : N, total, Hk, D}, of_v{packed ? 1 : N, total, Hk, Dv};
    const Array k = random() % 2 == 0 ? Array(dtype, of_k) : Array(dtype, of_k, random), v(DType::f32, of_v);
    fill_normal(k, random), fill_normal(v, random);
    const Array lengths(DType::i32, {N}), bounds(DType::i64, {N + 1}), table(DType::i32, {N, blocks});
    for (Index n = 0; n < N; ++n) {
        lengths.set(n, static_cast<double>(first[static_cast<std::size_t>(n)] + counts[static_cast<std::size_t>(n)]));
        bounds.set(n + 1, bounds.get(n) + static_cast<double>(counts[static_cast<std::size_t>(n)]));
        for (Index i = 0; i < blocks; ++i)
            table.set(n * blocks + i, static_cast<double>(N * blocks - 1 - (n * blocks + i)));
    }
    const DType scale_type = random() % 2 == 0 ? DType::f16 : DType::f32;
    const Index entries = paged ? N * blocks : N;
    Cache k_cache(kind, entries, rows, Hk, D, scale_type), v_cache(kind, entries, rows, Hk, Dv, scale_type);
    const std::vector<std::uint8_t> before = k_cache.memory;
    CacheAppendInputs in{.k = k.view(), .v = v.view(), .cache_seqlens = lengths.view()};
    if (packed) in.cu_seqlens = bounds.view();
    if (paged) in.block_table = table.view();
    Execution execution;
    execution.threads = static_cast<int>(1 + random() % 4);
    cache_append(in,
                 {.k_cache = k_cache.numbers,
                  .v_cache = v_cache.numbers,
                  .k_scale = k_cache.scale.view(),
                  .v_scale = v_cache.scale.view()},
                 execution);
    std::vector<bool> written(static_cast<std::size_t>(entries * rows), false);
    for (Index n = 0; n < N; ++n)
        for (Index i = 0; i < counts[static_cast<std::size_t>(n)]; ++i) {
            const Index key = first[static_cast<std::size_t>(n)] + i;
            const Index entry = paged ? static_cast<Index>(table.get(n * blocks + key / rows)) : n,
                        row = paged ? key % rows : key;
            written[static_cast<std::size_t>(entry * rows + row)] = true;
            const Index token = packed ? static_cast<Index>(bounds.get(n)) + i : n * total + i;
            for (Index h = 0; h < Hk; ++h) {
                const auto expect = [&](const Cache& cache, const Array& x, Index size) {
                    for (Index c = 0; c < size; ++c) {
                        const double expected = x.get((token * Hk + h) * size + c);
                        const auto [actual, allowed] = cache.get(entry, row, h, c, expected);
                        ASSERT_NEAR(actual, expected, allowed)
                            << "seed " << seed << ", key " << key << ", channel " << c;
                    }
                };
                expect(k_cache, k, D);
                expect(v_cache, v, Dv);
                if (testing::Test::HasFatalFailure()) return;
            }
        }
    const std::size_t row_bytes = static_cast<std::size_t>(Hk * D) *
                                  (kind == Kind::f32      ? 8
                                   : kind == Kind::bf16   ? 4
                                   : kind == Kind::halves ? 1
                                                          : 2) /
                                  2;
    for (std::size_t i = 0; i < before.size(); ++i) {
        const bool is_new = i / row_bytes < written.size() && written[i / row_bytes];
        ASSERT_TRUE(is_new || k_cache.memory[i] == before[i]) << "seed " << seed << ", byte " << i << " of another row";
    }
}

TEST(CacheAppend, WritesNewRowsAlone) {
    const std::uint64_t first = first_seed();
    for (std::uint64_t seed = first; seed < first + 200 && !testing::Test::HasFatalFailure(); ++seed) check(seed);
}

// Attention over a cache that was appended to token by token is that over all keys at once.
TEST(CacheAppend, IsWhatAttentionReads) {
    constexpr Index T = 40, Hk = 2, D = 32;
    Random random(1);
    const Array q(DType::f32, {1, T, 4, D}), k(DType::f32, {1, T, Hk, D}), v(DType::f32, {1, T, Hk, D});
    for (const Array* a : {&q, &k, &v}) fill_normal(*a, random);
    const Array k_cache(DType::f32, {8, 8, Hk, D}), v_cache(DType::f32, {8, 8, Hk, D}), table(DType::i32, {1, 6}),
        used(DType::i32, {1});
    for (Index i = 0; i < 6; ++i) table.set(i, static_cast<double>(7 - i));
    const Array whole(DType::f32, {1, T, 4, D}), o(DType::f32, {1, T, 4, D});
    attention_forward({.q = q.view(), .k = k.view(), .v = v.view()}, {.o = whole.view()},
                      {.causal = Causal::bottom_right}, {.engine = "reference"});
    const auto token = [](const Array& a, Index t) {
        return Tensor(static_cast<float*>(a.view().data()) + t * a.view().stride()[1], DType::f32,
                      {1, 1, a.view().shape(2), D});
    };
    for (Index t = 0; t < T; ++t) {
        used.set(0, static_cast<double>(t + 1));
        cache_append({.k = token(k, t), .v = token(v, t), .cache_seqlens = used.view(), .block_table = table.view()},
                     {.k_cache = k_cache.view(), .v_cache = v_cache.view()});
        attention_forward({.q = token(q, t),
                           .k = k_cache.view(),
                           .v = v_cache.view(),
                           .cache_seqlens = used.view(),
                           .block_table = table.view()},
                          {.o = token(o, t)}, {.causal = Causal::bottom_right}, {.engine = "reference"});
    }
    for (Index i = 0; i < o.count(); ++i) ASSERT_NEAR(o.get(i), whole.get(i), 1e-6) << i;
}

TEST(CacheAppend, NamesWhatIsWrong) {
    std::vector<float> data(4096, 1.0F);
    std::vector<std::int32_t> lengths{3, 3}, blocks{0, 1, 2, 3};
    const auto floats = [&](Index at, std::initializer_list<Index> shape) {
        return Tensor(data.data() + at, DType::f32, shape);
    };
    const CacheAppendInputs sound{.k = floats(0, {2, 2, 1, 4}),
                                  .v = floats(0, {2, 2, 1, 4}),
                                  .cache_seqlens = Tensor(lengths.data(), DType::i32, {2}),
                                  .block_table = Tensor(blocks.data(), DType::i32, {2, 2})};
    const CacheAppendOutputs cache{.k_cache = floats(100, {4, 2, 1, 4}), .v_cache = floats(200, {4, 2, 1, 4})};
    const auto error = [&](const auto& spoil) {
        CacheAppendInputs in = sound;
        CacheAppendOutputs out = cache;
        spoil(in, out);
        return error_of([&] { cache_append(in, out); });
    };
    EXPECT_EQ(error([](auto&, auto&) {}), "");
    EXPECT_EQ(error([](auto& in, auto&) { in.cache_seqlens = {}; }),
              "cache_seqlens is missing, expected a tensor: [N]");
    EXPECT_EQ(error([](auto&, auto& out) { out.v_cache = {}; }), "v_cache is missing, expected a tensor: the cache");
    EXPECT_EQ(error([&](auto&, auto& out) {
                  out.k_cache = floats(0, {4, 2, 1, 4});
              }),
              "k_cache: memory is shared with k, expected memory of its own: results are written while others are "
              "still needed");
    EXPECT_EQ(error([&](auto&, auto& out) {
                  out.k_scale = floats(300, {1, 1, 1, 1});
              }),
              "k_scale is given, expected none: k_cache is f32");
    lengths[1] = 5;
    EXPECT_EQ(error([](auto&, auto&) {}), "cache_seqlens[1] is 5, expected 2 to 4: it counts the new keys too");
    lengths[1] = 3, blocks[3] = 4;
    EXPECT_EQ(error([](auto&, auto&) {}), "block_table[1, 1] is 4, expected 0 to 3 (blocks of k_cache)");
    blocks[3] = 1;
    EXPECT_EQ(error([](auto&, auto&) {}),
              "block_table: block 1 is written for two sequences, expected one: others may read it");
}

}  // namespace
}  // namespace softdelta::test

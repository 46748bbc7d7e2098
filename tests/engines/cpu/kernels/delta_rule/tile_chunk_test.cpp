// The fold and the scan of a chunk by matrix tiles (chunk/tiles.h, forward/tiles.h) against the stages in f64. Factors
// of rows lie beside the operands: a test multiplies both. The scan is given the stages' fold.
#include "engines/cpu/kernels/delta_rule/chunk.h"
#include "engines/cpu/kernels/delta_rule/forward/tiles.h"

namespace softdelta::test {
namespace {

inline double number(const std::uint32_t* row, Index k) {
    return static_cast<double>(kernels::SOFTDELTA_ISA_NAMESPACE::a_element(row, k, PairProduct{}));
}

// Where row i of k lies in what is written.
inline Index written_place(Index i) {
    return i / two_tiles * two_tiles + kernels::sixteen_bits::place(static_cast<int>(i % two_tiles));
}

template <class P>
void check_tile_fold(const ChunkShape& shape) {
    const Chunk chunk(shape, stored_as<P>, 5);
    const Chunk sizes_of_chunk = with_sizes(chunk, stored_as<P>, 5);
    const Truth truth(chunk), sizes(sizes_of_chunk);
    const DeltaHeads heads = chunk.heads();
    const Index n = shape.n, K = shape.K;
    Scratched<Preparation<P>> prepared(heads, ChunkSizes<P>{K, shape.V, n});
    Scratched<TileFold<P>> fold(heads);
    Scratched<TileChunk> x(K);
    ASSERT_TRUE(prepared->load_value_head({0, 0, n}));
    ASSERT_TRUE(fold->fits(n, n, prepared->gates()));
    ASSERT_TRUE(fold->run({0, 0, n}, prepared->gates(), false, *x));

    const Matrix read = truth.read_query(), write = truth.write_key(), erase = truth.erase_key(), score = truth.score(),
                 erase_score = truth.erase_score(), score_size = sizes.score(), erase_score_size = sizes.erase_score();
    const auto limit = [](double size) { return 0x1p-8 * 3 * size + 0x1p-120; };
    for (Index i = 0; i < n; ++i) {
        const double to_read = static_cast<double>(x->read[i]), to_erase = static_cast<double>(x->erase[i]),
                     to_write = static_cast<double>(x->write[i]);
        for (Index m = 0; m < K; ++m) {
            ASSERT_NEAR(to_read * number(x->q + i * x->row, m), read(i, m), limit(std::abs(read(i, m)))) << "q";
            ASSERT_NEAR(to_erase * number(x->p + i * x->row, m), -erase(i, m), limit(std::abs(erase(i, m)))) << "p";
            const double after = shape.channel_gate() ? static_cast<double>(x->state_decay[m]) : 1;
            ASSERT_NEAR(after * to_write * number(x->written + m * TileChunk::written_row, written_place(i)),
                        write(i, m), limit(std::abs(write(i, m))))
                << "written";
        }
        const Index tile = i / tile_size * tile_size;
        for (Index j = 0; j < n && j < tile + tile_size; ++j) {
            ASSERT_NEAR(number(x->score + i * TileChunk::score_row, j), score(i, j), limit(score_size(i, j)))
                << "score " << i << ", " << j;
            const double left = number(x->erase_score + i * TileChunk::score_row, j);
            const double all = j < tile ? left : left + static_cast<double>(x->own[i * tile_size + j - tile]);
            ASSERT_NEAR(all, -erase_score(i, j), limit(erase_score_size(i, j))) << "erase_score " << i << ", " << j;
        }
    }
    for (Index i = n; i < x->rows; ++i) {  // products and U read these, too
        ASSERT_EQ(x->erase[i], 0.0F) << i;
        for (Index j = 0; j < x->rows; ++j) ASSERT_EQ(number(x->erase_score + i * TileChunk::score_row, j), 0) << i;
        for (Index j = 0; j < tile_size; ++j) ASSERT_EQ(x->own[i * tile_size + j], 0.0F) << i << ", " << j;
    }
    // Gates of a channel, together at most 60 here, are summed in f32.
    const double unit = shape.channel_gate() ? 0x1p-16 : 0x1p-18;
    const std::vector<double> decay = truth.state_decay();
    for (Index m = 0; m < K; ++m) {
        const double exact = decay[static_cast<std::size_t>(m)];
        ASSERT_NEAR(static_cast<double>(x->state_decay[m]), exact, unit * exact + 0x1p-120) << "state_decay";
    }
}

// The stages' fold with factors of 1.
inline void pack_tiles(const Chunk& chunk, const Truth& truth, Scratched<TileChunk>& tiles) {
    tiles.clear();
    TileChunk& x = *tiles;
    const Index n = chunk.shape.n, K = chunk.shape.K;
    const Matrix read = truth.read_query(), write = truth.write_key(), erase = truth.erase_key(), score = truth.score(),
                 erase_score = truth.erase_score();
    const std::vector<double> decay = truth.state_decay();
    x.set_rows(n);
    for (Index i = 0; i < n; ++i) {
        x.read[i] = x.write[i] = 1, x.erase[i] = -1;
        x.beta[i] = static_cast<float>(chunk.call.beta.get(i));
        for (Index m = 0; m < K; ++m) {
            put(x.q + i * x.row, m, read(i, m));
            put(x.p + i * x.row, m, erase(i, m));
            const double after = chunk.shape.channel_gate() ? decay[static_cast<std::size_t>(m)] : 1;
            put(x.written + m * TileChunk::written_row, written_place(i), write(i, m) / after);
        }
        const Index tile = i / tile_size * tile_size;
        for (Index j = 0; j <= i; ++j) {
            put(x.score + i * TileChunk::score_row, j, score(i, j));
            if (j < tile)
                put(x.erase_score + i * TileChunk::score_row, j, -erase_score(i, j));
            else
                x.own[i * tile_size + j - tile] = static_cast<float>(-erase_score(i, j));
        }
    }
    for (Index m = 0; m < K; ++m) x.state_decay[m] = static_cast<float>(decay[static_cast<std::size_t>(m)]);
}

// Within what rounding every operand to bf16 costs, over all numbers.
template <class Actual>
void expect_near(const Matrix& truth, const std::string& what, const Actual& actual) {
    double error = 0, size = 0;
    for (Index i = 0; i < truth.rows(); ++i)
        for (Index j = 0; j < truth.columns(); ++j) {
            error += (actual(i, j) - truth(i, j)) * (actual(i, j) - truth(i, j));
            size += truth(i, j) * truth(i, j);
        }
    EXPECT_LT(std::sqrt(error), 0.01 * std::sqrt(size) + 0x1p-120) << what;
}

template <class P>
void check_tile_scan(const ChunkShape& shape) {
    const Chunk chunk(shape, stored_as<P>, 7);
    const Truth truth(chunk);
    const DeltaHeads heads = chunk.heads();
    const ChunkSizes<P> of{shape.K, shape.V, shape.n};
    Scratched<TileChunk> x(shape.K);
    Scratched<StatePanels<P>> panels(of, Index{1});
    const Index columns = panels->columns();
    Scratched<TileScan<P>> scan(heads, columns);
    pack_tiles(chunk, truth, x);
    pack_panels(Matrix(chunk.call.initial_state, shape.K, shape.V, shape.V), Matrix(shape.n, shape.V), panels);
    const Buffer<float> o(shape.n * columns);
    Prefetch none;
    scan->run(
        {0, 0, shape.n}, *x, {0, columns}, *panels,
        [&](Index i, Index c, Index width, const auto& sums) {
            for (Index m = 0; m < width; m += W) store(o.data() + i * columns + c + m, sums(m));
        },
        none, true, false);
    expect_near(truth.U(), "U", [&](Index i, Index c) {
        const auto panel = panels->panel(c / NR * NR);
        return in_rows<P>(panel.operand_rows, panel.width, i, c % NR);
    });
    expect_near(truth.o(), "o", [&](Index i, Index c) { return static_cast<double>(o[i * columns + c]); });
    expect_near(truth.final_state(), "final state", [&](Index m, Index c) {
        const auto panel = panels->panel(c / NR * NR);
        return static_cast<double>(panel.state[m * panel.width + c % NR]);
    });
    for (Index m = 0; m < shape.K; ++m)  // for the next chunk
        for (Index c = 0; c < columns; ++c) {
            const auto panel = panels->panel(c / NR * NR);
            const core::bf16 rounded = core::to_bf16(static_cast<double>(panel.state[m * panel.width + c % NR]));
            ASSERT_EQ(in_rows<P>(panel.operand, panel.width, m, c % NR), core::to_float(rounded)) << m << ", " << c;
        }
}

template <class Test>
void for_each_tile_chunk(const Test& test) {
    for_each_product([&](auto product_kind) {
        using Tiles = typename decltype(product_kind)::Tiles;
        if constexpr (Tiles::exist) {
            const Tiles tiles;
            constexpr std::pair<Rule, Gates> kinds[] = {{Rule::delta_rule, Gates::none},
                                                        {Rule::gated_delta_rule, Gates::mild},
                                                        {Rule::gated_delta_rule, Gates::steep},
                                                        {Rule::gated_delta_rule, Gates::wiping},
                                                        {Rule::kda, Gates::mild},
                                                        {Rule::gdn2, Gates::mild},
                                                        {Rule::dplr, Gates::mild}};
            for (const auto& [name, gates] : kinds)
                for (const Index n : {5, 16, 31, 33, 48, 64}) {
                    const Index K = n % 2 == 0 ? 32 : 96, V = std::array<Index, 4>{16, 64, 33, 80}[n / 5 % 4];
                    const ChunkShape shape{core::rules[static_cast<std::size_t>(name)], name, gates, n, K, V};
                    SCOPED_TRACE(shape.describe());
                    test(product_kind, shape);
                    if (testing::Test::HasFatalFailure()) return;
                }
        }
    });
}

TEST(DeltaTiles, FoldWhatTheStagesFold) {
    for_each_tile_chunk(
        [](auto product_kind, const ChunkShape& shape) { check_tile_fold<decltype(product_kind)>(shape); });
}

TEST(DeltaTiles, GiveTheStagesOutputAndState) {
    for_each_tile_chunk(
        [](auto product_kind, const ChunkShape& shape) { check_tile_scan<decltype(product_kind)>(shape); });
}

}  // namespace
}  // namespace softdelta::test

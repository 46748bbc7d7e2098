// The fold of a chunk (docs/math.md, "Fold") against the stages' qg, kg, Aqk, L and w.
#include "engines/cpu/kernels/delta_rule/chunk.h"

namespace softdelta::test {
namespace {

// Rounding of `size`: a few ulp, in pairs those of bf16; smaller numbers than f32's become 0.
template <class P>
double limit(double size, double roundings) {
    return (P::depth == 1 ? 0x1p-23 * roundings : 0x1p-8 * 3) * size + 0x1p-120;
}

template <class P>
void check_fold(const ChunkShape& shape) {
    const Chunk chunk(shape, stored_as<P>, 1);
    const Chunk sizes_of_chunk = with_sizes(chunk, stored_as<P>, 1);
    const Truth truth(chunk), sizes(sizes_of_chunk);
    const DeltaHeads heads = chunk.heads();
    const ChunkSizes<P> of{shape.K, shape.V, shape.n};
    Scratched<Preparation<P>> prepared(heads, of);
    Scratched<Folded<P>> f(of);
    prepared->load_key_head({0, 0, shape.n});
    ASSERT_TRUE(prepared->load_value_head({0, 0, shape.n}));
    prepared->fold(0, shape.n, *f);

    const Index n = shape.n, K = shape.K, first_score = depth_of<P>(K) * P::depth;
    const Matrix read = truth.read_query(), write = truth.write_key(), erase = truth.erase_key();
    const Matrix score = truth.score(), erase_score = truth.erase_score();
    const Matrix score_size = sizes.score(), erase_score_size = sizes.erase_score();
    const double terms = 32 + static_cast<double>(K);
    const auto left = [](const Element<P>* row, Index k) { return static_cast<double>(a_element(row, k, P{})); };
    for (Index i = 0; i < n; ++i) {
        for (Index m = 0; m < K; ++m) {
            ASSERT_NEAR(left(f->read + i * f->row, m), read(i, m), limit<P>(std::abs(read(i, m)), 32)) << "read_query";
            ASSERT_NEAR(in_rows<P>(f->write_key, f->write_row, i, m), write(i, m), limit<P>(std::abs(write(i, m)), 32))
                << "write_key";
            if (!shape.erases()) continue;
            ASSERT_NEAR(left(f->erase + i * f->row, m), -erase(i, m), limit<P>(std::abs(erase(i, m)), 32))
                << "erase_key";
        }
        for (Index j = 0; j < n; ++j) {
            const double size = limit<P>(score_size(i, j), terms), erase_size = limit<P>(erase_score_size(i, j), terms);
            ASSERT_NEAR(left(f->read + i * f->row, first_score + j), score(i, j), size) << "score " << i << ", " << j;
            if (!shape.erases()) continue;
            ASSERT_NEAR(left(f->erase + i * f->row, first_score + j), -erase_score(i, j), erase_size)
                << "erase_score " << i << ", " << j;
            ASSERT_NEAR(static_cast<double>(f->erase_score[i * f->erase_score_row + j]), -erase_score(i, j), erase_size)
                << "erase_score in f32 " << i << ", " << j;
        }
    }
    const std::vector<double> decay = truth.state_decay();
    for (Index m = 0; m < K; ++m) {
        const double exact = decay[static_cast<std::size_t>(m)];
        ASSERT_NEAR(static_cast<double>(f->state_decay[m]), exact, limit<FloatProduct>(exact, 32)) << "state_decay";
    }
}

TEST(DeltaFold, IsWhatTheStagesFold) {
    for_each_chunk([](auto product_kind, const ChunkShape& shape) {
        SCOPED_TRACE(shape.describe());
        check_fold<decltype(product_kind)>(shape);
    });
}

}  // namespace
}  // namespace softdelta::test

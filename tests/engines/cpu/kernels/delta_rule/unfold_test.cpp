// The unfold of a chunk (docs/math.md, "Unfold" and "The gradient of the gate") against the stages' dq, dk, dp and dg.
// The gradients of the folded chunk are the stages'.
#include "engines/cpu/kernels/delta_rule/backward/unfold_channel_gate.h"
#include "engines/cpu/kernels/delta_rule/gradients.h"

namespace softdelta::test {
namespace {

// Every element within a part of the truth's root mean square.
template <class Actual>
void expect_close(const Matrix& truth, double limit, const std::string& what, const Actual& actual) {
    double square = 0;
    for (Index i = 0; i < truth.rows(); ++i)
        for (Index j = 0; j < truth.columns(); ++j) square += truth(i, j) * truth(i, j);
    const double most = limit * std::sqrt(square / static_cast<double>(truth.rows() * truth.columns()));
    for (Index i = 0; i < truth.rows(); ++i)
        for (Index j = 0; j < truth.columns(); ++j)
            ASSERT_NEAR(actual(i, j), truth(i, j), most) << what << " [" << i << ", " << j << "]";
}

template <class P>
void check_unfold(const ChunkShape& shape) {
    const Chunk chunk(shape, stored_as<P>, 5);
    const Truth forward(chunk);
    const TrueGradients truth(chunk, forward);
    const DeltaHeads heads = chunk.heads();
    const ChunkSizes<P> of{shape.K, shape.V, shape.n};
    const Index n = shape.n, K = shape.K;
    Scratched<Preparation<P>> prepared(heads, of);
    Scratched<Folded<P>> folded(of, shape.channel_gate());
    Scratched<ChannelUnfoldScratch<P>> channels(of, shape.channel_gate());
    channels->left = folded->left, channels->right = folded->right;
    prepared->load_key_head({0, 0, n});
    ASSERT_TRUE(prepared->load_value_head({0, 0, n}));
    prepared->fold(0, n, *folded);

    Scratched<ChunkGradients<P>> d(of, shape.channel_gate());
    d.clear();
    fill(d->dq, d->key_row, truth.read_query());
    fill(d->dk, d->key_row, truth.write_key());
    fill(d->de, d->key_row, truth.erase_key());
    fill(d->dscore, d->pair_row, truth.score());
    fill(d->derase_score, d->pair_row, truth.erase_score());
    const std::vector<double> decay = truth.state_decay();
    for (Index m = 0; m < K; ++m) d->dstate_decay[m] = static_cast<float>(decay[static_cast<std::size_t>(m)]);
    const bool has_p = takes(shape.rule, "p");
    if (shape.channel_gate()) {
        ChannelUnfold<P>(heads, prepared->keys(), prepared->gates(), *folded, *d, *channels).run();
    } else {
        Scratched<UnfoldScratch<P>> scratch(of, has_p);
        SharedUnfold<P>(heads, prepared->keys(), prepared->gates(), n, folded->state_decay, *d, *scratch).run();
    }

    const double limit = P::depth == 1 ? 2e-5 : 0.05;
    const auto at = [&](const float* rows, Index i, Index m) { return static_cast<double>(rows[i * d->key_row + m]); };
    const auto dp = [&](Index i, Index m) { return shape.erases() ? chunk.call.beta.get(i) * at(d->de, i, m) : 0; };
    expect_close(truth.result("dq", K), limit, "dq", [&](Index i, Index m) { return at(d->dq, i, m); });
    expect_close(truth.result("dk", K), limit, "dk",
                 [&](Index i, Index m) { return at(d->dk, i, m) + (has_p ? 0 : dp(i, m)); });
    if (has_p) expect_close(truth.result("dp", K), limit, "dp", dp);
    if (shape.gates == Gates::none) return;
    if (shape.channel_gate())
        expect_close(truth.result("dg", K), limit, "dg", [&](Index i, Index m) { return at(d->dg, i, m); });
    else
        expect_close(truth.result("dg", 1), limit, "dg",
                     [&](Index i, Index /*m*/) { return static_cast<double>(d->dg[i]); });
}

TEST(DeltaUnfold, IsTheAdjointOfTheFold) {
    for_each_chunk([](auto product_kind, const ChunkShape& shape) {
        SCOPED_TRACE(shape.describe());
        check_unfold<decltype(product_kind)>(shape);
    });
}

}  // namespace
}  // namespace softdelta::test

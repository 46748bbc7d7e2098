// The scan of a chunk backwards (docs/math.md, "Backward") against the stages' du, dAqk, dL_solve and dinitial_state.
// The folded chunk, states and U are the stages'.
#include "engines/cpu/kernels/delta_rule/backward/scan.h"

#include "engines/cpu/kernels/delta_rule/gradients.h"

namespace softdelta::test {
namespace {

template <class P>
class Case {
  public:
    explicit Case(const ChunkShape& of)
        : shape(of),
          chunk(of, stored_as<P>, 4),
          forward(chunk),
          truth(chunk, forward),
          sizes_of{of.K, of.V, of.n},
          d(sizes_of, of.channel_gate()) {}

    // dO as panels and as a left operand.
    void pack_output_gradients() {
        d.clear();
        for (Index i = 0; i < shape.n; ++i)
            for (Index c = 0; c < shape.V; ++c) {
                const auto panel = d->panel(c / NR * NR, shape.n);
                panel.d_o[i * panel.width + c % NR] = static_cast<float>(truth.d_o(i, c));
                put(d->d_o + i * d->value_row, c, truth.d_o(i, c));
                put(d->dR + i * d->value_row, c, truth.dR(i, c));
            }
    }

    const ChunkShape shape;
    const Chunk chunk;
    const Truth forward;
    const TrueGradients truth;
    const ChunkSizes<P> sizes_of;
    Scratched<ChunkGradients<P>> d;
};

template <class P>
void check_backward_scan(const ChunkShape& shape) {
    Case<P> x(shape);
    const TrueGradients& truth = x.truth;
    Scratched<Folded<P>> folded(x.sizes_of);
    pack_folded(x.chunk, x.forward, folded);
    Scratched<Reversed<P>> reversed(x.sizes_of);
    const ChunkSizes<FloatProduct> state_sizes{shape.K, shape.V, 0};
    Scratched<StateOnly> dstate(state_sizes, Index{1});
    pack_panels(truth.dh, Matrix(0, shape.V), dstate);
    x.pack_output_gradients();
    scan_backward(shape.erases(), reversed->of(*folded), shape.K, *dstate, *x.d, [] {});

    const Matrix& forward_score = x.forward.score();
    const Matrix du_size =
        sizes(transposed(forward_score)) * sizes(truth.d_o) + sizes(x.forward.write_key()) * sizes(truth.dh);
    const Matrix dR_size =
        shape.erases() ? sizes(transposed(x.forward.inverse())) *
                             (du_size + sizes(transposed(x.forward.erase_score())) * sizes(truth.dR) + sizes(truth.dR))
                       : du_size;
    expect_rounded<P>(truth.dR, dR_size, "dR", [&](Index i, Index c) {
        const auto panel = x.d->panel(c / NR * NR, shape.n);
        return static_cast<double>(panel.dR[i * panel.width + c % NR]);
    });
    const Matrix dS_size = rows_times(x.forward.state_decay(), sizes(truth.dh)) +
                           sizes(transposed(x.forward.read_query())) * sizes(truth.d_o) +
                           sizes(transposed(x.forward.erase_key())) * dR_size;
    expect_rounded<P>(truth.dinitial_state(), dS_size, "dS", [&](Index m, Index c) {
        const auto panel = dstate->panel(c / NR * NR);
        return static_cast<double>(panel.state[m * panel.width + c % NR]);
    });
}

template <class P>
void check_gradients(const ChunkShape& shape) {
    Case<P> x(shape);
    const TrueGradients& truth = x.truth;
    x.pack_output_gradients();
    Scratched<StatePanels<P>> state(x.sizes_of, Index{1});
    Scratched<StateOnly> dstate(ChunkSizes<FloatProduct>{shape.K, shape.V, 0}, Index{1});
    pack_panels(truth.h, Matrix(0, shape.V), state);
    pack_panels(truth.dh, Matrix(0, shape.V), dstate);
    const Buffer<float> entering(transposed_state(x.sizes_of));
    transpose_state(shape.K, shape.V, *state, entering.data());
    transpose_state(shape.K, shape.V, *dstate, x.d->dstate);
    const Buffer<Element<P>> U(shape.n * x.d->value_row);
    std::memset(U.data(), 0, static_cast<std::size_t>(U.count()) * sizeof(Element<P>));
    for (Index i = 0; i < shape.n; ++i)
        for (Index c = 0; c < shape.V; ++c) put(U.data() + i * x.d->value_row, c, truth.U(i, c));
    scan_gradients(shape.erases(), shape.n, shape.K, shape.V, entering.data(), U.data(), *x.d, [] {});

    const auto& d = *x.d;
    const auto rows = [&](const float* from, Index row) {
        return [=](Index i, Index j) { return static_cast<double>(from[i * row + j]); };
    };
    const auto lower = [&](const float* from, bool diagonal) {  // nothing is said of the rest
        return [=, row = d.pair_row](Index i, Index j) {
            return j < i || (diagonal && j == i) ? static_cast<double>(from[i * row + j]) : 0.0;
        };
    };
    expect_rounded<P>(truth.read_query(), sizes(truth.d_o) * sizes(transposed(truth.h)), "dread_query",
                      rows(d.dq, d.key_row));
    expect_rounded<P>(truth.write_key(), sizes(truth.U) * sizes(transposed(truth.dh)), "dwrite_key",
                      rows(d.dk, d.key_row));
    expect_rounded<P>(truth.score(), sizes(truth.d_o) * sizes(transposed(truth.U)), "dscore", lower(d.dscore, true));
    const std::vector<double> decay = truth.state_decay();
    for (Index m = 0; m < shape.K; ++m)
        ASSERT_NEAR(static_cast<double>(d.dstate_decay[m]), decay[static_cast<std::size_t>(m)],
                    1e-4 * static_cast<double>(shape.V))
            << "dstate_decay " << m;
    if (!shape.erases()) return;
    expect_rounded<P>(truth.erase_key(), sizes(truth.dR) * sizes(transposed(truth.h)), "derase_key",
                      rows(d.de, d.key_row));
    expect_rounded<P>(truth.erase_score(), sizes(truth.dR) * sizes(transposed(truth.U)), "derase_score",
                      lower(d.derase_score, false));
}

TEST(DeltaBackwardScan, SolvesAndCarriesTheState) {
    for_each_chunk([](auto product_kind, const ChunkShape& shape) {
        SCOPED_TRACE(shape.describe());
        check_backward_scan<decltype(product_kind)>(shape);
    });
}

TEST(DeltaBackwardScan, GivesTheGradientsOfTheFoldedChunk) {
    for_each_chunk([](auto product_kind, const ChunkShape& shape) {
        SCOPED_TRACE(shape.describe());
        check_gradients<decltype(product_kind)>(shape);
    });
}

}  // namespace
}  // namespace softdelta::test

// The triangular solve of a chunk (docs/math.md, "Forward") against the stages' v_new. The folded chunk is the stages'.
#include "engines/cpu/kernels/delta_rule/forward/solve.h"
#include "engines/cpu/kernels/delta_rule/chunk.h"

namespace softdelta::test {
namespace {

template <class P>
void check_solve(const ChunkShape& shape) {
    const Chunk chunk(shape, stored_as<P>, 2);
    const Truth truth(chunk);
    const ChunkSizes<P> of{shape.K, shape.V, shape.n};
    Scratched<Folded<P>> f(of);
    Scratched<StatePanels<P>> panels(of, Index{1});
    const Matrix state(chunk.call.initial_state, shape.K, shape.V, shape.V);
    Matrix values(chunk.call.v, shape.n, shape.V, shape.V);  // β∘v
    for (Index i = 0; i < shape.n; ++i)
        for (Index c = 0; c < shape.V; ++c) values(i, c) *= chunk.call.beta.get(i);
    pack_folded(chunk, truth, f);
    pack_panels(state, values, panels);
    for (Index c = 0; c < panels->columns(); c += NR) {
        Prefetch none;
        solve(*f, panels->panel(c), none, 0);
    }
    // U = (I + erase_score)⁻¹ (β∘v − erase_key S), row by row from the rows above
    const Matrix U = truth.U();
    const Matrix terms =
        sizes(values) + sizes(truth.erase_key()) * sizes(state) + sizes(truth.erase_score()) * sizes(U) + sizes(U);
    expect_rounded<P>(U, sizes(truth.inverse()) * terms, "U", [&](Index i, Index c) {
        const auto panel = panels->panel(c / NR * NR);
        return in_rows<P>(panel.operand_rows, panel.width, i, c % NR);
    });
}

TEST(DeltaSolve, GivesTheStagesU) {
    for_each_chunk([](auto product_kind, const ChunkShape& shape) {
        SCOPED_TRACE(shape.describe());
        if (shape.erases()) check_solve<decltype(product_kind)>(shape);
    });
}

}  // namespace
}  // namespace softdelta::test

// The scan of a chunk (docs/math.md, "Forward") against the stages' o and final state. The folded chunk is the stages',
// and so is U: it is given as values that erase nothing, so that the solve has no part in this.
#include "engines/cpu/kernels/delta_rule/forward/scan.h"

#include "engines/cpu/kernels/delta_rule/chunk.h"

namespace softdelta::test {
namespace {

template <class P>
void check_scan(const ChunkShape& shape) {
    const Chunk chunk(shape, stored_as<P>, 3);
    const Truth truth(chunk);
    const ChunkSizes<P> of{shape.K, shape.V, shape.n};
    Scratched<Folded<P>> f(of);
    Scratched<StatePanels<P>> panels(of, Index{1});
    pack_folded(chunk, truth, f);
    const Matrix state(chunk.call.initial_state, shape.K, shape.V, shape.V);
    pack_panels(state, truth.U(), panels);
    const Index columns = panels->columns();
    const Buffer<float> o(shape.n * columns);
    Prefetch none;
    f->prepare_write(shape.K);
    scan(false, *f, shape.K, {0, columns}, *panels, o.data(), columns, none);
    const Matrix size_of_U = sizes(truth.U());
    expect_rounded<P>(truth.o(), sizes(truth.read_query()) * sizes(state) + sizes(truth.score()) * size_of_U, "o",
                      [&](Index i, Index c) { return static_cast<double>(o[i * columns + c]); });
    expect_rounded<P>(truth.final_state(),
                      rows_times(truth.state_decay(), sizes(state)) + sizes(transposed(truth.write_key())) * size_of_U,
                      "final state", [&](Index m, Index c) {
                          const auto panel = panels->panel(c / NR * NR);
                          return static_cast<double>(panel.state[m * panel.width + c % NR]);
                      });
}

TEST(DeltaScan, GivesTheStagesOutputAndState) {
    for_each_chunk([](auto product_kind, const ChunkShape& shape) {
        SCOPED_TRACE(shape.describe());
        check_scan<decltype(product_kind)>(shape);
    });
}

}  // namespace
}  // namespace softdelta::test

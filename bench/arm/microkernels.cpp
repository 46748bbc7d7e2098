// What scripts/arm --model looks at: the loops in which kernels spend their time, compiled to assembly.
#include "engines/cpu/kernels/attention/decode/products.h"
#include "engines/cpu/kernels/delta_rule/step/state.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

template void microkernel<FloatProduct, MR, 2>(const float*, Index, Index, const float*, Index, float*, Index, Start,
                                               const float*);
template void dots_of<FloatProduct, core::f16, 4>(const float*, Index, Index, const void* const*, const QuantisedRows&,
                                                  const void* const*, float*);
template void step_state<float, 1>(const StateView<float>&, Index, Index, const StepRows&);

void exponentials(const float* x, float* __restrict p, Index n) {
    for (Index i = 0; i < n; i += W) store(p + i, exp2(load(x + i)));
}

#if defined(SOFTDELTA_LEVEL_HAS_BLOCKS)
template void block_microkernel<PairProduct, MR, 2>(const std::uint32_t*, const std::uint32_t*, Index, float*, Index,
                                                    Start, const float*);
#endif

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE

// The table of one instruction set. CMake compiles the kernels once per level; SOFTDELTA_ISA_NAMESPACE, _NAME and
// _TABLE are the level's namespace, its public name and the one symbol that stays visible.
#include "kernels/attention_backward.h"
#include "kernels/attention_decode.h"
#include "kernels/attention_forward.h"
#include "kernels/ceiling.h"
#include "kernels/delta_rule_backward.h"
#include "kernels/delta_rule_forward.h"
#include "kernels/delta_rule_split.h"
#include "kernels/delta_rule_step.h"
#include "kernels/table.h"

namespace softdelta::kernels {

namespace isa = SOFTDELTA_ISA_NAMESPACE;

extern "C" const Table SOFTDELTA_ISA_TABLE;

constinit const Table SOFTDELTA_ISA_TABLE = {
    .name = SOFTDELTA_ISA_NAME,
    .vector_floats = isa::W,
    .matrix_tiles = isa::PairProduct::Tiles::exist,
    .multiply_add_f32 = isa::multiply_add_f32,
    .multiply_add_bf16 = isa::multiply_add_bf16,
    .read_memory = isa::read_memory,
    .attention_forward = &isa::attention_forward,
    .attention_decode = &isa::attention_decode,
    .attention_backward = &isa::attention_backward,
    .delta_forward = &isa::delta_forward,
    .delta_split = &isa::delta_split,
    .delta_step = &isa::delta_step,
    .delta_backward = &isa::delta_backward,
};

}  // namespace softdelta::kernels

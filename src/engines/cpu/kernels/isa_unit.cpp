// The table of one instruction set. CMake compiles the kernels once per level; SOFTDELTA_ISA_NAMESPACE, _NAME and
// _TABLE are the level's namespace, its public name and the one symbol that stays visible.
#include "engines/cpu/kernels/attention/backward/backward.h"
#include "engines/cpu/kernels/attention/decode/decode.h"
#include "engines/cpu/kernels/attention/forward/forward.h"
#include "engines/cpu/kernels/ceiling.h"
#include "engines/cpu/kernels/delta_rule/backward/backward.h"
#include "engines/cpu/kernels/delta_rule/backward/split.h"
#include "engines/cpu/kernels/delta_rule/forward/forward.h"
#include "engines/cpu/kernels/delta_rule/forward/split.h"
#include "engines/cpu/kernels/delta_rule/step/step.h"
#include "engines/cpu/kernels/layer/convolution.h"
#include "engines/cpu/kernels/layer/norm.h"
#include "engines/cpu/kernels/table.h"

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
    .delta_backward_split = &isa::delta_backward_split,
    .convolution = &isa::convolution_kernels,
    .norm = &isa::norm_kernels,
};

}  // namespace softdelta::kernels

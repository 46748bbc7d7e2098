// The table of one instruction set. CMake compiles the kernels once per level; SOFTDELTA_ISA_NAMESPACE, _NAME and
// _TABLE are the level's namespace, its public name and the one symbol that stays visible.
#include "engines/cpu/kernels/isa_unit.h"

#include "engines/cpu/kernels/ceiling.h"

namespace softdelta::kernels {

namespace isa = SOFTDELTA_ISA_NAMESPACE;

extern "C" const Table SOFTDELTA_ISA_TABLE;

constinit const Table SOFTDELTA_ISA_TABLE = {
    .name = SOFTDELTA_ISA_NAME,
    .vector_floats = isa::W,
    .matrix_tiles = isa::MatrixTiles::exist,
    .asks_for_tiles = isa::MatrixTiles::are_granted,
    .multiply_add_f32 = isa::multiply_add_f32,
    .multiply_add_bf16 = isa::multiply_add_bf16,
    .loops = isa::tile_loops.data,
    .loop_count = isa::tile_loops.count,
    .product_flops = isa::tile_product_flops,
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

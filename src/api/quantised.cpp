#include "api/quantised.h"

#include <string>

#include "api/check.h"

namespace softdelta::api {

void take_blocks(const char* name, Tensor& t) {
    if (!t || !core::is_quantised(t.dtype)) return;
    const bool halves = t.dtype == core::DType::u8;
    const Index bytes = halves ? core::bytes_of_halves : core::quantised_block;
    if ((halves && t.rank != 5) || (t.rank == 5 && t.shape[4] != bytes))
        refuse(std::string(name) + ": shape", shape_text(t),
               std::string("blocks of 32 elements of ") + core::name_of(t.dtype) + ": 5 dimensions, the last " +
                   std::to_string(bytes));
    if (t.rank != 5) return;
    if (t.shape[3] > most_elements / core::quantised_block)
        refuse(std::string(name) + ": dimension 3", std::to_string(t.shape[3]), "a size that memory can hold");
    t.rank = 4;
    t.block = core::quantised_block;
    t.block_stride = t.stride[3];
    t.shape[3] *= core::quantised_block;
    t.stride[3] = t.stride[4];
}

void take_scale(const char* name, Tensor& scale, const char* of, const Tensor& t) {
    if (!core::is_quantised(t.dtype) && !scale) return;
    const std::string why = std::string(of) + " is " + core::name_of(t.dtype);
    if (!core::is_quantised(t.dtype)) return expect_absent(name, scale, why.c_str());
    expect_present(name, scale, why.c_str());
    expect_rank(name, scale, "B|1 Lk|1 Hk|1 D/32|1");
    for (std::size_t i = 0; i < 4; ++i) {
        const Index size = i < 3 ? t.shape[i] : t.block > 0 ? t.shape[3] / t.block : 1;
        if (scale.shape[i] != size && scale.shape[i] != 1) {
            const std::string what = std::string(i < 3 ? " (as " : " (blocks of ") + of + ") or 1";
            refuse(std::string(name) + ": dimension " + std::to_string(i), std::to_string(scale.shape[i]),
                   size == 1 ? "1" : std::to_string(size) + what);
        }
        if (scale.shape[i] == 1) scale.stride[i] = 0;
        scale.shape[i] = size;
    }
}

void take_blocks(core::AttentionInputs& in) {
    take_blocks("k", in.k);
    take_blocks("v", in.v);
}

void take_scales(core::AttentionInputs& in) {
    take_scale("k_scale", in.k_scale, "k", in.k);
    take_scale("v_scale", in.v_scale, "v", in.v);
}

}  // namespace softdelta::api

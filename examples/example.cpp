#include <cstdio>
#include <softdelta/softdelta.hpp>

int main() {
    using softdelta::DType, softdelta::Tensor;
    const std::int64_t T = 64, H = 2, D = 32;  // tokens, heads, head dimension
    std::vector<float> qkv(T * H * D, 0.1f), g(T * H, -0.5f), o(T * H * D);
    const Tensor x(qkv.data(), DType::f32, {1, T, H, D}), gate(g.data(), DType::f32, {1, T, H});
    const Tensor out(o.data(), DType::f32, {1, T, H, D});
    softdelta::delta_forward({.q = x, .k = x, .v = x, .g = gate}, {.o = out},
                             {.rule = softdelta::Rule::gated_delta_rule});
    std::printf("o[0] = %g\n", o[0]);
}

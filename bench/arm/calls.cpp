// One call of softdelta or of ggml's CPU code, for counting its instructions: calls softdelta|ggml attention|delta.
// Prints what is mapped where, for the addresses of the instructions, and the sum of the result.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <softdelta/softdelta.hpp>
#include <string>
#include <vector>

#include "ggml-cpu.h"
#include "ggml.h"

namespace {

using softdelta::DType, softdelta::Tensor;

constexpr std::int64_t queries = 512, keys = 4096, size = 128;
constexpr std::int64_t tokens = 512, heads = 4;  // of 32, which are alike

std::vector<float> numbers(std::int64_t count, float scale, float shift = 0) {
    std::vector<float> x(static_cast<std::size_t>(count));
    std::uint32_t state = 1;
    for (float& y : x) {
        state = state * 1664525U + 1013904223U;
        y = shift + scale * (static_cast<float>(state >> 8) * 0x1p-23F - 1);
    }
    return x;
}

// Not by ggml, whose instructions are counted.
std::vector<__fp16> rounded(const std::vector<float>& x) {
    return {x.begin(), x.end()};
}

struct Attention {
    std::vector<float> q = numbers(queries * size, 1.7F), o = q;
    std::vector<__fp16> k = rounded(numbers(keys * size, 1.7F, 0.1F)), v = rounded(numbers(keys * size, 1.7F));
};

struct Delta {
    std::vector<float> q = numbers(tokens * heads * size, 1.7F), k = numbers(tokens * heads * size, 0.15F), v = q;
    std::vector<float> g = numbers(tokens * heads, 0.05F, -0.05F), beta = numbers(tokens * heads, 0.5F, 0.5F);
    std::vector<float> state = numbers(heads * size * size, 0.1F), o = q, final_state = state;
};

void by_softdelta(Attention& x) {
    softdelta::attention_forward({.q = Tensor(x.q.data(), DType::f32, {1, queries, 1, size}),
                                  .k = Tensor(x.k.data(), DType::f16, {1, keys, 1, size}),
                                  .v = Tensor(x.v.data(), DType::f16, {1, keys, 1, size})},
                                 {.o = Tensor(x.o.data(), DType::f32, {1, queries, 1, size})}, {}, {.threads = 1});
}

void by_softdelta(Delta& x) {
    const auto rows = [&](std::vector<float>& data) {
        return Tensor(data.data(), DType::f32, {1, tokens, heads, size});
    };
    const auto numbers_of_rows = [&](std::vector<float>& data) {
        return Tensor(data.data(), DType::f32, {1, tokens, heads});
    };
    softdelta::delta_forward(
        {.q = rows(x.q),
         .k = rows(x.k),
         .v = rows(x.v),
         .g = numbers_of_rows(x.g),
         .beta = numbers_of_rows(x.beta),
         .initial_state = Tensor(x.state.data(), DType::f32, {1, heads, size, size})},
        {.o = rows(x.o), .final_state = Tensor(x.final_state.data(), DType::f32, {1, heads, size, size})},
        {.state_v_first = true}, {.threads = 1});
}

struct Graph {
    ggml_context* context = ggml_init({std::size_t{1} << 28, nullptr, false});

    ggml_tensor* tensor(ggml_type type, const void* data, std::int64_t a, std::int64_t b, std::int64_t c) const {
        ggml_tensor* t = ggml_new_tensor_3d(context, type, a, b, c);
        std::memcpy(t->data, data, ggml_nbytes(t));
        return t;
    }
    void compute(ggml_tensor* result, std::vector<float>& out) const {
        ggml_cgraph* graph = ggml_new_graph(context);
        ggml_build_forward_expand(graph, result);
        if (ggml_graph_compute_with_ctx(context, graph, 1) != GGML_STATUS_SUCCESS) std::abort();
        std::memcpy(out.data(), result->data, out.size() * sizeof(float));
    }
};

void by_ggml(Attention& x) {
    const Graph graph;
    ggml_tensor* q = graph.tensor(GGML_TYPE_F32, x.q.data(), size, queries, 1);
    ggml_tensor* k = graph.tensor(GGML_TYPE_F16, x.k.data(), size, keys, 1);
    ggml_tensor* v = graph.tensor(GGML_TYPE_F16, x.v.data(), size, keys, 1);
    graph.compute(ggml_flash_attn_ext(graph.context, q, k, v, nullptr, 1 / std::sqrt(static_cast<float>(size)), 0, 0),
                  x.o);
}

void by_ggml(Delta& x) {
    const Graph graph;
    const auto rows = [&](const std::vector<float>& data) {
        return graph.tensor(GGML_TYPE_F32, data.data(), size, heads, tokens);
    };
    const auto numbers_of_rows = [&](const std::vector<float>& data) {
        return graph.tensor(GGML_TYPE_F32, data.data(), 1, heads, tokens);
    };
    graph.compute(ggml_gated_delta_net(graph.context, rows(x.q), rows(x.k), rows(x.v), numbers_of_rows(x.g),
                                       numbers_of_rows(x.beta),
                                       graph.tensor(GGML_TYPE_F32, x.state.data(), size, size, heads), 1),
                  x.o);
}

template <class Call>
void compute(Call&& call, const std::string& who) {
    if (who == "ggml")
        by_ggml(call);
    else
        by_softdelta(call);
    double sum = 0;
    for (const float y : call.o) sum += y;
    std::cout << "sum " << sum << '\n';
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 1;
    std::cout << std::ifstream("/proc/self/maps").rdbuf();
    if (std::string(argv[2]) == "attention")
        compute(Attention(), argv[1]);
    else
        compute(Delta(), argv[1]);
}

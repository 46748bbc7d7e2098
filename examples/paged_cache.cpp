// Attention of a language model with a paged key/value cache. Two prompts are read in one call (prefill), then both
// sequences grow by a token per call (decode). Keys and values lie in blocks of 16 rows; a table says which blocks a
// sequence has, as in vLLM. At the end every row is compared with the f64 reference on plain, contiguous keys.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <softdelta/softdelta.hpp>
#include <vector>

using softdelta::DType, softdelta::Tensor;

constexpr std::int64_t H = 8, Hk = 2, D = 64;  // query heads, key heads, head dimension
constexpr std::int64_t sequences = 2, block_rows = 16, blocks = 16, max_blocks = 8;

struct Cache {
    std::vector<float> k = std::vector<float>(blocks * block_rows * Hk * D), v = k;
    std::vector<std::int32_t> table = std::vector<std::int32_t>(sequences * max_blocks);
    std::vector<std::int32_t> lengths = std::vector<std::int32_t>(sequences);
    std::int32_t used = 0;  // blocks handed out

    void append(std::int64_t n, const float* k_row, const float* v_row) {
        const std::int64_t t = lengths[n]++;
        if (t % block_rows == 0) table[n * max_blocks + t / block_rows] = used++;
        const std::int64_t row = table[n * max_blocks + t / block_rows] * block_rows + t % block_rows;
        std::copy_n(k_row, Hk * D, &k[row * Hk * D]);
        std::copy_n(v_row, Hk * D, &v[row * Hk * D]);
    }
};

// What a model's projections would give: all rows of a sequence, and what attention made of them.
struct Sequence {
    std::vector<float> q, k, v, o;
    std::int64_t prompt;
};

// Each sequence gets its next count[n] tokens: keys go to the cache, queries are packed one sequence after the other.
void attend(std::vector<Sequence>& all, Cache& cache, const std::vector<std::int64_t>& count) {
    std::vector<float> q;
    std::vector<std::int32_t> cu_seqlens{0};
    for (std::int64_t n = 0; n < sequences; ++n) {
        const std::int64_t begin = cache.lengths[n];
        for (std::int64_t t = begin; t < begin + count[n]; ++t)
            cache.append(n, &all[n].k[t * Hk * D], &all[n].v[t * Hk * D]);
        q.insert(q.end(), &all[n].q[begin * H * D], &all[n].q[begin * H * D] + count[n] * H * D);
        cu_seqlens.push_back(cu_seqlens.back() + static_cast<std::int32_t>(count[n]));
    }
    std::vector<float> o(q.size());
    const std::int64_t rows = cu_seqlens.back();
    softdelta::attention_forward({.q = Tensor(q.data(), DType::f32, {1, rows, H, D}),
                                  .k = Tensor(cache.k.data(), DType::f32, {blocks, block_rows, Hk, D}),
                                  .v = Tensor(cache.v.data(), DType::f32, {blocks, block_rows, Hk, D}),
                                  .cu_seqlens_q = Tensor(cu_seqlens.data(), DType::i32, {sequences + 1}),
                                  .cache_seqlens = Tensor(cache.lengths.data(), DType::i32, {sequences}),
                                  .block_table = Tensor(cache.table.data(), DType::i32, {sequences, max_blocks})},
                                 {.o = Tensor(o.data(), DType::f32, {1, rows, H, D})},
                                 {.causal = softdelta::Causal::bottom_right});  // the last query sees all keys
    for (std::int64_t n = 0; n < sequences; ++n)
        all[n].o.insert(all[n].o.end(), &o[cu_seqlens[n] * H * D], o.data() + cu_seqlens[n + 1] * H * D);
}

double largest_error(const Sequence& s) {
    const auto T = static_cast<std::int64_t>(s.o.size()) / (H * D);
    std::vector<double> truth(s.o.size());
    softdelta::attention_forward({.q = Tensor(s.q.data(), DType::f32, {1, T, H, D}),
                                  .k = Tensor(s.k.data(), DType::f32, {1, T, Hk, D}),
                                  .v = Tensor(s.v.data(), DType::f32, {1, T, Hk, D})},
                                 {.o = Tensor(truth.data(), DType::f64, {1, T, H, D})},
                                 {.causal = softdelta::Causal::top_left}, {.engine = "reference"});
    double error = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) error = std::max(error, std::abs(s.o[i] - truth[i]));
    return error;
}

int main() {
    std::mt19937 engine(1);
    std::normal_distribution<float> normal;
    const std::int64_t steps = 20;
    std::vector<Sequence> all(sequences);
    Cache cache;
    for (std::int64_t n = 0; n < sequences; ++n) {
        all[n].prompt = n == 0 ? 37 : 5;
        for (auto* rows : {&all[n].q, &all[n].k, &all[n].v}) {
            rows->resize((all[n].prompt + steps) * (rows == &all[n].q ? H : Hk) * D);
            std::generate(rows->begin(), rows->end(), [&] { return normal(engine); });
        }
    }
    attend(all, cache, {all[0].prompt, all[1].prompt});
    std::printf("prefill: %d and %d tokens in %d blocks\n", cache.lengths[0], cache.lengths[1], cache.used);
    for (std::int64_t step = 0; step < steps; ++step) attend(all, cache, {1, 1});
    std::printf("decode:  %d and %d tokens in %d blocks\n", cache.lengths[0], cache.lengths[1], cache.used);

    const double error = std::max(largest_error(all[0]), largest_error(all[1]));
    const bool right = error < 1e-5;
    std::printf("largest error against the f64 reference: %.1e, %s\n", error, right ? "right" : "WRONG");
    return right ? 0 : 1;
}

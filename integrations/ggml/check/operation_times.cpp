// Times of single operations: softdelta's device and ggml's CPU backend alternating, in one process with one OpenMP
// runtime.
//   operation_times THREADS [FILTER] [SECONDS]
// Rows whose name holds FILTER; about SECONDS (1) each. Prints the median time of both and their ratio.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Row {
    std::string name;
    std::function<ggml_tensor*(ggml_context*)> build;
    double
        limit;  // of the difference between both; ggml rounds queries and sums of decode to the type of keys and values
};

std::string with(const char* form, long long a, const char* b = "") {
    char text[96];
    std::snprintf(text, sizeof text, form, a, b);
    return text;
}

ggml_tensor* tensor(ggml_context* ctx, const char* name, ggml_type type, std::int64_t a, std::int64_t b, std::int64_t c,
                    std::int64_t d = 1) {
    ggml_tensor* t = ggml_new_tensor_4d(ctx, type, a, b, c, d);
    ggml_set_name(t, name);
    return t;
}

// Shapes of Qwen3-Next (16 key heads, 32 value heads of 128) and of Kimi Linear (32 heads of 128, a gate per channel).
Row gated_delta_net(std::int64_t tokens, bool channel_gate) {
    return {with("GATED_DELTA_NET T %lld, %s", tokens, channel_gate ? "a gate per channel" : "a gate per head"),
            [=](ggml_context* ctx) {
                const std::int64_t key_heads = channel_gate ? 32 : 16, heads = 32, size = 128;
                ggml_tensor* q = tensor(ctx, "q", GGML_TYPE_F32, size, key_heads, tokens);
                ggml_tensor* k = tensor(ctx, "k", GGML_TYPE_F32, size, key_heads, tokens);
                ggml_tensor* v = tensor(ctx, "v", GGML_TYPE_F32, size, heads, tokens);
                ggml_tensor* g = tensor(ctx, "g", GGML_TYPE_F32, channel_gate ? size : 1, heads, tokens);
                ggml_tensor* beta = tensor(ctx, "beta", GGML_TYPE_F32, 1, heads, tokens);
                ggml_tensor* state = tensor(ctx, "state", GGML_TYPE_F32, size, size, heads);
                return ggml_gated_delta_net(ctx, q, k, v, g, beta, state, 1);
            },
            1e-5};
}

// Keys and values as llama.cpp's cache has them: all heads of a token side by side. mask: hides later keys, or one
// more.
Row flash_attention(std::int64_t queries, std::int64_t keys, std::int64_t size, std::int64_t heads,
                    std::int64_t key_heads, ggml_type type, float max_bias = 0, const char* hides = "mask") {
    char name[128];
    std::snprintf(name, sizeof name, "FLASH_ATTN_EXT %lld x %lld, D %lld, H %lld/%lld, %s%s",
                  static_cast<long long>(queries), static_cast<long long>(keys), static_cast<long long>(size),
                  static_cast<long long>(heads), static_cast<long long>(key_heads), ggml_type_name(type),
                  max_bias > 0 ? ", ALiBi" : hides + 4);
    return {name,
            [=](ggml_context* ctx) {
                ggml_tensor* q = tensor(ctx, "q", GGML_TYPE_F32, size, heads, queries);
                ggml_tensor* k = tensor(ctx, "k", type, size, key_heads, keys);
                ggml_tensor* v = tensor(ctx, "v", type, size, key_heads, keys);
                ggml_tensor* mask = tensor(ctx, hides, GGML_TYPE_F16, keys, queries, 1);
                return ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), ggml_permute(ctx, k, 0, 2, 1, 3),
                                           ggml_permute(ctx, v, 0, 2, 1, 3), mask,
                                           1 / std::sqrt(static_cast<float>(size)), max_bias, 0);
            },
            type == GGML_TYPE_F32 ? 1e-5 : 5e-2};
}

// As DeepSeek and Kimi have it: values are the first 512 of a key's 576 numbers, and lie in it.
Row latent_attention(std::int64_t queries, std::int64_t keys, std::int64_t heads, std::int64_t key_heads,
                     const char* hides = "mask") {
    char name[128];
    std::snprintf(name, sizeof name, "FLASH_ATTN_EXT %lld x %lld, D 576/512, H %lld/%lld, f16%s",
                  static_cast<long long>(queries), static_cast<long long>(keys), static_cast<long long>(heads),
                  static_cast<long long>(key_heads), hides + 4);
    return {name,
            [=](ggml_context* ctx) {
                ggml_tensor* q = tensor(ctx, "q", GGML_TYPE_F32, 576, heads, queries);
                ggml_tensor* k = tensor(ctx, "k", GGML_TYPE_F16, 576, key_heads, keys);
                ggml_tensor* v = ggml_view_3d(ctx, k, 512, key_heads, keys, k->nb[1], k->nb[2], 0);
                ggml_tensor* mask = tensor(ctx, hides, GGML_TYPE_F16, keys, queries, 1);
                return ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), ggml_permute(ctx, k, 0, 2, 1, 3),
                                           ggml_permute(ctx, v, 0, 2, 1, 3), mask, 1 / std::sqrt(576.0F), 0, 0);
            },
            5e-2};
}

Row ssm_conv(std::int64_t tokens) {
    return {with("SSM_CONV T %lld, W 4, C 8192", tokens),
            [=](ggml_context* ctx) {
                return ggml_ssm_conv(ctx, tensor(ctx, "x", GGML_TYPE_F32, 3 + tokens, 8192, 1),
                                     tensor(ctx, "weight", GGML_TYPE_F32, 4, 8192, 1));
            },
            0};
}

// A Mamba-2 layer of 64 heads of 64, state 128, 8 groups.
Row ssm_scan(std::int64_t tokens) {
    return {with("SSM_SCAN T %lld, H 64, D 64, state 128", tokens),
            [=](ggml_context* ctx) {
                const std::int64_t heads = 64, size = 64, state = 128, groups = 8;
                return ggml_ssm_scan(ctx, tensor(ctx, "states", GGML_TYPE_F32, state, size, heads),
                                     tensor(ctx, "x", GGML_TYPE_F32, size, heads, tokens),
                                     tensor(ctx, "dt", GGML_TYPE_F32, heads, tokens, 1),
                                     tensor(ctx, "A", GGML_TYPE_F32, 1, heads, 1),
                                     tensor(ctx, "B", GGML_TYPE_F32, state, groups, tokens),
                                     tensor(ctx, "C", GGML_TYPE_F32, state, groups, tokens),
                                     tensor(ctx, "ids", GGML_TYPE_I32, 1, 1, 1), 1);
            },
            1e-5};
}

Row concat(std::int64_t tokens, std::int64_t channels = 8192, std::int64_t sequences = 1) {
    return {with("CONCAT T 3 + %lld%s", tokens, channels == 8192 ? ", C 8192" : ", C odd"),
            [=](ggml_context* ctx) {
                ggml_tensor* x = tensor(ctx, "x", GGML_TYPE_F32, channels, tokens, sequences);
                return ggml_concat(ctx, tensor(ctx, "state", GGML_TYPE_F32, 3, channels, sequences),
                                   ggml_transpose(ctx, x), 0);
            },
            0};
}

std::vector<Row> rows() {
    std::vector<Row> all;
    for (const std::int64_t tokens : {1, 4, 8, 16, 64, 512}) all.push_back(concat(tokens));
    all.push_back(concat(37, 101, 2));
    for (const std::int64_t tokens : {1, 2, 4, 8, 16, 64, 512}) all.push_back(ssm_conv(tokens));
    for (const bool channel_gate : {false, true})
        for (const std::int64_t tokens : {512, 4096, 1, 4, 2, 3, 8, 16, 24, 32, 33, 64})
            all.push_back(gated_delta_net(tokens, channel_gate));
    for (const std::int64_t tokens : {512, 4096, 4, 8, 16, 24, 32, 64, 128}) all.push_back(ssm_scan(tokens));
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
        for (const std::int64_t size : {128, 256}) all.push_back(flash_attention(512, 8192, size, 16, 2, type));
        all.push_back(flash_attention(1, 32768, 128, 16, 2, type));
        all.push_back(flash_attention(1, 32768, 128, 16, 16, type));
        for (const std::int64_t queries : {1, 2, 4, 8, 16, 64}) {
            all.push_back(flash_attention(queries, 2048, 128, 16, 2, type));
            all.push_back(flash_attention(queries, 2048, 128, 16, 16, type));
        }
    }
    for (const std::int64_t queries : {1, 2, 512})
        all.push_back(flash_attention(queries, 8192, 128, 16, 2, GGML_TYPE_F16, 8));
    for (const std::int64_t queries : {1, 4, 16, 64})
        all.push_back(flash_attention(queries, 2048, 128, 16, 2, GGML_TYPE_Q5_1));
    for (const std::int64_t key_heads : {2, 16})
        all.push_back(flash_attention(1, 16384, 128, 16, key_heads, GGML_TYPE_Q5_1));
    all.push_back(flash_attention(512, 512, 256, 16, 2, GGML_TYPE_F16));
    for (const char* mask : {"mask, one key hidden", "mask, padded"})
        for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_Q8_0})
            all.push_back(flash_attention(64, 96, 64, 4, 2, type, 0, mask));
    for (const std::int64_t queries : {1, 512}) all.push_back(latent_attention(queries, 4096, 16, 1));
    for (const char* mask : {"mask, 1 of 4 seen", "mask, 1 of 8 seen", "mask, 1 of 32 seen"}) {
        all.push_back(latent_attention(1, 16384, 16, 1, mask));
        for (const std::int64_t queries : {1, 4, 16})
            all.push_back(flash_attention(queries, 16384, 128, 16, 2, GGML_TYPE_F16, 0, mask));
    }
    for (const std::int64_t queries : {1, 4})
        all.push_back(flash_attention(queries, 16384, 128, 16, 2, GGML_TYPE_F16, 0, "mask, a slot of 4"));
    for (const std::int64_t size : {64, 256, 512}) all.push_back(flash_attention(1, 8192, size, 8, 8, GGML_TYPE_F16));
    for (const std::int64_t keys : {32, 128, 512}) {
        all.push_back(flash_attention(1, keys, 64, 4, 2, GGML_TYPE_F16));
        all.push_back(flash_attention(keys, keys, 64, 4, 2, GGML_TYPE_F16));
    }
    return all;
}

void fill(ggml_context* ctx) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (ggml_tensor* t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
        const std::string_view name = t->name;
        if (t->op != GGML_OP_NONE || name.empty()) continue;
        const auto count = static_cast<std::size_t>(ggml_nelements(t));
        std::vector<float> numbers(count);
        for (float& x : numbers) x = normal(random);
        if (name == "g")
            for (float& x : numbers) x = -0.1F * std::abs(x);
        if (name == "beta")
            for (float& x : numbers) x = 1 / (1 + std::exp(-x));
        if (name == "A")
            for (float& x : numbers) x = -std::exp(x);
        if (name == "ids") std::fill(numbers.begin(), numbers.end(), 0.0F);
        if (name == "B")
            for (float& x : numbers) x /= std::sqrt(static_cast<float>(t->ne[0]));
        if (name == "k" && t->type == GGML_TYPE_F32 && t->ne[0] == 128)  // of the delta rule: of length 1, more or less
            for (float& x : numbers) x /= 11.3F;
        if (name.substr(0, 4) == "mask")
            for (std::int64_t row = 0; row < t->ne[1]; ++row)
                for (std::int64_t key = 0; key < t->ne[0]; ++key)
                    numbers[static_cast<std::size_t>(row * t->ne[0] + key)] =
                        key <= t->ne[0] - t->ne[1] + row ? 0 : -INFINITY;
        if (name == "mask, one key hidden") numbers[static_cast<std::size_t>(t->ne[1] / 2 * t->ne[0] + 1)] = -INFINITY;
        if (name.substr(0, 8) == "mask, 1 ") {  // of so many keys is seen, as an indexer chooses them
            const auto many = static_cast<std::size_t>(std::atoi(name.data() + 11));
            for (std::size_t i = 0; i < count; ++i) numbers[i] = (i * 2654435761U >> 16) % many == 0 ? 0 : -INFINITY;
        }
        if (name == "mask, a slot of 4")  // row i sees the keys of one of four sequences that share the cache
            for (std::size_t i = 0; i < count; ++i) {
                const std::size_t keys = static_cast<std::size_t>(t->ne[0]), row = i / keys, key = i % keys;
                numbers[i] = key * 4 / keys == (row + 1) % 4 ? 0 : -INFINITY;
            }
        if (name == "mask, padded")  // the cache is longer than its keys
            for (std::int64_t row = 0; row < t->ne[1]; ++row)
                for (std::int64_t key = t->ne[0] - 5 - t->ne[1] + row + 1; key < t->ne[0]; ++key)
                    numbers[static_cast<std::size_t>(row * t->ne[0] + key)] = -INFINITY;
        if (ggml_type_size(t->type) == sizeof(float)) {  // f32, and 0 of i32
            ggml_backend_tensor_set(t, numbers.data(), 0, ggml_nbytes(t));
        } else {
            std::vector<char> stored(ggml_nbytes(t));
            ggml_quantize_chunk(t->type, numbers.data(), stored.data(), 0, ggml_nelements(t) / t->ne[0], t->ne[0],
                                nullptr);
            ggml_backend_tensor_set(t, stored.data(), 0, stored.size());
        }
    }
}

double seconds_of(ggml_backend_t backend, ggml_cgraph* graph) {
    const auto start = Clock::now();
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) std::exit(1);
    return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> x) {
    std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
    return x[x.size() / 2];
}

ggml_backend_t backend_of(ggml_backend_dev_t device, int threads) {
    ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
    const auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
    set(backend, threads);
    return backend;
}

// |a − b| / |b|
double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        difference += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
        size += static_cast<double>(b[i]) * b[i];
    }
    return std::sqrt(difference / size);
}

// Whether both results are the same within the row's limit.
bool time_row(const Row& row, const std::vector<ggml_backend_t>& backends, double seconds) {
    ggml_context* ctx = ggml_init({std::size_t{1} << 20, nullptr, true});
    ggml_tensor* result = row.build(ctx);
    ggml_cgraph* graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, result);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
    fill(ctx);
    std::vector<std::vector<float>> results;
    double once = 0;
    for (ggml_backend_t backend : backends) {
        once += seconds_of(backend, graph);
        results.emplace_back(ggml_nelements(result));
        ggml_backend_tensor_get(result, results.back().data(), 0, ggml_nbytes(result));
    }
    std::vector<std::vector<double>> times(backends.size());
    const int turns = std::clamp(static_cast<int>(seconds / once), 3, 500);
    for (int i = 0; i < turns; ++i)
        for (std::size_t j = 0; j < backends.size(); ++j) times[j].push_back(seconds_of(backends[j], graph));
    const double ours = median(times[0]), theirs = median(times[1]);
    const double difference = distance(results[0], results[1]);
    const bool right = difference <= row.limit;
    std::printf("%-56s %12.4f %12.4f %8.2f   %.0e%s\n", row.name.c_str(), 1e3 * ours, 1e3 * theirs, theirs / ours,
                difference, right ? "" : " WRONG");
    std::fflush(stdout);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return right;
}

}  // namespace

int main(int argc, char** argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
    const std::string filter = argc > 2 ? argv[2] : "";
    const double seconds = argc > 3 ? std::atof(argv[3]) : 1;
    ggml_backend_load_all();  // with GGML_BACKEND_PATH, SOFTDELTA_GGML_DEVICE=1 and SOFTDELTA_GGML_TAKE=all
    ggml_backend_dev_t softdelta = ggml_backend_dev_by_name("softdelta"), cpu = ggml_backend_dev_by_name("CPU");
    if (softdelta == nullptr || cpu == nullptr) {
        std::fprintf(stderr, "no device named softdelta or CPU\n");
        return 1;
    }
    const std::vector<ggml_backend_t> backends = {backend_of(softdelta, threads), backend_of(cpu, threads)};
    std::printf("%-56s %12s %12s %8s   difference\n", "", "softdelta ms", "ggml ms", "ratio");
    bool right = true;
    for (const Row& row : rows())
        if (row.name.find(filter) != std::string::npos) right = time_row(row, backends, seconds) && right;
    for (ggml_backend_t backend : backends) ggml_backend_free(backend);
    return right ? 0 : 1;
}

// Is a kernel right? This program has a kernel of its own, causal attention in plain loops. It writes inputs and
// results to a case file (docs/case-file.md) and lets `softdelta verify` judge them, once as it should be. It does so
// again with a mistake in the mask, which `softdelta diagnose` then finds.
//
//     judge_a_kernel [PROGRAM]      PROGRAM: softdelta, where it is not on the PATH
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

constexpr int T = 100, H = 2, D = 32;  // rows, heads, head dimension

struct Tensor {
    std::string name, shape;
    std::vector<float> data;
};

// o of a causal softmax; each row also sees the `ahead` keys that follow it.
std::vector<float> attention(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
                             int ahead) {
    const auto at = [](int t, int h) { return (t * H + h) * D; };  // [1, T, H, D]
    std::vector<float> o(q.size());
    for (int h = 0; h < H; ++h)
        for (int i = 0; i < T; ++i) {
            const int keys = std::min(i + 1 + ahead, T);
            std::vector<float> p(keys);
            float sum = 0;
            for (int j = 0; j < keys; ++j) {
                float score = 0;
                for (int d = 0; d < D; ++d) score += q[at(i, h) + d] * k[at(j, h) + d];
                sum += p[j] = std::exp(score / std::sqrt(static_cast<float>(D)));
            }
            for (int j = 0; j < keys; ++j)
                for (int d = 0; d < D; ++d) o[at(i, h) + d] += p[j] / sum * v[at(j, h) + d];
        }
    return o;
}

// A safetensors file: the length of a JSON header, the header, and the data in the header's order.
void write_dump(const std::string& path, const std::vector<Tensor>& tensors, const std::string& metadata) {
    std::string header = "{\"__metadata__\":{" + metadata + "}";
    std::size_t end = 0;
    for (const Tensor& t : tensors) {
        const std::size_t begin = end;
        end += t.data.size() * sizeof(float);
        header += ",\"" + t.name + "\":{\"dtype\":\"F32\",\"shape\":" + t.shape + ",\"data_offsets\":[" +
                  std::to_string(begin) + "," + std::to_string(end) + "]}";
    }
    header += "}";
    const std::uint64_t length = header.size();  // little-endian, as x86-64 is
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file << header;
    for (const Tensor& t : tensors)
        file.write(reinterpret_cast<const char*>(t.data.data()),
                   static_cast<std::streamsize>(t.data.size() * sizeof(float)));
}

// The exit status of `PROGRAM command path`; it prints its report.
int ask(const std::string& program, const std::string& command, const std::string& path) {
    std::fflush(stdout);
    const int status = std::system(("'" + program + "' " + command + " " + path).c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int main(int argc, char** argv) {
    const std::string program = argc > 1 ? argv[1] : "softdelta";
    const std::string shape = "[1," + std::to_string(T) + "," + std::to_string(H) + "," + std::to_string(D) + "]";
    std::mt19937 engine(1);
    std::normal_distribution<float> normal;
    std::vector<float> q(T * H * D), k(q), v(q);
    for (auto* x : {&q, &k, &v})
        for (float& element : *x) element = normal(engine);

    int verdicts[2];
    for (const int ahead : {0, 1}) {
        const std::string path = ahead == 0 ? "kernel.safetensors" : "mistaken_kernel.safetensors";
        write_dump(path, {{"q", shape, q}, {"k", shape, k}, {"v", shape, v}, {"o", shape, attention(q, k, v, ahead)}},
                   "\"op\":\"attention\",\"causal\":\"top_left\",\"producer\":\"judge_a_kernel\"");
        verdicts[ahead] = ask(program, "verify", path);
    }
    std::printf("\n");
    const int diagnosed = ask(program, "diagnose", "mistaken_kernel.safetensors");

    // 0: every result is right, 1: one is wrong
    const bool as_expected = verdicts[0] == 0 && verdicts[1] == 1 && diagnosed == 1;
    std::printf("\n%s\n", as_expected ? "The kernel is right, its mistaken twin was found out." : "NOT AS EXPECTED");
    return as_expected ? 0 : 1;
}

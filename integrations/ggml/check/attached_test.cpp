// The backend inside ggml's CPU backend, as a program has it: its threads, its memory, and what happens without memory.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "ggml-cpu.h"
#include "ggml.h"
#include "load.h"
#include "operations/thresholds.h"

namespace {

// Every `new` of the process: bytes in use, and allocations that fail.
struct Memory {
    std::atomic<std::int64_t> now{0}, most{0};
    std::atomic<std::int64_t> until_failure{-1};  // allocations before one fails; −1: none fails
    std::atomic<bool> all_after{false}, failed{false};

    bool fails() {
        if (until_failure < 0) return false;
        if (until_failure-- > 0) return false;
        if (all_after) until_failure = 0;
        failed = true;
        return true;
    }
    void* take(std::size_t size) {
        void* p = fails() ? nullptr : std::malloc(size);
        if (p == nullptr) throw std::bad_alloc();
        now += static_cast<std::int64_t>(malloc_usable_size(p));
        if (now > most) most = now.load();
        return p;
    }
    void give(void* p) {
        if (p != nullptr) now -= static_cast<std::int64_t>(malloc_usable_size(p));
        std::free(p);
    }
} memory;

// In it allocation `first`, and with `all` every later one, fails.
class Failing {
  public:
    Failing(std::int64_t first, bool all) {
        memory.failed = false;
        memory.all_after = all;
        memory.until_failure = first;
    }
    ~Failing() { memory.until_failure = -1; }
};

}  // namespace

void* operator new(std::size_t size) {
    return memory.take(size);
}
void* operator new[](std::size_t size) {
    return memory.take(size);
}
void operator delete(void* p) noexcept {
    memory.give(p);
}
void operator delete[](void* p) noexcept {
    memory.give(p);
}
void operator delete(void* p, std::size_t) noexcept {
    memory.give(p);
}
void operator delete[](void* p, std::size_t) noexcept {
    memory.give(p);
}

namespace {

ggml_backend_t new_backend() {
    return ggml_backend_dev_init(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), nullptr);
}

// One FLASH_ATTN_EXT, with heads of 128, as llama.cpp has its cache.
class Attention {
  public:
    Attention(std::int64_t queries, std::int64_t keys, ggml_type type, float softcap = 0) {
        ggml_tensor *q = tensor(GGML_TYPE_F32, 16, queries), *k = tensor(type, 2, keys), *v = tensor(type, 2, keys);
        result_ =
            ggml_flash_attn_ext(context_, ggml_permute(context_, q, 0, 2, 1, 3), ggml_permute(context_, k, 0, 2, 1, 3),
                                ggml_permute(context_, v, 0, 2, 1, 3), nullptr, 1 / std::sqrt(128.0F), 0, softcap);
        graph_ = ggml_new_graph(context_);
        ggml_build_forward_expand(graph_, result_);
        buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(context_, ggml_backend_cpu_buffer_type());
        for (ggml_tensor* t : {q, k, v}) fill(t);
    }
    ~Attention() {
        ggml_backend_buffer_free(buffer_);
        ggml_free(context_);
    }
    Attention(const Attention&) = delete;
    Attention& operator=(const Attention&) = delete;

    ggml_status compute(ggml_backend_t backend) { return ggml_backend_graph_compute(backend, graph_); }
    std::vector<float> result() const {
        std::vector<float> numbers(static_cast<std::size_t>(ggml_nelements(result_)));
        ggml_backend_tensor_get(result_, numbers.data(), 0, ggml_nbytes(result_));
        return numbers;
    }
    void forget() {
        ggml_backend_buffer_clear(buffer_, 0);
        for (const auto& [t, stored] : filled_) ggml_backend_tensor_set(t, stored.data(), 0, stored.size());
    }

  private:
    ggml_tensor* tensor(ggml_type type, std::int64_t heads, std::int64_t rows) {
        return ggml_new_tensor_3d(context_, type, 128, heads, rows);
    }
    void fill(ggml_tensor* t) {
        std::mt19937 random(static_cast<unsigned>(filled_.size()));
        std::normal_distribution<float> normal;
        std::vector<float> numbers(static_cast<std::size_t>(ggml_nelements(t)));
        for (float& x : numbers) x = normal(random);
        std::vector<char> stored(ggml_nbytes(t));
        if (t->type == GGML_TYPE_F32)
            std::copy_n(reinterpret_cast<const char*>(numbers.data()), stored.size(), stored.data());
        else
            ggml_quantize_chunk(t->type, numbers.data(), stored.data(), 0, ggml_nelements(t) / 128, 128, nullptr);
        ggml_backend_tensor_set(t, stored.data(), 0, stored.size());
        filled_.push_back({t, std::move(stored)});
    }

    ggml_context* context_ = ggml_init({std::size_t{1} << 20, nullptr, true});
    ggml_tensor* result_;
    ggml_cgraph* graph_;
    ggml_backend_buffer_t buffer_;
    std::vector<std::pair<ggml_tensor*, std::vector<char>>> filled_;
};

double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
        size += std::pow(static_cast<double>(b[i]), 2);
    }
    return std::sqrt(difference / size);
}

std::int64_t threads_of_process() {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

// Frees the backend, and returns what it says it computed.
std::string counts_of(ggml_backend_t backend) {
    testing::internal::CaptureStderr();
    ggml_backend_free(backend);
    return testing::internal::GetCapturedStderr();
}

// ggml's functions that a program which links ggml's CPU backend calls itself.
template <class Function>
Function of_cpu_backend(const char* name) {
    const auto folder = std::filesystem::canonical("/proc/self/exe").parent_path();
    return reinterpret_cast<Function>(dlsym(dlopen((folder / "libggml-cpu.so").c_str(), RTLD_NOW | RTLD_NOLOAD), name));
}

// The OpenMP runtime ends the threads that a team does without, so those of the process are those of the last call.
TEST(Attached, ComputesWithTheThreadsThatTheProgramSets) {
    Attention attention(64, 2048, GGML_TYPE_F16);
    ggml_backend_t backend = new_backend();
    const auto direct = of_cpu_backend<void (*)(ggml_backend_t, int)>("ggml_backend_cpu_set_n_threads");
    const auto registered = reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(backend)), "ggml_backend_set_n_threads"));
    ASSERT_NE(direct, nullptr);
    ASSERT_EQ(attention.compute(backend), GGML_STATUS_SUCCESS);
    EXPECT_EQ(threads_of_process(), GGML_DEFAULT_N_THREADS);
    int calls = 1;
    for (const int threads : {3, 5, 2})
        for (const auto set : {direct, registered}) {
            const int asked = threads + (set == registered ? 4 : 0);
            set(backend, asked);
            ASSERT_EQ(attention.compute(backend), GGML_STATUS_SUCCESS);
            EXPECT_EQ(threads_of_process(), asked) << (set == direct ? "set directly" : "set through the registry");
            ++calls;
        }
    const std::string all = std::to_string(calls);
    EXPECT_NE(counts_of(backend).find("FLASH_ATTN_EXT: " + all + " of " + all), std::string::npos);
}

// A token over a cache that becomes floats, eight times as many as are kept at once.
TEST(Attached, MemoryHasALimit) {
    ggml_backend_t backend = new_backend();
    Attention attention(1, 16384, GGML_TYPE_Q5_1);
    ASSERT_EQ(16384 * 2 * 256, 8 * softdelta_ggml::expanded_numbers);
    const std::int64_t before = memory.now;
    memory.most = before;
    ASSERT_EQ(attention.compute(backend), GGML_STATUS_SUCCESS);
    EXPECT_LE(memory.most - before, 4 * softdelta_ggml::expanded_numbers + (1 << 20));
    EXPECT_GE(memory.most - before, 4 * softdelta_ggml::expanded_numbers) << "no floats were made";
    EXPECT_NE(counts_of(backend).find("FLASH_ATTN_EXT: 1 of 1"), std::string::npos);
}

// Nothing is thrown through ggml: what has no memory is computed by ggml, or the graph fails.
TEST(Attached, EveryAllocationMayFail) {
    Attention attention(4, 3000, GGML_TYPE_Q5_1);  // in two ranges of keys
    ggml_backend_t backend = new_backend();
    ASSERT_EQ(attention.compute(backend), GGML_STATUS_SUCCESS);
    const std::vector<float> right = attention.result();
    ggml_backend_free(backend);
    std::int64_t allocation = 0, computed = 0;
    for (bool failed = true; failed; ++allocation) {
        backend = new_backend();
        attention.forget();
        ggml_status status = GGML_STATUS_ABORTED;
        {
            const Failing failing(allocation, false);
            EXPECT_NO_THROW(status = attention.compute(backend)) << "allocation " << allocation;
            failed = memory.failed;
        }
        if (status != GGML_STATUS_ALLOC_FAILED) {
            EXPECT_EQ(status, GGML_STATUS_SUCCESS) << "allocation " << allocation;
            EXPECT_LE(distance(attention.result(), right), 2e-2) << "allocation " << allocation;
            ++computed;
        }
        ggml_backend_free(backend);
    }
    EXPECT_GT(computed, 3) << "of " << allocation;
}

// Neither has memory.
TEST(Attached, WithoutMemoryAGraphFails) {
    Attention attention(4, 4096, GGML_TYPE_Q5_1);
    ggml_backend_t backend = new_backend();
    ggml_status status = GGML_STATUS_SUCCESS;
    {
        const Failing failing(0, true);
        EXPECT_NO_THROW(status = attention.compute(backend));
    }
    EXPECT_EQ(status, GGML_STATUS_ALLOC_FAILED);
    EXPECT_EQ(attention.compute(backend), GGML_STATUS_SUCCESS) << "with memory again";
    ggml_backend_free(backend);
}

TEST(Attached, WithoutMemoryThereIsNoBackend) {
    bool failed = true;
    for (std::int64_t allocation = 0; failed; ++allocation) {
        ggml_backend_t backend = nullptr;
        {
            const Failing failing(allocation, false);
            EXPECT_NO_THROW(backend = new_backend()) << "allocation " << allocation;
            failed = memory.failed;
        }
        if (backend != nullptr) ggml_backend_free(backend);  // ggml's alone, where only ours failed
    }
}

// The library refuses a negative softcap, which ggml takes for a positive one.
TEST(Attached, WhatTheLibraryRefusesIsComputedByGgml) {
    Attention attention(4, 4096, GGML_TYPE_F32, 8), refused(4, 4096, GGML_TYPE_F32, -8);
    ggml_backend_t backend = new_backend();
    ASSERT_EQ(attention.compute(backend), GGML_STATUS_SUCCESS);
    ASSERT_EQ(refused.compute(backend), GGML_STATUS_SUCCESS);
    EXPECT_LE(distance(refused.result(), attention.result()), 1e-5);
    EXPECT_NE(counts_of(backend).find("FLASH_ATTN_EXT: 1 of 2"), std::string::npos);
}

}  // namespace

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
    return check::load(false) ? RUN_ALL_TESTS() : 1;
}

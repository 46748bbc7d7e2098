// Stands in for src/engines/cuda/ptx.h: the same functions, in plain C++.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "engines/cuda/host/device.h"

namespace softdelta::cuda::ptx {

inline char* shared_memory() {
    return reinterpret_cast<char*>(host::shared_memory());
}
inline std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(static_cast<const std::byte*>(p) - host::shared_memory()) + host::first_shared;
}
inline void copy_async(std::uint32_t to, const void* from, bool take) {
    host::check(reinterpret_cast<std::uintptr_t>(from) % 16 == 0, "16 bytes to copy are not aligned");
    host::begin_copy(host::shared_at(to, host::copy_bytes), take ? from : nullptr);
}
inline void commit_copies() {
    host::commit_copies();
}
template <int groups>
void wait_for_copies_but() {
    host::wait_for_copies(groups);
}
inline void wait_for_copies() {
    host::commit_copies();
    host::wait_for_copies(0);
}

inline std::uint32_t load_word(const void* from, bool take) {
    return take ? *static_cast<const std::uint32_t*>(from) : 0;
}
inline float2 load_pair(const void* from, bool take) {
    return take ? *static_cast<const float2*>(from) : float2{0, 0};
}

// Element i of a row of 8.
inline std::uint16_t element(std::uint32_t row, int i) {
    std::uint16_t x;
    std::memcpy(&x, host::shared_at(row, 16) + 2 * i, 2);
    return x;
}
inline void load(std::uint32_t (&out)[4], std::uint32_t address, bool transposed) {
    const int lane = host::lane(), row = lane / 4, column = 2 * (lane % 4);
    std::memcpy(host::place(lane), &address, sizeof address);
    host::shuffle();
    for (int m = 0; m < 4; ++m) {
        const auto get = [&](int r, int c) {
            std::uint32_t of_row;
            std::memcpy(&of_row, host::place(8 * m + (transposed ? c : r)), sizeof of_row);
            return element(of_row, transposed ? r : c);
        };
        out[m] = std::uint32_t{get(row, column)} | std::uint32_t{get(row, column + 1)} << 16;
    }
    host::shuffle();
}
inline void prefetch(const void*) {}
inline void load_matrices(std::uint32_t (&out)[4], std::uint32_t address) {
    load(out, address, false);
}
inline void load_matrices_transposed(std::uint32_t (&out)[4], std::uint32_t address) {
    load(out, address, true);
}
inline void store(std::uint32_t address, const std::uint32_t (&x)[4], bool transposed) {
    const int lane = host::lane(), row = lane / 4, column = 2 * (lane % 4);
    std::memcpy(host::place(lane), &address, sizeof address);
    host::shuffle();
    for (int m = 0; m < 4; ++m)
        for (int c = 0; c < 2; ++c) {
            std::uint32_t of_row;
            std::memcpy(&of_row, host::place(8 * m + (transposed ? column + c : row)), sizeof of_row);
            const auto element = static_cast<std::uint16_t>(x[m] >> (16 * c));
            std::memcpy(host::shared_at(of_row, 16) + 2 * (transposed ? row : column + c), &element, 2);
        }
    host::shuffle();
}
inline void store_matrices(std::uint32_t address, const std::uint32_t (&x)[4]) {
    store(address, x, false);
}
inline void store_matrices_transposed(std::uint32_t address, const std::uint32_t (&x)[4]) {
    store(address, x, true);
}
inline std::uint32_t transpose(std::uint32_t x) {
    const int lane = host::lane(), row = lane / 4, column = 2 * (lane % 4);
    std::memcpy(host::place(lane), &x, sizeof x);
    host::shuffle();
    const auto get = [&](int r, int c) {
        std::uint32_t both;
        std::memcpy(&both, host::place(4 * r + c / 2), sizeof both);
        return (both >> (c % 2 * 16)) & 0xffffu;
    };
    const std::uint32_t out = get(column, row) | get(column + 1, row) << 16;
    host::shuffle();
    return out;
}

inline std::uint32_t pack(float x, float y, __nv_bfloat16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    std::uint32_t out;
    std::memcpy(&out, &both, 4);
    return out;
}
inline std::uint32_t pack(float x, float y, __half) {
    const __half2 both = __floats2half2_rn(x, y);
    std::uint32_t out;
    std::memcpy(&out, &both, 4);
    return out;
}
inline float2 unpack(std::uint32_t x, __nv_bfloat16) {
    const std::uint32_t low = x << 16, high = x & 0xffff0000u;
    float2 out;
    std::memcpy(&out.x, &low, 4);
    std::memcpy(&out.y, &high, 4);
    return out;
}
inline float2 unpack(std::uint32_t x, __half) {
    __half2 both;
    std::memcpy(&both, &x, 4);
    return __half22float2(both);
}

template <class T>
void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, T type) {
    struct Operands {
        std::uint32_t a[4], b[2];
    };
    const Operands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
    const int lane = host::lane(), row = lane / 4, column = 2 * (lane % 4);
    std::memcpy(host::place(lane), &mine, sizeof mine);
    host::shuffle();
    for (int m = 0; m < 16; m += 2) {  // two of the depth
        const int other = m % 8 / 2, half = m / 8;
        Operands left, right[2];
        std::memcpy(&left, host::place(4 * row + other), sizeof left);
        for (int c = 0; c < 2; ++c) std::memcpy(&right[c], host::place(4 * (column + c) + other), sizeof left);
        for (int i = 0; i < 4; ++i) {
            const float2 x = unpack(left.a[i / 2 + 2 * half], type), y = unpack(right[i % 2].b[half], type);
            d[i] += x.x * y.x;
            d[i] += x.y * y.y;
        }
    }
    host::shuffle();
}

template <class T>
void multiply_eight(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b, T type) {
    multiply(d, {a0, a1, 0, 0}, b, 0, type);
}

// Of a warpgroup: an operand is its address and what lies between its panels.
inline std::uint64_t shared_operand(std::uint32_t address, int panel_bytes, int offset = 0) {
    address += static_cast<std::uint32_t>(offset);
    host::check(address % 16 == 0 && address % 1024 < 128, "an operand's first row is not the first of eight");
    return std::uint64_t{address} | static_cast<std::uint64_t>(panel_bytes) << 32;
}
constexpr bool has_warpgroups = true;
template <class Register, int n>
void keep_registers(Register (&)[n][4]) {}
inline void forget(int&) {}
template <class... Registers>
void begin_products(Registers&...) {}
inline void commit_products() {
    host::races::commit_products();
}
template <int running>
void wait_for_products() {
    host::races::wait_for_products(running);
}
template <int running, int n>
void wait_for_products(float (&)[n][4]) {
    wait_for_products<running>();
}
inline void publish_to_products() {
    host::races::publish_to_products();
}

// Each warp has 16 rows of its own; b(depth, column) is an element.
template <int n, class T, class Right>
void multiply_warpgroup(float (&d)[n][4], const std::uint32_t (&a)[4], bool add, T type, const Right& right) {
    for (int tile = 0; tile < n; ++tile) {
        if (!add)
            for (float& x : d[tile]) x = 0;
        const int lane = host::lane(), row = lane / 4, c = 2 * (lane % 4);
        std::uint32_t b[2];
        for (int i = 0; i < 2; ++i)
            b[i] = std::uint32_t{right(c + 8 * i, 8 * tile + row)} | std::uint32_t{right(c + 8 * i + 1, 8 * tile + row)}
                                                                         << 16;
        multiply(d[tile], a, b[0], b[1], type);
    }
}
SOFTDELTA_UNSEEN inline std::uint16_t swizzled(std::uint32_t address, int row, int column) {
    address += static_cast<std::uint32_t>(row * 128 + 2 * column);
    std::uint16_t x;
    const std::byte* const at = host::shared_at(address ^ ((address >> 3) & 0x70u), sizeof x);
    host::races::product_reads(at, sizeof x);
    std::memcpy(&x, at, sizeof x);
    return x;
}
template <int n, class T>
void warpgroup_multiply(float (&d)[n][4], const std::uint32_t (&a)[4], std::uint64_t b, bool add, T type) {
    multiply_warpgroup(d, a, add, type,
                       [&](int depth, int column) { return swizzled(static_cast<std::uint32_t>(b), column, depth); });
}
inline void load_left(std::uint32_t (&left)[4], std::uint64_t a) {
    const int lane = host::lane(), row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4, c = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
        const auto get = [&](int column) {
            return std::uint32_t{swizzled(static_cast<std::uint32_t>(a), row + 8 * (i % 2), 8 * (i / 2) + column)};
        };
        left[i] = get(c) | get(c + 1) << 16;
    }
}
template <int n, class T>
void warpgroup_multiply(float (&d)[n][4], std::uint64_t a, std::uint64_t b, bool add, T type) {
    std::uint32_t left[4];
    load_left(left, a);
    warpgroup_multiply(d, left, b, add, type);
}
template <int n, class T>
void warpgroup_multiply_mn_major(float (&d)[n][4], const std::uint32_t (&a)[4], std::uint64_t b, bool add, T type) {
    multiply_warpgroup(d, a, add, type, [&](int depth, int column) {
        const auto panel = static_cast<std::uint32_t>(b >> 32) * static_cast<std::uint32_t>(column / 64);
        return swizzled(static_cast<std::uint32_t>(b) + panel, depth, column % 64);
    });
}
template <int n, class T>
void warpgroup_multiply_mn_major(float (&d)[n][4], std::uint64_t a, std::uint64_t b, bool add, T type) {
    std::uint32_t left[4];
    load_left(left, a);
    warpgroup_multiply_mn_major(d, left, b, add, type);
}

inline void start_counter(std::uint32_t counter, int arrivals) {
    host::start_counter(counter, arrivals);
}
inline void arrive(std::uint32_t counter) {
    host::arrive(counter);
}
inline void arrive_as_warp(std::uint32_t counter, int lane) {
    host::wait_for_warp();
    if (lane == 0) host::arrive(counter);
}
inline void arrive_after_copies(std::uint32_t counter) {
    wait_for_copies();
    host::arrive(counter);
}
inline void wait(std::uint32_t counter, int parity) {
    host::wait_for_counter(counter, parity);
}

// Blocks run one after the other, and so do launches: none can wait for one that comes later.
inline void let_next_begin() {}
inline void wait_for_launch_before() {}
SOFTDELTA_UNSEEN inline void raise_flag(int* flag) {
    *flag = 1;
}
SOFTDELTA_UNSEEN inline void wait_for_flag(const int* flag) {
    host::check(*flag == 1, "a block waits for one that comes later");
}

inline float exp2(float x) {
    return std::exp2(x);
}
inline float reciprocal(float x) {
    return 1 / x;
}

inline bool has_nonfinite(std::uint32_t x, __nv_bfloat16) {
    return (((x & 0x7f807f80u) + 0x00800080u) & 0x80008000u) != 0;
}
inline bool has_nonfinite(std::uint32_t x, __half) {
    return (((x & 0x7c007c00u) + 0x04000400u) & 0x80008000u) != 0;
}

template <int registers>
void release_registers() {
    host::release_registers(registers);
}
template <int registers>
void take_registers() {
    host::take_registers(registers);
}
inline void barrier(int which, int threads) {
    host::wait_for_block(which, threads);
}

inline void arrive(int which, int threads) {
    host::arrive_at_block(which, threads);
}
SOFTDELTA_UNSEEN inline bool any(int which, int threads, bool x) {
    static thread_local bool found[16];
    found[which] = found[which] || x;
    host::wait_for_block(which, threads);
    const bool out = found[which];
    host::wait_for_block(which, threads);
    found[which] = false;
    host::wait_for_block(which, threads);
    return out;
}

}  // namespace softdelta::cuda::ptx

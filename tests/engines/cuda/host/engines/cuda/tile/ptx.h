// Stands in for src/engines/cuda/tile/ptx.h: the same functions, in plain C++.
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

// The rows of four 8×8 matrices: lane l hands in the address of row l % 8 of matrix l / 8.
struct Rows {
    std::uint32_t address, *words;
};
// move(bytes of a lane's register, bytes of shared memory, how many) for all that the lane holds of them.
template <class Move>
void with_matrices(Rows mine, bool transposed, const Move& move) {
    host::together(mine, [transposed, &move](const auto& of) {
        std::byte* rows[32];
        host::as_lanes(32, [&](int i) { rows[i] = host::shared_at(of(i).address, 16); });
        host::as_lanes(32, [&](int lane) {
            const int row = lane / 4, column = 2 * (lane % 4);
            for (int m = 0; m < 4; ++m) {
                auto* const word = reinterpret_cast<std::byte*>(of(lane).words + m);
                if (transposed)
                    for (int c = 0; c < 2; ++c) move(word + 2 * c, rows[8 * m + column + c] + 2 * row, std::size_t{2});
                else
                    move(word, rows[8 * m + row] + 2 * column, std::size_t{4});
            }
        });
    });
}
inline void load(std::uint32_t (&out)[4], std::uint32_t address, bool transposed) {
    with_matrices({address, out}, transposed,
                  [](std::byte* word, const std::byte* there, std::size_t bytes) { std::memcpy(word, there, bytes); });
}
inline void prefetch(const void*) {}
inline void load_matrices(std::uint32_t (&out)[4], std::uint32_t address) {
    load(out, address, false);
}
inline void load_matrices_transposed(std::uint32_t (&out)[4], std::uint32_t address) {
    load(out, address, true);
}
inline void store(std::uint32_t address, const std::uint32_t (&x)[4], bool transposed) {
    host::check_hopper();
    std::uint32_t words[4] = {x[0], x[1], x[2], x[3]};
    with_matrices({address, words}, transposed,
                  [](const std::byte* word, std::byte* there, std::size_t bytes) { std::memcpy(there, word, bytes); });
}
inline void store_matrices(std::uint32_t address, const std::uint32_t (&x)[4]) {
    store(address, x, false);
}
inline void store_matrices_transposed(std::uint32_t address, const std::uint32_t (&x)[4]) {
    store(address, x, true);
}
inline std::uint32_t transpose(std::uint32_t x) {
    struct Exchange {
        std::uint32_t x, out;
    } mine{x, 0};
    host::together(mine, [](const auto& of) {
        for (int lane = 0; lane < 32; ++lane) {
            const int row = lane / 4, column = 2 * (lane % 4);
            const auto get = [&](int r, int c) { return (of(4 * r + c / 2).x >> (c % 2 * 16)) & 0xffffu; };
            of(lane).out = get(column, row) | get(column + 1, row) << 16;
        }
    });
    return mine.out;
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

// What a lane has of a product d += a · b of 16 rows, 16 of depth and 8 columns.
struct Factors {
    float* d;
    const std::uint32_t* a;
    std::uint32_t b[2];
};
using Left = float[16][16];
using Right = float[16][8];
template <class T, class Of>
void gather_left(Left& left, const Of& of, T type) {
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            const float2 x = unpack(of(lane).a[i], type);
            float* to = &left[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8];
            to[0] = x.x, to[1] = x.y;
        }
}
// Columns first + {0, …, 7} of d, in the order of the depth. Four columns at a time, which -O1 does not do by itself.
template <class Of>
void add_product(const Left& left, const Right& right, const Of& of, int first) {
    using Four = float __attribute__((vector_size(16)));
    for (int row = 0; row < 16; ++row) {
        Four sums[2], factors[2];
        float* parts[4];  // of the four lanes that have this row
        for (int i = 0; i < 4; ++i) {
            parts[i] = of(row % 8 * 4 + i).d + first / 2 + row / 8 * 2;
            std::memcpy(reinterpret_cast<float*>(sums) + 2 * i, parts[i], 8);
        }
        for (int k = 0; k < 16; ++k) {
            std::memcpy(factors, right[k], sizeof factors);
            const float x = left[row][k];
            for (int i = 0; i < 2; ++i) sums[i] += Four{x, x, x, x} * factors[i];
        }
        for (int i = 0; i < 4; ++i) std::memcpy(parts[i], reinterpret_cast<float*>(sums) + 2 * i, 8);
    }
}

template <class T>
void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, T type) {
    Factors mine{d, a, {b0, b1}};
    host::together(mine, [type](const auto& of) {
        Left left;
        Right right;
        gather_left(left, of, type);
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 2; ++i) {
                const float2 x = unpack(of(lane).b[i], type);
                const int k = lane % 4 * 2 + 8 * i;
                right[k][lane / 4] = x.x, right[k + 1][lane / 4] = x.y;
            }
        add_product(left, right, of, 0);
    });
}

template <class T>
void multiply_eight(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b, T type) {
    multiply(d, {a0, a1, 0, 0}, b, 0, type);
}

// tf32 reads numbers without their last 13 bits. Sums in the order of the depth, as above.
inline void multiply_tf32(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    Factors mine{d, a, {b[0], b[1]}};
    host::together(mine, [](const auto& of) {
        const auto number = [](std::uint32_t x) {
            float out;
            x &= 0xffffe000u;
            std::memcpy(&out, &x, 4);
            return out;
        };
        Left left = {};
        Right right = {};
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 4; ++i) left[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = number(of(lane).a[i]);
            for (int i = 0; i < 2; ++i) right[lane % 4 * 2 + i][lane / 4] = number(of(lane).b[i]);
        }
        add_product(left, right, of, 0);
    });
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
template <class Register>
void forget(Register&) {}
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

// Where so many bytes of a swizzled operand lie.
SOFTDELTA_UNSEEN inline const std::byte* swizzled(std::uint32_t address, int row, int column, std::uint32_t bytes) {
    address += static_cast<std::uint32_t>(row * 128 + 2 * column);
    const std::byte* const at = host::shared_at(address ^ ((address >> 3) & 0x70u), bytes);
    host::races::product_reads(at, bytes);
    return at;
}
template <class T>
SOFTDELTA_UNSEEN void read_eight(float (&out)[8], const std::byte* from, T type) {
    std::uint32_t words[4];
    std::memcpy(words, from, sizeof words);
    for (int i = 0; i < 4; ++i) {
        const float2 x = unpack(words[i], type);
        out[2 * i] = x.x, out[2 * i + 1] = x.y;
    }
}
// Each warp has 16 rows of its own; read(b, tile) reads eight columns of the operand, which is the same for all lanes.
template <int n, class T, class Read>
void multiply_warpgroup(float (&d)[n][4], const std::uint32_t (&a)[4], std::uint64_t operand, bool add, T type,
                        const Read& read) {
    host::check_hopper();
    if (!add)
        for (auto& tile : d)
            for (float& x : tile) x = 0;
    Factors mine{d[0], a, {static_cast<std::uint32_t>(operand), static_cast<std::uint32_t>(operand >> 32)}};
    host::together(mine, [&](const auto& of) {
        for (int lane = 1; lane < 32; ++lane)
            host::check(of(lane).b[0] == of(0).b[0] && of(lane).b[1] == of(0).b[1], "lanes name different operands");
        Left left;
        Right right;
        gather_left(left, of, type);
        for (int tile = 0; tile < n; ++tile) {
            read(right, tile);
            add_product(left, right, of, 8 * tile);
        }
    });
}
template <int n, class T>
void warpgroup_multiply(float (&d)[n][4], const std::uint32_t (&a)[4], std::uint64_t b, bool add, T type) {
    multiply_warpgroup(d, a, b, add, type, [&](Right& right, int tile) {
        host::as_lanes(16, [&](int lane) {
            float depth[8];
            const int column = lane % 8, first = lane / 8 * 8;
            read_eight(depth, swizzled(static_cast<std::uint32_t>(b), 8 * tile + column, first, 16), type);
            for (int i = 0; i < 8; ++i) right[first + i][column] = depth[i];
        });
    });
}
SOFTDELTA_UNSEEN inline std::uint32_t swizzled_word(std::uint32_t address, int row, int column) {
    std::uint32_t out;
    std::memcpy(&out, swizzled(address, row, column, sizeof out), sizeof out);
    return out;
}
inline void load_left(std::uint32_t (&left)[4], std::uint64_t a) {
    const int lane = host::lane(), row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4, c = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i)
        left[i] = swizzled_word(static_cast<std::uint32_t>(a), row + 8 * (i % 2), 8 * (i / 2) + c);
}
template <int n, class T>
void warpgroup_multiply(float (&d)[n][4], std::uint64_t a, std::uint64_t b, bool add, T type) {
    std::uint32_t left[4];
    load_left(left, a);
    warpgroup_multiply(d, left, b, add, type);
}
template <int n, class T>
void warpgroup_multiply_mn_major(float (&d)[n][4], const std::uint32_t (&a)[4], std::uint64_t b, bool add, T type) {
    multiply_warpgroup(d, a, b, add, type, [&](Right& right, int tile) {
        const auto panel = static_cast<std::uint32_t>(b >> 32) * static_cast<std::uint32_t>(tile / 8);
        host::as_lanes(16, [&](int lane) {
            read_eight(right[lane], swizzled(static_cast<std::uint32_t>(b) + panel, lane, tile % 8 * 8, 16), type);
        });
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
inline void show_counters() {
    host::show_counters();
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
inline void follow_launch_before() {}
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
// Of f32, from 2^100 on: products of split numbers may overflow.
inline bool has_nonfinite(std::uint32_t x, float) {
    return (((x & 0x7f800000u) + 0x0e800000u) & 0x80000000u) != 0;
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

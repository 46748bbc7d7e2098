// The one file that names instructions: matrix products of a warp, their operands from shared memory, and copies into
// it. What is not said to need sm_90a runs on sm_80 and newer.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace softdelta::cuda::ptx {

// The block's dynamic shared memory.
__device__ inline char* shared_memory() {
    extern __shared__ __align__(1024) char memory[];
    return memory;
}
__device__ inline std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory, in the background; zeros instead where `take` is false.
__device__ inline void copy_async(std::uint32_t to, const void* from, bool take) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(take ? 16 : 0) : "memory");
}
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
// The copies so far are a group; all but the last `groups` of these are there.
__device__ inline void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int groups>
__device__ inline void wait_for_copies_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// Four or eight bytes from global memory, zeros where `take` is false. Such loads do not wait for each other: only the
// use of a result waits.
__device__ inline std::uint32_t load_word(const void* from, bool take) {
    std::uint32_t out;
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.b32 %0, [%1];\n}"
                 : "=r"(out)
                 : "l"(from), "r"(take ? 1 : 0));
    return out;
}
__device__ inline float2 load_pair(const void* from, bool take) {
    float2 out;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\n"
        "@p ld.global.v2.f32 {%0, %1}, [%2];\n}"
        : "=f"(out.x), "=f"(out.y)
        : "l"(from), "r"(take ? 1 : 0));
    return out;
}

// Prefetches what is soon read into L2.
__device__ inline void prefetch(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Four 8×8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Of each matrix a lane
// gets elements (l / 4, 2·(l % 4) + {0, 1}); transposed: (2·(l % 4) + {0, 1}, l / 4).
__device__ inline void load_matrices(std::uint32_t (&out)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}
__device__ inline void load_matrices_transposed(std::uint32_t (&out)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// Their way back, on sm_90 and newer.
__device__ inline void store_matrices(std::uint32_t address, const std::uint32_t (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
#endif
}
__device__ inline void store_matrices_transposed(std::uint32_t address, const std::uint32_t (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
#endif
}

// An 8×8 matrix of 16-bit elements, held as above, transposed.
__device__ inline std::uint32_t transpose(std::uint32_t x) {
    std::uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
    return out;
}

// d [16, 8] += a [16, 16] b [16, 8]. A lane holds, with r = l / 4 and c = 2·(l % 4):
// d (r, c + {0, 1}), (r + 8, c + {0, 1});   a the same of columns c and c + 8;   b (c + {0, 1}, r), (c + 8 + {0, 1},
// r).
__device__ inline void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                                __nv_bfloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                                __half) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of half the depth: a0, a1 of rows r and r + 8, columns c; b (c + {0, 1}, r).
__device__ inline void multiply_eight(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b,
                                      __nv_bfloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// d [16, 8] += a [16, 8] b [8, 8] of f32 numbers, of whose fractions tf32 has 10 bits. A lane holds d and a alike, with
// r and c as above: (r, c + {0, 1}), (r + 8, c + {0, 1}); b (c + {0, 1}, r). The instruction has another order of the
// depth in mind, which is the same for a and b.
__device__ inline void multiply_tf32(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool has_warpgroups = true;
#else
constexpr bool has_warpgroups = false;
#endif

// Products of a warpgroup, four warps side by side, on sm_90a: d [64, N] += a [64, 16] b [16, N]. A warp has 16 rows,
// as multiply() lays them out; b lies in shared memory, a in registers or as b's transpose there. They run in the
// background. begin_products() comes before the first of a group, commit_products() after the last. Before d is read or
// written, wait_for_products<n>(d) waits until at most n groups run.
//
// b: tiles of rows of 128 bytes whose 16-byte units are swizzled by row % 8, at multiples of 1024 bytes. N columns of
// a row each (`mn_major`: N runs in memory), in panels of 64 so many bytes apart; or transposed, N rows (K runs).
// It begins `offset` bytes after the address: added last, so that operands of one address differ by a constant.
__device__ inline std::uint64_t shared_operand(std::uint32_t address, int panel_bytes, int offset = 0) {
    constexpr std::uint64_t eight_rows = std::uint64_t{1024 >> 4} << 32, swizzle = std::uint64_t{1} << 62;
    const std::uint32_t begin = (static_cast<std::uint32_t>(panel_bytes >> 4) << 16) | ((address & 0x3ffffu) >> 4);
    return swizzle | eight_rows | (begin + static_cast<std::uint32_t>(offset >> 4));
}
template <class Register, int n>
__device__ inline void keep_registers(Register (&x)[n][4]) {  // what is done to them stays before, or after
#pragma unroll
    for (int i = 0; i < n; ++i) {
        if constexpr (sizeof(Register) == sizeof(float) && static_cast<Register>(0.5F) != 0)
            asm volatile("" : "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])::"memory");
        else
            asm volatile("" : "+r"(x[i][0]), "+r"(x[i][1]), "+r"(x[i][2]), "+r"(x[i][3])::"memory");
    }
}
template <class... Registers>
__device__ inline void begin_products(Registers&... all) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    (keep_registers(all), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void commit_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int running>
__device__ inline void wait_for_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(running) : "memory");
#endif
}
template <int running, int n>
__device__ inline void wait_for_products(float (&d)[n][4]) {
    wait_for_products<running>();
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    keep_registers(d);
#endif
}
// What this thread wrote to shared memory, also by copy_async, is seen by products of a warpgroup after a barrier.
__device__ inline void publish_to_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// The overloads: warpgroup_multiply and _mn_major(d, a, b, add, type), where without `add` d is the product. They
// differ in the text of one instruction, which names every sum and numbers the operands after them. N: eights of
// columns.
#define SOFTDELTA_FOUR(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define SOFTDELTA_SUMS(n)                                                                                          \
    SOFTDELTA_FOUR(n), SOFTDELTA_FOUR(n + 1), SOFTDELTA_FOUR(n + 2), SOFTDELTA_FOUR(n + 3), SOFTDELTA_FOUR(n + 4), \
        SOFTDELTA_FOUR(n + 5), SOFTDELTA_FOUR(n + 6), SOFTDELTA_FOUR(n + 7)
#define SOFTDELTA_SUMS_4 SOFTDELTA_FOUR(0), SOFTDELTA_FOUR(1), SOFTDELTA_FOUR(2), SOFTDELTA_FOUR(3)
#define SOFTDELTA_SUMS_8 SOFTDELTA_SUMS(0)
#define SOFTDELTA_SUMS_16 SOFTDELTA_SUMS(0), SOFTDELTA_SUMS(8)
#define SOFTDELTA_SHAPE_4 "m64n32k16"
#define SOFTDELTA_SHAPE_8 "m64n64k16"
#define SOFTDELTA_SHAPE_16 "m64n128k16"
#define SOFTDELTA_TO_4 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define SOFTDELTA_TO_8                                                                                 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define SOFTDELTA_TO_16                                                                                    \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "     \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, " \
    "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, " \
    "%61, %62, %63}"
#define SOFTDELTA_ADD_4 "%16"
#define SOFTDELTA_ADD_8 "%32"
#define SOFTDELTA_ADD_16 "%64"
#define SOFTDELTA_OF_REGISTERS_4 "{%17, %18, %19, %20}, %21"
#define SOFTDELTA_OF_REGISTERS_8 "{%33, %34, %35, %36}, %37"
#define SOFTDELTA_OF_REGISTERS_16 "{%65, %66, %67, %68}, %69"
#define SOFTDELTA_OF_SHARED_4 "%17, %18"
#define SOFTDELTA_OF_SHARED_8 "%33, %34"
#define SOFTDELTA_OF_SHARED_16 "%65, %66"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SOFTDELTA_PRODUCT(N, kind, where, order, ...)                                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " SOFTDELTA_ADD_##N                                          \
                 ", 0;\n"                                                                                       \
                 "wgmma.mma_async.sync.aligned." SOFTDELTA_SHAPE_##N ".f32." kind "." kind " " SOFTDELTA_TO_##N \
                 ", " SOFTDELTA_OF_##where##_##N ", p, 1, 1, " order ";\n}"                                     \
                 : SOFTDELTA_SUMS_##N                                                                           \
                 : "r"(add ? 1 : 0), __VA_ARGS__, "l"(b))
#else
#define SOFTDELTA_PRODUCT(...)
#endif
#define SOFTDELTA_LEFT_IN_REGISTERS(name, N, T, kind, major)                                                 \
    __device__ inline void name(float(&d)[N][4], const std::uint32_t(&a)[4], std::uint64_t b, bool add, T) { \
        SOFTDELTA_PRODUCT(N, kind, REGISTERS, major, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));            \
    }
#define SOFTDELTA_LEFT_IN_SHARED(name, N, T, kind, major)                                         \
    __device__ inline void name(float(&d)[N][4], std::uint64_t a, std::uint64_t b, bool add, T) { \
        SOFTDELTA_PRODUCT(N, kind, SHARED, "0, " major, "l"(a));                                  \
    }
SOFTDELTA_LEFT_IN_REGISTERS(warpgroup_multiply, 8, __nv_bfloat16, "bf16", "0")
SOFTDELTA_LEFT_IN_REGISTERS(warpgroup_multiply, 8, __half, "f16", "0")
SOFTDELTA_LEFT_IN_REGISTERS(warpgroup_multiply_mn_major, 8, __nv_bfloat16, "bf16", "1")
SOFTDELTA_LEFT_IN_REGISTERS(warpgroup_multiply_mn_major, 8, __half, "f16", "1")
SOFTDELTA_LEFT_IN_REGISTERS(warpgroup_multiply_mn_major, 16, __nv_bfloat16, "bf16", "1")
SOFTDELTA_LEFT_IN_REGISTERS(warpgroup_multiply_mn_major, 16, __half, "f16", "1")
SOFTDELTA_LEFT_IN_REGISTERS(warpgroup_multiply_mn_major, 4, __nv_bfloat16, "bf16", "1")
SOFTDELTA_LEFT_IN_SHARED(warpgroup_multiply, 4, __nv_bfloat16, "bf16", "0")
SOFTDELTA_LEFT_IN_SHARED(warpgroup_multiply, 4, __half, "f16", "0")
SOFTDELTA_LEFT_IN_SHARED(warpgroup_multiply_mn_major, 4, __nv_bfloat16, "bf16", "1")
SOFTDELTA_LEFT_IN_SHARED(warpgroup_multiply, 8, __nv_bfloat16, "bf16", "0")
SOFTDELTA_LEFT_IN_SHARED(warpgroup_multiply, 8, __half, "f16", "0")
SOFTDELTA_LEFT_IN_SHARED(warpgroup_multiply, 16, __nv_bfloat16, "bf16", "0")
SOFTDELTA_LEFT_IN_SHARED(warpgroup_multiply, 16, __half, "f16", "0")
SOFTDELTA_LEFT_IN_SHARED(warpgroup_multiply_mn_major, 8, __nv_bfloat16, "bf16", "1")
SOFTDELTA_LEFT_IN_SHARED(warpgroup_multiply_mn_major, 16, __nv_bfloat16, "bf16", "1")

// Counters of arrivals in shared memory, on sm_90 and newer. A phase ends when all have arrived; wait() waits until the
// last phase of that parity is over, of which the one before the first has parity 1.
//
// For a warp, one lane arrives after __syncwarp(). compute-sanitizer's racecheck does not see the other lanes then, and
// reports what they wrote before. With SOFTDELTA_CUDA_EVERY_LANE_ARRIVES a counter counts lanes: a thread alone arrives
// 32 times, a lane of a warp once.
#if defined(SOFTDELTA_CUDA_EVERY_LANE_ARRIVES)
constexpr int arrival = 32;
#else
constexpr int arrival = 1;
#endif
__device__ inline void start_counter(std::uint32_t counter, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(counter), "r"(arrivals * arrival) : "memory");
}
// The counters that this thread has started, to the copy engine; the block waits afterwards.
__device__ inline void show_counters() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
#endif
}
template <int count = arrival>
__device__ inline void arrive(std::uint32_t counter) {
    if constexpr (count == 1)
        asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(counter) : "memory");
    else if constexpr (count > 1)
        asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0], %1;\n}" ::"r"(counter),
                     "n"(count)
                     : "memory");
}
// By all lanes of a warp: one arrival.
__device__ inline void arrive_as_warp(std::uint32_t counter, int lane) {
    __syncwarp();
    if (arrival == 32 || lane == 0) arrive<1>(counter);
}
// When all copies of this thread so far are there.
__device__ inline void arrive_after_copies(std::uint32_t counter) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(counter) : "memory");
    arrive<arrival - 1>(counter);
}
__device__ inline void wait(std::uint32_t counter, int parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::
            "r"(counter),
        "r"(parity)
        : "memory");
#endif
}

// On sm_90 and newer. The next launch, if it may, begins when all blocks of this one have said so; it waits until they
// have ended.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Of kernels in a row, each of which begins while the one before ends: launch's `early`. All blocks wait, so that the
// next kernel knows that those before this one have ended, too.
__device__ inline void follow_launch_before() {
    wait_for_launch_before();
    let_next_begin();
}
// Flags in global memory, between blocks. A block that sees the flag also sees what this thread wrote, and other
// threads before a barrier.
__device__ inline void raise_flag(int* flag) {
    asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ inline void wait_for_flag(const int* flag) {
    int there = 0;
    while (there == 0) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(flag) : "memory");
}

// 2^x.
__device__ inline float exp2(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// 1 / x to within an ulp; 0 where the reciprocal is below 2^−126.
__device__ inline float reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// The compiler makes what depends on x anew after this, where registers are too few to keep it. A spilled register can
// cost more: where shared memory leaves L1 no room, each is a trip of 300 cycles to L2.
template <class Register>
__device__ inline void forget(Register& x) {
    asm volatile("" : "+r"(x));
}

// Two numbers, rounded, in one register: the first in the lower half.
__device__ inline std::uint32_t pack(float x, float y, __nv_bfloat16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const std::uint32_t&>(both);
}
__device__ inline std::uint32_t pack(float x, float y, __half) {
    const __half2 both = __floats2half2_rn(x, y);
    return reinterpret_cast<const std::uint32_t&>(both);
}
__device__ inline float2 unpack(std::uint32_t x, __nv_bfloat16) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
__device__ inline float2 unpack(std::uint32_t x, __half) {
    return __half22float2(reinterpret_cast<const __half2&>(x));
}

// Whether one of the two numbers is infinite or NaN: an exponent of ones carries into the sign.
__device__ inline bool has_nonfinite(std::uint32_t x, __nv_bfloat16) {
    return (((x & 0x7f807f80u) + 0x00800080u) & 0x80008000u) != 0;
}
__device__ inline bool has_nonfinite(std::uint32_t x, __half) {
    return (((x & 0x7c007c00u) + 0x04000400u) & 0x80008000u) != 0;
}
// Of f32, from 2^100 on: products of split numbers may overflow.
__device__ inline bool has_nonfinite(std::uint32_t x, float) {
    return (((x & 0x7f800000u) + 0x0e800000u) & 0x80000000u) != 0;
}

// On sm_90a warpgroups share out registers: those that load give some to those that multiply. Elsewhere nothing.
template <int registers>
__device__ inline void release_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}
template <int registers>
__device__ inline void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}

// Some warps of a block wait for each other.
__device__ inline void barrier(int which, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

// Others wait for these threads, which go on.
__device__ inline void arrive(int which, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
// As barrier(), and whether x is true for any of their threads.
__device__ inline bool any(int which, int threads, bool x) {
    int out;
    asm volatile(
        "{\n.reg .pred p, r;\nsetp.ne.b32 p, %1, 0;\nbarrier.cta.red.or.pred r, %2, %3, p;\nselp.b32 %0, 1, 0, r;\n}"
        : "=r"(out)
        : "r"(x ? 1 : 0), "r"(which), "r"(threads)
        : "memory");
    return out != 0;
}

}  // namespace softdelta::cuda::ptx

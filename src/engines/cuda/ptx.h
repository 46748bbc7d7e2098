// The one file that names instructions: matrix products of a warp, their operands from shared memory, and copies into
// it. Everything here runs on sm_80 and newer.
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
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x));
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

}  // namespace softdelta::cuda::ptx

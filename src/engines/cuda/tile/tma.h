// Hopper's copy engine: one thread copies a box of a tensor into shared memory, in the background.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "engines/cuda/tile/ptx.h"

namespace softdelta::cuda {

// A tensor of 16-bit elements [3, 2, 1, 0], sizes and strides in elements, and a box of it: columns of one row each
// become 128 bytes of shared memory. They are swizzled as products of warpgroups want them, unless the box is one row
// or memory has them so already.
struct BoxShape {
    void* data = nullptr;
    std::uint64_t size[4] = {};
    std::uint64_t stride[4] = {};  // that of columns is 1
    unsigned columns = 64, rows = 1;
    bool swizzled_there = false;
};

// What the engine knows of it. Not given: it takes no such tensor.
struct Boxes {
    CUtensorMap map{};
    bool given = false;
};

inline Boxes boxes_of(const BoxShape& shape) {
    static const auto encode = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result{};
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        return error == cudaSuccess ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found) : nullptr;
    }();
    Boxes boxes;
    if (encode == nullptr) return boxes;
    const cuuint64_t size[4] = {shape.size[0], shape.size[1], shape.size[2], shape.size[3]};
    const cuuint64_t stride[3] = {2 * shape.stride[1], 2 * shape.stride[2], 2 * shape.stride[3]};
    const cuuint32_t box[4] = {shape.columns, shape.rows, 1, 1}, steps[4] = {1, 1, 1, 1};
    boxes.given =
        encode(&boxes.map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, shape.data, size, stride, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE,
               shape.rows > 1 && !shape.swizzled_there ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
    return boxes;
}

// The engine's knowledge of `count` rows alone that begin at `data`, in device memory. A later launch calls
// take_cut_boxes() before it copies.
__device__ inline void cut_boxes(Boxes& to, const Boxes& from, const void* data, int count) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    to = from;
    const auto map = reinterpret_cast<std::uint64_t>(__cvta_generic_to_global(&to.map));
    asm volatile(
        "tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;\n"
        "tensormap.replace.tile.global_dim.global.b1024.b32 [%0], 1, %2;\n"
        "fence.proxy.tensormap::generic.release.gpu;" ::"l"(map),
        "l"(data), "r"(count)
        : "memory");
#endif
}
__device__ inline void take_cut_boxes(const Boxes& boxes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;\nprefetch.tensormap [%0];" ::"l"(&boxes.map)
                 : "memory");
#endif
}

// The box that begins there; zeros beyond the tensor. Its bytes arrive at the counter.
__device__ inline void copy_box(std::uint32_t to, const Boxes& boxes, int column, int row, int i2, int i3,
                                std::uint32_t counter) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
        "%5}], "
        "[%6];" ::"r"(to),
        "l"(&boxes.map), "r"(column), "r"(row), "r"(i2), "r"(i3), "r"(counter)
        : "memory");
#endif
}
// The same of bytes side by side, a multiple of 16.
__device__ inline void copy_side_by_side(std::uint32_t to, const void* from, int bytes, std::uint32_t counter) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(counter)
                 : "memory");
#endif
}
// The way back, of what ptx::publish_to_products() has shown; elements beyond the tensor are left out. The memory may
// be written again after wait_for_stored_boxes() of the same thread.
__device__ inline void store_box(const Boxes& boxes, std::uint32_t from, int column, int row, int i2, int i3) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
        "cp.async.bulk.commit_group;" ::"l"(&boxes.map),
        "r"(column), "r"(row), "r"(i2), "r"(i3), "r"(from)
        : "memory");
#endif
}
// The same of bytes side by side, a multiple of 16.
__device__ inline void store_bytes(void* to, std::uint32_t from, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
        "cp.async.bulk.commit_group;" ::"l"(to),
        "r"(from), "r"(bytes)
        : "memory");
#endif
}
__device__ inline void wait_for_stored_boxes() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
// As ptx::arrive(), after which the phase also waits for so many bytes.
__device__ inline void arrive_expecting(std::uint32_t counter, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(counter),
                 "r"(bytes)
                 : "memory");
    ptx::arrive<ptx::arrival - 1>(counter);
#endif
}

}  // namespace softdelta::cuda

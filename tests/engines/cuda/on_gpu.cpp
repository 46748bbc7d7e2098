#include "engines/cuda/on_gpu.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace softdelta::test {

namespace {

constexpr std::size_t guard = 256;
constexpr int poison_byte = 0xff;

void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(std::string("cuda: ") + cudaGetErrorString(error));
}

std::size_t size_of(const Tensor& t) {
    return core::size_of(static_cast<core::DType>(t.dtype()));
}

// visit(offset in elements) for every element.
template <class Visit>
void for_each_element(const Tensor& t, const Visit& visit) {
    for (std::int64_t element = 0; element < t.count(); ++element) {
        std::int64_t offset = 0, rest = element;
        for (std::size_t dim = t.rank(); dim-- > 0; rest /= t.shape(dim))
            offset += rest % t.shape(dim) * t.stride()[dim];
        visit(offset);
    }
}

}  // namespace

bool has_gpu() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

void GpuEvent::Free::operator()(void* event) const {
    cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

GpuEvent::GpuEvent() {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    event_.reset(event);
    check(cudaEventRecord(event, nullptr));
}

void GpuTensor::Free::operator()(std::byte* memory) const {
    cudaFree(memory);
}

GpuTensor::GpuTensor(const Tensor& host, bool poison) : poisoned_(poison) {
    if (!host) return;
    std::int64_t low = 0, high = -1;
    for (std::size_t dim = 0; dim < host.rank() && host.count() > 0; ++dim) {
        const std::int64_t reach = (host.shape(dim) - 1) * host.stride()[dim];
        (reach < 0 ? low : high) += reach;
    }
    if (host.count() > 0) high += 1;
    const auto size = static_cast<std::ptrdiff_t>(size_of(host));
    lowest_ = low * size;
    bytes_ = host.count() > 0 ? static_cast<std::size_t>((high - low + 1) * size) : 0;
    void* allocated = nullptr;
    check(cudaMalloc(&allocated, bytes_ + 2 * guard));
    auto* memory = static_cast<std::byte*>(allocated);
    memory_.reset(memory);
    check(cudaMemset(memory, poison_byte, bytes_ + 2 * guard));
    if (!poison && bytes_ > 0)
        check(
            cudaMemcpy(memory + guard, static_cast<std::byte*>(host.data()) + lowest_, bytes_, cudaMemcpyHostToDevice));
    view_ = Tensor(memory + guard - lowest_, host.dtype(), host.shape(), host.stride()).on({kDLCUDA, 0});
}

GpuTensor GpuTensor::input(const Tensor& host) {
    return {host, false};
}

GpuTensor GpuTensor::dense(const Tensor& host) {
    if (!host) return {};
    const std::size_t size = size_of(host);
    std::vector<std::int64_t> once(host.shape().begin(), host.shape().end()), stride(host.rank());
    std::int64_t step = 1;
    for (std::size_t dim = host.rank(); dim-- > 0;) {
        if (host.stride()[dim] == 0) once[dim] = std::min<std::int64_t>(once[dim], 1);
        stride[dim] = host.stride()[dim] == 0 ? 0 : step;
        step *= once[dim];
    }
    std::vector<std::byte> copy;
    for_each_element(Tensor(host.data(), host.dtype(), once, host.stride()), [&](std::int64_t offset) {
        const auto* element = static_cast<const std::byte*>(host.data()) + offset * static_cast<std::ptrdiff_t>(size);
        copy.insert(copy.end(), element, element + size);
    });
    return input(Tensor(copy.data(), host.dtype(), host.shape(), stride));
}

GpuTensor GpuTensor::result(const Tensor& host) {
    return {host, true};
}

Tensor GpuTensor::part(std::size_t dim, std::int64_t begin, std::int64_t count) const {
    std::vector<std::int64_t> shape(view_.shape().begin(), view_.shape().end());
    shape[dim] = count;
    auto* first =
        static_cast<std::byte*>(view_.data()) + begin * view_.stride()[dim] * static_cast<std::int64_t>(size_of(view_));
    return Tensor(first, view_.dtype(), shape, view_.stride()).on({kDLCUDA, 0});
}

void GpuTensor::check_guards() const {
    std::byte around[2][guard];
    check(cudaMemcpy(around[0], memory_.get(), guard, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(around[1], memory_.get() + guard + bytes_, guard, cudaMemcpyDeviceToHost));
    for (const auto& side : around)
        for (const std::byte byte : side)
            if (byte != std::byte{poison_byte}) throw std::runtime_error("memory outside of a result was written");
}

void GpuTensor::copy_to(const Tensor& host) const {
    if (!view_) return;
    std::vector<std::byte> all(bytes_ + 2 * guard);
    check(cudaMemcpy(all.data(), memory_.get(), all.size(), cudaMemcpyDeviceToHost));
    std::byte* first = all.data() + guard - lowest_;
    const auto size = static_cast<std::ptrdiff_t>(size_of(host));
    for_each_element(host, [&](std::int64_t offset) {
        std::memcpy(static_cast<std::byte*>(host.data()) + offset * size, first + offset * size,
                    static_cast<std::size_t>(size));
        if (poisoned_) std::memset(first + offset * size, poison_byte, static_cast<std::size_t>(size));
    });
    if (!poisoned_) return;
    for (const std::byte byte : all)
        if (byte != std::byte{poison_byte}) throw std::runtime_error("memory outside of a result was written");
}

}  // namespace softdelta::test

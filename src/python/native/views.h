// Python objects as DLPack views, without copies: whatever has DLPack's C exchange table (torch), the buffer protocol
// (NumPy) or __dlpack__ (JAX on CPU).
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "softdelta/softdelta.h"

namespace softdelta::python {

namespace nb = nanobind;

struct ExchangeTable;    // DLPackExchangeAPI
struct VersionedTensor;  // DLManagedTensorVersioned

// The operands of one call; holds what their views need until the call is over.
class Views {
  public:
    // uint16_is_bf16: elements of 16-bit unsigned integers are bf16, for NumPy has no such type.
    explicit Views(bool uint16_is_bf16 = false) : uint16_is_bf16_(uint16_is_bf16) {}
    ~Views();
    Views(const Views&) = delete;
    Views& operator=(const Views&) = delete;

    // The view of an input; null for None. With heads_first it is [B, H, L, D] and seen as [B, L, H, D]. Throws
    // nb::value_error or nb::type_error, which name the argument.
    const DLTensor* input(const char* name, nb::handle object, bool heads_first = false) {
        return view(name, object, false, heads_first);
    }
    // The view of a result, which must be writable.
    DLTensor* result(const char* name, nb::handle object, bool heads_first = false) {
        return view(name, object, true, heads_first);
    }

    // The stream that the caller's library works on, where its tensors lie on a GPU.
    void* stream() const { return stream_; }
    bool on_gpu() const { return gpu_.device_type != kDLCPU; }

    // Memory on that GPU for the length of the call, from the library that has the tensors.
    void* memory(std::size_t bytes);

  private:
    static constexpr std::size_t most = 32, max_rank = 6;
    struct Slot {
        DLTensor view{};
        std::array<std::int64_t, max_rank> shape{}, stride{};
        Py_buffer buffer{};  // buffer.obj: whether it is held
        PyObject* capsule = nullptr;
    };

    DLTensor* view(const char* name, nb::handle object, bool written, bool heads_first);
    void take_stream(const char* name, nb::handle object, DLDevice device);
    static void swap_rows_and_heads(Slot& slot);
    bool from_exchange_table(Slot& slot, const char* name, nb::handle object);
    bool from_buffer(Slot& slot, const char* name, nb::handle object, bool written);
    void from_capsule(Slot& slot, const char* name, nb::handle object, bool written);

    std::array<Slot, most> slots_{};
    std::size_t used_ = 0;
    void* stream_ = nullptr;
    DLDevice gpu_{kDLCPU, 0};  // until a tensor lies on one
    const ExchangeTable* gpu_table_ = nullptr;
    VersionedTensor* memory_ = nullptr;
    bool uint16_is_bf16_;
};

}  // namespace softdelta::python

// Arguments of the C interface made into core views, or one error that names argument, expected and actual.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <string>

#include "api/engines/table.h"
#include "api/first_sizes.h"
#include "core/error.h"
#include "core/execution.h"
#include "core/handover.h"
#include "core/operands.h"
#include "core/tensor.h"
#include "softdelta/softdelta.h"

namespace softdelta::api {

using core::Index;
using core::Tensor;

[[noreturn]] void refuse(const std::string& argument, const std::string& actual, const std::string& expected);

// "[2, 3]"
std::string shape_text(const Tensor& t);

// A size that a dimension may have, and what it stands for ("key heads"; "" when the number says enough).
struct Size {
    static constexpr Index unknown = -1;

    Index value = unknown;
    const char* meaning = "";
};

// The sizes of a call by their symbols. One that is not known may be anything.
class Sizes {
  public:
    Sizes() { (*this)[core::Symbol::one] = {1}; }
    Size& operator[](core::Symbol symbol) { return sizes_[static_cast<std::size_t>(symbol)]; }
    const Size& operator[](core::Symbol symbol) const { return sizes_[static_cast<std::size_t>(symbol)]; }

  private:
    std::array<Size, core::symbol_names.size()> sizes_{};
};

// More than any memory holds. Sums and products of a few numbers below it do not overflow.
inline constexpr Index most_elements = Index{1} << 48;

// Refuses sizes whose product is more than that.
void expect_memory(const char* what, std::initializer_list<Index> sizes);

// The view of a tensor; absent when null.
Tensor import(const char* name, const DLTensor* tensor);

// "cpu", "cuda:0"
std::string device_text(core::Device device);

// On the device of the operand `first`; lengths may lie on the host.
void expect_device(const char* name, const Tensor& t, core::Kind kind, core::Device device, const char* first);

// Each checks a tensor that is present; an absent one passes.
void expect_rank(const char* name, const Tensor& t, const core::Shape& shape);
void expect_size(const char* name, const Tensor& t, int dim, const Size& size);
void expect_shape(const char* name, const Tensor& t, const core::Shape& shape, const Sizes& sizes);
void expect_kind(const char* name, const Tensor& t, core::Kind kind);
void expect_writable(const char* name, const Tensor& t);

void expect_present(const char* name, const Tensor& t, const char* why);
void expect_absent(const char* name, const Tensor& t, const char* why);

// "1e+300"
std::string number_text(double value);

// A finite number that f32 can hold: the fast engines compute with that.
bool fits_f32(double value);
void expect_f32(const char* name, double value);

// A wanted gradient: of the shape of its input, and none without it. `name` is d + the input's.
void expect_gradient(const char* name, const Tensor& gradient, const Tensor& input);

// 0 = first ≤ … ≤ last = total; returns the longest sequence. What lies on another device is not read: no sequence is
// longer than all.
Index expect_cumulative(const char* name, const Tensor& t, Index total, const char* total_name);

// The entries of pools of states that sequences use.
struct PoolIndices {
    const Tensor &state, &final_state, &has_initial, &snapshot;
};
// They lie in their pool; what is written is written once, and no sequence reads what another one writes.
void expect_state_indices(const PoolIndices& indices, const Tensor& initial_state, const Tensor& final_state);

// The flag fields of option structures are 0 or 1.
bool expect_flag(const char* name, std::int32_t value);

// Where a number is returned to the caller.
template <class T>
T& result(const char* name, T* given) {
    if (given == nullptr) refuse(name, "null", "where to write it");
    return *given;
}

// The limits of a workspace, each 0 or more.
core::Limits check_limits(const softdelta_limits* limits);

// What execution hands over between calls (gpu) is for delta rules.
enum class Family { delta_rule, other };
struct CheckedExecution {
    core::Execution execution;
    WantedEngine engine;
    core::Handover handover;
};
CheckedExecution check_execution(const softdelta_execution* execution, Family family = Family::other);

// The caller's size of a structure, which is at least that of the first release.
template <class T>
std::size_t size_given(const char* name, const T* given) {
    constexpr std::size_t largest = 4096;
    if (given == nullptr) refuse(name, "null", "a structure");
    if (given->size < first_size<T> || given->size > largest)
        refuse(std::string(name) + ".size", std::to_string(given->size), std::to_string(sizeof(T)) + ", its sizeof");
    return given->size;
}

// A caller's structure: `size` says how much of it there is, that of its first release at least. What the caller's
// version lacks is 0, its default; what a later version adds must be 0 here.
template <class T>
T read_struct(const char* name, const T* given) {
    const std::size_t size = size_given(name, given);
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    for (std::size_t i = sizeof(T); i < size; ++i)
        if (bytes[i] != 0)
            throw core::Unsupported(std::string(name) + ": byte " + std::to_string(i) +
                                    " is set, expected 0: this softdelta knows " + std::to_string(sizeof(T)) +
                                    " bytes");
    T copy{};
    std::memcpy(&copy, given, std::min(size, sizeof(T)));
    if constexpr (requires { copy.reserved; })
        if (copy.reserved != 0) refuse(std::string(name) + ".reserved", std::to_string(copy.reserved), "0");
    return copy;
}

// A result for the caller: as much as both know, and the caller's size stays. What only the caller knows is 0.
template <class T>
void write_struct(const char* name, T* given, const T& value) {
    const std::size_t size = size_given(name, given);
    std::memset(given, 0, size);
    std::memcpy(given, &value, std::min(size, sizeof(T)));
    given->size = size;
}

}  // namespace softdelta::api

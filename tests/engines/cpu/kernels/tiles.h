// Shared by the tests of what kernels are made of: numbers, and memory that ends at an unreadable page.
#pragma once

#include <random>
#include <type_traits>

#include "engines/cpu/kernels/gemm/pack.h"
#include "softdelta/softdelta.hpp"
#include "support/guarded.h"
#include "support/random.h"

namespace softdelta::test {

// Linux grants matrix tiles to a process that asks; the library asks when a level is selected.
inline const bool granted = (select_isa_level(""), true);

using kernels::Range;
using namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE;

// `count` elements, NaN until they are written.
template <class T>
class Buffer {
  public:
    explicit Buffer(Index count, Side side = Side::end)
        : memory_(static_cast<std::size_t>(count) * sizeof(T), side), count_(count) {}
    T* data() const { return reinterpret_cast<T*>(memory_.data()); }
    T& operator[](Index i) const { return data()[i]; }
    Index count() const { return count_; }

  private:
    GuardedMemory memory_;
    Index count_;
};

inline float to_f32(float x) {
    return x;
}
inline float to_f32(core::bf16 x) {
    return core::to_float(x);
}
inline float to_f32(core::f16 x) {
    return core::to_float(x);
}

template <class T>
T to_stored(double x) {
    if constexpr (std::is_same_v<T, core::bf16>)
        return core::to_bf16(x);
    else if constexpr (std::is_same_v<T, core::f16>)
        return core::to_f16(x);
    else
        return static_cast<float>(x);
}

template <class T>
constexpr core::DType dtype_of() {
    if (std::is_same_v<T, core::bf16>) return core::DType::bf16;
    return std::is_same_v<T, core::f16> ? core::DType::f16 : core::DType::f32;
}

// The two numbers of a pair, and a number as the only one of its element.
inline float part(float element, Index /*of*/) {
    return element;
}
inline float part(std::uint32_t element, Index of) {
    return core::to_float(core::bf16{static_cast<std::uint16_t>(element >> (16 * of))});
}

template <class P>
Element<P> random_element(std::mt19937_64& random) {
    Normal normal;
    if constexpr (P::depth == 1) {
        return static_cast<float>(normal(random));
    } else {
        const std::uint32_t first = core::to_bf16(normal(random)).bits, second = core::to_bf16(normal(random)).bits;
        return first | second << 16;
    }
}

// Calls test(P{}) with each kind of product that the instruction set has.
template <class Test>
void for_each_product(const Test& test) {
    test(FloatProduct{});
    if constexpr (has_bf16_products) test(PairProduct{});
}

// Calls test(T{}) with each storage type.
template <class Test>
void for_each_type(const Test& test) {
    test(float{});
    test(core::bf16{});
    test(core::f16{});
}

}  // namespace softdelta::test

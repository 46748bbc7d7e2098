// Vectors of 16 words for the emulated level, in what the compiler has for vectors of any size. Names are xsimd's,
// whose own vectors end with the CPU's registers.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE::emulated {

// 64 bytes of T. g++ 12 takes a vector of a template's parameter for the parameter itself.
template <class T>
struct Register;
#define SOFTDELTA_REGISTER(T)                            \
    template <>                                          \
    struct Register<T> {                                 \
        typedef T type __attribute__((vector_size(64))); \
    };
SOFTDELTA_REGISTER(float)
SOFTDELTA_REGISTER(double)
SOFTDELTA_REGISTER(std::int32_t)
SOFTDELTA_REGISTER(std::uint32_t)
SOFTDELTA_REGISTER(std::int64_t)
#undef SOFTDELTA_REGISTER

// Flags of a batch<T>: all bits of a lane or none.
template <class T>
struct batch_bool {
    using Lane = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
    typename Register<Lane>::type lanes;

    SOFTDELTA_INLINE friend batch_bool operator&(batch_bool a, batch_bool b) { return {a.lanes & b.lanes}; }
    SOFTDELTA_INLINE friend batch_bool operator|(batch_bool a, batch_bool b) { return {a.lanes | b.lanes}; }
    SOFTDELTA_INLINE friend batch_bool operator!(batch_bool a) { return {~a.lanes}; }
};

template <class T>
struct batch {
    using Lanes = typename Register<T>::type;
    using Flags = batch_bool<T>;
    static constexpr std::size_t size = 64 / sizeof(T);
    Lanes lanes;

    batch() = default;
    batch(Lanes x) : lanes(x) {}
    explicit batch(T x) : lanes(x - Lanes{}) {}  // −0, too
    template <class Value>
    SOFTDELTA_INLINE static batch of(const Value& value) {  // lane i is value(i)
        batch x;
        for (std::size_t i = 0; i < size; ++i) x.lanes[i] = static_cast<T>(value(i));
        return x;
    }

    static batch load_unaligned(const T* p) {
        batch x;
        __builtin_memcpy(&x.lanes, p, 64);
        return x;
    }
    static batch load_aligned(const T* p) { return load_unaligned(p); }
    void store_unaligned(T* p) const { __builtin_memcpy(p, &lanes, 64); }
    void store_aligned(T* p) const { store_unaligned(p); }

    SOFTDELTA_INLINE friend batch operator+(batch a, batch b) { return a.lanes + b.lanes; }
    SOFTDELTA_INLINE friend batch operator-(batch a, batch b) { return a.lanes - b.lanes; }
    SOFTDELTA_INLINE friend batch operator-(batch a) { return -a.lanes; }
    SOFTDELTA_INLINE friend batch operator*(batch a, batch b) { return a.lanes * b.lanes; }
    SOFTDELTA_INLINE friend batch operator/(batch a, batch b) { return a.lanes / b.lanes; }
    SOFTDELTA_INLINE friend batch operator&(batch a, batch b) { return a.lanes & b.lanes; }
    SOFTDELTA_INLINE friend batch operator|(batch a, batch b) { return a.lanes | b.lanes; }
    SOFTDELTA_INLINE friend batch operator^(batch a, batch b) { return a.lanes ^ b.lanes; }
    SOFTDELTA_INLINE friend batch operator<<(batch a, int bits) { return a.lanes << bits; }
    SOFTDELTA_INLINE friend batch operator>>(batch a, int bits) { return a.lanes >> bits; }
    SOFTDELTA_INLINE friend Flags operator<(batch a, batch b) { return {a.lanes < b.lanes}; }
    SOFTDELTA_INLINE friend Flags operator>(batch a, batch b) { return {a.lanes > b.lanes}; }
    SOFTDELTA_INLINE friend Flags operator<=(batch a, batch b) { return {a.lanes <= b.lanes}; }
    SOFTDELTA_INLINE friend Flags operator>=(batch a, batch b) { return {a.lanes >= b.lanes}; }
    SOFTDELTA_INLINE friend Flags operator==(batch a, batch b) { return {a.lanes == b.lanes}; }
    SOFTDELTA_INLINE friend Flags operator!=(batch a, batch b) { return {a.lanes != b.lanes}; }
};

template <class T>
SOFTDELTA_INLINE bool any(batch_bool<T> a) {
    typename batch_bool<T>::Lane bits = 0;
    for (std::size_t i = 0; i < batch<T>::size; ++i) bits |= a.lanes[i];
    return bits != 0;
}
template <class T>
SOFTDELTA_INLINE bool all(batch_bool<T> a) {
    return !any(!a);
}
template <class T>
SOFTDELTA_INLINE batch<T> select(batch_bool<T> flags, batch<T> a, batch<T> b) {
    return flags.lanes ? a.lanes : b.lanes;
}
template <class T>
SOFTDELTA_INLINE batch<T> max(batch<T> a, batch<T> b) {
    return select(a > b, a, b);
}
template <class T>
SOFTDELTA_INLINE batch<T> min(batch<T> a, batch<T> b) {
    return select(a < b, a, b);
}
// f of the halves, which AVX2 has vectors for.
template <class Function, class... Batches>
SOFTDELTA_INLINE batch<float> of_halves(const Function& f, const Batches&... a) {
    struct Halves {
        __m256 low, high;
    };
    return std::bit_cast<batch<float>::Lanes>(
        Halves{f(std::bit_cast<Halves>(a.lanes).low...), f(std::bit_cast<Halves>(a.lanes).high...)});
}
template <class T>
SOFTDELTA_INLINE batch<T> fma(batch<T> a, batch<T> b, batch<T> c) {
    return of_halves([](__m256 x, __m256 y, __m256 z) { return _mm256_fmadd_ps(x, y, z); }, a, b, c);
}
template <class T>
SOFTDELTA_INLINE batch<T> copysign(batch<T> a, batch<T> b) {
    return batch<T>::of([&](std::size_t i) { return std::copysign(a.lanes[i], b.lanes[i]); });
}
template <class T>
SOFTDELTA_INLINE batch<T> abs(batch<T> a) {
    return batch<T>::of([&](std::size_t i) { return std::fabs(a.lanes[i]); });
}
template <class T>
SOFTDELTA_INLINE batch<T> sqrt(batch<T> a) {
    return batch<T>::of([&](std::size_t i) { return std::sqrt(a.lanes[i]); });
}
template <class T>
SOFTDELTA_INLINE batch<T> nearbyint(batch<T> a) {
    return of_halves([](__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }, a);
}
template <class T>
SOFTDELTA_INLINE batch<T> exp(batch<T> a) {
    return batch<T>::of([&](std::size_t i) { return std::exp(a.lanes[i]); });
}
template <class T>
SOFTDELTA_INLINE batch<T> log1p(batch<T> a) {
    return batch<T>::of([&](std::size_t i) { return std::log1p(a.lanes[i]); });
}
SOFTDELTA_INLINE batch<float> to_float(batch<std::int32_t> a) {
    return __builtin_convertvector(a.lanes, batch<float>::Lanes);
}
SOFTDELTA_INLINE batch<std::int32_t> to_int(batch<float> a) {  // towards 0
    return __builtin_convertvector(a.lanes, batch<std::int32_t>::Lanes);
}
template <class To, class T>
SOFTDELTA_INLINE To bitwise_cast(batch<T> a) {
    return std::bit_cast<typename To::Lanes>(a.lanes);
}

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE::emulated

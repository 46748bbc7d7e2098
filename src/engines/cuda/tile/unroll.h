// Loops whose counts are known, unrolled: what they index stays in registers.
#pragma once

namespace softdelta::cuda {

// use(i), use(i, j), … for all i < count, j < counts …, the last the fastest.
template <int count, int... counts, class Use>
__device__ inline void unrolled(Use&& use) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
        if constexpr (sizeof...(counts) == 0)
            use(i);
        else
            unrolled<counts...>([&](auto... rest) { use(i, rest...); });
    }
}

// The same in order, as long as use(i) says so.
template <int count, class Use>
__device__ inline void unrolled_while(Use&& use) {
#pragma unroll
    for (int i = 0; i < count; ++i)
        if (!use(i)) break;
}

// Whether it is so for any.
template <int count, int... counts, class Is>
__device__ inline bool any_of(Is&& is) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        if constexpr (sizeof...(counts) == 0)
            any = any | is(i);
        else
            any = any | any_of<counts...>([&](auto... rest) { return is(i, rest...); });
    }
    return any;
}

}  // namespace softdelta::cuda

// Small helpers of the kernels: partial vectors, the norm of a row, activations rounded to int8.
#pragma once

#include <algorithm>
#include <cmath>
#include <new>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "simd.h"
#include "thread_pool.h"

namespace ANAPHORA_ISA {

// Arrays that begin where a vector register's worth of memory does: no load crosses cache lines.
// Their type is this instruction set's own, so that the linker cannot share their code with others'.
template <class T>
struct Aligned {
    using value_type = T;
    static constexpr std::align_val_t alignment{64};
    Aligned() = default;
    template <class U>
    Aligned(const Aligned<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), alignment)); }
    void deallocate(T* p, size_t) { ::operator delete(p, alignment); }
    template <class U>
    bool operator==(const Aligned<U>&) const {
        return true;
    }
};
template <class T>
using AlignedVector = std::vector<T, Aligned<T>>;

// Asks for so many bytes to come to the second-level cache.
template <int Bytes>
inline void prefetch(const void* p) {
#pragma GCC unroll 16
    for (int i = 0; i < Bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i, 0, 2);
}

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Loads up to sixteen floats; the lanes beyond `count` are zero.
inline f32x16 load_first(const float* p, int count) {
    if (count >= kLanes) return load(p);
    float lanes[kLanes] = {};
    if (count > 0) std::copy(p, p + count, lanes);
    return load(lanes);
}

inline void store_first(float* p, f32x16 v, int count) {
    if (count >= kLanes) {
        store(p, v);
        return;
    }
    float lanes[kLanes];
    store(lanes, v);
    std::copy(lanes, lanes + count, p);
}

// Calls body with `rows` (1 to Most) as a compile-time constant.
template <int Most, class Body>
inline void with_rows(int rows, Body&& body) {
    if constexpr (Most > 1) {
        if (rows < Most) return with_rows<Most - 1>(rows, body);
    }
    body(std::integral_constant<int, Most>{});
}

template <class Body>
void for_rows(int m, Body&& body) {
    constexpr int rows = 16;
    anaphora::parallel_for(ceil_div(m, rows), [&](int task) {
        for (int row = task * rows; row < std::min(m, (task + 1) * rows); ++row) body(row);
    });
}

// 1 / sqrt(mean(x^2) + eps)
inline float inverse_rms(const float* x, int k, float eps) {
    f32x16 squares = set1(0.0f);
    for (int i = 0; i < k; i += kLanes) {
        const f32x16 v = load_first(x + i, k - i);
        squares = fma(v, v, squares);
    }
    return 1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(k) + eps);
}

// Rounds a group of 32 activations to int8: q = round(x / scale), scale = max |x| / 127. A group
// with an infinite or NaN value gets a NaN scale, so that the damage shows; one without a value
// above 1e-30 becomes zeros. `start` takes back what the weights' offset adds to each product.
inline void quantize_group(f32x16 low, f32x16 high, Activation* q, float* scale, int32_t* start) {
    constexpr float largest_int8 = 127.0f;
    const float largest = reduce_max(max(abs(low), abs(high)));
    const float poison = reduce_add(low * set1(0.0f) + high * set1(0.0f));
    const bool is_zero = !(largest > 1e-30f);
    const f32x16 inverse = set1(is_zero ? 0.0f : largest_int8 / largest);
    const f32x16 a = round(low * inverse), b = round(high * inverse);
    store_activations(q, a);
    store_activations(q + kLanes, b);
    *scale = (is_zero ? 0.0f : largest / largest_int8) + poison;
    *start = poison == 0.0f ? -kWeightOffset * static_cast<int32_t>(reduce_add(a + b)) : 0;
}

// A key, value or query times `factor`, rounded to whole numbers within +-limit; `to` gives each
// element's place. Returns the scale, max |x| / limit, NaN if an element is not finite.
template <class To>
float round_to_int16(const float* x, int dim, float factor, int limit, To&& to) {
    const auto at = [&](int d) { return load_first(x + d, dim - d) * set1(factor); };
    f32x16 lanes = set1(0.0f), damage = set1(0.0f);
    for (int d = 0; d < dim; d += kLanes) {
        lanes = max(lanes, abs(at(d)));
        damage = damage + at(d) * set1(0.0f);
    }
    const float largest = reduce_max(lanes);
    const auto bound = static_cast<float>(limit);
    const bool is_zero = !(largest > 1e-30f);
    const f32x16 inverse = set1(is_zero ? 0.0f : bound / largest);
    for (int d = 0; d < dim; d += kLanes) {
        int16_t rounded[kLanes];
        store_i16(rounded, max(set1(-bound), min(set1(bound), round(at(d) * inverse))));
        for (int i = 0; i < std::min(kLanes, dim - d); ++i) *to(d + i) = rounded[i];
    }
    return (is_zero ? 0.0f : largest / bound) + reduce_add(damage);
}

}  // namespace ANAPHORA_ISA

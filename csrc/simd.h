// Sixteen lanes at a time, written once per instruction set.
//
// Every kernel is written against these few operations and compiled once per instruction set, each
// time into its own namespace (ANAPHORA_ISA). A vector always has sixteen lanes, whatever the
// register width, and reductions always add lanes in the same tree. With fused multiply-add in
// hardware, a float result is therefore the same on each instruction set; without it (portable on
// old x86) float results may differ in the last bits, integer results never do.
//
// f32x16, i32x16    sixteen floats, sixteen int32
// i16x32            sixteen pairs of int16: dot() multiplies each pair with one common pair
// Weights           kDepth int8 of sixteen columns: dot() multiplies them with kDepth activations,
//                   which the instruction set wants as Activation; weights are stored plus
//                   kWeightOffset; load_fp4 makes them of four-bit floats, in halves, plus
//                   kFp4Offset
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(ANAPHORA_AVX2) || defined(ANAPHORA_AVX512)
#include <immintrin.h>
#elif defined(ANAPHORA_NEON)
#include <arm_neon.h>
#endif

namespace ANAPHORA_ISA {

inline constexpr int kLanes = 16;

// Half precision (IEEE) and bfloat16 as stored; arithmetic happens in float.
struct half {
    uint16_t bits;
};
struct bfloat {
    uint16_t bits;
};

inline bfloat to_bfloat(float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

#if defined(ANAPHORA_AVX512)
#include "simd_avx512.h"
#elif defined(ANAPHORA_AVX2)
#include "simd_avx2.h"
#elif defined(ANAPHORA_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

// exp(x) in single precision after Cephes' expf: x = n ln 2 + r, a polynomial in r, times 2^n.
// Below -87 the result is that of -87 (1.6e-38): callers mask what must be zero. NaN gives NaN.
inline f32x16 exp(f32x16 x) {
    x = min(set1(88.0f), max(set1(-87.0f), x));  // in this order NaN stays NaN
    const f32x16 n = round(x * set1(1.44269504088896341f));
    f32x16 r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    f32x16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    return scale_by_power(fma(p * r, r, r + set1(1.0f)), n);
}

}  // namespace ANAPHORA_ISA

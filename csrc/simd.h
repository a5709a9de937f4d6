// Sixteen lanes at a time, written once per instruction set.
//
// Every kernel is written against these few operations and compiled once per instruction set, each
// time into its own namespace (ANAPHORA_ISA). A vector always has sixteen lanes, whatever the
// register width, and reductions always add lanes in the same tree. With fused multiply-add in
// hardware, a float result is therefore the same on each instruction set; without it (portable on
// old x86) float results may differ in the last bits, integer results never do.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(ANAPHORA_AVX2) || defined(ANAPHORA_AVX512)
#include <immintrin.h>
#endif

namespace ANAPHORA_ISA {

inline constexpr int kLanes = 16;

// IEEE half precision as stored; arithmetic happens in float.
struct half {
    uint16_t bits;
};

#if defined(ANAPHORA_AVX2)

struct f32x16 {
    __m256 lo, hi;
};
struct i32x16 {
    __m256i lo, hi;
};
struct i16x32 {
    __m256i lo, hi;
};

inline f32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline f32x16 load(const half* p) {
    const auto* v = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(v)), _mm256_cvtph_ps(_mm_loadu_si128(v + 1))};
}
inline void store(float* p, f32x16 v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}
inline f32x16 operator+(f32x16 a, f32x16 b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline f32x16 operator-(f32x16 a, f32x16 b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline f32x16 operator*(f32x16 a, f32x16 b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline f32x16 operator/(f32x16 a, f32x16 b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 max(f32x16 a, f32x16 b) {
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline f32x16 min(f32x16 a, f32x16 b) {
    return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline f32x16 abs(f32x16 a) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
inline f32x16 round(f32x16 a) {  // to nearest, ties to even
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
// a * 2^n for whole n in [-126, 127]
inline f32x16 scale_by_power(f32x16 a, f32x16 n) {
    const auto pow2 = [](__m256 x) {
        const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
        return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
    };
    return {_mm256_mul_ps(a.lo, pow2(n.lo)), _mm256_mul_ps(a.hi, pow2(n.hi))};
}
// lanes n and above become `other`
inline f32x16 keep_first(f32x16 v, int n, float other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
    const __m256i high = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane);
    const __m256 rest = _mm256_set1_ps(other);
    return {_mm256_blendv_ps(rest, v.lo, _mm256_castsi256_ps(low)),
            _mm256_blendv_ps(rest, v.hi, _mm256_castsi256_ps(high))};
}
inline float reduce_add(f32x16 v) {
    const __m256 a = _mm256_add_ps(v.lo, v.hi);
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
inline float reduce_max(f32x16 v) {
    const __m256 a = _mm256_max_ps(v.lo, v.hi);
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

inline i32x16 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline f32x16 to_float(i32x16 v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }
inline i16x32 widen(const int8_t* p) {
    const auto* v = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(v)), _mm256_cvtepi8_epi16(_mm_loadu_si128(v + 1))};
}
// acc[lane] += w[2 lane] * pair[0] + w[2 lane + 1] * pair[1]
inline i32x16 dot_pair(i32x16 acc, i16x32 w, const int16_t* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof both);
    const __m256i x = _mm256_set1_epi32(both);
    return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(w.lo, x)),
            _mm256_add_epi32(acc.hi, _mm256_madd_epi16(w.hi, x))};
}
// whole numbers within the int16 range
inline void store_i16(int16_t* p, f32x16 v) {
    const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline half to_half(float x) {
    return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
}

#elif defined(ANAPHORA_AVX512)

struct f32x16 {
    __m512 v;
};
struct i32x16 {
    __m512i v;
};
struct i16x32 {
    __m512i v;
};

inline f32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline f32x16 load(const half* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline f32x16 round(f32x16 a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline f32x16 scale_by_power(f32x16 a, f32x16 n) {
    const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(_mm512_slli_epi32(e, 23)))};
}
inline f32x16 keep_first(f32x16 a, int n, float other) {
    const unsigned mask = n >= kLanes ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1;
    return {_mm512_mask_blend_ps(static_cast<__mmask16>(mask), _mm512_set1_ps(other), a.v)};
}
// The halves are added first, then as in eight lanes: the tree is the same everywhere.
inline float reduce_add(f32x16 a) {
    const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
inline float reduce_max(f32x16 a) { return _mm512_reduce_max_ps(a.v); }

inline i32x16 zero_i32() { return {_mm512_setzero_si512()}; }
inline f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline i16x32 widen(const int8_t* p) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline i32x16 dot_pair(i32x16 acc, i16x32 w, const int16_t* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof both);
    return {_mm512_dpwssd_epi32(acc.v, w.v, _mm512_set1_epi32(both))};
}
inline void store_i16(int16_t* p, f32x16 a) {
    const __m256i packed = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a.v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
inline half to_half(float x) {
    return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
}

#else  // portable: plain loops that any compiler vectorises as far as it can

struct f32x16 {
    float at[kLanes];
};
struct i32x16 {
    int32_t at[kLanes];
};
struct i16x32 {
    int16_t at[2 * kLanes];
};

template <class F>
inline f32x16 each(F f) {
    f32x16 r;
    for (int i = 0; i < kLanes; ++i) r.at[i] = f(i);
    return r;
}
inline float half_to_float(half h) {
    const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000) << 16;
    const uint32_t rest = static_cast<uint32_t>(h.bits & 0x7fff) << 13;
    uint32_t bits;
    if (rest >= 0x0f800000) {
        bits = rest | 0x70000000 | 0x7f800000;  // infinity and NaN
    } else {
        // The exponent's bias grows by 112: multiply by 2^112, which also normalises subnormals.
        float f;
        std::memcpy(&f, &rest, sizeof f);
        f *= 5.192296858534828e33f;
        std::memcpy(&bits, &f, sizeof bits);
    }
    bits |= sign;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}
inline half to_half(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits & 0x80000000u;
    bits ^= sign;
    uint32_t out;
    if (bits >= 0x47800000) {  // too large, infinity, NaN
        out = bits > 0x7f800000 ? 0x7e00 | ((bits >> 13) & 0x3ff) : 0x7c00;
    } else if (bits < 0x38800000) {  // subnormal: let the float adder round at the right bit
        float f;
        std::memcpy(&f, &bits, sizeof f);
        f += 0.5f;
        std::memcpy(&out, &f, sizeof out);
        out -= 0x3f000000;
    } else {
        const uint32_t odd = (bits >> 13) & 1;
        out = (bits - 0x38000000 + 0xfff + odd) >> 13;
    }
    return {static_cast<uint16_t>(out | (sign >> 16))};
}

inline f32x16 set1(float x) {
    return each([&](int) { return x; });
}
inline f32x16 load(const float* p) {
    return each([&](int i) { return p[i]; });
}
inline f32x16 load(const half* p) {
    return each([&](int i) { return half_to_float(p[i]); });
}
inline void store(float* p, f32x16 v) { std::memcpy(p, v.at, sizeof v.at); }
inline f32x16 operator+(f32x16 a, f32x16 b) {
    return each([&](int i) { return a.at[i] + b.at[i]; });
}
inline f32x16 operator-(f32x16 a, f32x16 b) {
    return each([&](int i) { return a.at[i] - b.at[i]; });
}
inline f32x16 operator*(f32x16 a, f32x16 b) {
    return each([&](int i) { return a.at[i] * b.at[i]; });
}
inline f32x16 operator/(f32x16 a, f32x16 b) {
    return each([&](int i) { return a.at[i] / b.at[i]; });
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__FP_FAST_FMAF)
    return each([&](int i) { return __builtin_fmaf(a.at[i], b.at[i], c.at[i]); });
#else
    return each([&](int i) { return a.at[i] * b.at[i] + c.at[i]; });
#endif
}
inline f32x16 max(f32x16 a, f32x16 b) {
    return each([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; });
}
inline f32x16 min(f32x16 a, f32x16 b) {
    return each([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; });
}
inline f32x16 abs(f32x16 a) {
    return each([&](int i) { return std::fabs(a.at[i]); });
}
inline f32x16 round(f32x16 a) {
    return each([&](int i) { return std::nearbyintf(a.at[i]); });
}
inline f32x16 scale_by_power(f32x16 a, f32x16 n) {
    return each([&](int i) {
        const int32_t whole = n.at[i] == n.at[i] ? static_cast<int32_t>(n.at[i]) : 0;
        const uint32_t bits = static_cast<uint32_t>(whole + 127) << 23;
        float pow2;
        std::memcpy(&pow2, &bits, sizeof pow2);
        return a.at[i] * pow2;
    });
}
inline f32x16 keep_first(f32x16 v, int n, float other) {
    return each([&](int i) { return i < n ? v.at[i] : other; });
}
inline float reduce_add(f32x16 v) {
    for (int half_width = kLanes / 2; half_width > 0; half_width /= 2)
        for (int i = 0; i < half_width; ++i) v.at[i] += v.at[i + half_width];
    return v.at[0];
}
inline float reduce_max(f32x16 v) {
    float m = v.at[0];
    for (int i = 1; i < kLanes; ++i) m = v.at[i] > m ? v.at[i] : m;
    return m;
}
inline i32x16 zero_i32() { return {}; }
inline f32x16 to_float(i32x16 v) {
    return each([&](int i) { return static_cast<float>(v.at[i]); });
}
inline i16x32 widen(const int8_t* p) {
    i16x32 r;
    for (int i = 0; i < 2 * kLanes; ++i) r.at[i] = p[i];
    return r;
}
inline i32x16 dot_pair(i32x16 acc, i16x32 w, const int16_t* pair) {
    for (int i = 0; i < kLanes; ++i)
        acc.at[i] += w.at[2 * i] * pair[0] + w.at[2 * i + 1] * pair[1];
    return acc;
}
inline void store_i16(int16_t* p, f32x16 v) {
    for (int i = 0; i < kLanes; ++i)
        p[i] = v.at[i] == v.at[i] ? static_cast<int16_t>(v.at[i]) : int16_t{0};
}

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

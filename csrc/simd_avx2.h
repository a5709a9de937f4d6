// Included by simd.h within its namespace: sixteen lanes as two registers of AVX2.
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
inline f32x16 load(const bfloat* p) {
    const auto* v = reinterpret_cast<const __m128i*>(p);
    const auto widen = [](__m128i x) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
    };
    return {widen(_mm_loadu_si128(v)), widen(_mm_loadu_si128(v + 1))};
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
inline i32x16 operator+(i32x16 a, i32x16 b) {
    return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline i32x16 set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline i16x32 load(const int16_t* p) {
    const auto* v = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
// acc[lane] += w[2 lane] * pair[0] + w[2 lane + 1] * pair[1]
inline i32x16 dot(i32x16 acc, i16x32 w, const int16_t* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof both);
    const __m256i x = _mm256_set1_epi32(both);
#if defined(ANAPHORA_AVX_VNNI)
    return {_mm256_dpwssd_avx_epi32(acc.lo, w.lo, x), _mm256_dpwssd_avx_epi32(acc.hi, w.hi, x)};
#else
    return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(w.lo, x)),
            _mm256_add_epi32(acc.hi, _mm256_madd_epi16(w.hi, x))};
#endif
}

inline f32x16 power_of_two(const uint8_t* exponents) {
    const auto widen = [](const uint8_t* p) {
        const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(x), 23));
    };
    return {widen(exponents), widen(exponents + 8)};
}

#if defined(ANAPHORA_AVX_VNNI)

// Unsigned weights (stored + 128) times signed activations, four of each column at a time.
inline constexpr int kDepth = 4;
inline constexpr int kWeightOffset = 128;
inline constexpr int kFp4Offset = 12;
inline constexpr uint8_t kFp4Values[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                           12, 11, 10, 9,  8,  6,  4,  0};
using Activation = int8_t;
struct Weights {
    __m256i lo, hi;
};
inline Weights load_weights(const int8_t* p) {
    const auto* v = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
inline i32x16 dot(i32x16 acc, Weights w, const int8_t* four) {
    int32_t all;
    std::memcpy(&all, four, sizeof all);
    const __m256i x = _mm256_set1_epi32(all);
    return {_mm256_dpbusd_avx_epi32(acc.lo, w.lo, x), _mm256_dpbusd_avx_epi32(acc.hi, w.hi, x)};
}
inline Weights load_fp4(const uint8_t* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(kFp4Values)));
    return {_mm256_shuffle_epi8(table, _mm256_and_si256(both, low)),
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), low))};
}
// whole numbers within the int8 range
inline void store_activations(int8_t* p, f32x16 v) {
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packs_epi32(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi)), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi16(_mm256_castsi256_si128(words),
                                     _mm256_extracti128_si256(words, 1)));
}

#else

// Without a byte product that cannot saturate: both sides as int16, two of each column at a time.
inline constexpr int kDepth = 2;
inline constexpr int kWeightOffset = 0;
inline constexpr int kFp4Offset = 0;
inline constexpr int8_t kFp4Values[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                          0, -1, -2, -3, -4, -6, -8, -12};
using Activation = int16_t;
using Weights = i16x32;
inline Weights load_weights(const int8_t* p) {
    const auto* v = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(v)), _mm256_cvtepi8_epi16(_mm_loadu_si128(v + 1))};
}
inline Weights load_fp4(const uint8_t* p) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i low = _mm_set1_epi8(15);
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kFp4Values));
    const auto widen = [&](__m128i x) {
        return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(table, _mm_and_si128(x, low)));
    };
    return {widen(both), widen(_mm_srli_epi16(both, 4))};
}

#endif

// whole numbers within the int16 range
inline void store_i16(int16_t* p, f32x16 v) {
    const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
#if !defined(ANAPHORA_AVX_VNNI)
inline void store_activations(int16_t* p, f32x16 v) { store_i16(p, v); }
#endif
inline half to_half(float x) {
    return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
}

// Included by simd.h within its namespace: sixteen lanes as one register of AVX-512.
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
inline f32x16 load(const bfloat* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
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
inline i32x16 operator+(i32x16 a, i32x16 b) {
    return {_mm512_add_epi32(a.v, b.v)};
}
inline i32x16 set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline i16x32 load(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
inline i32x16 dot(i32x16 acc, i16x32 w, const int16_t* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof both);
    return {_mm512_dpwssd_epi32(acc.v, w.v, _mm512_set1_epi32(both))};
}

inline constexpr int kDepth = 4;
inline constexpr int kWeightOffset = 128;
inline constexpr int kFp4Offset = 12;
inline constexpr uint8_t kFp4Values[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                           12, 11, 10, 9,  8,  6,  4,  0};
using Activation = int8_t;
struct Weights {
    __m512i v;
};
inline Weights load_weights(const int8_t* p) { return {_mm512_loadu_si512(p)}; }
inline i32x16 dot(i32x16 acc, Weights w, const int8_t* four) {
    int32_t all;
    std::memcpy(&all, four, sizeof all);
    return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(all))};
}
// Number i of the first half of a piece is in the low half of byte i, of the second in the high.
inline Weights load_fp4(const uint8_t* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m512i halves = _mm512_inserti64x4(_mm512_castsi256_si512(both),
                                              _mm256_srli_epi16(both, 4), 1);
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(kFp4Values)));
    return {_mm512_shuffle_epi8(table, _mm512_and_si512(halves, _mm512_set1_epi8(15)))};
}
inline f32x16 power_of_two(const uint8_t* exponents) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(x), 23))};
}
inline void store_activations(int8_t* p, f32x16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
inline void store_i16(int16_t* p, f32x16 a) {
    const __m256i packed = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a.v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
inline half to_half(float x) {
    return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
}

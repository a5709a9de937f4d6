// Included by simd.h within its namespace: sixteen lanes as plain loops that any compiler vectorises as far as it can.
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
inline f32x16 load(const bfloat* p) {
    return each([&](int i) {
        const uint32_t bits = static_cast<uint32_t>(p[i].bits) << 16;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    });
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
inline i32x16 operator+(i32x16 a, i32x16 b) {
    for (int i = 0; i < kLanes; ++i) a.at[i] += b.at[i];
    return a;
}
inline i32x16 set1(int32_t x) {
    i32x16 r;
    for (int i = 0; i < kLanes; ++i) r.at[i] = x;
    return r;
}
inline i16x32 load(const int16_t* p) {
    i16x32 r;
    std::memcpy(r.at, p, sizeof r.at);
    return r;
}
inline i32x16 dot(i32x16 acc, i16x32 w, const int16_t* pair) {
    for (int i = 0; i < kLanes; ++i)
        acc.at[i] += w.at[2 * i] * pair[0] + w.at[2 * i + 1] * pair[1];
    return acc;
}

inline constexpr int kDepth = 2;
inline constexpr int kWeightOffset = 0;
inline constexpr int kFp4Offset = 0;
inline constexpr int8_t kFp4Values[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                          0, -1, -2, -3, -4, -6, -8, -12};
using Activation = int16_t;
using Weights = i16x32;
inline Weights load_weights(const int8_t* p) {
    Weights r;
    for (int i = 0; i < 2 * kLanes; ++i) r.at[i] = p[i];
    return r;
}
inline Weights load_fp4(const uint8_t* p) {
    Weights r;
    for (int i = 0; i < kLanes; ++i) {
        r.at[i] = kFp4Values[p[i] & 15];
        r.at[i + kLanes] = kFp4Values[p[i] >> 4];
    }
    return r;
}
inline f32x16 power_of_two(const uint8_t* exponents) {
    return each([&](int i) {
        const uint32_t bits = static_cast<uint32_t>(exponents[i]) << 23;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    });
}
inline void store_i16(int16_t* p, f32x16 v) {
    for (int i = 0; i < kLanes; ++i)
        p[i] = v.at[i] == v.at[i] ? static_cast<int16_t>(v.at[i]) : int16_t{0};
}
inline void store_activations(int16_t* p, f32x16 v) { store_i16(p, v); }

// Included by simd.h within its namespace: sixteen lanes as four registers of NEON with the
// dot-product extension (ARMv8.2 and later).
struct f32x16 {
    float32x4_t at[4];
};
struct i32x16 {
    int32x4_t at[4];
};
struct i16x32 {
    int16x8_t at[4];
};

template <class F>
inline f32x16 each(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}
inline f32x16 set1(float x) {
    return each([&](int) { return vdupq_n_f32(x); });
}
inline f32x16 load(const float* p) {
    return each([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline f32x16 load(const half* p) {
    const auto* from = reinterpret_cast<const uint16_t*>(p);
    return each([&](int i) {
        return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * i)));
    });
}
inline f32x16 load(const bfloat* p) {
    const auto* from = reinterpret_cast<const uint16_t*>(p);
    return each([&](int i) {
        return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * i), 16));
    });
}
inline void store(float* p, f32x16 v) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v.at[i]);
}
inline f32x16 operator+(f32x16 a, f32x16 b) {
    return each([&](int i) { return vaddq_f32(a.at[i], b.at[i]); });
}
inline f32x16 operator-(f32x16 a, f32x16 b) {
    return each([&](int i) { return vsubq_f32(a.at[i], b.at[i]); });
}
inline f32x16 operator*(f32x16 a, f32x16 b) {
    return each([&](int i) { return vmulq_f32(a.at[i], b.at[i]); });
}
inline f32x16 operator/(f32x16 a, f32x16 b) {
    return each([&](int i) { return vdivq_f32(a.at[i], b.at[i]); });
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return each([&](int i) { return vfmaq_f32(c.at[i], a.at[i], b.at[i]); });
}
// As x86 has it: where the comparison fails, also for NaN, the second operand.
inline f32x16 max(f32x16 a, f32x16 b) {
    return each([&](int i) { return vbslq_f32(vcgtq_f32(a.at[i], b.at[i]), a.at[i], b.at[i]); });
}
inline f32x16 min(f32x16 a, f32x16 b) {
    return each([&](int i) { return vbslq_f32(vcltq_f32(a.at[i], b.at[i]), a.at[i], b.at[i]); });
}
inline f32x16 abs(f32x16 a) {
    return each([&](int i) { return vabsq_f32(a.at[i]); });
}
inline f32x16 round(f32x16 a) {
    return each([&](int i) { return vrndnq_f32(a.at[i]); });
}
inline f32x16 scale_by_power(f32x16 a, f32x16 n) {
    return each([&](int i) {
        const int32x4_t e = vaddq_s32(vcvtq_s32_f32(n.at[i]), vdupq_n_s32(127));
        return vmulq_f32(a.at[i], vreinterpretq_f32_s32(vshlq_n_s32(e, 23)));
    });
}
inline f32x16 keep_first(f32x16 v, int n, float other) {
    const int32x4_t lane = {0, 1, 2, 3};
    return each([&](int i) {
        const uint32x4_t keep = vcgtq_s32(vdupq_n_s32(n - 4 * i), lane);
        return vbslq_f32(keep, v.at[i], vdupq_n_f32(other));
    });
}
inline float reduce_add(f32x16 v) {
    const float32x4_t low = vaddq_f32(v.at[0], v.at[2]);
    const float32x4_t high = vaddq_f32(v.at[1], v.at[3]);
    const float32x4_t four = vaddq_f32(low, high);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float reduce_max(f32x16 v) {
    const f32x16 pairs = max(v, f32x16{{v.at[1], v.at[0], v.at[3], v.at[2]}});
    float lanes[8];
    vst1q_f32(lanes, pairs.at[0]);
    vst1q_f32(lanes + 4, pairs.at[2]);
    float m = lanes[0];
    for (int i = 1; i < 8; ++i) m = lanes[i] > m ? lanes[i] : m;
    return m;
}

inline i32x16 operator+(i32x16 a, i32x16 b) {
    for (int i = 0; i < 4; ++i) a.at[i] = vaddq_s32(a.at[i], b.at[i]);
    return a;
}
inline i32x16 set1(int32_t x) {
    return {{vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}};
}
inline i32x16 zero_i32() { return set1(int32_t{0}); }
inline f32x16 to_float(i32x16 v) {
    return each([&](int i) { return vcvtq_f32_s32(v.at[i]); });
}
inline i16x32 load(const int16_t* p) {
    return {{vld1q_s16(p), vld1q_s16(p + 8), vld1q_s16(p + 16), vld1q_s16(p + 24)}};
}
inline i32x16 dot(i32x16 acc, i16x32 w, const int16_t* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof both);
    const int16x8_t x = vreinterpretq_s16_s32(vdupq_n_s32(both));
    for (int i = 0; i < 4; ++i) {
        const int32x4_t low = vmull_s16(vget_low_s16(w.at[i]), vget_low_s16(x));
        const int32x4_t high = vmull_high_s16(w.at[i], x);
        acc.at[i] = vaddq_s32(acc.at[i], vpaddq_s32(low, high));
    }
    return acc;
}

inline constexpr int kDepth = 4;
inline constexpr int kWeightOffset = 0;
inline constexpr int kFp4Offset = 0;
inline constexpr int8_t kFp4Values[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                          0, -1, -2, -3, -4, -6, -8, -12};
using Activation = int8_t;
struct Weights {
    int8x16_t at[4];
};
inline Weights load_weights(const int8_t* p) {
    return {{vld1q_s8(p), vld1q_s8(p + 16), vld1q_s8(p + 32), vld1q_s8(p + 48)}};
}
inline Weights load_fp4(const uint8_t* p) {
    const int8x16_t table = vld1q_s8(kFp4Values);
    const uint8x16_t a = vld1q_u8(p), b = vld1q_u8(p + 16), low = vdupq_n_u8(15);
    return {{vqtbl1q_s8(table, vandq_u8(a, low)), vqtbl1q_s8(table, vandq_u8(b, low)),
             vqtbl1q_s8(table, vshrq_n_u8(a, 4)), vqtbl1q_s8(table, vshrq_n_u8(b, 4))}};
}
inline f32x16 power_of_two(const uint8_t* exponents) {
    const uint8x16_t x = vld1q_u8(exponents);
    const uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_high_u8(x);
    const auto shift = [](uint32x4_t v) { return vreinterpretq_f32_u32(vshlq_n_u32(v, 23)); };
    return {{shift(vmovl_u16(vget_low_u16(low))), shift(vmovl_high_u16(low)),
             shift(vmovl_u16(vget_low_u16(high))), shift(vmovl_high_u16(high))}};
}
inline i32x16 dot(i32x16 acc, Weights w, const int8_t* four) {
    int32_t all;
    std::memcpy(&all, four, sizeof all);
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(all));
    for (int i = 0; i < 4; ++i) acc.at[i] = vdotq_s32(acc.at[i], w.at[i], x);
    return acc;
}
inline int16x8_t narrow(float32x4_t a, float32x4_t b) {
    return vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(a)), vcvtnq_s32_f32(b));
}
inline void store_i16(int16_t* p, f32x16 v) {
    vst1q_s16(p, narrow(v.at[0], v.at[1]));
    vst1q_s16(p + 8, narrow(v.at[2], v.at[3]));
}
inline void store_activations(int8_t* p, f32x16 v) {
    const int16x8_t low = narrow(v.at[0], v.at[1]), high = narrow(v.at[2], v.at[3]);
    vst1q_s8(p, vqmovn_high_s16(vqmovn_s16(low), high));
}
inline half to_half(float x) {
    const float16x4_t h = vcvt_f16_f32(vdupq_n_f32(x));
    return {vget_lane_u16(vreinterpret_u16_f16(h), 0)};
}

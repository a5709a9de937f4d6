// The element-wise kernels: normalisation, rotary positions, the gated activation, K/V storage.
#include <algorithm>
#include <cmath>

#include "isa.h"
#include "rows.h"

namespace ANAPHORA_ISA {
namespace {

using anaphora::kPanel;
using anaphora::KVLayout;

inline void put(float* p, float x) { *p = x; }
inline void put(half* p, float x) { *p = to_half(x); }
inline void put(bfloat* p, float x) { *p = to_bfloat(x); }

template <class Element>
void store_floats(const KVLayout& kv, int layer, const float* k, const float* v, int64_t slot) {
    const int dim = kv.head_dim;
    const auto offset = static_cast<int>(slot % kv.block_size);
    auto* keys = reinterpret_cast<Element*>(kv.part(slot / kv.block_size, layer, 0));
    auto* values = reinterpret_cast<Element*>(kv.part(slot / kv.block_size, layer, 1));
    keys += int64_t{offset / kPanel} * dim * kPanel + offset % kPanel;
    values += int64_t{offset} * dim;
    for (int head = 0; head < kv.num_kv_heads; ++head) {
        const int64_t base = head * kv.head_elements();
        for (int d = 0; d < dim; ++d) put(keys + base + int64_t{d} * kPanel, k[head * dim + d]);
        for (int d = 0; d < dim; ++d) put(values + base + d, v[head * dim + d]);
    }
}

void store_int16(const KVLayout& kv, int layer, const float* k, const float* v, int64_t slot) {
    const int dim = kv.head_dim, key_max = anaphora::kv_int16_max(dim);
    const auto offset = static_cast<int>(slot % kv.block_size);
    char* key_part = kv.part(slot / kv.block_size, layer, 0);
    char* value_part = kv.part(slot / kv.block_size, layer, 1);
    for (int head = 0; head < kv.num_kv_heads; ++head) {
        auto* keys = reinterpret_cast<int16_t*>(key_part) + head * kv.head_elements() +
                     int64_t{offset / kPanel} * dim * kPanel + offset % kPanel * 2;
        auto* values = reinterpret_cast<int16_t*>(value_part) + head * kv.head_elements() +
                       int64_t{offset / 2} * dim * 2 + offset % 2;
        const int scale_at = head * kv.block_size + offset;
        kv.scales(key_part)[scale_at] =
            round_to_int16(k + head * dim, dim, 1.0f, key_max,
                           [&](int d) { return keys + d / 2 * 2 * kPanel + d % 2; });
        kv.scales(value_part)[scale_at] =
            round_to_int16(v + head * dim, dim, 1.0f, anaphora::kValueMax,
                           [&](int d) { return values + 2 * d; });
    }
}

}  // namespace

void rms_norm(const float* x, const anaphora::Norm& norm, int m, int k, float* out) {
    for_rows(m, [&](int row) {
        const float* in = x + int64_t{row} * k;
        const f32x16 inverse = set1(inverse_rms(in, k, norm.eps));
        for (int i = 0; i < k; i += kLanes) {
            const f32x16 v =
                load_first(in + i, k - i) * inverse * load_first(norm.weight + i, k - i);
            store_first(out + int64_t{row} * k + i, v, k - i);
        }
    });
}

void norm_heads(float* x, int64_t stride, int t, int num_heads, int head_dim,
                const anaphora::Norm& norm) {
    for_rows(t, [&](int row) {
        for (int head = 0; head < num_heads; ++head) {
            float* at = x + row * stride + int64_t{head} * head_dim;
            const f32x16 inverse = set1(inverse_rms(at, head_dim, norm.eps));
            for (int i = 0; i < head_dim; i += kLanes) {
                const int count = head_dim - i;
                const f32x16 v = load_first(at + i, count) * inverse *
                                 load_first(norm.weight + i, count);
                store_first(at + i, v, count);
            }
        }
    });
}

void rope(float* x, int64_t stride, const int32_t* positions, int t, int num_heads, int head_dim,
          const float* cos, const float* sin) {
    const int pairs = head_dim / 2;
    for_rows(t, [&](int row) {
        const float* c = cos + int64_t{positions[row]} * pairs;
        const float* s = sin + int64_t{positions[row]} * pairs;
        for (int head = 0; head < num_heads; ++head) {
            float* first = x + row * stride + int64_t{head} * head_dim;
            float* second = first + pairs;
            for (int i = 0; i < pairs; i += kLanes) {
                const int count = pairs - i;
                const f32x16 a = load_first(first + i, count);
                const f32x16 b = load_first(second + i, count);
                const f32x16 ci = load_first(c + i, count);
                const f32x16 si = load_first(s + i, count);
                store_first(first + i, a * ci - b * si, count);
                store_first(second + i, b * ci + a * si, count);
            }
        }
    });
}

void store_kv(const KVLayout& kv, int layer, const float* k, const float* v, int64_t stride,
              const int64_t* slots, int t) {
    const auto store = [&] {
        switch (kv.type) {
            case anaphora::KVType::float32: return store_floats<float>;
            case anaphora::KVType::float16: return store_floats<half>;
            case anaphora::KVType::bfloat16: return store_floats<bfloat>;
            default: return store_int16;
        }
    }();
    for_rows(t, [&](int row) {
        if (slots[row] != anaphora::kNoSlot)
            store(kv, layer, k + row * stride, v + row * stride, slots[row]);
    });
}

}  // namespace ANAPHORA_ISA

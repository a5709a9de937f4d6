// The element-wise kernels: normalisation, rotary positions, the gated activation, K/V storage.
#include <algorithm>
#include <cmath>

#include "isa.h"
#include "simd.h"
#include "thread_pool.h"

namespace ANAPHORA_ISA {
namespace {

using anaphora::kPanel;
using anaphora::parallel_for;

constexpr int kRowsPerTask = 16;

template <class Body>
void for_rows(int m, Body&& body) {
    parallel_for((m + kRowsPerTask - 1) / kRowsPerTask, [&](int task) {
        const int end = std::min(m, (task + 1) * kRowsPerTask);
        for (int row = task * kRowsPerTask; row < end; ++row) body(row);
    });
}

// Loads up to sixteen floats; the lanes beyond `count` are zero.
inline f32x16 load_first(const float* p, int count) {
    if (count >= kLanes) return load(p);
    float lanes[kLanes] = {};
    std::copy(p, p + count, lanes);
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

inline void put(float* p, float x) { *p = x; }
inline void put(half* p, float x) { *p = to_half(x); }

template <class Element>
void store_kv_row(const anaphora::KVLayout& kv, int layer, const float* k, const float* v,
                  int64_t slot) {
    const int dim = kv.head_dim;
    auto* part = static_cast<Element*>(kv.data) + slot / kv.block_size * kv.block_elements() +
                 2 * layer * kv.part_elements();
    const auto offset = static_cast<int>(slot % kv.block_size);
    for (int head = 0; head < kv.num_kv_heads; ++head) {
        const int64_t base = int64_t{head} * kv.block_size * dim;
        Element* keys = part + base + int64_t{offset / kPanel} * dim * kPanel + offset % kPanel;
        Element* values = part + kv.part_elements() + base + int64_t{offset} * dim;
        for (int d = 0; d < dim; ++d) put(keys + int64_t{d} * kPanel, k[head * dim + d]);
        for (int d = 0; d < dim; ++d) put(values + d, v[head * dim + d]);
    }
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, int m, int k, float* out) {
    for_rows(m, [&](int row) {
        const float* in = x + int64_t{row} * k;
        f32x16 squares = set1(0.0f);
        for (int i = 0; i < k; i += kLanes) {
            const f32x16 v = load_first(in + i, k - i);
            squares = fma(v, v, squares);
        }
        const float mean = reduce_add(squares) / static_cast<float>(k);
        const f32x16 inverse = set1(1.0f / std::sqrt(mean + eps));
        for (int i = 0; i < k; i += kLanes) {
            const f32x16 v = load_first(in + i, k - i) * inverse * load_first(weight + i, k - i);
            store_first(out + int64_t{row} * k + i, v, k - i);
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

void store_kv(const anaphora::KVLayout& kv, int layer, const float* k, const float* v,
              int64_t stride, const int64_t* slots, int t) {
    for_rows(t, [&](int row) {
        const float* keys = k + row * stride;
        const float* values = v + row * stride;
        if (kv.is_half)
            store_kv_row<half>(kv, layer, keys, values, slots[row]);
        else
            store_kv_row<float>(kv, layer, keys, values, slots[row]);
    });
}

void silu_and_mul(const float* x, int m, int k, float* out) {
    for_rows(m, [&](int row) {
        const float* gate = x + int64_t{row} * 2 * k;
        for (int i = 0; i < k; i += kLanes) {
            const f32x16 g = load_first(gate + i, k - i);
            const f32x16 up = load_first(gate + k + i, k - i);
            const f32x16 sigmoid = set1(1.0f) / (set1(1.0f) + exp(set1(0.0f) - g));
            store_first(out + int64_t{row} * k + i, g * sigmoid * up, k - i);
        }
    });
}

}  // namespace ANAPHORA_ISA

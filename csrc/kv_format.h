// How attention reads keys and values: as floats of some width, or as int16 with scales.
//
// A format holds one panel of keys or values at a time and scores, or sums, R rows against it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rows.h"

namespace ANAPHORA_ISA {

using anaphora::kPanel;
using anaphora::kPartition;
using anaphora::KVLayout;

// Rows by panels, and rows by vectors of the head dimension, that are multiplied at once: their sums
// must fit the registers, and loads are fewest where both factors are large.
#if defined(ANAPHORA_AVX512)
constexpr int kScoreRows = 8, kScorePanels = 2, kValueRows = 4, kValueVectors = 4;
#else
constexpr int kScoreRows = 4, kScorePanels = 1, kValueRows = 4, kValueVectors = 1;
#endif

inline int padded(int dim) { return ceil_div(dim, kLanes) * kLanes; }

// v with the lanes outside [from, to) set to `other`.
inline f32x16 keep(f32x16 v, int from, int to, float other) {
    if (from <= 0) return keep_first(v, to, other);
    float lanes[kLanes];
    store(lanes, v);
    for (int i = 0; i < kLanes; ++i)
        if (i < from || i >= to) lanes[i] = other;
    return load(lanes);
}

// Keys [begin, end) of a panel or partition.
struct Range {
    int begin, end;

    bool is_empty() const { return begin >= end; }
    Range within(int start, int width) const {
        return {std::max(begin - start, 0), std::min(end - start, width)};
    }
};

// K and V as floats of some width; products and sums in float, fused.
template <class Element>
struct FloatFormat {
    using Query = float;

    KVLayout kv;
    int dim;
    AlignedVector<float> keys, values;

    void reset(const KVLayout& layout) {
        kv = layout;
        dim = kv.head_dim;
        keys.resize(kScorePanels * kPanel * dim);
        values.resize(kPanel * padded(dim));
    }

    const Element* head(int64_t block, int layer, int part, int kv_head) const {
        return reinterpret_cast<const Element*>(kv.part(block, layer, part)) +
               kv_head * kv.head_elements();
    }

    float set_query(const float* from, float scale, float* to) const {
        for (int d = 0; d < dim; ++d) to[d] = from[d] * scale;
        return 1.0f;
    }

    // `slot` (below kScorePanels) is the panel's number among those that are scored together.
    void load_keys(int slot, int64_t block, int layer, int kv_head, int offset) {
        const Element* from = head(block, layer, 0, kv_head) + int64_t{offset} * dim;
        float* to = keys.data() + slot * kPanel * dim;
        for (int d = 0; d < dim; ++d) store(to + d * kPanel, load(from + int64_t{d} * kPanel));
    }

    // Scores of R rows against P panels. scores [R][kPartition].
    template <int R, int P>
    void score(const float* queries, const float*, float* scores) const {
        f32x16 acc[R][P];
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p) acc[r][p] = set1(0.0f);
        for (int d = 0; d < dim; ++d) {
            f32x16 key[P];
            for (int p = 0; p < P; ++p) key[p] = load(keys.data() + (p * dim + d) * kPanel);
            for (int r = 0; r < R; ++r)
                for (int p = 0; p < P; ++p)
                    acc[r][p] = fma(set1(queries[r * dim + d]), key[p], acc[r][p]);
        }
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p) store(scores + r * kPartition + p * kPanel, acc[r][p]);
    }

    void load_values(int64_t block, int layer, int kv_head, int offset, Range visible) {
        const Element* from = head(block, layer, 1, kv_head) + int64_t{offset} * dim;
        const int whole = dim / kLanes * kLanes;
        for (int key = visible.begin; key < visible.end; ++key) {
            const Element* row = from + int64_t{key} * dim;
            float* to = values.data() + key * padded(dim);
            for (int d = 0; d < whole; d += kLanes) store(to + d, load(row + d));
            if (whole == dim) continue;
            Element rest[kLanes] = {};
            std::copy(row + whole, row + dim, rest);
            store(to + whole, load(rest));
        }
    }

    // acc += p v over the visible keys, in order. probabilities [R][kPartition].
    template <int R>
    void add_values(const float* probabilities, Range visible, float* acc) const {
        const int width = padded(dim);
        for (int d = 0; d < width; d += kLanes) {
            f32x16 sum[R];
            for (int r = 0; r < R; ++r) sum[r] = load(acc + r * width + d);
            for (int key = visible.begin; key < visible.end; ++key) {
                const f32x16 value = load(values.data() + key * width + d);
                for (int r = 0; r < R; ++r)
                    sum[r] = fma(set1(probabilities[r * kPartition + key]), value, sum[r]);
            }
            for (int r = 0; r < R; ++r) store(acc + r * width + d, sum[r]);
        }
    }
};

// K and V as int16 with a scale per token and head. Queries and probabilities are rounded likewise;
// products and their sums over the head dimension, or over a panel's keys, are exact integers.
struct Int16Format {
    using Query = int16_t;

    KVLayout kv;
    int dim;
    const int16_t* keys[kScorePanels];
    const float* key_scales[kScorePanels];
    const int16_t* values;
    f32x16 weights;  // of the panel's probabilities before they are rounded
    float value_scale;
    AlignedVector<int16_t> padded_values;

    void reset(const KVLayout& layout) {
        kv = layout;
        dim = kv.head_dim;
        padded_values.resize(kPanel * padded(dim));
    }

    const int16_t* head(int64_t block, int layer, int part, int kv_head, const float** scales) const {
        char* at = kv.part(block, layer, part);
        *scales = kv.scales(at) + int64_t{kv_head} * kv.block_size;
        return reinterpret_cast<const int16_t*>(at) + kv_head * kv.head_elements();
    }

    float set_query(const float* from, float scale, int16_t* to) const {
        return round_to_int16(from, dim, scale, anaphora::kv_int16_max(dim),
                              [&](int d) { return to + d; });
    }

    void load_keys(int slot, int64_t block, int layer, int kv_head, int offset) {
        keys[slot] = head(block, layer, 0, kv_head, &key_scales[slot]) + int64_t{offset} * dim;
        key_scales[slot] += offset;
    }

    template <int R, int P>
    void score(const int16_t* queries, const float* query_scales, float* scores) const {
        // Few rows: two sums each, or a product would wait for the one before.
        constexpr int S = 2 * R * P <= kScoreRows * kScorePanels ? 2 : 1;
        i32x16 acc[R * P * S];
#pragma GCC unroll 16
        for (int i = 0; i < R * P * S; ++i) acc[i] = zero_i32();
        for (int d = 0; d < dim; d += 8)  // head_dim is a multiple of 8
#pragma GCC unroll 4
            for (int e = d; e < d + 8; e += 2 * S) {
                i16x32 key[P * S];
#pragma GCC unroll 4
                for (int i = 0; i < P * S; ++i)
                    key[i] = load(keys[i % P] + (e + i / P * 2) * kPanel);
#pragma GCC unroll 16
                for (int i = 0; i < R * P * S; ++i)
                    acc[i] = dot(acc[i], key[i % (P * S)],
                                 queries + i / (P * S) * dim + e + i % (P * S) / P * 2);
            }
#pragma GCC unroll 16
        for (int i = 0; i < R * P; ++i) {
            const int r = i / P, p = i % P;
            i32x16 sum = acc[r * P * S + p];
            if constexpr (S == 2) sum = sum + acc[r * P * S + P + p];
            store(scores + r * kPartition + p * kPanel,
                  to_float(sum) * load(key_scales[p]) * set1(query_scales[r]));
        }
    }

    // The largest visible value scale is the panel's; each key's own goes into its probability.
    void load_values(int64_t block, int layer, int kv_head, int offset, Range visible) {
        const float* scales;
        values = head(block, layer, 1, kv_head, &scales) + int64_t{offset} * dim;
        const f32x16 kept = keep(load(scales + offset), visible.begin, visible.end, 0.0f);
        const float largest = reduce_max(kept);
        constexpr auto limit = static_cast<float>(anaphora::kProbabilityMax);
        const bool is_zero = !(largest > 1e-30f);
        weights = kept * set1(is_zero ? 0.0f : limit / largest);
        value_scale = (is_zero ? 0.0f : largest / limit) + reduce_add(kept * set1(0.0f));
        if (dim % kLanes == 0) return;
        for (int pair = 0; pair < kPanel / 2; ++pair)
            std::copy(values + pair * 2 * dim, values + (pair + 1) * 2 * dim,
                      padded_values.data() + pair * 2 * padded(dim));
        values = padded_values.data();
    }

    template <int R>
    void add_values(const float* probabilities, Range, float* acc) const {
        int16_t p[R][kPanel];
        for (int r = 0; r < R; ++r)
            store_i16(p[r], round(load(probabilities + r * kPartition) * weights));
        int d = 0;
        for (; d + kValueVectors * kLanes <= padded(dim); d += kValueVectors * kLanes)
            add_vectors<R, kValueVectors>(p, d, acc);
        for (; d < padded(dim); d += kLanes) add_vectors<R, 1>(p, d, acc);
    }

    template <int R, int C>
    void add_vectors(const int16_t (&p)[R][kPanel], int d, float* acc) const {
        const int width = padded(dim);
        i32x16 sum[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) sum[r][c] = zero_i32();
        for (int key = 0; key < kPanel; key += 2) {
            i16x32 value[C];
            for (int c = 0; c < C; ++c)
                value[c] = load(values + int64_t{key} * width + 2 * (d + c * kLanes));
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c) sum[r][c] = dot(sum[r][c], value[c], p[r] + key);
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) {
                float* to = acc + r * width + d + c * kLanes;
                store(to, load(to) + to_float(sum[r][c]) * set1(value_scale));
            }
    }
};

}  // namespace ANAPHORA_ISA

// Weights in the order in which the tiles of gemm.cpp read them.
#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace anaphora {
namespace {

int64_t panels(int n) { return (int64_t{n} + kPanel - 1) / kPanel; }

// out[panel][k / depth][column][k % depth] plus offset, columns and inputs padded with zeros (that
// is, with the offset).
template <class T>
void pack(const T* w, int n, int k, int64_t k_padded, int depth, int offset, T* out) {
    std::fill(out, out + panels(n) * kPanel * k_padded, static_cast<T>(offset));
    for (int64_t row = 0; row < n; ++row) {
        T* panel = out + row / kPanel * kPanel * k_padded + row % kPanel * depth;
        for (int64_t i = 0; i < k; ++i)
            panel[i / depth * depth * kPanel + i % depth] =
                static_cast<T>(w[row * k + i] + static_cast<T>(offset));
    }
}

template <class T>
void pack_ranks(const T* b, int n, int k, const RankSpan* spans, int depth, int offset, T* out) {
    for (int panel = 0; panel < panels(n); ++panel) {
        const RankSpan& span = spans[panel];
        const int first = kPanel * span.first, count = kPanel * span.count;
        T* to = out + int64_t{kPanel * kPanel} * span.offset;
        std::fill(to, to + kPanel * count, static_cast<T>(offset));
        for (int column = 0; column < std::min(kPanel, n - panel * kPanel); ++column)
            for (int i = 0; i < count; ++i) {
                const int64_t from = int64_t{panel * kPanel + column} * k + first + i;
                to[i / depth * depth * kPanel + column * depth + i % depth] =
                    static_cast<T>(b[from] + static_cast<T>(offset));
            }
    }
}

int64_t whole_groups(int k) { return (int64_t{k} + kGroup - 1) / kGroup * kGroup; }

}  // namespace

int64_t packed_size_int8(int n, int k) { return panels(n) * kPanel * whole_groups(k); }
int64_t packed_size_f32(int n, int k) { return panels(n) * kPanel * k; }
void pack_int8(const int8_t* w, int n, int k, int depth, int offset, int8_t* out) {
    pack(w, n, k, whole_groups(k), depth, offset, out);
}
void pack_f32(const float* w, int n, int k, float* out) { pack(w, n, k, k, 1, 0, out); }

int64_t packed_size_mxfp4(int n, int k) { return panels(n) * mxfp4_panel_bytes(k); }
void pack_mxfp4(const uint8_t* blocks, const uint8_t* exponents, int n, int k, int depth,
                uint8_t* out) {
    std::fill(out, out + packed_size_mxfp4(n, k), uint8_t{0});
    const int groups = k / kGroup, half = kPanel * depth / 2;
    for (int64_t row = 0; row < n; ++row)
        for (int g = 0; g < groups; ++g) {
            const int column = static_cast<int>(row % kPanel);
            uint8_t* group = out + row / kPanel * mxfp4_panel_bytes(k) +
                             g * (kPanel * kGroup / 2 + kPanel);
            const uint8_t* block = blocks + (row * groups + g) * (kGroup / 2);
            for (int i = 0; i < kGroup; ++i) {
                const int element = block[i / 2] >> (i % 2 * 4) & 15;
                const int at = column * depth + i % depth;
                group[i / depth * half + at % half] |=
                    static_cast<uint8_t>(element << (at / half * 4));
            }
            // Elements are counted in halves, so the exponent is one less.
            const uint8_t exponent = exponents[row * groups + g];
            group[kPanel * kGroup / 2 + column] = exponent > 0 ? exponent - 1 : 0;
        }
}

void pack_ranks_int8(const int8_t* b, int n, int k, const RankSpan* spans, int depth, int offset,
                     int8_t* out) {
    pack_ranks(b, n, k, spans, depth, offset, out);
}
void pack_ranks_f32(const float* b, int n, int k, const RankSpan* spans, float* out) {
    pack_ranks(b, n, k, spans, 1, 0, out);
}

int kv_int16_max(int head_dim) {
    return std::min(32767, static_cast<int>(std::sqrt(2147483647.0 / head_dim)));
}

}  // namespace anaphora

// Weights in the order in which the tiles of gemm.cpp read them.
#include <algorithm>

#include "kernels.h"

namespace anaphora {
namespace {

int64_t panels(int n) { return (int64_t{n} + kPanel - 1) / kPanel; }

// out[panel][k / depth][column][k % depth], padded with zeros.
template <class T>
void pack(const T* w, int n, int k, int depth, T* out) {
    const int64_t k_padded = (int64_t{k} + depth - 1) / depth * depth;
    std::fill(out, out + panels(n) * kPanel * k_padded, T{0});
    for (int64_t row = 0; row < n; ++row) {
        T* panel = out + row / kPanel * kPanel * k_padded + row % kPanel * depth;
        for (int64_t i = 0; i < k; ++i)
            panel[i / depth * depth * kPanel + i % depth] = w[row * k + i];
    }
}

}  // namespace

int64_t packed_size_int8(int n, int k) { return panels(n) * kPanel * (int64_t{k} + k % 2); }
int64_t packed_size_f32(int n, int k) { return panels(n) * kPanel * k; }
void pack_int8(const int8_t* w, int n, int k, int8_t* out) { pack(w, n, k, 2, out); }
void pack_f32(const float* w, int n, int k, float* out) { pack(w, n, k, 1, out); }

}  // namespace anaphora

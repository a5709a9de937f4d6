// Every native kernel's signature. No Python here; bindings.cpp is the only file that knows it.
//
// Promise of all kernels: a row's result does not depend on which other rows are in the call, on
// the number of threads, or on how the work was cut. Rows are contiguous, matrices row-major.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace anaphora {

// Columns of a weight matrix that are packed side by side, and keys that are scored together.
inline constexpr int kPanel = 16;

// Attention softmax is computed per partition of this many tokens, counted from position 0, and
// the partitions are merged in order. Part of the numbers' definition: changing it changes bits.
inline constexpr int kPartition = 512;

// Where one layer's keys and values lie in the paged store.
//
//   block:  layer 0 [ K | V ]  layer 1 [ K | V ]  ...        one contiguous run of bytes
//   K:      [num_kv_heads][block_size / 16][head_dim][16]    sixteen keys side by side, to be
//                                                            scored in one vector
//   V:      [num_kv_heads][block_size][head_dim]
struct KVLayout {
    void* data;
    bool is_half;  // IEEE half precision, else float
    int64_t num_blocks;
    int num_layers;
    int num_kv_heads;
    int block_size;
    int head_dim;

    int64_t part_elements() const { return int64_t{1} * num_kv_heads * block_size * head_dim; }
    int64_t block_elements() const { return 2 * num_layers * part_elements(); }
};

// What one pass of attention reads. T rows (tokens) of S sequences.
struct AttentionBatch {
    int num_rows;                 // T
    int max_blocks;               // width of block_tables
    const int32_t* positions;     // [T]; row t sees keys 0..positions[t]
    const int32_t* seq_index;     // [T]; its row in block_tables, equal neighbours share a tile
    const int32_t* block_tables;  // [S, max_blocks]
};

// One instruction set's kernels. Each is run by the calling thread and the pool together.
struct Kernels {
    const char* name;

    // q[m, k] = round(x[m, k] * qmax / max|x[m, :]|), scale[m] = max|x[m, :]| / qmax.
    // x [M, K]; q [M, K rounded up to 2], the odd column zero.
    void (*quantize_rows)(const float* x, int m, int k, int qmax, int16_t* q, float* scale);

    // out[m, n] = (sum_k q[m, k] w[n, k]) * scale[m] * w_scale[n] + bias[n], the sum in int32.
    // w packed by pack_int8; bias may be null.
    void (*gemm_int8)(const int16_t* q, const float* scale, int m, int k, const int8_t* w,
                      const float* w_scale, const float* bias, int n, float* out);

    // out[m, n] = sum_k x[m, k] w[n, k] + bias[n], summed over k in ascending order, fused.
    void (*gemm_f32)(const float* x, int m, int k, const float* w, const float* bias, int n,
                     float* out);

    // out = x / sqrt(mean(x^2) + eps) * weight, per row.
    void (*rms_norm)(const float* x, const float* weight, float eps, int m, int k, float* out);

    // Rotates in place each head of x [T, num_heads, head_dim] (rows `stride` floats apart) by its
    // position's angles: pairs (i, i + head_dim / 2). cos, sin [positions, head_dim / 2].
    void (*rope)(float* x, int64_t stride, const int32_t* positions, int t, int num_heads,
                 int head_dim, const float* cos, const float* sin);

    // Writes k, v [T, num_kv_heads, head_dim] (rows `stride` floats apart) to their slots,
    // slot = block * block_size + offset in the block.
    void (*store_kv)(const KVLayout& kv, int layer, const float* k, const float* v, int64_t stride,
                     const int64_t* slots, int t);

    // out [T, num_heads, head_dim] = softmax(scale q K^T) V over the row's visible keys.
    // q rows are `q_stride` floats apart.
    void (*attention)(const KVLayout& kv, int layer, const AttentionBatch& batch, const float* q,
                      int64_t q_stride, int num_heads, float scale, float* out);

    // out [M, K] = silu(x[:, :K]) * x[:, K:] for x [M, 2K].
    void (*silu_and_mul)(const float* x, int m, int k, float* out);
};

// Weight packing, the same for every instruction set; K and N are padded with zeros.
//   int8:  [ceil(N/16)][ceil(K/2)][16][2]
//   f32:   [ceil(N/16)][K][16]
int64_t packed_size_int8(int n, int k);
int64_t packed_size_f32(int n, int k);
void pack_int8(const int8_t* w, int n, int k, int8_t* out);
void pack_f32(const float* w, int n, int k, float* out);

// The kernel sets this processor can run, best first, and the one in use.
std::vector<const Kernels*> available_kernels();
const Kernels& kernels();
bool select_kernels(const std::string& name);  // false: this processor cannot run it
std::vector<std::string> cpu_features();

// Threads that take part in a kernel, the caller included. Not to be called during a kernel.
void set_num_threads(int n);
int num_threads();

}  // namespace anaphora

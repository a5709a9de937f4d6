// Every native kernel's signature. No Python here; bindings.cpp is the only file that knows it.
//
// Promise of all kernels: a row's result does not depend on which other rows are in the call, on
// the number of threads, or on how the work was cut. Rows are contiguous, matrices row-major.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

// Inline functions that several instruction sets' files share must not be emitted by any of them:
// the linker would keep one for all.
#define ANAPHORA_INLINE __attribute__((always_inline)) inline

namespace anaphora {

// Columns of a weight matrix that are packed side by side, and keys that are scored together.
inline constexpr int kPanel = 16;

// Neighbouring activations of a row that share a scale in the int8 mode. Part of the numbers'
// definition: changing it changes bits.
inline constexpr int kGroup = 32;

// Attention softmax is computed per partition of this many tokens, counted from position 0, and
// the partitions are merged in order. Part of the numbers' definition: changing it changes bits.
inline constexpr int kPartition = 512;

// A packed matrix: n columns (outputs) of k inputs each.
//
//   float32  data [ceil(n/16)][k][16]
//   int8     data [ceil(n/16)][ceil(k/32) * 32 / depth][16][depth], in the byte order of one
//            instruction set (Kernels::depth and weight_offset); scale [ceil(n/16) * 16]
//   mxfp4    data [ceil(n/16)][k/32][elements, exponents]: four-bit floats (OCP MX, E2M1) of sixteen
//            columns by 32 inputs as [32 / depth] pieces, of which a byte holds number i of the
//            first half below number i of the second; a biased exponent for each column
//
// A gated matrix holds two of the same size whose panels of sixteen columns take turns: n counts
// the columns of both, padding included. A stack holds several matrices of the same size, one after
// the other, each with its scale and bias.
enum class WeightType { float32, int8, mxfp4 };

struct Weight {
    WeightType type;
    int n, k;
    const void* data;
    const float* scale;  // per column, int8 only
    const float* bias;   // padded like scale; may be null
};

// Which of the ranks a panel of B's columns uses, and where its elements begin in b.
struct RankSpan {
    uint16_t first, count;  // in whole panels of ranks
    uint32_t offset;        // in kPanel * kPanel elements
};

// What a low-rank adapter adds to the product with one matrix: B (A x), its scaling within B
// (Hu et al., 2021). A matrix may have several parts, of which each has an A of its own: the ranks
// of all of them, padded to whole panels part by part, are the rows of `a`.
//
//   b   [panel of the matrix][16 * count / depth][16][depth], otherwise as Weight::data; float32:
//       depth 1
struct LowRank {
    int n;     // columns of the matrix
    Weight a;  // without bias
    const void* b;
    const float* scale;     // per column, int8 only
    const RankSpan* spans;  // per panel
};

// The rows of a product to which an adapter adds something.
struct Adapted {
    int first_row, end_row;
    const LowRank* delta;
};

// All of them: ascending, without overlap. In the int8 mode A x is rounded per row and kPanel ranks.
struct Adapters {
    const Adapted* segments;
    int count;
};

// Root mean square normalisation of a row before it is multiplied; none if weight is null.
struct Norm {
    const float* weight;
    float eps;
};

// What is multiplied with `up` in a gated MLP.
enum class Gate { silu, gelu_tanh };

// Experts of one layer (Shazeer et al., 2017): gated MLPs, of which each row uses the top_k with the
// largest router logits. gate = min(gate, limit), up = clamp(up, -limit, limit); their product is
// gate sigmoid(alpha gate) (up + 1).
struct Experts {
    int count, top_k;
    float alpha, limit;
    Weight gate_up, down;  // stacks
};

inline constexpr int64_t kNoSlot = -1;

enum class KVType { float32, float16, bfloat16, int16 };

// Where one layer's keys and values lie in the paged store.
//
//   block:  layer 0 [ K | V ]  layer 1 [ K | V ]  ...        one contiguous run of bytes
//
//   floats  K [num_kv_heads][block_size / 16][head_dim][16]       sixteen keys side by side
//           V [num_kv_heads][block_size][head_dim]
//   int16   K [num_kv_heads][block_size / 16][head_dim / 2][16][2]
//           V [num_kv_heads][block_size / 2][head_dim][2]         two values side by side
//           each followed by its float scales [num_kv_heads][block_size], one per token and head
struct KVLayout {
    void* data;
    KVType type;
    int64_t num_blocks;
    int num_layers;
    int num_kv_heads;
    int block_size;
    int head_dim;

    ANAPHORA_INLINE int64_t element_bytes() const { return type == KVType::float32 ? 4 : 2; }
    ANAPHORA_INLINE int64_t head_elements() const { return int64_t{1} * block_size * head_dim; }
    ANAPHORA_INLINE int64_t part_bytes() const {
        const int64_t scales = type == KVType::int16 ? 4 * block_size : 0;
        return num_kv_heads * (head_elements() * element_bytes() + scales);
    }
    ANAPHORA_INLINE int64_t block_bytes() const { return 2 * num_layers * part_bytes(); }
    ANAPHORA_INLINE char* part(int64_t block, int layer, int index) const {  // index 0: keys, 1: values
        return static_cast<char*>(data) + block * block_bytes() + (2 * layer + index) * part_bytes();
    }
    ANAPHORA_INLINE float* scales(char* part) const {  // int16 only
        return reinterpret_cast<float*>(part + num_kv_heads * head_elements() * 2);
    }
};

// What one pass of attention reads. T rows (tokens) of S sequences.
struct AttentionBatch {
    int num_rows;                 // T
    int max_blocks;               // width of block_tables
    const int32_t* positions;     // [T]
    const int32_t* seq_index;     // [T]; its row in block_tables
    const int32_t* block_tables;  // [S, max_blocks]
    const int32_t* order;         // [T] rows such that those that share blocks are neighbours
};

// Row t sees the keys max(0, p - window + 1) .. p of its sequence, p its position (window 0: all
// from 0), and the weight exp(sinks[head]) for no key, if there are sinks (Xiao et al., 2023).
struct AttentionParams {
    int num_heads;
    float scale;
    int window;
    const float* sinks;  // [num_heads] or null
    float softcap;       // scores become softcap tanh(score / softcap); 0: as they are
};

// One instruction set's kernels. Each is run by the calling thread and the pool together.
struct Kernels {
    const char* name;
    int depth;          // neighbouring inputs that lie side by side in a packed int8 matrix
    int weight_offset;  // what is added to each of its elements

    // out [m, n] = norm(x) w^T + bias, or added to what is there. x [m, k].
    //   int8:    x is rounded to int8 with one scale per row and group of kGroup; sums of a group
    //            are exact, groups are added in ascending order, rounded at each step
    //   float32: summed over k in ascending order, fused
    // What an adapter adds comes last.
    void (*linear)(const float* x, int m, const Norm& norm, const Weight& w,
                   const Adapters& adapters, bool is_added, float* out);

    // out [m, down.n] = (gate(gate) * up) down^T + bias, or added, for gate | up = norm(x) w^T + bias
    // with the gated matrix gate_up.
    void (*gated_mlp)(const float* x, int m, const Norm& norm, const Weight& gate_up,
                      const Weight& down, Gate gate, const Adapters& gate_up_adapters,
                      const Adapters& down_adapters, bool is_added, float* out);

    // Adds to out [m, down.n] what each row's experts give, weighted by the softmax of their router
    // logits [m, experts.count], in the order of the experts' numbers. x [m, gate_up.k].
    void (*experts)(const float* x, int m, const float* router, const Experts& experts, float* out);

    // out = x / sqrt(mean(x^2) + eps) * weight, per row of k.
    void (*rms_norm)(const float* x, const Norm& norm, int m, int k, float* out);

    // Normalises in place each head of x [T, num_heads, head_dim] (rows `stride` floats apart).
    void (*norm_heads)(float* x, int64_t stride, int t, int num_heads, int head_dim,
                       const Norm& norm);

    // Rotates in place each head of x [T, num_heads, head_dim] (rows `stride` floats apart) by its
    // position's angles: pairs (i, i + head_dim / 2). cos, sin [positions, head_dim / 2].
    void (*rope)(float* x, int64_t stride, const int32_t* positions, int t, int num_heads,
                 int head_dim, const float* cos, const float* sin);

    // Writes k, v [T, num_kv_heads, head_dim] (rows `stride` floats apart) to their slots,
    // slot = block * block_size + offset in the block; rows with kNoSlot are left out.
    void (*store_kv)(const KVLayout& kv, int layer, const float* k, const float* v, int64_t stride,
                     const int64_t* slots, int t);

    // out [T, num_heads, head_dim] = softmax(scale q K^T) V over the row's visible keys.
    // q rows are `q_stride` floats apart.
    void (*attention)(const KVLayout& kv, int layer, const AttentionBatch& batch,
                      const AttentionParams& params, const float* q, int64_t q_stride, float* out);

    // Operations of a second's worth of independent multiply-adds (counted as two) on the calling
    // thread: int8 as linear uses them, and float. What no kernel can exceed.
    double (*peak_int8)(double seconds);
    double (*peak_float)(double seconds);
};

// Largest quantised key and query of the int16 store: head_dim products of two fit int32.
int kv_int16_max(int head_dim);

// Largest quantised value of the int16 store and largest probability it is multiplied with:
// sixteen products of two fit int32.
inline constexpr int kValueMax = 4095;
inline constexpr int kProbabilityMax = 32767;

// Weight packing; K and N are padded with zeros, K of int8 to whole groups.
int64_t packed_size_int8(int n, int k);
int64_t packed_size_f32(int n, int k);
int64_t packed_size_mxfp4(int n, int k);  // k a multiple of kGroup
void pack_int8(const int8_t* w, int n, int k, int depth, int offset, int8_t* out);
void pack_f32(const float* w, int n, int k, float* out);
// blocks [n, k / 32, 16]: element 2 i in the low half of byte i, 2 i + 1 in the high half;
// exponents [n, k / 32] biased by 127.
void pack_mxfp4(const uint8_t* blocks, const uint8_t* exponents, int n, int k, int depth,
                uint8_t* out);

inline constexpr int64_t mxfp4_panel_bytes(int k) {
    return int64_t{k} / kGroup * (kPanel * kGroup / 2 + kPanel);
}

// LowRank::b from [n, k] with k ranks: of each panel only its span.
void pack_ranks_int8(const int8_t* b, int n, int k, const RankSpan* spans, int depth, int offset,
                     int8_t* out);
void pack_ranks_f32(const float* b, int n, int k, const RankSpan* spans, float* out);

// The kernel sets this processor can run, best first, and the one in use.
std::vector<const Kernels*> available_kernels();
const Kernels& kernels();
bool select_kernels(const std::string& name);  // false: this processor cannot run it
std::vector<std::string> cpu_features();

// Operations per second of the kernels in use and bytes per second read from memory, all threads
// together.
struct Peaks {
    double int8_ops, float_ops, memory_bytes;
};
Peaks measure_peaks(double seconds);

// Threads that take part in a kernel, the caller included. Not to be called during a kernel.
void set_num_threads(int n);
int num_threads();

}  // namespace anaphora

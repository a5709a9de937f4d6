// What the files that are compiled once per instruction set define, each in its own namespace.
#pragma once

#include "kernels.h"

#define ANAPHORA_DECLARE_KERNELS(isa)                                                             \
    namespace isa {                                                                               \
    extern const int weight_depth, weight_offset;                                                 \
    void linear(const float*, int, const anaphora::Norm&, const anaphora::Weight&,                \
                const anaphora::Adapters&, bool, float*);                                         \
    void gated_mlp(const float*, int, const anaphora::Norm&, const anaphora::Weight&,             \
                   const anaphora::Weight&, anaphora::Gate, const anaphora::Adapters&,            \
                   const anaphora::Adapters&, bool, float*);                                      \
    void experts(const float*, int, const float*, const anaphora::Experts&, float*);              \
    void norm_heads(float*, int64_t, int, int, int, const anaphora::Norm&);                       \
    void rms_norm(const float*, const anaphora::Norm&, int, int, float*);                         \
    void rope(float*, int64_t, const int32_t*, int, int, int, const float*, const float*);        \
    void store_kv(const anaphora::KVLayout&, int, const float*, const float*, int64_t,            \
                  const int64_t*, int);                                                           \
    void attention(const anaphora::KVLayout&, int, const anaphora::AttentionBatch&,               \
                   const anaphora::AttentionParams&, const float*, int64_t, float*);              \
    double peak_int8(double);                                                                     \
    double peak_float(double);                                                                    \
    }

ANAPHORA_DECLARE_KERNELS(anaphora_avx512)
ANAPHORA_DECLARE_KERNELS(anaphora_avxvnni)
ANAPHORA_DECLARE_KERNELS(anaphora_avx2)
ANAPHORA_DECLARE_KERNELS(anaphora_neon)
ANAPHORA_DECLARE_KERNELS(anaphora_portable)

// What the files that are compiled once per instruction set define, each in its own namespace.
#pragma once

#include "kernels.h"

#define ANAPHORA_DECLARE_KERNELS(isa)                                                             \
    namespace isa {                                                                               \
    void quantize_rows(const float*, int, int, int, int16_t*, float*);                            \
    void gemm_int8(const int16_t*, const float*, int, int, const int8_t*, const float*,           \
                   const float*, int, float*);                                                    \
    void gemm_f32(const float*, int, int, const float*, const float*, int, float*);               \
    void rms_norm(const float*, const float*, float, int, int, float*);                           \
    void rope(float*, int64_t, const int32_t*, int, int, int, const float*, const float*);        \
    void store_kv(const anaphora::KVLayout&, int, const float*, const float*, int64_t,            \
                  const int64_t*, int);                                                           \
    void attention(const anaphora::KVLayout&, int, const anaphora::AttentionBatch&, const float*, \
                   int64_t, int, float, float*);                                                  \
    void silu_and_mul(const float*, int, int, float*);                                            \
    }

ANAPHORA_DECLARE_KERNELS(anaphora_avx512)
ANAPHORA_DECLARE_KERNELS(anaphora_avx2)
ANAPHORA_DECLARE_KERNELS(anaphora_portable)

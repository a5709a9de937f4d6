// Which kernels this processor can run, chosen at run time.
#include <cstring>

#include "isa.h"

namespace anaphora {
namespace {

#define ANAPHORA_KERNELS(name, isa)                                                           \
    Kernels {                                                                                 \
        name, isa::quantize_rows, isa::gemm_int8, isa::gemm_f32, isa::rms_norm, isa::rope,    \
            isa::store_kv, isa::attention, isa::silu_and_mul                                  \
    }

#if defined(__x86_64__)
const Kernels avx512 = ANAPHORA_KERNELS("avx512-vnni", anaphora_avx512);
const Kernels avx2 = ANAPHORA_KERNELS("avx2", anaphora_avx2);
#endif
const Kernels portable = ANAPHORA_KERNELS("portable", anaphora_portable);

const Kernels* selected = nullptr;

}  // namespace

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> sets;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni"))
        sets.push_back(&avx512);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        sets.push_back(&avx2);
#endif
    sets.push_back(&portable);
    return sets;
}

const Kernels& kernels() {
    if (selected == nullptr) selected = available_kernels().front();
    return *selected;
}

bool select_kernels(const std::string& name) {
    for (const Kernels* set : available_kernels())
        if (name == set->name) {
            selected = set;
            return true;
        }
    return false;
}

std::vector<std::string> cpu_features() {
    std::vector<std::string> features;
#if defined(__x86_64__)
#define ANAPHORA_FEATURE(name) \
    if (__builtin_cpu_supports(name)) features.push_back(name)
    ANAPHORA_FEATURE("sse4.2");
    ANAPHORA_FEATURE("f16c");
    ANAPHORA_FEATURE("fma");
    ANAPHORA_FEATURE("avx2");
    ANAPHORA_FEATURE("avx512f");
    ANAPHORA_FEATURE("avx512bw");
    ANAPHORA_FEATURE("avx512vnni");
#undef ANAPHORA_FEATURE
#elif defined(__aarch64__)
    features.push_back("neon");
#endif
    return features;
}

}  // namespace anaphora

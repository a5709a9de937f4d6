// Which kernels this processor can run, chosen at run time.
#include <chrono>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "isa.h"
#include "thread_pool.h"

namespace anaphora {
namespace {

#define ANAPHORA_KERNELS(name, isa)                                                            \
    Kernels {                                                                                  \
        name, isa::weight_depth, isa::weight_offset, isa::linear, isa::gated_mlp,              \
            isa::experts, isa::rms_norm, isa::norm_heads, isa::rope, isa::store_kv,            \
            isa::attention, isa::peak_int8, isa::peak_float                                                                    \
    }

// Functions, not constants: other files' constants may not be there yet when this one's are made.
#if defined(__x86_64__)
const Kernels& avx512() {
    static const Kernels set = ANAPHORA_KERNELS("avx512-vnni", anaphora_avx512);
    return set;
}
const Kernels& avxvnni() {
    static const Kernels set = ANAPHORA_KERNELS("avx-vnni", anaphora_avxvnni);
    return set;
}
const Kernels& avx2() {
    static const Kernels set = ANAPHORA_KERNELS("avx2", anaphora_avx2);
    return set;
}

// Leaf 7, subleaf 1, bit 4 of EAX; not every compiler's __builtin_cpu_supports knows the name.
bool has_avx_vnni() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}
#elif defined(__aarch64__)
const Kernels& neon() {
    static const Kernels set = ANAPHORA_KERNELS("neon-dot", anaphora_neon);
    return set;
}
#endif
const Kernels& portable() {
    static const Kernels set = ANAPHORA_KERNELS("portable", anaphora_portable);
    return set;
}

const Kernels* selected = nullptr;

}  // namespace

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> sets;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni"))
        sets.push_back(&avx512());
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
        if (has_avx_vnni()) sets.push_back(&avxvnni());
        sets.push_back(&avx2());
    }
#elif defined(__aarch64__)
    if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) sets.push_back(&neon());
#endif
    sets.push_back(&portable());
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
    if (has_avx_vnni()) features.push_back("avxvnni");
#undef ANAPHORA_FEATURE
#elif defined(__aarch64__)
    features.push_back("neon");
    if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) features.push_back("dotprod");
#endif
    return features;
}

Peaks measure_peaks(double seconds) {
    const int threads = num_threads();
    std::vector<Peaks> peaks(threads);
    const auto each_thread = [&](auto body) { parallel_for(threads, [&](int i) { body(i); }); };
    each_thread([&](int i) { peaks[i].int8_ops = kernels().peak_int8(seconds); });
    each_thread([&](int i) { peaks[i].float_ops = kernels().peak_float(seconds); });
    // Far more than the caches hold, read once over.
    constexpr int64_t words = int64_t{256} * 1024 * 1024 / sizeof(uint64_t);
    const std::vector<uint64_t> memory(words, 1);
    constexpr int64_t chunk = 64 * 1024;
    std::vector<uint64_t> sums(words / chunk);  // kept, so that the reading is too
    using Clock = std::chrono::steady_clock;
    double best = 0;
    const auto begin = Clock::now();
    while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
        const auto start = Clock::now();
        parallel_for(static_cast<int>(words / chunk), [&](int i) {
            uint64_t sum[8] = {};
            for (int64_t at = i * chunk; at < (i + 1) * chunk; at += 8)
                for (int j = 0; j < 8; ++j) sum[j] += memory[at + j];
            for (const uint64_t part : sum) sums[i] += part;
        });
        const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
        best = std::max(best, static_cast<double>(words) * sizeof(uint64_t) / elapsed);
    }
    Peaks total{0, 0, best};
    for (const Peaks& peak : peaks) {
        total.int8_ops += peak.int8_ops;
        total.float_ops += peak.float_ops;
    }
    return total;
}

}  // namespace anaphora

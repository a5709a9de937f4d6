// How fast this instruction set multiplies and adds when nothing else is in the way: chains of
// dot() and fma() that are independent of each other and of memory.
#include <chrono>

#include "isa.h"
#include "simd.h"

namespace ANAPHORA_ISA {

const int weight_depth = kDepth, weight_offset = kWeightOffset;

namespace {

// More than an operation takes cycles times the units that do it, and no more than fit registers.
#if defined(ANAPHORA_AVX512)
constexpr int kChains = 12;
#else
constexpr int kChains = 5;
#endif

// Keeps a value in registers and the compiler from seeing through it.
template <class Vector>
inline void keep(Vector& v) {
#if defined(ANAPHORA_AVX512)
    asm volatile("" : "+v"(v.v));
#elif defined(ANAPHORA_AVX2)
    asm volatile("" : "+x"(v.lo), "+x"(v.hi));
#elif defined(ANAPHORA_NEON)
    asm volatile("" : "+w"(v.at[0]), "+w"(v.at[1]), "+w"(v.at[2]), "+w"(v.at[3]));
#else
    asm volatile("" : "+m"(v));
#endif
}

// Operations per second of chains of `step`, each of which does `operations` of them.
template <int Chains, class Vector, class Step>
double rate(double seconds, double operations, Vector zero, Step&& step) {
    using Clock = std::chrono::steady_clock;
    constexpr int rounds = 20000;
    const auto start = Clock::now();
    double elapsed = 0;
    int64_t done = 0;
    while (elapsed < seconds) {
        Vector sums[Chains];
        for (Vector& sum : sums) {
            sum = zero;
            keep(sum);  // else the compiler sees that all chains are one
        }
        for (int i = 0; i < rounds; ++i)
#pragma GCC unroll 16
            for (int c = 0; c < Chains; ++c) {
                sums[c] = step(sums[c]);
#if !defined(ANAPHORA_AVX512) && !defined(ANAPHORA_AVX2) && !defined(ANAPHORA_NEON)
                keep(sums[c]);  // plain loops are simplified across rounds otherwise
#endif
            }
        for (Vector& sum : sums) keep(sum);
        done += int64_t{rounds} * Chains;
        elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    }
    return static_cast<double>(done) * operations / elapsed;
}

}  // namespace

double peak_int8(double seconds) {
    alignas(64) const int8_t bytes[64] = {1, 2, 3};
    alignas(64) const Activation few[kDepth] = {1};
    Weights w = load_weights(bytes);
    keep(w);
    return rate<kChains>(seconds, 2.0 * kLanes * kDepth, zero_i32(),
                         [&](i32x16 sum) { return dot(sum, w, few); });
}

double peak_float(double seconds) {
    f32x16 a = set1(1e-9f);
    keep(a);
    return rate<kChains>(seconds, 2.0 * kLanes, set1(0.0f),
                         [&](f32x16 sum) { return fma(a, a, sum); });
}

}  // namespace ANAPHORA_ISA

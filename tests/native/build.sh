#!/bin/sh
# Builds kernels_agree for the compiler in $CXX: build.sh OUTPUT. Same options as CMakeLists.txt,
# with multiply-add fused in the portable kernels too, so that floats must agree.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$1
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
flags="-O3 -std=c++20 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -I$root/csrc"

kernels() { # name, options
    name=$1
    shift
    for source in gemm moe attention norm_rope peak; do
        $CXX $flags -DANAPHORA_ISA=anaphora_$name "$@" -c "$root/csrc/$source.cpp" \
            -o "$objects/$source-$name.o"
    done
}

case $($CXX -dumpmachine) in
x86_64*)
    kernels portable -mfma -mf16c
    kernels avx2 -mavx2 -mfma -mf16c -DANAPHORA_AVX2
    kernels avxvnni -mavx2 -mfma -mf16c -mavxvnni -DANAPHORA_AVX2 -DANAPHORA_AVX_VNNI
    kernels avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mf16c -mfma \
        -mprefer-vector-width=512 -Wno-maybe-uninitialized -DANAPHORA_AVX512
    ;;
aarch64*)
    kernels portable
    kernels neon -march=armv8.2-a+dotprod+fp16 -DANAPHORA_NEON
    ;;
*) kernels portable ;;
esac
for source in cpu pack thread_pool; do
    $CXX $flags -c "$root/csrc/$source.cpp" -o "$objects/$source.o"
done
$CXX $flags "$root/tests/native/kernels_agree.cpp" "$objects"/*.o -o "$out" -pthread -static

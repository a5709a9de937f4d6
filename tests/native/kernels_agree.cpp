// Every kernel set of this processor against the portable one, bit for bit, at random sizes.
//
// For processors that the test run's machine is not: `make check-arm` builds it with a cross
// compiler and runs it in an emulator. Where multiply-add is fused, as on 64-bit ARM, the sets must
// agree in float too; the portable set itself is held to NumPy by tests/ops/test_parity.py.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"

using namespace anaphora;

namespace {

std::mt19937 rng(1);

int any(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }

std::vector<float> normals(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> x(count);
    for (float& v : x) v = normal(rng);
    return x;
}

int64_t padded(int n) { return (int64_t{n} + kPanel - 1) / kPanel * kPanel; }

// A random matrix, int8 in the order of `set` or float.
struct Matrix {
    std::vector<int8_t> bytes;
    std::vector<float> floats, scale, bias;
    int n, k;

    Matrix(int n_, int k_) : n(n_), k(k_) {
        for (int64_t i = 0; i < int64_t{n} * k; ++i)
            bytes.push_back(static_cast<int8_t>(any(-127, 127)));
        floats = normals(int64_t{n} * k);
        scale = normals(padded(n));
        bias = normals(padded(n));
    }

    Weight packed(const Kernels& set, bool is_int8, std::vector<float>& memory) const {
        const int64_t size = is_int8 ? packed_size_int8(n, k) / 4 + 1 : packed_size_f32(n, k);
        memory.assign(size, 0.0f);
        if (is_int8)
            pack_int8(bytes.data(), n, k, set.depth, set.weight_offset,
                      reinterpret_cast<int8_t*>(memory.data()));
        else
            pack_f32(floats.data(), n, k, memory.data());
        return {is_int8 ? WeightType::int8 : WeightType::float32, n, k, memory.data(),
                is_int8 ? scale.data() : nullptr, bias.data()};
    }
};

// A stack of random matrices in four-bit floats.
struct Stack {
    int count, n, k;
    std::vector<uint8_t> blocks, exponents;
    std::vector<float> bias;

    Stack(int count_, int n_, int k_)
        : count(count_), n(n_), k(k_), bias(normals(count * padded(n))) {
        for (int64_t i = 0; i < int64_t{count} * n * k / 2; ++i)
            blocks.push_back(static_cast<uint8_t>(any(0, 255)));
        for (int64_t i = 0; i < int64_t{count} * n * k / 32; ++i)
            exponents.push_back(static_cast<uint8_t>(any(118, 124)));
    }

    Weight packed(const Kernels& set, std::vector<uint8_t>& memory) const {
        const int64_t size = packed_size_mxfp4(n, k);
        memory.assign(count * size, 0);
        for (int i = 0; i < count; ++i)
            pack_mxfp4(&blocks[int64_t{i} * n * k / 2], &exponents[int64_t{i} * n * k / 32], n, k,
                       set.depth, &memory[i * size]);
        return {WeightType::mxfp4, n, k, memory.data(), nullptr, bias.data()};
    }
};

// What a random adapter adds to a matrix, for the rows [first, end).
struct Adapter {
    int ranks = kPanel * any(1, 3), n, first, end;
    Matrix a, b;
    std::vector<RankSpan> spans;
    std::vector<float> memory[2];
    LowRank delta{};

    Adapter(const Matrix& w, int first_, int end_)
        : n(w.n), first(first_), end(end_), a(ranks, w.k), b(w.n, ranks) {
        uint32_t size = 0;
        for (int panel = 0; panel < padded(n) / kPanel; ++panel) {
            const int begin = any(0, ranks / kPanel), count = any(0, ranks / kPanel - begin);
            spans.push_back({static_cast<uint16_t>(begin), static_cast<uint16_t>(count), size});
            size += count;
        }
        memory[1].assign(size * kPanel * kPanel, 0.0f);
    }

    Adapted packed(const Kernels& set, bool is_int8) {
        Weight ranks_of = a.packed(set, is_int8, memory[0]);
        ranks_of.bias = nullptr;
        if (is_int8)
            pack_ranks_int8(b.bytes.data(), n, ranks, spans.data(), set.depth, set.weight_offset,
                            reinterpret_cast<int8_t*>(memory[1].data()));
        else
            pack_ranks_f32(b.floats.data(), n, ranks, spans.data(), memory[1].data());
        delta = {n, ranks_of, memory[1].data(), is_int8 ? b.scale.data() : nullptr, spans.data()};
        return {first, end, &delta};
    }
};

// A random problem's results of one kernel set, all in one vector.
struct Problem {
    bool is_int8 = any(0, 1) == 1, is_normed = any(0, 1) == 1;
    int m = any(1, 3) == 1 ? any(1, 140) : any(1, 9), k = any(1, 100), n = any(1, 90);
    int hidden = any(1, 90);
    std::vector<float> x = normals(int64_t{m} * k), norm = normals(k);
    Matrix w{n, k}, gate_up{static_cast<int>(2 * padded(hidden)), k}, down{k, hidden};

    Gate gate = any(0, 1) == 1 ? Gate::silu : Gate::gelu_tanh;
    int num_experts = any(1, 9), top_k = any(1, std::min(num_experts, 4));
    int expert_k = 32 * any(1, 3), expert_hidden = 32 * any(1, 3);
    std::vector<float> expert_x = normals(int64_t{m} * expert_k);
    std::vector<float> router = normals(int64_t{m} * num_experts);
    Stack expert_up{num_experts, 2 * expert_hidden, expert_k};
    Stack expert_down{num_experts, expert_k, expert_hidden};
    int middle = any(0, m - 1);  // one adapter for the rows before it, others for those after it
    Adapter before{w, 0, middle}, after{w, middle, m}, of_gate_up{gate_up, middle, m},
        of_down{down, middle, m};

    KVType type = static_cast<KVType>(any(0, 3));
    int kv_heads = any(1, 3), group = any(1, 4), dim = 8 * any(1, 10);
    int block_size = 16 << any(0, 2), window = any(0, 1) * any(1, 700);
    int lengths[3] = {any(1, 40), any(1, 700), any(1, 700)};
    int blocks = 3 * (700 / 16 + 1);
    std::vector<float> qkv, sinks = normals(kv_heads * group);
    std::vector<int32_t> positions, seq_index, tables, order;
    std::vector<int64_t> slots;

    Problem() {
        const int width = blocks / 3;
        for (int i = 0; i < blocks; ++i) tables.push_back(i);
        const bool is_shared = any(0, 1) == 1;
        if (is_shared) std::copy(&tables[0], &tables[2], &tables[width]);
        for (int s = 0; s < 3; ++s)
            for (int p = 0; p < lengths[s]; ++p) {
                order.push_back(static_cast<int32_t>(positions.size()));
                positions.push_back(p);
                seq_index.push_back(s);
                // Sequence 1 finds its first two blocks and does not write them.
                const bool is_found = is_shared && s == 1 && p < 2 * block_size;
                slots.push_back(is_found ? kNoSlot
                                         : int64_t{tables[s * width + p / block_size]} *
                                                   block_size +
                                               p % block_size);
            }
        const auto rows = static_cast<int64_t>(positions.size());
        qkv = normals(rows * (group + 2) * kv_heads * dim);
    }

    std::vector<float> run(const Kernels& set) {
        std::vector<float> results, memory[3];
        const Norm norms{is_normed ? norm.data() : nullptr, 1e-5f};
        std::vector<float> out(int64_t{m} * n, 0.5f);
        std::vector<Adapted> rows_of;
        if (middle > 0) rows_of.push_back(before.packed(set, is_int8));
        rows_of.push_back(after.packed(set, is_int8));
        set.linear(x.data(), m, norms, w.packed(set, is_int8, memory[0]),
                   {rows_of.data(), static_cast<int>(rows_of.size())}, true, out.data());
        results.insert(results.end(), out.begin(), out.end());
        out.assign(int64_t{m} * k, 0.5f);
        const Adapted first = of_gate_up.packed(set, is_int8),
                      second = of_down.packed(set, is_int8);
        set.gated_mlp(x.data(), m, norms, gate_up.packed(set, is_int8, memory[1]),
                      down.packed(set, is_int8, memory[2]), gate, {&first, 1}, {&second, 1}, false,
                      out.data());
        results.insert(results.end(), out.begin(), out.end());
        std::vector<uint8_t> stacks[2];
        const Experts experts{num_experts,
                              top_k,
                              1.702f,
                              0.8f,
                              expert_up.packed(set, stacks[0]),
                              expert_down.packed(set, stacks[1])};
        out.assign(int64_t{m} * expert_k, 0.5f);
        set.experts(expert_x.data(), m, router.data(), experts, out.data());
        results.insert(results.end(), out.begin(), out.end());
        const auto rows = static_cast<int>(positions.size());
        KVLayout kv{nullptr, type, blocks, 1, kv_heads, block_size, dim};
        std::vector<char> store(blocks * kv.block_bytes());
        kv.data = store.data();
        const int heads = group * kv_heads;
        const int64_t stride = int64_t{heads + 2 * kv_heads} * dim;
        std::vector<float> rotated = qkv, angles = normals(700 * dim / 2);
        for (size_t i = 0; i < angles.size(); ++i) angles[i] = 1.0f / static_cast<float>(i + 1);
        if (is_normed) {
            const std::vector<float> weight(dim, 1.25f);
            set.norm_heads(rotated.data(), stride, rows, heads, dim, {weight.data(), 1e-6f});
        }
        set.rope(rotated.data(), stride, positions.data(), rows, heads + kv_heads, dim,
                 angles.data(), angles.data());
        const float* keys = rotated.data() + int64_t{heads} * dim;
        set.store_kv(kv, 0, keys, keys + int64_t{kv_heads} * dim, stride, slots.data(), rows);
        const AttentionBatch batch{rows,          blocks / 3,    positions.data(), seq_index.data(),
                                   tables.data(), order.data()};
        const AttentionParams params{heads, 0.3f, window, window > 0 ? sinks.data() : nullptr,
                                     is_normed ? 2.0f : 0.0f};
        out.assign(int64_t{rows} * heads * dim, 0.0f);
        set.attention(kv, 0, batch, params, rotated.data(), stride, out.data());
        results.insert(results.end(), out.begin(), out.end());
        return results;
    }
};

}  // namespace

int main(int argc, char** argv) {
    const int cases = argc > 1 ? std::atoi(argv[1]) : 100;
    set_num_threads(argc > 2 ? std::atoi(argv[2]) : 2);
    const auto sets = available_kernels();
    const Kernels& portable = *sets.back();
    for (const Kernels* set : sets) std::printf("%s ", set->name);
    std::printf("\n");
    for (int i = 0; i < cases; ++i) {
        Problem problem;
        const std::vector<float> expected = problem.run(portable);
        for (const Kernels* set : sets) {
            const std::vector<float> found = problem.run(*set);
            for (size_t at = 0; at < expected.size(); ++at)
                if (std::memcmp(&found[at], &expected[at], sizeof(float)) != 0) {
                    std::printf("case %d, %s: result %zu of %zu is %.9g, expected %.9g (m %d k %d "
                                "n %d hidden %d int8 %d, kv type %d dim %d)\n",
                                i, set->name, at, expected.size(), found[at], expected[at],
                                problem.m, problem.k, problem.n, problem.hidden, problem.is_int8,
                                static_cast<int>(problem.type), problem.dim);
                    return 1;
                }
        }
    }
    std::printf("%d cases agree\n", cases);
    return 0;
}

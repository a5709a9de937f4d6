// Tiles of matrix products with packed weights: out[m, n] = sum_k x[m, k] w[n, k].
//
// A tile is R rows by C panels of sixteen columns, its sums held in registers. How an output is
// summed over k does not depend on R and C, so cutting the work never changes it.
#pragma once

#include <algorithm>

#include "rows.h"

namespace ANAPHORA_ISA {

using anaphora::kGroup;
using anaphora::kPanel;
using anaphora::Norm;
using anaphora::parallel_for;
using anaphora::Weight;

// A tile's sums, and what they are made of, must fit the registers.
#if defined(ANAPHORA_AVX512)
constexpr int kRows = 6;  // by 2 panels: 12 sums of the group, 12 in all, of 32 registers
constexpr int panels_of(int rows) { return rows <= 3 ? 4 : 2; }
#elif defined(ANAPHORA_NEON)
constexpr int kRows = 4;  // by 1 panel of four registers: 16 of 32
constexpr int panels_of(int rows) { return rows == 1 ? 2 : 1; }
#else
constexpr int kRows = 4;  // by 1 panel of two registers: 8 of 16
constexpr int panels_of(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif
constexpr int kRowBlock = 128;  // rows of one task: their activations stay in L2

constexpr int kGatedPanels = 4;  // of one task of a gated matrix: two gates and their two ups
constexpr int kGatedColumns = kGatedPanels / 2 * kPanel;
static_assert(kGatedColumns == kGroup);

// Memory that a thread's kernels reuse from call to call.
class Scratch {
   public:
    template <class T>
    T* get(int64_t count) {
        const size_t bytes = static_cast<size_t>(count) * sizeof(T);
        if (bytes > memory_.size()) memory_ = AlignedVector<char>(bytes);
        return reinterpret_cast<T*>(memory_.data());
    }

   private:
    AlignedVector<char> memory_;
};

// Activations as a product reads them.
struct Int8Rows {
    int k, groups;      // k padded to whole groups
    Activation* q;      // [m, k]
    float* scale;       // [m, groups]
    int32_t* start;     // [m, groups], where a group's sum begins

    static int64_t bytes(int m, int k) {
        const int groups = ceil_div(k, kGroup);
        return int64_t{m} * groups * (kGroup * sizeof(Activation) + sizeof(float) + sizeof(int32_t));
    }
    static Int8Rows in(char* memory, int m, int k) {
        const int groups = ceil_div(k, kGroup);
        auto* scale = reinterpret_cast<float*>(memory + int64_t{m} * groups * kGroup * sizeof(Activation));
        return {groups * kGroup, groups, reinterpret_cast<Activation*>(memory), scale,
                reinterpret_cast<int32_t*>(scale + int64_t{m} * groups)};
    }
    void set(int row, int group, f32x16 low, f32x16 high) const {
        const int64_t at = int64_t{row} * groups + group;
        quantize_group(low, high, q + at * kGroup, scale + at, start + at);
    }
};

struct FloatRows {
    int k;
    float* x;  // [m, k]; only written by whoever made it

    // 32 columns of a row from a whole group on.
    void set(int row, int group, f32x16 low, f32x16 high) const {
        const int column = group * kGroup;
        float* to = x + int64_t{row} * k + column;
        store_first(to, low, k - column);
        if (k > column + kLanes) store_first(to + kLanes, high, k - column - kLanes);
    }
};

struct Int8Problem {
    using Rows = Int8Rows;
    Rows rows;
    const int8_t* w;
    const float* w_scale;
    const float* bias;

    int64_t panel_size() const { return int64_t{kPanel} * rows.k; }

    template <int R, int C>
    void tile(int row, int panel, bool is_first, f32x16 (&total)[R][C]) const {
        const int8_t* weights = w + panel * panel_size();
        const Activation* x = rows.q + int64_t{row} * rows.k;
        const float* scale = rows.scale + int64_t{row} * rows.groups;
        const int32_t* start = rows.start + int64_t{row} * rows.groups;
        for (int g = 0; g < rows.groups; ++g) {
            i32x16 acc[R][C];
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c)
                    acc[r][c] = kWeightOffset == 0 ? zero_i32() : set1(start[r * rows.groups + g]);
            for (int i = 0; i < kGroup; i += kDepth) {
                Weights column[C];
                for (int c = 0; c < C; ++c)
                    column[c] = load_weights(weights + c * panel_size() + kPanel * i);
                for (int r = 0; r < R; ++r)
                    for (int c = 0; c < C; ++c)
                        acc[r][c] = dot(acc[r][c], column[c], x + int64_t{r} * rows.k + i);
            }
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c)
                    total[r][c] =
                        total[r][c] + to_float(acc[r][c]) * set1(scale[r * rows.groups + g]);
            if (is_first)  // the next tile's weights, on their way from memory meanwhile
                for (int c = 0; c < C; ++c)
                    prefetch<kPanel * kGroup>(weights + (C + c) * panel_size());
            weights += kPanel * kGroup;
            x += kGroup;
        }
        for (int c = 0; c < C; ++c) {
            const f32x16 s = load(w_scale + (panel + c) * kPanel);
            for (int r = 0; r < R; ++r) total[r][c] = total[r][c] * s;
        }
    }
};

// Four-bit floats (OCP MX, E2M1) with one power of two for each group of 32 inputs of a column. The
// elements are whole numbers of halves, so that a group's products with int8 are exact, as above.
struct Mxfp4Problem {
    using Rows = Int8Rows;
    Rows rows;
    const uint8_t* w;
    const float* bias;

    static constexpr int kElementBytes = kPanel * kGroup / 2;
    int64_t panel_size() const { return anaphora::mxfp4_panel_bytes(rows.k); }

    template <int R, int C>
    void tile(int row, int panel, bool is_first, f32x16 (&total)[R][C]) const {
        constexpr int group_bytes = kElementBytes + kPanel;
        const uint8_t* weights = w + panel * panel_size();
        const Activation* x = rows.q + int64_t{row} * rows.k;
        const float* scale = rows.scale + int64_t{row} * rows.groups;
        const int32_t* start = rows.start + int64_t{row} * rows.groups;
        for (int g = 0; g < rows.groups; ++g) {
            i32x16 acc[R][C];
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c)
                    // what start takes back for int8, in terms of this offset
                    acc[r][c] = set1(start[r * rows.groups + g] / std::max(kWeightOffset, 1) *
                                     kFp4Offset);
            for (int i = 0; i < kGroup; i += kDepth) {
                Weights column[C];
                for (int c = 0; c < C; ++c)
                    column[c] = load_fp4(weights + c * panel_size() + kPanel * i / 2);
                for (int r = 0; r < R; ++r)
                    for (int c = 0; c < C; ++c)
                        acc[r][c] = dot(acc[r][c], column[c], x + int64_t{r} * rows.k + i);
            }
            for (int c = 0; c < C; ++c) {
                const f32x16 s = power_of_two(weights + c * panel_size() + kElementBytes);
                for (int r = 0; r < R; ++r)
                    total[r][c] = total[r][c] +
                                  to_float(acc[r][c]) * set1(scale[r * rows.groups + g]) * s;
            }
            if (is_first)
                for (int c = 0; c < C; ++c)
                    prefetch<group_bytes>(weights + (C + c) * panel_size());
            weights += group_bytes;
            x += kGroup;
        }
    }
};

struct FloatProblem {
    using Rows = FloatRows;
    Rows rows;
    const float* w;
    const float* bias;

    int64_t panel_size() const { return int64_t{kPanel} * rows.k; }

    template <int R, int C>
    void tile(int row, int panel, bool, f32x16 (&total)[R][C]) const {
        const float* weights = w + panel * panel_size();
        const float* x = rows.x + int64_t{row} * rows.k;
        for (int i = 0; i < rows.k; ++i) {
            f32x16 column[C];
            for (int c = 0; c < C; ++c)
                column[c] = load(weights + c * panel_size() + int64_t{kPanel} * i);
            for (int r = 0; r < R; ++r) {
                const f32x16 value = set1(x[int64_t{r} * rows.k + i]);
                for (int c = 0; c < C; ++c) total[r][c] = fma(value, column[c], total[r][c]);
            }
        }
    }
};

// Where a block's results go: columns [first_panel * 16, n) of rows [first_row, ...).
struct Target {
    float* out;
    int64_t stride;
    int first_row, first_panel;
    int n;  // columns that exist, counted from column 0 of the matrix
    bool is_added;

    void put(int row, int panel, f32x16 v) const {
        float* to = out + (row - first_row) * stride + int64_t{panel - first_panel} * kPanel;
        const int count = n - panel * kPanel;
        if (is_added) v = load_first(to, count) + v;
        store_first(to, v, count);
    }
};

template <int R, int C, class Problem>
void run_tile(const Problem& p, const Target& target, int row, int panel, bool is_first) {
    f32x16 total[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) total[r][c] = set1(0.0f);
    p.tile(row, panel, is_first, total);
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) {
            f32x16 v = total[r][c];
            if (p.bias != nullptr) v = v + load(p.bias + (panel + c) * kPanel);
            target.put(row + r, panel + c, v);
        }
}

// Rows [row, row_end) by panels [panel, panel_end), in tiles of about equal height.
template <class Problem>
void run_block(const Problem& p, const Target& target, int row, int row_end, int panel,
               int panel_end) {
    const int count = row_end - row;
    const int tiles = ceil_div(count, kRows);
    const auto first_row = [&](int tile) { return row + tile * count / tiles; };
    const int width = panels_of(ceil_div(count, tiles));
    for (; panel < panel_end; panel += width)
        for (int t = 0; t < tiles; ++t) {
            const int begin = first_row(t);
            with_rows<kRows>(first_row(t + 1) - begin, [&](auto rows) {
                constexpr int R = rows, C = panels_of(R);
                int at = panel;
                const int end = std::min(panel + width, panel_end);
                const bool is_first = t == 0;
                for (; at + C <= end; at += C) run_tile<R, C>(p, target, begin, at, is_first);
                if constexpr (C > 2)
                    for (; at + 2 <= end; at += 2)
                        run_tile<R, 2>(p, target, begin, at, is_first);
                for (; at < end; ++at) run_tile<R, 1>(p, target, begin, at, is_first);
            });
        }
}

// Nothing is added to a product.
struct NoDeltas {
    void expect(int, int, int, int) const {}
    void add(const Target&, int, int, int, int) const {}
};

// Rows [row, row_end) by kGatedPanels panels of a gated matrix of n columns, from `panel` on:
// gate(gate, up) goes to `rows` as a group of 32 columns.
template <class Problem, class Deltas, class Gate, class Rows>
void run_gated_block(const Problem& p, const Deltas& deltas, int row, int row_end, int panel, int n,
                     Gate&& gate, const Rows& rows) {
    constexpr int width = kGatedPanels * kPanel;
    thread_local Scratch scratch;
    auto* block = scratch.get<float>(int64_t{kRowBlock} * width);
    const int panel_end = std::min(panel + kGatedPanels, ceil_div(n, kPanel));
    deltas.expect(row, row_end, panel, panel_end);
    run_block(p, Target{block, width, row, panel, n, false}, row, row_end, panel, panel_end);
    deltas.add(Target{block, width, row, panel, n, true}, row, row_end, panel, panel_end);
    for (int r = row; r < row_end; ++r) {
        const float* at = block + (r - row) * width;
        const auto gated = [&](int pair) {
            if (panel + 2 * pair >= panel_end) return set1(0.0f);
            return gate(load(at + 2 * pair * kPanel), load(at + (2 * pair + 1) * kPanel));
        };
        rows.set(r, panel / kGatedPanels, gated(0), gated(1));
    }
}

// The rows of x, normalised if asked for, in the form that the product reads.
inline Int8Rows prepare_int8(Scratch& scratch, const float* x, int m, int k, const Norm& norm) {
    const Int8Rows rows = Int8Rows::in(scratch.get<char>(Int8Rows::bytes(m, k)), m, k);
    for_rows(m, [&](int row) {
        const float* in = x + int64_t{row} * k;
        const bool is_normed = norm.weight != nullptr;
        const f32x16 inverse = set1(is_normed ? inverse_rms(in, k, norm.eps) : 1.0f);
        const auto at = [&](int i) {
            const f32x16 v = load_first(in + i, k - i);
            return is_normed ? v * inverse * load_first(norm.weight + i, k - i) : v;
        };
        for (int g = 0; g < rows.groups; ++g)
            rows.set(row, g, at(g * kGroup), at(g * kGroup + kLanes));
    });
    return rows;
}

inline FloatRows prepare_float(Scratch& scratch, const float* x, int m, int k, const Norm& norm) {
    if (norm.weight == nullptr) return {k, const_cast<float*>(x)};
    auto* normed = scratch.get<float>(int64_t{m} * k);
    rms_norm(x, norm, m, k, normed);
    return {k, normed};
}

inline Int8Problem int8_problem(const Int8Rows& rows, const Weight& w) {
    return {rows, static_cast<const int8_t*>(w.data), w.scale, w.bias};
}

inline Mxfp4Problem mxfp4_problem(const Int8Rows& rows, const Weight& w) {
    return {rows, static_cast<const uint8_t*>(w.data), w.bias};
}

inline FloatProblem float_problem(const FloatRows& rows, const Weight& w) {
    return {rows, static_cast<const float*>(w.data), w.bias};
}

}  // namespace ANAPHORA_ISA

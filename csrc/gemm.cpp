// Matrix products against packed weights: out[m, n] = sum_k x[m, k] w[n, k].
//
// A tile is R rows by C panels of sixteen columns, its sums held in registers. Every output is
// summed over k in ascending order whatever R and C are, so cutting the work never changes it.
#include <algorithm>
#include <cmath>

#include "isa.h"
#include "simd.h"
#include "thread_pool.h"

namespace ANAPHORA_ISA {
namespace {

using anaphora::kPanel;
using anaphora::parallel_for;

// A large tile's sums, and what they are made of, must fit the registers.
#if defined(ANAPHORA_AVX512)
constexpr int kRows = 8;        // by 2 panels: 16 of 32 registers
constexpr int kTilePanels = 2;
#else
constexpr int kRows = 4;        // by 1 panel of two registers: 8 of 16
constexpr int kTilePanels = 1;
#endif
constexpr int kRowPanels = 4;   // width of a tile of one row
constexpr int kRowBlock = 128;  // rows of one task: their activations stay in L2
constexpr int kPanelBlock = 4;  // panels of one task

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The last panel may be wider than what is left of a row; the surplus lanes are dropped.
inline void store_columns(float* out, f32x16 v, int columns) {
    if (columns >= kPanel) {
        store(out, v);
        return;
    }
    float lanes[kPanel];
    store(lanes, v);
    std::copy(lanes, lanes + columns, out);
}

struct Int8Problem {
    const int16_t* q;
    const float* scale;
    int k;  // padded to even
    const int8_t* w;
    const float* w_scale;
    const float* bias;
    int n;
    float* out;

    template <int R, int C>
    void tile(int row, int panel) const {
        i32x16 acc[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) acc[r][c] = zero_i32();
        const int64_t panel_size = int64_t{kPanel} * k;
        const int8_t* weights = w + panel * panel_size;
        const int16_t* x = q + int64_t{row} * k;
        for (int i = 0; i < k; i += 2) {
            i16x32 column[C];
            for (int c = 0; c < C; ++c)
                column[c] = widen(weights + c * panel_size + int64_t{kPanel} * i);
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c)
                    acc[r][c] = dot_pair(acc[r][c], column[c], x + int64_t{r} * k + i);
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) {
                const int column = (panel + c) * kPanel;
                f32x16 v = to_float(acc[r][c]) * set1(scale[row + r]) * load(w_scale + column);
                if (bias != nullptr) v = v + load(bias + column);
                store_columns(out + int64_t{row + r} * n + column, v, n - column);
            }
    }
};

struct FloatProblem {
    const float* x;
    int k;
    const float* w;
    const float* bias;
    int n;
    float* out;

    template <int R, int C>
    void tile(int row, int panel) const {
        f32x16 acc[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) acc[r][c] = set1(0.0f);
        const int64_t panel_size = int64_t{kPanel} * k;
        const float* weights = w + panel * panel_size;
        const float* rows = x + int64_t{row} * k;
        for (int i = 0; i < k; ++i) {
            f32x16 column[C];
            for (int c = 0; c < C; ++c)
                column[c] = load(weights + c * panel_size + int64_t{kPanel} * i);
            for (int r = 0; r < R; ++r) {
                const f32x16 value = set1(rows[int64_t{r} * k + i]);
                for (int c = 0; c < C; ++c) acc[r][c] = fma(value, column[c], acc[r][c]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) {
                const int column = (panel + c) * kPanel;
                f32x16 v = acc[r][c];
                if (bias != nullptr) v = v + load(bias + column);
                store_columns(out + int64_t{row + r} * n + column, v, n - column);
            }
    }
};

// Rows [row, row_end) by C panels, in tiles as high as fit.
template <int C, class Problem>
void run_panels(const Problem& p, int row, int row_end, int panel) {
    for (; row + kRows <= row_end; row += kRows) p.template tile<kRows, C>(row, panel);
    for (; row + 2 <= row_end; row += 2) p.template tile<2, C>(row, panel);
    for (; row < row_end; ++row) p.template tile<1, C>(row, panel);
}

// Rows [row, row_end) by panels [panel, panel_end).
template <class Problem>
void run_block(const Problem& p, int row, int row_end, int panel, int panel_end) {
    constexpr int rows_of_wide_tile = 2;
    if (row_end - row < rows_of_wide_tile)
        for (; panel + kRowPanels <= panel_end; panel += kRowPanels)
            run_panels<kRowPanels>(p, row, row_end, panel);
    for (; panel + kTilePanels <= panel_end; panel += kTilePanels)
        run_panels<kTilePanels>(p, row, row_end, panel);
    for (; panel < panel_end; ++panel) run_panels<1>(p, row, row_end, panel);
}

template <class Problem>
void run(const Problem& p, int m) {
    const int panels = ceil_div(p.n, kPanel);
    const int row_blocks = ceil_div(m, kRowBlock);
    const int panel_blocks = ceil_div(panels, kPanelBlock);
    parallel_for(row_blocks * panel_blocks, [&](int task) {
        const int row = task / panel_blocks * kRowBlock;
        const int panel = task % panel_blocks * kPanelBlock;
        run_block(p, row, std::min(row + kRowBlock, m), panel,
                  std::min(panel + kPanelBlock, panels));
    });
}

void quantize_row(const float* x, int k, int qmax, int16_t* q, float* scale) {
    const int whole = k / kLanes * kLanes;
    f32x16 lanes = set1(0.0f);
    f32x16 damage = set1(0.0f);  // becomes NaN at the first infinite or NaN input
    for (int i = 0; i < whole; i += kLanes) {
        const f32x16 v = load(x + i);
        lanes = max(lanes, abs(v));
        damage = fma(v, set1(0.0f), damage);
    }
    float largest = reduce_max(lanes);
    float poison = reduce_add(damage);
    for (int i = whole; i < k; ++i) {
        largest = std::max(largest, std::fabs(x[i]));
        poison += x[i] * 0.0f;
    }
    // A row of zeros stays zeros; a damaged row gets a NaN scale, so that the damage shows.
    *scale = largest / static_cast<float>(qmax) + poison;
    const bool is_sound = poison == 0.0f && largest > 0.0f;
    const float inverse = is_sound ? static_cast<float>(qmax) / largest : 0.0f;
    const f32x16 limit = set1(static_cast<float>(qmax));
    const f32x16 lowest = set1(-static_cast<float>(qmax));
    for (int i = 0; i < whole; i += kLanes)
        store_i16(q + i, min(max(round(load(x + i) * set1(inverse)), lowest), limit));
    if (whole == k) return;
    float rest[kLanes] = {};
    int16_t rounded[kLanes];
    std::copy(x + whole, x + k, rest);
    store_i16(rounded, min(max(round(load(rest) * set1(inverse)), lowest), limit));
    std::copy(rounded, rounded + k - whole, q + whole);
    if (k % 2 != 0) q[k] = 0;
}

}  // namespace

void quantize_rows(const float* x, int m, int k, int qmax, int16_t* q, float* scale) {
    const int k_even = k + k % 2;
    constexpr int rows = 16;
    parallel_for(ceil_div(m, rows), [&](int task) {
        for (int r = task * rows; r < std::min(m, (task + 1) * rows); ++r)
            quantize_row(x + int64_t{r} * k, k, qmax, q + int64_t{r} * k_even, scale + r);
    });
}

void gemm_int8(const int16_t* q, const float* scale, int m, int k, const int8_t* w,
               const float* w_scale, const float* bias, int n, float* out) {
    run(Int8Problem{q, scale, k + k % 2, w, w_scale, bias, n, out}, m);
}

void gemm_f32(const float* x, int m, int k, const float* w, const float* bias, int n, float* out) {
    run(FloatProblem{x, k, w, bias, n, out}, m);
}

}  // namespace ANAPHORA_ISA

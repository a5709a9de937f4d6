// Products with one matrix, and with the two of a gated MLP.
#include <algorithm>

#include "isa.h"
#include "tiles.h"

namespace ANAPHORA_ISA {
namespace {

using anaphora::Gate;
using anaphora::WeightType;

// Tasks of `panels` panels: wide enough to be worth a claim, enough of them that no thread ends
// alone, a multiple of what a tile takes.
int panels_per_task(int panels, int row_blocks) {
    constexpr int tasks_per_thread = 8, widest = 16;
    const int wanted = panels * row_blocks / (tasks_per_thread * anaphora::num_threads());
    return std::clamp(wanted / kGatedPanels * kGatedPanels, kGatedPanels, widest);
}

template <class Problem>
void multiply(const Problem& p, int m, int n, bool is_added, float* out) {
    const int panels = ceil_div(n, kPanel);
    const int row_blocks = ceil_div(m, kRowBlock);
    const int width = panels_per_task(panels, row_blocks);
    const int panel_blocks = ceil_div(panels, width);
    const Target target{out, n, 0, 0, n, is_added};
    parallel_for(row_blocks * panel_blocks, [&](int task) {
        const int row = task / panel_blocks * kRowBlock;
        const int panel = task % panel_blocks * width;
        run_block(p, target, row, std::min(row + kRowBlock, m), panel,
                  std::min(panel + width, panels));
    });
}

f32x16 silu(f32x16 x) { return x * (set1(1.0f) / (set1(1.0f) + exp(set1(0.0f) - x))); }

// 0.5 x (1 + tanh(y)) = x / (1 + exp(-2 y)) with y = sqrt(2 / pi) (x + 0.044715 x^3)
// (Hendrycks and Gimpel, 2016; PyTorch's approximate="tanh").
f32x16 gelu_tanh(f32x16 x) {
    const f32x16 y = set1(0.7978845608028654f) * (x + set1(0.044715f) * x * x * x);
    return x * (set1(1.0f) / (set1(1.0f) + exp(set1(-2.0f) * y)));
}

// Multiplies with a gated matrix; put(row, column, low, high) gets 32 columns of gate(gate) * up.
template <class Problem, class Put>
void multiply_gated(const Problem& p, int m, int n, Gate gate, Put&& put) {
    const int panels = ceil_div(n, kPanel);
    const int row_blocks = ceil_div(m, kRowBlock);
    const int panel_blocks = ceil_div(panels, kGatedPanels);
    parallel_for(row_blocks * panel_blocks, [&](int task) {
        const int row = task / panel_blocks * kRowBlock;
        const int panel = task % panel_blocks * kGatedPanels;
        run_gated_block(p, row, std::min(row + kRowBlock, m), panel, n,
                        [gate](f32x16 x, f32x16 up) {
                            return (gate == Gate::silu ? silu(x) : gelu_tanh(x)) * up;
                        },
                        put);
    });
}

thread_local Scratch input_rows, hidden_rows;

}  // namespace

void linear(const float* x, int m, const Norm& norm, const Weight& w, bool is_added, float* out) {
    if (w.type == WeightType::float32) {
        multiply(float_problem(prepare_float(input_rows, x, m, w.k, norm), w), m, w.n, is_added,
                 out);
        return;
    }
    const Int8Rows rows = prepare_int8(input_rows, x, m, w.k, norm);
    if (w.type == WeightType::int8)
        multiply(int8_problem(rows, w), m, w.n, is_added, out);
    else
        multiply(mxfp4_problem(rows, w), m, w.n, is_added, out);
}

void gated_mlp(const float* x, int m, const Norm& norm, const Weight& gate_up, const Weight& down,
               Gate gate, bool is_added, float* out) {
    if (gate_up.type == WeightType::int8) {
        const Int8Rows hidden =
            Int8Rows::in(hidden_rows.get<char>(Int8Rows::bytes(m, down.k)), m, down.k);
        multiply_gated(int8_problem(prepare_int8(input_rows, x, m, gate_up.k, norm), gate_up), m,
                       gate_up.n, gate, hidden);
        multiply(int8_problem(hidden, down), m, down.n, is_added, out);
        return;
    }
    const FloatRows hidden{down.k, hidden_rows.get<float>(int64_t{m} * down.k)};
    multiply_gated(float_problem(prepare_float(input_rows, x, m, gate_up.k, norm), gate_up), m,
                   gate_up.n, gate, hidden);
    multiply(float_problem(hidden, down), m, down.n, is_added, out);
}

}  // namespace ANAPHORA_ISA

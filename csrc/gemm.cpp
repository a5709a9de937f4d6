// Products with one matrix, and with the two of a gated MLP.
#include <algorithm>

#include "isa.h"
#include "lora.h"
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

template <class Problem, class Deltas>
void multiply(const Problem& p, Deltas&& deltas, int m, int n, bool is_added, float* out) {
    const int panels = ceil_div(n, kPanel);
    const int row_blocks = ceil_div(m, kRowBlock);
    const int width = panels_per_task(panels, row_blocks);
    const int panel_blocks = ceil_div(panels, width);
    const Target target{out, n, 0, 0, n, is_added};
    parallel_for(deltas.num_tasks() + row_blocks * panel_blocks, [&](int task) {
        if (task < deltas.num_tasks()) return deltas.compute(task);
        task -= deltas.num_tasks();
        const int row = task / panel_blocks * kRowBlock;
        const int panel = task % panel_blocks * width;
        const int row_end = std::min(row + kRowBlock, m);
        const int panel_end = std::min(panel + width, panels);
        deltas.expect(row, row_end, panel, panel_end);
        run_block(p, target, row, row_end, panel, panel_end);
        deltas.add(Target{out, n, 0, 0, n, true}, row, row_end, panel, panel_end);
    });
}

f32x16 silu(f32x16 x) { return x * (set1(1.0f) / (set1(1.0f) + exp(set1(0.0f) - x))); }

// 0.5 x (1 + tanh(y)) = x / (1 + exp(-2 y)) with y = sqrt(2 / pi) (x + 0.044715 x^3)
// (Hendrycks and Gimpel, 2016; PyTorch's approximate="tanh").
f32x16 gelu_tanh(f32x16 x) {
    const f32x16 y = set1(0.7978845608028654f) * (x + set1(0.044715f) * x * x * x);
    return x * (set1(1.0f) / (set1(1.0f) + exp(set1(-2.0f) * y)));
}

// Multiplies with a gated matrix; gate(gate) * up goes to `rows`.
template <class Problem, class Deltas, class Rows>
void multiply_gated(const Problem& p, Deltas&& deltas, int m, int n, Gate gate, const Rows& rows) {
    const int panels = ceil_div(n, kPanel);
    const int row_blocks = ceil_div(m, kRowBlock);
    const int panel_blocks = ceil_div(panels, kGatedPanels);
    parallel_for(deltas.num_tasks() + row_blocks * panel_blocks, [&](int task) {
        if (task < deltas.num_tasks()) return deltas.compute(task);
        task -= deltas.num_tasks();
        const int row = task / panel_blocks * kRowBlock;
        const int panel = task % panel_blocks * kGatedPanels;
        run_gated_block(p, deltas, row, std::min(row + kRowBlock, m), panel, n,
                        [gate](f32x16 x, f32x16 up) {
                            return (gate == Gate::silu ? silu(x) : gelu_tanh(x)) * up;
                        },
                        rows);
    });
}

thread_local Scratch input_rows, hidden_rows, input_ranks, hidden_ranks;

// What adapters add to a product of these m rows.
template <class Ranks, class ProblemOf>
auto deltas_of(Scratch& scratch, int m, const Adapters& adapters, ProblemOf problem_of) {
    const auto product = [=](const Weight& a, int row, int row_end, float* out) {
        const Target target{out, a.n, row, 0, a.n, false};
        run_block(problem_of(a), target, row, row_end, 0, a.n / kPanel);
    };
    using Of = Deltas<Ranks, decltype(product)>;
    return Of(adapters, scratch.get<char>(Ranks::bytes(m, Of::width(adapters))), m, product);
}

auto deltas_of(Scratch& scratch, const Int8Rows& rows, int m, const Adapters& adapters) {
    return deltas_of<Int8Ranks>(scratch, m, adapters,
                                [&](const Weight& a) { return int8_problem(rows, a); });
}

auto deltas_of(Scratch& scratch, const FloatRows& rows, int m, const Adapters& adapters) {
    return deltas_of<FloatRanks>(scratch, m, adapters,
                                 [&](const Weight& a) { return float_problem(rows, a); });
}

}  // namespace

void linear(const float* x, int m, const Norm& norm, const Weight& w, const Adapters& adapters,
            bool is_added, float* out) {
    if (w.type == WeightType::float32) {
        const FloatRows rows = prepare_float(input_rows, x, m, w.k, norm);
        multiply(float_problem(rows, w), deltas_of(input_ranks, rows, m, adapters), m, w.n,
                 is_added, out);
        return;
    }
    const Int8Rows rows = prepare_int8(input_rows, x, m, w.k, norm);
    auto deltas = deltas_of(input_ranks, rows, m, adapters);
    if (w.type == WeightType::int8)
        multiply(int8_problem(rows, w), deltas, m, w.n, is_added, out);
    else
        multiply(mxfp4_problem(rows, w), deltas, m, w.n, is_added, out);
}

void gated_mlp(const float* x, int m, const Norm& norm, const Weight& gate_up, const Weight& down,
               Gate gate, const Adapters& gate_up_adapters, const Adapters& down_adapters,
               bool is_added, float* out) {
    if (gate_up.type == WeightType::int8) {
        const Int8Rows rows = prepare_int8(input_rows, x, m, gate_up.k, norm);
        const Int8Rows hidden =
            Int8Rows::in(hidden_rows.get<char>(Int8Rows::bytes(m, down.k)), m, down.k);
        multiply_gated(int8_problem(rows, gate_up),
                       deltas_of(input_ranks, rows, m, gate_up_adapters), m, gate_up.n, gate,
                       hidden);
        multiply(int8_problem(hidden, down), deltas_of(hidden_ranks, hidden, m, down_adapters), m,
                 down.n, is_added, out);
        return;
    }
    const FloatRows rows = prepare_float(input_rows, x, m, gate_up.k, norm);
    const FloatRows hidden{down.k, hidden_rows.get<float>(int64_t{m} * down.k)};
    multiply_gated(float_problem(rows, gate_up), deltas_of(input_ranks, rows, m, gate_up_adapters),
                   m, gate_up.n, gate, hidden);
    multiply(float_problem(hidden, down), deltas_of(hidden_ranks, hidden, m, down_adapters), m,
             down.n, is_added, out);
}

}  // namespace ANAPHORA_ISA

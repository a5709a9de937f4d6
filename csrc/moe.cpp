// A mixture of experts: rows are grouped by expert, so that an expert's weights are read once for
// all of its rows.
#include <algorithm>

#include "isa.h"
#include "tiles.h"

namespace ANAPHORA_ISA {
namespace {

using anaphora::Experts;
using anaphora::WeightType;

// Which rows each expert has. A slot is one row of one expert; an expert's slots are neighbours.
struct Routes {
    AlignedVector<int> first;      // [count + 1], each expert's first slot
    AlignedVector<int> rows;       // [slots]
    AlignedVector<int> slots;      // [m, top_k], a row's slots in the order of its experts' numbers
    AlignedVector<float> weights;  // [m, top_k], likewise

    Routes(const float* router, int m, const Experts& experts) {
        const int count = experts.count, k = experts.top_k;
        AlignedVector<int> chosen(int64_t{m} * k);
        weights.resize(chosen.size());
        first.assign(count + 1, 0);
        for (int row = 0; row < m; ++row) {
            choose(router + int64_t{row} * count, count, k, chosen.data() + int64_t{row} * k,
                   weights.data() + int64_t{row} * k);
            for (int i = 0; i < k; ++i) ++first[chosen[int64_t{row} * k + i] + 1];
        }
        for (int e = 0; e < count; ++e) first[e + 1] += first[e];
        AlignedVector<int> next = first;
        rows.resize(chosen.size());
        slots.resize(chosen.size());
        for (size_t i = 0; i < chosen.size(); ++i) {
            slots[i] = next[chosen[i]]++;
            rows[slots[i]] = static_cast<int>(i) / k;
        }
    }

    // The k largest of a row's logits, in the order of their numbers (the first of equals), and their
    // softmax.
    static void choose(const float* logits, int count, int k, int* chosen, float* weights) {
        const auto is_chosen = [&](int e, int found) {
            for (int i = 0; i < found; ++i)
                if (chosen[i] == e) return true;
            return false;
        };
        for (int i = 0; i < k; ++i) {
            int best = -1;
            for (int e = 0; e < count; ++e)
                if (!is_chosen(e, i) && (best < 0 || logits[e] > logits[best])) best = e;
            chosen[i] = best;
        }
        const float largest = logits[chosen[0]];
        for (int i = 1; i < k; ++i)  // few numbers: sorted by insertion
            for (int j = i; j > 0 && chosen[j - 1] > chosen[j]; --j)
                std::swap(chosen[j - 1], chosen[j]);
        float lanes[kLanes] = {};
        for (int i = 0; i < k; ++i) lanes[i] = logits[chosen[i]];
        const f32x16 p = keep_first(exp(load(lanes) - set1(largest)), k, 0.0f);
        store(lanes, p / set1(reduce_add(p)));
        std::copy(lanes, lanes + k, weights);
    }
};

// A piece of the work: one expert's slots [slot, slot_end) by panels from `panel` on.
struct Task {
    int expert, slot, slot_end, panel;
};

AlignedVector<Task> cut(const Routes& routes, int count, int n, int panels) {
    AlignedVector<Task> tasks;
    for (int e = 0; e < count; ++e)
        for (int slot = routes.first[e]; slot < routes.first[e + 1]; slot += kRowBlock)
            for (int panel = 0; panel < ceil_div(n, kPanel); panel += panels)
                tasks.push_back({e, slot, std::min(slot + kRowBlock, routes.first[e + 1]), panel});
    return tasks;
}

// Rows in the order of the slots.
Int8Rows gather(Scratch& scratch, const Int8Rows& from, const AlignedVector<int>& rows) {
    const int m = static_cast<int>(rows.size());
    const Int8Rows to = Int8Rows::in(scratch.get<char>(Int8Rows::bytes(m, from.k)), m, from.k);
    for_rows(m, [&](int i) {
        const int64_t a = rows[i], b = i;
        std::copy_n(from.q + a * from.k, from.k, to.q + b * from.k);
        std::copy_n(from.scale + a * from.groups, from.groups, to.scale + b * from.groups);
        std::copy_n(from.start + a * from.groups, from.groups, to.start + b * from.groups);
    });
    return to;
}

FloatRows gather(Scratch& scratch, const FloatRows& from, const AlignedVector<int>& rows) {
    const int m = static_cast<int>(rows.size());
    const FloatRows to{from.k, scratch.get<float>(int64_t{m} * from.k)};
    for_rows(m, [&](int i) {
        std::copy_n(from.x + int64_t{rows[i]} * from.k, from.k, to.x + int64_t{i} * from.k);
    });
    return to;
}

Int8Rows make_rows(Scratch& scratch, int m, int k, const Int8Rows*) {
    return Int8Rows::in(scratch.get<char>(Int8Rows::bytes(m, k)), m, k);
}
FloatRows make_rows(Scratch& scratch, int m, int k, const FloatRows*) {
    return {k, scratch.get<float>(int64_t{m} * k)};
}

thread_local Scratch input_rows, slot_rows, hidden_rows, result_rows;

// `problem(rows, stack, expert)` gives the product of rows with one of a stack's matrices.
template <class Rows, class Problem>
void run(const Rows& x, int m, const float* router, const Experts& experts, Problem&& problem,
         float* out) {
    const Routes routes(router, m, experts);
    const int slots = static_cast<int>(routes.rows.size()), width = experts.down.n;
    const Rows inputs = gather(slot_rows, x, routes.rows);
    const Rows hidden = make_rows(hidden_rows, slots, experts.down.k, &x);
    auto* results = result_rows.get<float>(int64_t{slots} * width);
    const auto gate = [&](f32x16 g, f32x16 up) {
        const f32x16 limit = set1(experts.limit);
        g = min(limit, g);
        up = max(set1(-experts.limit), min(limit, up));
        const f32x16 e = exp(set1(-experts.alpha) * g);
        return (up + set1(1.0f)) * (g * (set1(1.0f) / (set1(1.0f) + e)));
    };
    const AlignedVector<Task> first = cut(routes, experts.count, experts.gate_up.n, kGatedPanels);
    parallel_for(static_cast<int>(first.size()), [&](int i) {
        const Task& task = first[i];
        run_gated_block(problem(inputs, experts.gate_up, task.expert), NoDeltas{}, task.slot,
                        task.slot_end, task.panel, experts.gate_up.n, gate, hidden);
    });
    const AlignedVector<Task> second = cut(routes, experts.count, width, kGatedPanels);
    const Target target{results, width, 0, 0, width, false};
    parallel_for(static_cast<int>(second.size()), [&](int i) {
        const Task& task = second[i];
        run_block(problem(hidden, experts.down, task.expert), target, task.slot, task.slot_end,
                  task.panel, std::min(task.panel + kGatedPanels, ceil_div(width, kPanel)));
    });
    for_rows(m, [&](int row) {
        const int64_t at = int64_t{row} * experts.top_k;
        for (int i = 0; i < width; i += kLanes) {
            f32x16 sum = set1(0.0f);
            for (int k = 0; k < experts.top_k; ++k) {
                const float* result = results + int64_t{routes.slots[at + k]} * width + i;
                sum = sum + load_first(result, width - i) * set1(routes.weights[at + k]);
            }
            float* to = out + int64_t{row} * width + i;
            store_first(to, load_first(to, width - i) + sum, width - i);
        }
    });
}

// One matrix of a stack whose matrices take `size` elements each.
template <class Element>
Weight nth(const Weight& stack, int64_t size, int expert) {
    const auto vector = [&](const float* v) {
        return v == nullptr ? v : v + int64_t{expert} * ceil_div(stack.n, kPanel) * kPanel;
    };
    Weight w = stack;
    w.data = static_cast<const Element*>(stack.data) + expert * size;
    w.scale = vector(stack.scale);
    w.bias = vector(stack.bias);
    return w;
}

}  // namespace

void experts(const float* x, int m, const float* router, const Experts& experts, float* out) {
    const Norm none{nullptr, 0.0f};
    const int k = experts.gate_up.k;
    if (experts.gate_up.type == WeightType::float32)
        return run(prepare_float(input_rows, x, m, k, none), m, router, experts,
                   [](const FloatRows& rows, const Weight& w, int e) {
                       return float_problem(
                           rows, nth<float>(w, anaphora::packed_size_f32(w.n, w.k), e));
                   },
                   out);
    const Int8Rows rows = prepare_int8(input_rows, x, m, k, none);
    if (experts.gate_up.type == WeightType::int8)
        return run(rows, m, router, experts,
                   [](const Int8Rows& r, const Weight& w, int e) {
                       return int8_problem(
                           r, nth<int8_t>(w, anaphora::packed_size_int8(w.n, w.k), e));
                   },
                   out);
    run(rows, m, router, experts,
        [](const Int8Rows& r, const Weight& w, int e) {
            return mxfp4_problem(r, nth<uint8_t>(w, anaphora::packed_size_mxfp4(w.n, w.k), e));
        },
        out);
}

}  // namespace ANAPHORA_ISA

// Low-rank adapters: what they add to a product, in the tasks that compute it.
//
// A row's ranks (A x) do not depend on which rows are computed with it, and neither does what B
// makes of them, so a row with an adapter has the same bits in any batch. Rows without one are not
// touched.
#pragma once

#include <algorithm>
#include <atomic>

#include "rows.h"

namespace ANAPHORA_ISA {

using anaphora::Adapted;
using anaphora::Adapters;
using anaphora::kPanel;
using anaphora::LowRank;
using anaphora::RankSpan;

inline constexpr int kRankRows = 4;    // rows of a tile
inline constexpr int kRankChunk = 32;  // rows of one task of A x
inline constexpr int64_t kSquare = kPanel * kPanel;

// A x rounded to int8, with one scale for sixteen ranks.
struct Int8Ranks {
    static constexpr int kElementBytes = 1;  // of B
    int width, groups;  // ranks of a row, and its scales
    Activation* q;      // [m, width]
    float* scale;       // [m, groups]
    int32_t* start;     // [m, groups], where a group's sum begins

    static int64_t bytes(int m, int width) {
        return int64_t{m} * width / kPanel *
               (kPanel * sizeof(Activation) + sizeof(float) + sizeof(int32_t));
    }
    static Int8Ranks in(char* memory, int m, int width) {
        const int groups = width / kPanel;
        auto* scale = reinterpret_cast<float*>(memory + int64_t{m} * width * sizeof(Activation));
        return {width, groups, reinterpret_cast<Activation*>(memory), scale,
                reinterpret_cast<int32_t*>(scale + int64_t{m} * groups)};
    }
    void set(int row, int group, f32x16 v) const {
        const int64_t at = int64_t{row} * groups + group;
        const float largest = reduce_max(abs(v)), poison = reduce_add(v * set1(0.0f));
        const bool is_zero = !(largest > 1e-30f);  // as quantize_group in rows.h
        const f32x16 rounded = round(v * set1(is_zero ? 0.0f : 127.0f / largest));
        store_activations(q + at * kPanel, rounded);
        scale[at] = (is_zero ? 0.0f : largest / 127.0f) + poison;
        start[at] = poison == 0.0f ? -kWeightOffset * static_cast<int32_t>(reduce_add(rounded)) : 0;
    }
    template <int R>
    void tile(const LowRank& delta, const RankSpan& span, int panel, int row,
              f32x16 (&total)[R]) const {
        const int8_t* b = static_cast<const int8_t*>(delta.b) + kSquare * span.offset;
        for (int at = span.first; at < span.first + span.count; ++at) {
            const int64_t group = int64_t{row} * groups + at;
            i32x16 acc[R];
            for (int r = 0; r < R; ++r)
                acc[r] = kWeightOffset == 0 ? zero_i32() : set1(start[group + int64_t{r} * groups]);
            for (int i = 0; i < kPanel; i += kDepth, b += kPanel * kDepth) {
                const Weights columns = load_weights(b);
                for (int r = 0; r < R; ++r)
                    acc[r] = dot(acc[r], columns, q + int64_t{row + r} * width + kPanel * at + i);
            }
            for (int r = 0; r < R; ++r)
                total[r] = total[r] + to_float(acc[r]) * set1(scale[group + int64_t{r} * groups]);
        }
        const f32x16 s = load(delta.scale + int64_t{panel} * kPanel);
        for (int r = 0; r < R; ++r) total[r] = total[r] * s;
    }
};

// A x as floats.
struct FloatRanks {
    static constexpr int kElementBytes = 4;
    int width;
    float* ranks;  // [m, width]

    static int64_t bytes(int m, int width) { return int64_t{m} * width * sizeof(float); }
    static FloatRanks in(char* memory, int, int width) {
        return {width, reinterpret_cast<float*>(memory)};
    }
    void set(int row, int group, f32x16 v) const {
        store(ranks + int64_t{row} * width + group * kPanel, v);
    }
    template <int R>
    void tile(const LowRank& delta, const RankSpan& span, int, int row, f32x16 (&total)[R]) const {
        const float* b = static_cast<const float*>(delta.b) + kSquare * span.offset;
        const int first = kPanel * span.first, end = first + kPanel * span.count;
        for (int rank = first; rank < end; ++rank, b += kPanel) {
            const f32x16 columns = load(b);
            for (int r = 0; r < R; ++r)
                total[r] = fma(set1(ranks[int64_t{row + r} * width + rank]), columns, total[r]);
        }
    }
};

// What adapters add to a product of m rows. The product's tasks come after num_tasks() of these,
// which compute A x: tasks are begun in ascending order, so that waiting for them ends.
template <class Ranks, class Product>
class Deltas {
   public:
    // product(weight, row, row_end, out) is that of some rows, out [row_end - row, weight.n];
    // `memory` has Ranks::bytes(m, width(adapters)) bytes.
    Deltas(const Adapters& adapters, char* memory, int m, Product product)
        : adapters_(adapters), ranks_(Ranks::in(memory, m, width(adapters))), product_(product) {
        for (int i = 0; i < adapters.count; ++i) num_tasks_ += num_tasks_of(adapters.segments[i]);
    }

    static int width(const Adapters& adapters) {
        int most = 0;
        for (int i = 0; i < adapters.count; ++i)
            most = std::max(most, adapters.segments[i].delta->a.n);
        return most;
    }

    int num_tasks() const { return num_tasks_; }

    void compute(int task) {
        thread_local AlignedVector<float> block;
        const Adapted* segment = adapters_.segments;
        for (; task >= num_tasks_of(*segment); ++segment) task -= num_tasks_of(*segment);
        const auto& a = segment->delta->a;
        const int row = segment->first_row + task * kRankChunk;
        const int row_end = std::min(row + kRankChunk, segment->end_row);
        const size_t size = size_t{kRankChunk} * a.n;
        if (block.size() < size) block.resize(size);
        product_(a, row, row_end, block.data());
        for (int r = row; r < row_end; ++r)
            for (int group = 0; group < a.n / kPanel; ++group)
                ranks_.set(r, group, load(&block[int64_t{r - row} * a.n + group * kPanel]));
        num_done_.fetch_add(1, std::memory_order_release);
    }

    // Has the weights come that `add` is going to read: many short runs, of each adapter one.
    void expect(int row, int row_end, int panel, int panel_end) const {
        for_segments(row, row_end, [&](const LowRank& delta, int, int) {
            const RankSpan &first = delta.spans[panel], &last = delta.spans[panel_end - 1];
            const char* b = static_cast<const char*>(delta.b);
            const int64_t end = int64_t{last.offset} + last.count;
            const int64_t bytes = kSquare * Ranks::kElementBytes;
            for (int64_t at = first.offset * bytes; at < end * bytes; at += 64)
                __builtin_prefetch(b + at, 0, 2);
            for (int p = panel; p < panel_end && delta.scale != nullptr; ++p)
                __builtin_prefetch(delta.scale + int64_t{p} * kPanel, 0, 2);
        });
    }

    // Adds to the results of rows [row, row_end) by panels [panel, panel_end) that `target` holds.
    template <class Target>
    void add(const Target& target, int row, int row_end, int panel, int panel_end) const {
        while (num_done_.load(std::memory_order_acquire) < num_tasks_) anaphora::pause();
        for_segments(row, row_end, [&](const LowRank& delta, int begin, int end) {
            for (int p = panel; p < panel_end; ++p) {
                const RankSpan& span = delta.spans[p];
                if (span.count == 0) continue;
                tiles(begin, end, [&](auto rows, int at) {
                    constexpr int R = rows;
                    f32x16 total[R];
                    for (int r = 0; r < R; ++r) total[r] = set1(0.0f);
                    ranks_.tile(delta, span, p, at, total);
                    for (int r = 0; r < R; ++r) target.put(at + r, p, total[r]);
                });
            }
        });
    }

   private:
    static int num_tasks_of(const Adapted& segment) {
        return ceil_div(segment.end_row - segment.first_row, kRankChunk);
    }

    // Calls body(delta, row, row_end) for the rows among [row, row_end) that have an adapter.
    template <class Body>
    void for_segments(int row, int row_end, Body&& body) const {
        for (int i = 0; i < adapters_.count; ++i) {
            const Adapted& segment = adapters_.segments[i];
            const int begin = std::max(row, segment.first_row);
            const int end = std::min(row_end, segment.end_row);
            if (begin < end) body(*segment.delta, begin, end);
        }
    }

    // Calls body(R, row) for tiles of at most kRankRows rows.
    template <class Body>
    static void tiles(int row, int row_end, Body&& body) {
        for (; row < row_end; row += kRankRows)
            with_rows<kRankRows>(std::min(kRankRows, row_end - row),
                                 [&](auto rows) { body(rows, row); });
    }

    Adapters adapters_;
    Ranks ranks_;
    Product product_;
    int num_tasks_ = 0;
    std::atomic<int> num_done_{0};
};

}  // namespace ANAPHORA_ISA

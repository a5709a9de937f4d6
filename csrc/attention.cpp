// Attention over the paged store.
//
// A tile holds tokens that share blocks, or neighbour each other in one sequence, times the query
// heads that share a K/V head: its rows. A tile visits the keys in partitions of kPartition tokens
// counted from position 0, a panel of sixteen keys at a time; rows for which a panel is the same
// physical block load it once:
//
//   scores  S[row][key] = q . k, summed over the head dimension in order
//   softmax m = max S, p = exp(S - m), l = sum p          over the row's visible keys only
//   values  acc[row][d] = sum p v, over keys in order      likewise
//
// and partition after partition is merged into the running (m, l, acc). What is computed for a row
// depends on its own keys alone; tiles and tasks only decide what is loaded together.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "isa.h"
#include "kv_format.h"

namespace ANAPHORA_ISA {
namespace {

using anaphora::AttentionBatch;
using anaphora::AttentionParams;
using anaphora::KVType;
using anaphora::parallel_for;

constexpr int kTileRows = 48;      // scores of a tile: 48 x 512 floats, 96 KiB of L2
constexpr int kMaxSplitTokens = 64;  // beyond this the pieces' sums would take much memory

// One row's softmax so far: acc holds sum p v, not yet divided by l.
struct RowState {
    float m;
    float l;
    float* acc;  // [padded head_dim]
};

void merge(RowState& into, const RowState& part, int dim) {
    const float m = std::max(into.m, part.m);
    float w[kLanes];
    float shifts[kLanes] = {into.m - m, part.m - m};
    store(w, exp(load(shifts)));
    into.m = m;
    into.l = into.l * w[0] + part.l * w[1];
    for (int d = 0; d < dim; d += kLanes)
        store(into.acc + d,
              load(into.acc + d) * set1(w[0]) + load(part.acc + d) * set1(w[1]));
}

// Tokens [first, first + count) of the batch's order.
struct Tile {
    int first, count;
};

// A tile's neighbouring tokens of one sequence, and the keys of a partition that all of them see,
// or any.
struct Span {
    int first, count;
    const int32_t* blocks;
    Range all, any;
};

// What a thread needs for one tile, K/V head and partition; reused, so that no task allocates.
template <class Format>
struct Work {
    Format format;
    AlignedVector<typename Format::Query> queries;
    AlignedVector<float> query_scales, scores, acc, total;
    AlignedVector<Range> ranges;  // of each token, in the partition
    AlignedVector<Span> spans;
    AlignedVector<RowState> states, totals;

    static Work& of_this_thread(const KVLayout& kv, int rows, int tokens) {
        thread_local Work work;
        work.format.reset(kv);
        grow(work.queries, rows * kv.head_dim);
        grow(work.query_scales, rows);
        grow(work.scores, rows * kPartition);
        grow(work.acc, rows * padded(kv.head_dim));
        grow(work.total, rows * padded(kv.head_dim));
        grow(work.ranges, tokens);
        grow(work.states, rows);
        grow(work.totals, rows);
        return work;
    }

    template <class Vector>
    static void grow(Vector& v, int size) {
        if (static_cast<int>(v.size()) < size) v.resize(size);
    }
};

template <class Format>
struct Attention {
    const KVLayout& kv;
    int layer;
    const AttentionBatch& batch;
    const AttentionParams& params;
    const float* q;
    int64_t q_stride;
    float* out;

    int dim() const { return kv.head_dim; }
    int group() const { return params.num_heads / kv.num_kv_heads; }
    int width() const { return padded(dim()); }
    int token(const Tile& tile, int i) const { return batch.order[tile.first + i]; }

    const int32_t* blocks(int token) const {
        return batch.block_tables + int64_t{batch.seq_index[token]} * batch.max_blocks;
    }

    Range visible(int token) const {
        const int end = batch.positions[token] + 1;
        return {params.window > 0 ? std::max(end - params.window, 0) : 0, end};
    }

    // Tiles are cut where nothing is shared, so that unrelated sequences are tasks of their own.
    AlignedVector<Tile> cut_tiles() const {
        const int most = std::max(1, kTileRows / group());
        AlignedVector<Tile> tiles;
        for (int i = 0; i < batch.num_rows; ++i) {
            if (!tiles.empty() && tiles.back().count < most &&
                blocks(batch.order[i - 1])[0] == blocks(batch.order[i])[0])
                ++tiles.back().count;
            else
                tiles.push_back({i, 1});
        }
        return tiles;
    }

    // The partitions that any token of the tile sees.
    Range partitions(const Tile& tile) const {
        Range all{std::numeric_limits<int>::max(), 0};
        for (int i = 0; i < tile.count; ++i) {
            const Range keys = visible(token(tile, i));
            all.begin = std::min(all.begin, keys.begin / kPartition);
            all.end = std::max(all.end, ceil_div(keys.end, kPartition));
        }
        return all;
    }

    void load_queries(const Tile& tile, int kv_head, Work<Format>& work) const {
        for (int row = 0; row < tile.count * group(); ++row) {
            const float* from = q + token(tile, row / group()) * q_stride +
                                int64_t{kv_head * group() + row % group()} * dim();
            work.query_scales[row] =
                work.format.set_query(from, params.scale, work.queries.data() + row * dim());
        }
    }

    void find_spans(const Tile& tile, int start, Work<Format>& work) const {
        work.spans.clear();
        for (int i = 0; i < tile.count; ++i) {
            const Range keys = visible(token(tile, i)).within(start, kPartition);
            work.ranges[i] = keys;
            if (i > 0 && blocks(token(tile, i)) == blocks(token(tile, i - 1))) {
                Span& span = work.spans.back();
                ++span.count;
                span.all = {std::max(span.all.begin, keys.begin),
                            std::min(span.all.end, keys.end)};
                span.any = {std::min(span.any.begin, keys.begin),
                            std::max(span.any.end, keys.end)};
            } else {
                work.spans.push_back({i, 1, blocks(token(tile, i)), keys, keys});
            }
        }
    }

    // Calls body(first token, tokens, their blocks, panel, panels, visible keys): tokens that see
    // whole panels in the same blocks together and up to `most` panels at once, others one by one.
    template <int Most, class Body>
    void for_runs(const Work<Format>& work, int start, int first_panel, int end_panel,
                  Body&& body) const {
        const auto sees = [](const Range& keys, int panel, int count) {
            return keys.begin <= panel * kPanel && keys.end >= (panel + count) * kPanel;
        };
        const auto block_index = [&](int panel) { return (start + panel * kPanel) / kv.block_size; };
        const auto run_span = [&](const Span& span, int panel) {
            if (sees(span.all, panel, 1))
                return body(span.first, span.count, span.blocks, panel,
                            std::integral_constant<int, 1>{}, Range{0, kPanel});
            for (int i = span.first; i < span.first + span.count; ++i) {
                const Range keys = work.ranges[i].within(panel * kPanel, kPanel);
                if (!keys.is_empty())
                    body(i, 1, span.blocks, panel, std::integral_constant<int, 1>{}, keys);
            }
        };
        const int num_spans = static_cast<int>(work.spans.size());
        for (int panel = first_panel; panel < end_panel; panel += Most) {
            const int last = std::min(panel + Most, end_panel) - 1;
            for (int s = 0; s < num_spans; ++s) {
                const Span& span = work.spans[s];
                if (span.any.begin >= (last + 1) * kPanel || span.any.end <= panel * kPanel)
                    continue;
                if (last + 1 - panel < Most || !sees(span.all, panel, Most)) {
                    for (int p = panel; p <= last; ++p) run_span(span, p);
                    continue;
                }
                int count = span.count;
                while (s + 1 < num_spans && sees(work.spans[s + 1].all, panel, Most) &&
                       work.spans[s + 1].blocks[block_index(panel)] ==
                           span.blocks[block_index(panel)] &&
                       work.spans[s + 1].blocks[block_index(last)] ==
                           span.blocks[block_index(last)])
                    count += work.spans[++s].count;
                body(span.first, count, span.blocks, panel, std::integral_constant<int, Most>{},
                     Range{0, kPanel});
            }
        }
    }

    // softcap tanh(x / softcap), with tanh(y) = 1 - 2 / (exp(2 y) + 1).
    f32x16 cap(f32x16 x) const {
        const f32x16 e = exp(x * set1(2.0f / params.softcap));
        return set1(params.softcap) * (set1(1.0f) - set1(2.0f) / (e + set1(1.0f)));
    }

    // Turns a row's scores into probabilities (not yet divided by l) in place; the panels at the
    // range's ends are zero outside it.
    RowState softmax(float* scores, Range keys, float* acc) const {
        constexpr float lowest = -std::numeric_limits<float>::infinity();
        // Vectors that the range fills, and the two at its ends that it may fill in part.
        const int begin = keys.begin / kLanes * kLanes, end = keys.end / kLanes * kLanes;
        const int whole = ceil_div(keys.begin, kLanes) * kLanes;
        const auto for_parts = [&](auto&& body) {
            if (begin < whole) body(begin);
            if (end < keys.end && (end != begin || begin == whole)) body(end);
        };
        if (params.softcap > 0.0f) {
            for (int i = begin; i < keys.end; i += kLanes) store(scores + i, cap(load(scores + i)));
        }
        f32x16 largest = set1(lowest);
        for (int i = whole; i < end; i += kLanes) largest = max(largest, load(scores + i));
        for_parts([&](int i) {
            largest = max(largest, keep(load(scores + i), keys.begin - i, keys.end - i, lowest));
        });
        const f32x16 m = set1(reduce_max(largest));
        f32x16 sum = set1(0.0f);
        for (int i = whole; i < end; i += kLanes) {
            const f32x16 p = exp(load(scores + i) - m);
            store(scores + i, p);
            sum = sum + p;
        }
        for_parts([&](int i) {
            const f32x16 p =
                keep(exp(load(scores + i) - m), keys.begin - i, keys.end - i, 0.0f);
            store(scores + i, p);
            sum = sum + p;
        });
        return {reduce_max(m), reduce_add(sum), acc};
    }

    // Fills work.states for one partition, sums in `sums`; a row that sees no key gets l = 0.
    void run_partition(const Tile& tile, int kv_head, int partition, Work<Format>& work,
                       float* sums) const {
        const int start = partition * kPartition, rows = tile.count * group();
        find_spans(tile, start, work);
        int first_panel = kPartition / kPanel, panels = 0;
        for (const Span& span : work.spans) {
            if (span.any.is_empty()) continue;
            first_panel = std::min(first_panel, span.any.begin / kPanel);
            panels = std::max(panels, ceil_div(span.any.end, kPanel));
        }
        Format& format = work.format;
        const auto offset = [&](int panel) { return (start + panel * kPanel) % kv.block_size; };
        const auto id = [&](const int32_t* blocks, int panel) {
            return int64_t{blocks[(start + panel * kPanel) / kv.block_size]};
        };
        for_runs<kScorePanels>(
            work, start, first_panel, panels,
            [&](int first, int count, const int32_t* blocks, int panel, auto together, Range) {
                for (int p = 0; p < together; ++p)
                    format.load_keys(p, id(blocks, panel + p), layer, kv_head, offset(panel + p));
                const int end = (first + count) * group();
                for (int row = first * group(); row < end; row += kScoreRows)
                    with_rows<kScoreRows>(std::min(kScoreRows, end - row), [&](auto size) {
                        format.template score<size, together>(
                            work.queries.data() + row * dim(), work.query_scales.data() + row,
                            work.scores.data() + row * kPartition + panel * kPanel);
                    });
            });
        std::fill(sums, sums + rows * width(), 0.0f);
        for (int row = 0; row < rows; ++row) {
            float* acc = sums + row * width();
            const Range keys = work.ranges[row / group()];
            work.states[row] = keys.is_empty()
                                   ? RowState{0.0f, 0.0f, acc}
                                   : softmax(work.scores.data() + row * kPartition, keys, acc);
        }
        for_runs<1>(
            work, start, first_panel, panels,
            [&](int first, int count, const int32_t* blocks, int panel, auto, Range keys) {
                format.load_values(id(blocks, panel), layer, kv_head, offset(panel), keys);
                const int end = (first + count) * group();
                for (int row = first * group(); row < end; row += kValueRows)
                    with_rows<kValueRows>(std::min(kValueRows, end - row), [&](auto size) {
                        format.template add_values<size>(
                            work.scores.data() + row * kPartition + panel * kPanel, keys,
                            sums + row * width());
                    });
            });
    }

    void write(const Tile& tile, int kv_head, int row, const RowState& state) const {
        const int head = kv_head * group() + row % group();
        float* to = out + (int64_t{token(tile, row / group())} * params.num_heads + head) * dim();
        float weight = 1.0f, l = state.l;
        if (params.sinks != nullptr) {
            const float m = std::max(state.m, params.sinks[head]);
            float w[kLanes];
            float shifts[kLanes] = {state.m - m, params.sinks[head] - m};
            store(w, exp(load(shifts)));
            weight = w[0];
            l = state.l * w[0] + w[1];
        }
        for (int d = 0; d < dim(); ++d) to[d] = state.acc[d] * weight / l;
    }

    // Merges a partition's state of a row into the running one.
    void take_over(RowState& total, const RowState& part) const {
        if (part.l == 0.0f) return;
        if (total.l != 0.0f) return merge(total, part, width());
        total.m = part.m;
        total.l = part.l;
        std::copy(part.acc, part.acc + width(), total.acc);
    }

    // All partitions of one tile and K/V head, one after the other.
    void run_tile(const Tile& tile, int kv_head) const {
        const int rows = tile.count * group();
        auto& work = Work<Format>::of_this_thread(kv, rows, tile.count);
        load_queries(tile, kv_head, work);
        const Range all = partitions(tile);
        run_partition(tile, kv_head, all.begin, work, work.total.data());
        std::copy(work.states.begin(), work.states.begin() + rows, work.totals.begin());
        for (int p = all.begin + 1; p < all.end; ++p) {
            run_partition(tile, kv_head, p, work, work.acc.data());
            for (int row = 0; row < rows; ++row) take_over(work.totals[row], work.states[row]);
        }
        for (int row = 0; row < rows; ++row) write(tile, kv_head, row, work.totals[row]);
    }

    // One partition each, then merged in the same order as run_tile does: for few, long rows.
    void run_split(const AlignedVector<Tile>& tiles) const {
        struct Piece {
            Tile tile;
            int kv_head, partition, first_row;  // its rows' states begin there
        };
        thread_local AlignedVector<Piece> pieces;
        thread_local AlignedVector<int> firsts;  // where each tile and K/V head begins
        thread_local AlignedVector<RowState> states;
        thread_local AlignedVector<float> sums;
        pieces.clear();
        firsts.clear();
        int num_rows = 0;
        for (const Tile& tile : tiles)
            for (int head = 0; head < kv.num_kv_heads; ++head) {
                firsts.push_back(static_cast<int>(pieces.size()));
                const Range all = partitions(tile);
                for (int p = all.begin; p < all.end; ++p) {
                    pieces.push_back({tile, head, p, num_rows});
                    num_rows += tile.count * group();
                }
            }
        firsts.push_back(static_cast<int>(pieces.size()));
        states.resize(num_rows);
        sums.resize(static_cast<size_t>(num_rows) * width());
        // Workers have variables of these names of their own.
        parallel_for(static_cast<int>(pieces.size()),
                     [&, pieces = pieces.data(), states = states.data(), sums = sums.data()](int i) {
                         const Piece& piece = pieces[i];
                         const int rows = piece.tile.count * group();
                         auto& work = Work<Format>::of_this_thread(kv, rows, piece.tile.count);
                         load_queries(piece.tile, piece.kv_head, work);
                         run_partition(piece.tile, piece.kv_head, piece.partition, work,
                                       sums + int64_t{piece.first_row} * width());
                         std::copy(work.states.begin(), work.states.begin() + rows,
                                   states + piece.first_row);
                     });
        for (size_t i = 0; i + 1 < firsts.size(); ++i) {
            const Piece& piece = pieces[firsts[i]];
            for (int row = 0; row < piece.tile.count * group(); ++row) {
                RowState& total = states[piece.first_row + row];
                for (int p = firsts[i] + 1; p < firsts[i + 1]; ++p)
                    take_over(total, states[pieces[p].first_row + row]);
                write(piece.tile, piece.kv_head, row, total);
            }
        }
    }

    void run() const {
        const AlignedVector<Tile> tiles = cut_tiles();
        const int tasks = static_cast<int>(tiles.size()) * kv.num_kv_heads;
        if (batch.num_rows <= kMaxSplitTokens && tasks < 4 * anaphora::num_threads()) {
            run_split(tiles);
            return;
        }
        parallel_for(tasks, [&](int i) {
            // Late tiles see the most keys: they go first, so that no thread ends alone.
            const int tile = static_cast<int>(tiles.size()) - 1 - i / kv.num_kv_heads;
            run_tile(tiles[tile], i % kv.num_kv_heads);
        });
    }
};

}  // namespace

void attention(const KVLayout& kv, int layer, const AttentionBatch& batch,
               const AttentionParams& params, const float* q, int64_t q_stride, float* out) {
    const auto run = [&](auto format) {
        using Format = typename decltype(format)::type;
        Attention<Format>{kv, layer, batch, params, q, q_stride, out}.run();
    };
    switch (kv.type) {
        case KVType::float32: return run(std::type_identity<FloatFormat<float>>{});
        case KVType::float16: return run(std::type_identity<FloatFormat<half>>{});
        case KVType::bfloat16: return run(std::type_identity<FloatFormat<bfloat>>{});
        case KVType::int16: return run(std::type_identity<Int16Format>{});
    }
}

}  // namespace ANAPHORA_ISA

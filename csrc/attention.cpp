// Attention over the paged store.
//
// The rows of a tile are neighbouring tokens of one sequence times the query heads that share a
// K/V head. A tile visits the keys in partitions of kPartition tokens counted from position 0:
//
//   scores  S[row][key] = q . k, sixteen keys at a time, summed over the head dimension in order
//   softmax m = max S, p = exp(S - m), l = sum p          over the row's visible keys only
//   values  acc[row][d] = sum p v, over keys in order      likewise
//
// and partition after partition is merged into the running (m, l, acc). What is computed for a row
// depends on its own keys alone; tiles and tasks only decide what is loaded together.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "isa.h"
#include "simd.h"
#include "thread_pool.h"

namespace ANAPHORA_ISA {
namespace {

using anaphora::AttentionBatch;
using anaphora::kPanel;
using anaphora::kPartition;
using anaphora::KVLayout;
using anaphora::parallel_for;

constexpr int kTileRows = 32;  // scores of a tile: 32 x 512 floats, half of a small L2
constexpr int kMaxSplitRows = 64;  // beyond this the pieces' sums would take much memory
constexpr int kRowGroup = 4;   // rows that share a load: 8 sums of 8 lanes fit 16 registers

struct Tile {
    int token;  // first row of the batch
    int num_tokens;
};

std::vector<Tile> cut_tiles(const AttentionBatch& batch, int tokens_per_tile) {
    std::vector<Tile> tiles;
    for (int t = 0; t < batch.num_rows;) {
        int end = t + 1;
        while (end < batch.num_rows && end - t < tokens_per_tile &&
               batch.seq_index[end] == batch.seq_index[t])
            ++end;
        tiles.push_back({t, end - t});
        t = end;
    }
    return tiles;
}

// One row's softmax so far: acc holds sum p v, not yet divided by l.
struct RowState {
    float m;
    float l;
    float* acc;  // [head_dim]
};

void merge(RowState& into, const RowState& part, int dim) {
    const float m = std::max(into.m, part.m);
    float w[kLanes];
    float shifts[kLanes] = {into.m - m, part.m - m};
    store(w, exp(load(shifts)));
    into.m = m;
    into.l = into.l * w[0] + part.l * w[1];
    for (int d = 0; d < dim; d += 8)
        for (int i = d; i < d + 8; ++i) into.acc[i] = into.acc[i] * w[0] + part.acc[i] * w[1];
}

// Calls body with `rows` (1 to kRowGroup) as a compile-time constant.
template <class Body>
inline void with_rows(int rows, Body&& body) {
    switch (rows) {
        case 1: return body(std::integral_constant<int, 1>{});
        case 2: return body(std::integral_constant<int, 2>{});
        case 3: return body(std::integral_constant<int, 3>{});
        default: return body(std::integral_constant<int, kRowGroup>{});
    }
}

template <class Element>
struct Attention {
    const KVLayout& kv;
    int layer;
    const AttentionBatch& batch;
    const float* q;
    int64_t q_stride;
    int num_heads;
    float scale;
    float* out;

    int dim() const { return kv.head_dim; }
    int group() const { return num_heads / kv.num_kv_heads; }
    int padded_dim() const { return (dim() + kLanes - 1) / kLanes * kLanes; }

    const Element* block_part(const Tile& tile, int kv_head, int key, int part) const {
        const int32_t* table =
            batch.block_tables + int64_t{batch.seq_index[tile.token]} * batch.max_blocks;
        return static_cast<const Element*>(kv.data) +
               table[key / kv.block_size] * kv.block_elements() +
               (2 * layer + part) * kv.part_elements() + int64_t{kv_head} * kv.block_size * dim();
    }

    int row_position(const Tile& tile, int row) const {
        return batch.positions[tile.token + row / group()];
    }

    // Keys of [start, start + width) that the row may see.
    int visible(const Tile& tile, int row, int start, int width) const {
        return std::clamp(row_position(tile, row) + 1 - start, 0, width);
    }

    int num_partitions(const Tile& tile) const {
        return row_position(tile, (tile.num_tokens - 1) * group()) / kPartition + 1;
    }

    void load_queries(const Tile& tile, int kv_head, float* queries) const {
        for (int row = 0; row < tile.num_tokens * group(); ++row) {
            const float* from = q + (tile.token + row / group()) * q_stride +
                                int64_t{kv_head * group() + row % group()} * dim();
            for (int d = 0; d < dim(); ++d) queries[row * dim() + d] = from[d] * scale;
        }
    }

    template <int R>
    void score(const float* queries, const float* keys, float* scores) const {
        f32x16 acc[R];
        for (int r = 0; r < R; ++r) acc[r] = set1(0.0f);
        for (int d = 0; d < dim(); ++d) {
            const f32x16 key = load(keys + d * kPanel);
            for (int r = 0; r < R; ++r) acc[r] = fma(set1(queries[r * dim() + d]), key, acc[r]);
        }
        for (int r = 0; r < R; ++r) store(scores + r * kPartition, acc[r]);
    }

    template <int R>
    void add_values(const float* probabilities, const float* values, int begin, int end,
                    float* acc) const {
        for (int d = 0; d < padded_dim(); d += kLanes) {
            f32x16 sum[R];
            for (int r = 0; r < R; ++r) sum[r] = load(acc + r * padded_dim() + d);
            for (int key = begin; key < end; ++key) {
                const f32x16 value = load(values + key * padded_dim() + d);
                for (int r = 0; r < R; ++r)
                    sum[r] = fma(set1(probabilities[r * kPartition + key]), value, sum[r]);
            }
            for (int r = 0; r < R; ++r) store(acc + r * padded_dim() + d, sum[r]);
        }
    }

    void score_partition(const Tile& tile, int kv_head, int start, int width, const float* queries,
                         float* keys, float* scores) const {
        const int rows = tile.num_tokens * group();
        for (int key = 0; key < width; key += kPanel) {
            const int position = start + key;
            const Element* from = block_part(tile, kv_head, position, 0) +
                                  int64_t{position % kv.block_size / kPanel} * dim() * kPanel;
            for (int d = 0; d < dim(); ++d)
                store(keys + d * kPanel, load(from + int64_t{d} * kPanel));
            for (int row = 0; row < rows; row += kRowGroup)
                with_rows(std::min(kRowGroup, rows - row), [&](auto size) {
                    score<size>(queries + row * dim(), keys, scores + row * kPartition + key);
                });
        }
    }

    // Turns a row's scores into probabilities (not yet divided by l) in place.
    RowState softmax(float* scores, int count, float* acc) const {
        constexpr float lowest = -std::numeric_limits<float>::infinity();
        f32x16 largest = set1(lowest);
        for (int i = 0; i < count; i += kLanes)
            largest = max(largest, keep_first(load(scores + i), count - i, lowest));
        const float m = reduce_max(largest);
        f32x16 sum = set1(0.0f);
        for (int i = 0; i < count; i += kLanes) {
            const f32x16 p = keep_first(exp(load(scores + i) - set1(m)), count - i, 0.0f);
            store(scores + i, p);
            sum = sum + p;
        }
        return {m, reduce_add(sum), acc};
    }

    void value_partition(const Tile& tile, int kv_head, int start, int width,
                         const float* probabilities, float* values, float* acc) const {
        const int rows = tile.num_tokens * group();
        for (int key = 0; key < width; key += kPanel) {
            const int count = std::min(kPanel, width - key);
            const Element* from = block_part(tile, kv_head, start + key, 1) +
                                  int64_t{(start + key) % kv.block_size} * dim();
            for (int i = 0; i < count; ++i) load_value(from + int64_t{i} * dim(), values, i);
            for (int row = 0; row < rows; row += kRowGroup) {
                const int size = std::min(kRowGroup, rows - row);
                // The rows of a group may see different numbers of these keys: the common ones
                // together, the rest row by row, so that no row ever touches a key it may not see.
                const int shared = visible(tile, row, start + key, count);
                const float* p = probabilities + row * kPartition + key;
                float* sums = acc + row * padded_dim();
                with_rows(size, [&](auto n) { add_values<n>(p, values, 0, shared, sums); });
                for (int r = 0; r < size; ++r) {
                    const int end = visible(tile, row + r, start + key, count);
                    if (end > shared)
                        add_values<1>(p + r * kPartition, values, shared, end,
                                      sums + r * padded_dim());
                }
            }
        }
    }

    void load_value(const Element* from, float* values, int key) const {
        float* to = values + key * padded_dim();
        for (int d = 0; d + kLanes <= dim(); d += kLanes) store(to + d, load(from + d));
        const int whole = dim() / kLanes * kLanes;
        if (whole == dim()) return;
        Element rest[kLanes] = {};
        std::copy(from + whole, from + dim(), rest);
        store(to + whole, load(rest));
    }

    struct Scratch {
        std::vector<float> queries, keys, scores, values, acc, total;

        Scratch(int rows, int dim, int padded_dim)
            : queries(rows * dim),
              keys(kPanel * dim),
              scores(rows * kPartition),
              values(kPanel * padded_dim),
              acc(rows * padded_dim),
              total(rows * padded_dim) {}
    };

    // States of one partition's rows; rows that see none of its keys get l = 0.
    void run_partition(const Tile& tile, int kv_head, int partition, Scratch& s,
                       RowState* states, float* acc) const {
        const int rows = tile.num_tokens * group();
        const int start = partition * kPartition;
        const int width = visible(tile, rows - 1, start, kPartition);
        score_partition(tile, kv_head, start, width, s.queries.data(), s.keys.data(),
                        s.scores.data());
        std::fill(acc, acc + rows * padded_dim(), 0.0f);
        for (int row = 0; row < rows; ++row)
            states[row] = softmax(s.scores.data() + row * kPartition,
                                  visible(tile, row, start, kPartition), acc + row * padded_dim());
        value_partition(tile, kv_head, start, width, s.scores.data(), s.values.data(), acc);
    }

    void write(const Tile& tile, int kv_head, int row, const RowState& state) const {
        float* to = out + (int64_t{tile.token + row / group()} * num_heads + kv_head * group() +
                           row % group()) *
                              dim();
        for (int d = 0; d < dim(); ++d) to[d] = state.acc[d] / state.l;
    }

    // All partitions of one tile and K/V head, one after the other.
    void run_tile(const Tile& tile, int kv_head) const {
        const int rows = tile.num_tokens * group();
        Scratch s(rows, dim(), padded_dim());
        std::vector<RowState> parts(rows), totals(rows);
        load_queries(tile, kv_head, s.queries.data());
        run_partition(tile, kv_head, 0, s, totals.data(), s.total.data());
        for (int p = 1; p < num_partitions(tile); ++p) {
            run_partition(tile, kv_head, p, s, parts.data(), s.acc.data());
            for (int row = 0; row < rows; ++row)
                if (row_position(tile, row) >= p * kPartition)
                    merge(totals[row], parts[row], padded_dim());
        }
        for (int row = 0; row < rows; ++row) write(tile, kv_head, row, totals[row]);
    }

    // One partition each, then merged in the same order as run_tile does: for few, long rows.
    void run_split(const std::vector<Tile>& tiles) const {
        struct Piece {
            Tile tile;
            int kv_head, partition;
            std::vector<RowState> states;
            std::vector<float> acc;
        };
        std::vector<Piece> pieces;
        std::vector<int> firsts;  // where each tile and K/V head begins
        for (const Tile& tile : tiles)
            for (int head = 0; head < kv.num_kv_heads; ++head) {
                firsts.push_back(static_cast<int>(pieces.size()));
                for (int p = 0; p < num_partitions(tile); ++p)
                    pieces.push_back({tile, head, p, {}, {}});
            }
        firsts.push_back(static_cast<int>(pieces.size()));
        parallel_for(static_cast<int>(pieces.size()), [&](int i) {
            Piece& piece = pieces[i];
            const int rows = piece.tile.num_tokens * group();
            Scratch s(rows, dim(), padded_dim());
            piece.states.resize(rows);
            piece.acc.resize(static_cast<size_t>(rows) * padded_dim());
            load_queries(piece.tile, piece.kv_head, s.queries.data());
            run_partition(piece.tile, piece.kv_head, piece.partition, s, piece.states.data(),
                          piece.acc.data());
        });
        parallel_for(static_cast<int>(firsts.size()) - 1, [&](int i) {
            Piece& total = pieces[firsts[i]];
            for (int row = 0; row < static_cast<int>(total.states.size()); ++row) {
                const int last = row_position(total.tile, row) / kPartition;
                for (int p = 1; p <= last; ++p)
                    merge(total.states[row], pieces[firsts[i] + p].states[row], padded_dim());
                write(total.tile, total.kv_head, row, total.states[row]);
            }
        });
    }

    void run() const {
        const std::vector<Tile> tiles = cut_tiles(batch, std::max(1, kTileRows / group()));
        const int tasks = static_cast<int>(tiles.size()) * kv.num_kv_heads;
        if (batch.num_rows <= kMaxSplitRows && tasks < 4 * anaphora::num_threads()) {
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

void attention(const KVLayout& kv, int layer, const AttentionBatch& batch, const float* q,
               int64_t q_stride, int num_heads, float scale, float* out) {
    if (kv.is_half)
        Attention<half>{kv, layer, batch, q, q_stride, num_heads, scale, out}.run();
    else
        Attention<float>{kv, layer, batch, q, q_stride, num_heads, scale, out}.run();
}

}  // namespace ANAPHORA_ISA

// The only file that knows Python: checks shapes and bounds, releases the GIL, calls kernels.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace anaphora {
namespace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

template <class Message>
void check(bool ok, Message&& message) {
    if (!ok) fail(message);
}

std::string shape(const std::string& name, size_t found, size_t expected) {
    return name + " is " + std::to_string(found) + ", expected " + std::to_string(expected);
}

void check_size(const char* name, size_t found, int64_t expected) {
    if (static_cast<int64_t>(found) != expected) fail(shape(name, found, expected));
}

template <class A>
int dim(const A& array, int axis) {
    return static_cast<int>(array.shape(axis));
}

// Per-channel vectors are read sixteen at a time, so they are padded like the weights.
int64_t padded(int n) { return (int64_t{n} + kPanel - 1) / kPanel * kPanel; }

// int8 and mxfp4 weights lie in the order of one instruction set; float32 ones are the same for all.
std::string layout_name(bool is_int8) {
    if (!is_int8) return "float32";
    return "int8 group " + std::to_string(kGroup) + " depth " + std::to_string(kernels().depth) +
           " offset " + std::to_string(kernels().weight_offset);
}

using AnyVector = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A packed weight together with the arrays that hold it.
struct WeightView {
    AnyVector data;
    std::optional<Array<const float, 1>> scale, bias;
    std::string layout;
    int depth = kernels().depth, offset = kernels().weight_offset;
    int count;  // of matrices, one after the other
    Weight weight;

    WeightView(AnyVector data_, std::optional<Array<const float, 1>> scale_,
               std::optional<Array<const float, 1>> bias_, int n, int k, std::string layout_,
               int count_)
        : data(std::move(data_)),
          scale(std::move(scale_)),
          bias(std::move(bias_)),
          layout(std::move(layout_)),
          count(count_),
          weight{type_of(data),
                 n,
                 k,
                 data.data(),
                 scale ? scale->data() : nullptr,
                 bias ? bias->data() : nullptr} {
        check(n > 0 && k > 0 && count > 0, "a weight needs at least one row and one column");
        check(scale.has_value() == (weight.type == WeightType::int8),
              "int8 weights have scales, others none");
        check(weight.type != WeightType::mxfp4 || k % kGroup == 0,
              "mxfp4 weights have whole groups of 32 inputs");
        const std::string wanted = layout_name(weight.type != WeightType::float32);
        check(layout == wanted, "a weight packed as '" + layout +
                                    "' cannot be used by kernels '" + kernels().name +
                                    "', which want '" + wanted + "'");
        check_size("packed weight's length", data.shape(0), count * packed_size());
        if (scale) check_size("scale's length", scale->shape(0), count * padded(n));
        if (bias) check_size("bias' length", bias->shape(0), count * padded(n));
    }

    static WeightType type_of(const AnyVector& data) {
        if (data.dtype() == nb::dtype<int8_t>()) return WeightType::int8;
        if (data.dtype() == nb::dtype<uint8_t>()) return WeightType::mxfp4;
        check(data.dtype() == nb::dtype<float>(), "packed weights are int8, uint8 or float32");
        return WeightType::float32;
    }

    int64_t packed_size() const {
        switch (weight.type) {
            case WeightType::int8: return packed_size_int8(weight.n, weight.k);
            case WeightType::mxfp4: return packed_size_mxfp4(weight.n, weight.k);
            default: return packed_size_f32(weight.n, weight.k);
        }
    }
};

void check_weight(const WeightView& w, int k, int count = 1) {
    if (w.weight.k != k) fail(shape("x's row length", k, w.weight.k));
    check_size("the number of matrices", w.count, count);
    if (w.weight.type != WeightType::float32 &&
        (w.depth != kernels().depth || w.offset != kernels().weight_offset))
        fail("a weight packed as '" + w.layout + "' cannot be used by kernels '" +
             kernels().name + "'");
}

using OptionalVector = std::optional<Array<const float, 1>>;

struct NormView {
    Array<const float, 1> weight;
    float eps;
};

Norm make_norm(const NormView* norm, int k) {
    if (norm == nullptr) return {nullptr, 0.0f};
    check_size("norm's length", norm->weight.shape(0), k);
    return {norm->weight.data(), norm->eps};
}

using AnyMatrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// What an adapter adds to one matrix: packed here, and kept here.
struct LowRankView {
    const WeightView& a;
    int n;
    std::vector<RankSpan> spans;
    std::vector<int8_t> bytes;
    std::vector<float> floats, scale;
    LowRank delta;

    // b [n, ranks] int8 with a scale per column or float32; spans [panels, 2]: first rank and count.
    LowRankView(const WeightView& a_, AnyMatrix b, OptionalVector scale_,
                Array<const int32_t, 2> spans_)
        : a(a_), n(dim(b, 0)) {
        const bool is_int8 = a.weight.type == WeightType::int8;
        const int ranks = dim(b, 1);
        check(b.dtype() == (is_int8 ? nb::dtype<int8_t>() : nb::dtype<float>()) &&
                  scale_.has_value() == is_int8,
              "b must be int8 with scales or float32 without, as a is");
        check_size("b's ranks", ranks, a.weight.n);
        check(ranks % kPanel == 0 && a.weight.bias == nullptr,
              "a must have whole panels of ranks and no bias");
        check_size("spans' length", spans_.shape(0), padded(n) / kPanel);
        check_size("spans' width", spans_.shape(1), 2);
        constexpr int64_t square = kPanel * kPanel;
        check(ranks / kPanel <= UINT16_MAX && padded(n) / kPanel * (ranks / kPanel) <= UINT32_MAX,
              "an adapter has too many ranks");
        int64_t size = 0;
        for (int panel = 0; panel < dim(spans_, 0); ++panel) {
            const int32_t first = spans_.data()[2 * panel], count = spans_.data()[2 * panel + 1];
            check(first >= 0 && count >= 0 && first % kPanel == 0 && count % kPanel == 0 &&
                      int64_t{first} + count <= ranks,
                  "a span must be whole panels of ranks that exist");
            spans.push_back({static_cast<uint16_t>(first / kPanel),
                             static_cast<uint16_t>(count / kPanel),
                             static_cast<uint32_t>(size / square)});
            size += int64_t{kPanel} * count;
        }
        if (is_int8) {
            check_size("scale's length", scale_->shape(0), padded(n));
            scale.assign(scale_->data(), scale_->data() + padded(n));
            bytes.resize(size);
            pack_ranks_int8(static_cast<const int8_t*>(b.data()), n, ranks, spans.data(),
                            kernels().depth, kernels().weight_offset, bytes.data());
        } else {
            floats.resize(size);
            pack_ranks_f32(static_cast<const float*>(b.data()), n, ranks, spans.data(),
                           floats.data());
        }
        delta = {n, a.weight, is_int8 ? static_cast<const void*>(bytes.data()) : floats.data(),
                 is_int8 ? scale.data() : nullptr, spans.data()};
    }

    int64_t num_bytes() const {
        return static_cast<int64_t>(bytes.size() + spans.size() * sizeof(RankSpan)) +
               4 * static_cast<int64_t>(floats.size() + scale.size());
    }
};

// Which rows of a step have which adapter. An adapter is a list of what it adds to each place, a
// LowRankView or None.
struct AdaptedRowsView {
    nb::list kept;
    std::vector<std::vector<Adapted>> places;
    int end_row = 0;

    AdaptedRowsView(nb::list adapters, Array<const int32_t, 2> rows) : kept(adapters) {
        check_size("rows' length", rows.shape(0), static_cast<int64_t>(nb::len(adapters)));
        check_size("rows' width", rows.shape(1), 2);
        for (int i = 0; i < dim(rows, 0); ++i) {
            const int first = rows.data()[2 * i], end = rows.data()[2 * i + 1];
            check(first >= end_row && end > first, "rows must ascend without overlap");
            end_row = end;
            const auto deltas = nb::cast<nb::sequence>(adapters[i]);
            size_t place = 0;
            for (nb::handle delta : deltas) {
                if (place == places.size()) places.emplace_back();
                if (!delta.is_none()) {
                    const auto& view = nb::cast<const LowRankView&>(delta);
                    check(view.a.layout == layout_name(view.a.weight.type == WeightType::int8),
                          "an adapter packed as '" + view.a.layout + "' cannot be used by these kernels");
                    places[place].push_back({first, end, &view.delta});
                }
                ++place;
            }
        }
    }
};

// Of one place, checked against the product that it is added to.
Adapters make_adapters(const AdaptedRowsView* rows, int place, int m, const Weight& w) {
    if (rows == nullptr || place < 0 || place >= static_cast<int>(rows->places.size()))
        return {nullptr, 0};
    const auto& segments = rows->places[place];
    for (const Adapted& segment : segments) {
        check(segment.end_row <= m, "a row with an adapter is outside the batch");
        const LowRank& delta = *segment.delta;
        check(delta.n == w.n && delta.a.k == w.k && delta.a.type == w.type,
              "the adapter was made for another matrix");
    }
    return {segments.data(), static_cast<int>(segments.size())};
}

void linear(Array<const float, 2> x, const WeightView& w, Array<float, 2> out, bool is_added,
            const NormView* norm, const AdaptedRowsView* adapters, int place) {
    check_weight(w, dim(x, 1));
    check_size("out's rows", out.shape(0), dim(x, 0));
    check_size("out's row length", out.shape(1), w.weight.n);
    check(out.data() != x.data(), "out must not be x");
    const Norm before = make_norm(norm, dim(x, 1));
    const Adapters added = make_adapters(adapters, place, dim(x, 0), w.weight);
    nb::gil_scoped_release release;
    kernels().linear(x.data(), dim(x, 0), before, w.weight, added, is_added, out.data());
}

void gated_mlp(Array<const float, 2> x, const WeightView& gate_up, const WeightView& down,
               const std::string& gate, Array<float, 2> out, bool is_added, const NormView* norm,
               const AdaptedRowsView* adapters, int gate_up_place, int down_place) {
    check(gate == "silu" || gate == "gelu_tanh", "gate must be silu or gelu_tanh");
    check_weight(gate_up, dim(x, 1));
    check_weight(down, down.weight.k);
    check(gate_up.weight.type == down.weight.type && down.weight.type != WeightType::mxfp4,
          "both weights must be int8, or both float32");
    check_size("gate and up's columns", gate_up.weight.n, 2 * padded(down.weight.k));
    check_size("out's rows", out.shape(0), dim(x, 0));
    check_size("out's row length", out.shape(1), down.weight.n);
    const Norm before = make_norm(norm, dim(x, 1));
    const Adapters first = make_adapters(adapters, gate_up_place, dim(x, 0), gate_up.weight);
    const Adapters second = make_adapters(adapters, down_place, dim(x, 0), down.weight);
    nb::gil_scoped_release release;
    kernels().gated_mlp(x.data(), dim(x, 0), before, gate_up.weight, down.weight,
                        gate == "silu" ? Gate::silu : Gate::gelu_tanh, first, second, is_added,
                        out.data());
}

void experts(Array<const float, 2> x, Array<const float, 2> router, const WeightView& gate_up,
             const WeightView& down, int top_k, float alpha, float limit, Array<float, 2> out) {
    const int count = dim(router, 1);
    check_weight(gate_up, dim(x, 1), count);
    check_weight(down, down.weight.k, count);
    check(gate_up.weight.type == down.weight.type, "both weights must be of one type");
    check_size("gate and up's columns", gate_up.weight.n, 2 * padded(down.weight.k));
    check_size("router's rows", router.shape(0), dim(x, 0));
    check(out.shape(0) == x.shape(0) && out.shape(1) == static_cast<size_t>(down.weight.n),
          "out must be [T, the experts' outputs]");
    check(out.data() != x.data(), "out must not be x");
    check(top_k >= 1 && top_k <= count && top_k <= kPanel,
          "top_k must be 1 to 16, and no more than there are experts");
    const Experts all{count, top_k, alpha, limit, gate_up.weight, down.weight};
    nb::gil_scoped_release release;
    kernels().experts(x.data(), dim(x, 0), router.data(), all, out.data());
}

void rms_norm(Array<const float, 2> x, const NormView& norm, Array<float, 2> out) {
    check(out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1), "out must have x's shape");
    const Norm checked = make_norm(&norm, dim(x, 1));
    nb::gil_scoped_release release;
    kernels().rms_norm(x.data(), checked, dim(x, 0), dim(x, 1), out.data());
}

// The paged store as the kernels see it.
struct KVView {
    nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu> data;
    KVLayout layout;

    KVView(nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu> data_, const std::string& dtype,
           int num_layers, int num_kv_heads, int block_size, int head_dim)
        : data(std::move(data_)),
          layout{data.data(),  type(dtype),  static_cast<int64_t>(data.shape(0)),
                 num_layers,   num_kv_heads, block_size,
                 head_dim} {
        check(num_layers > 0 && num_kv_heads > 0, "num_layers and num_kv_heads must be above 0");
        check(block_size > 0 && kPartition % block_size == 0 && block_size % kPanel == 0,
              "block_size is " + std::to_string(block_size) +
                  "; it must divide 512 and be a multiple of 16");
        check(head_dim % 8 == 0 && head_dim > 0,
              "head_dim is " + std::to_string(head_dim) + "; it must be a multiple of 8");
        check_size("kv's block length in bytes", data.shape(1) * data.itemsize(),
                   layout.block_bytes());
    }

    static KVType type(const std::string& dtype) {
        if (dtype == "float32") return KVType::float32;
        if (dtype == "float16") return KVType::float16;
        if (dtype == "bfloat16") return KVType::bfloat16;
        if (dtype == "int16") return KVType::int16;
        fail("kv dtype is '" + dtype + "'; it must be float32, float16, bfloat16 or int16");
    }

    void check_layer(int layer) const {
        if (layer < 0 || layer >= layout.num_layers)
            fail("layer is " + std::to_string(layer) + " of " + std::to_string(layout.num_layers));
    }
};

// A step's tokens, checked once against the store that all its layers use.
struct BatchView {
    Array<const int32_t, 1> positions, seq_index;
    Array<const int64_t, 1> slots;
    Array<const int32_t, 2> block_tables;
    std::vector<int32_t> order;
    int max_position = -1;
    int64_t num_blocks;
    int block_size;

    BatchView(const KVView& kv, Array<const int32_t, 1> positions_,
              Array<const int32_t, 1> seq_index_, Array<const int64_t, 1> slots_,
              Array<const int32_t, 2> block_tables_)
        : positions(std::move(positions_)),
          seq_index(std::move(seq_index_)),
          slots(std::move(slots_)),
          block_tables(std::move(block_tables_)),
          num_blocks(kv.layout.num_blocks),
          block_size(kv.layout.block_size) {
        check(seq_index.shape(0) == positions.shape(0) && slots.shape(0) == positions.shape(0),
              "positions, seq_index and slots must have the same length");
        const int rows = dim(positions, 0), max_blocks = dim(block_tables, 1);
        for (int i = 0; i < rows; ++i) {
            const int seq = seq_index.data()[i], position = positions.data()[i];
            if (seq < 0 || seq >= dim(block_tables, 0) || position < 0 ||
                position / block_size >= max_blocks)
                fail("row " + std::to_string(i) + " has no block for its position");
            max_position = std::max(max_position, position);
            if (slots.data()[i] < kNoSlot || slots.data()[i] >= num_blocks * block_size)
                fail("slot " + std::to_string(slots.data()[i]) + " is outside the store");
            if (i + 1 < rows && seq_index.data()[i + 1] == seq &&
                positions.data()[i + 1] >= position)
                continue;  // a later row of the sequence sees all of this one's blocks
            for (int b = 0; b <= position / block_size; ++b) {
                const int32_t id = table(i)[b];
                if (id < 0 || id >= num_blocks)
                    fail("block " + std::to_string(id) + " is outside the store");
            }
        }
        order.resize(rows);
        std::iota(order.begin(), order.end(), 0);
        // Sequences that share more of their beginning come to lie closer together.
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
            if (seq_index.data()[a] == seq_index.data()[b]) return false;
            return std::lexicographical_compare(table(a), table(a) + max_blocks, table(b),
                                                table(b) + max_blocks);
        });
    }

    const int32_t* table(int row) const {
        return block_tables.data() + int64_t{seq_index.data()[row]} * dim(block_tables, 1);
    }

    int rows() const { return dim(positions, 0); }

    void check_store(const KVView& kv) const {
        check(kv.layout.num_blocks >= num_blocks && kv.layout.block_size == block_size,
              "the batch was made for another store");
    }
};

// Angles of the positions, each [positions, head_dim / 2].
struct RopeView {
    Array<const float, 2> cos, sin;

    RopeView(Array<const float, 2> cos_, Array<const float, 2> sin_)
        : cos(std::move(cos_)), sin(std::move(sin_)) {
        check(sin.shape(0) == cos.shape(0) && sin.shape(1) == cos.shape(1),
              "sin must have cos' shape");
    }
};

// The numbers of heads in qkv [T, num_heads + 2 num_kv_heads, head_dim].
int num_query_heads(const KVView& kv, int layer, const Array<float, 3>& qkv,
                    const BatchView& batch) {
    kv.check_layer(layer);
    batch.check_store(kv);
    check_size("qkv's rows", qkv.shape(0), batch.rows());
    check_size("qkv's head_dim", qkv.shape(2), kv.layout.head_dim);
    const int num_heads = dim(qkv, 1) - 2 * kv.layout.num_kv_heads;
    check(num_heads > 0 && num_heads % kv.layout.num_kv_heads == 0,
          "qkv must be [T, num_heads + 2 * num_kv_heads, head_dim] with whole groups of the "
          "store's K/V heads");
    return num_heads;
}

void rope_and_store(const KVView& kv, int layer, Array<float, 3> qkv, const BatchView& batch,
                    const RopeView& rope, const NormView* q_norm, const NormView* k_norm) {
    const int num_heads = num_query_heads(kv, layer, qkv, batch), dim_ = dim(qkv, 2);
    check_size("cos' width", 2 * rope.cos.shape(1), dim_);
    if (batch.max_position >= dim(rope.cos, 0))
        fail("position " + std::to_string(batch.max_position) + " has no angles");
    const int num_kv = kv.layout.num_kv_heads, rows = batch.rows();
    const int64_t stride = int64_t{dim(qkv, 1)} * dim_;
    float* k = qkv.data() + int64_t{num_heads} * dim_;
    const Norm before_q = make_norm(q_norm, dim_), before_k = make_norm(k_norm, dim_);
    nb::gil_scoped_release release;
    if (q_norm != nullptr)
        kernels().norm_heads(qkv.data(), stride, rows, num_heads, dim_, before_q);
    if (k_norm != nullptr) kernels().norm_heads(k, stride, rows, num_kv, dim_, before_k);
    kernels().rope(qkv.data(), stride, batch.positions.data(), rows, num_heads + num_kv, dim_,
                   rope.cos.data(), rope.sin.data());
    kernels().store_kv(kv.layout, layer, k, k + int64_t{num_kv} * dim_, stride,
                       batch.slots.data(), rows);
}

void attention(const KVView& kv, int layer, Array<float, 3> qkv, const BatchView& batch,
               float scale, Array<float, 2> out, int window, OptionalVector sinks, float softcap) {
    const int rows = batch.rows(), num_heads = num_query_heads(kv, layer, qkv, batch);
    check(dim(out, 0) == rows && dim(out, 1) == num_heads * dim(qkv, 2),
          "out must be [T, num_heads * head_dim]");
    check(window >= 0, "window must be 0 (none) or above");
    check(softcap >= 0.0f, "softcap must be 0 (none) or above");
    if (sinks) check_size("sinks' length", sinks->shape(0), num_heads);
    const int64_t stride = int64_t{dim(qkv, 1)} * dim(qkv, 2);
    nb::gil_scoped_release release;
    const AttentionBatch view{rows,
                              dim(batch.block_tables, 1),
                              batch.positions.data(),
                              batch.seq_index.data(),
                              batch.block_tables.data(),
                              batch.order.data()};
    const AttentionParams params{num_heads, scale, window, sinks ? sinks->data() : nullptr,
                                 softcap};
    kernels().attention(kv.layout, layer, view, params, qkv.data(), stride, out.data());
}

void pack_int8_array(Array<const int8_t, 2> w, Array<int8_t, 1> out) {
    const int n = dim(w, 0), k = dim(w, 1);
    check_size("out's length", out.shape(0), packed_size_int8(n, k));
    nb::gil_scoped_release release;
    pack_int8(w.data(), n, k, kernels().depth, kernels().weight_offset, out.data());
}

void pack_mxfp4_array(Array<const uint8_t, 3> blocks, Array<const uint8_t, 2> exponents,
                      Array<uint8_t, 1> out) {
    const int n = dim(blocks, 0), k = dim(blocks, 1) * kGroup;
    check_size("bytes of a block", blocks.shape(2), kGroup / 2);
    check(exponents.shape(0) == blocks.shape(0) && exponents.shape(1) == blocks.shape(1),
          "there must be one exponent for each block");
    check_size("out's length", out.shape(0), packed_size_mxfp4(n, k));
    nb::gil_scoped_release release;
    pack_mxfp4(blocks.data(), exponents.data(), n, k, kernels().depth, out.data());
}

void pack_f32_array(Array<const float, 2> w, Array<float, 1> out) {
    const int n = dim(w, 0), k = dim(w, 1);
    check_size("out's length", out.shape(0), packed_size_f32(n, k));
    nb::gil_scoped_release release;
    pack_f32(w.data(), n, k, out.data());
}

}  // namespace

NB_MODULE(_native, m) {
    // Arrays are never converted: a kernel that wrote to a converted copy would lose its result.
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
    m.attr("PANEL") = kPanel;
    m.attr("GROUP") = kGroup;
    m.attr("PARTITION") = kPartition;
    nb::class_<WeightView>(m, "Weight")
        .def(nb::init<AnyVector, OptionalVector,
                      OptionalVector, int, int, std::string, int>(),
             array("data"), array("scale").none(), array("bias").none(), "n"_a, "k"_a, "layout"_a,
             "count"_a)
        .def_ro("layout", &WeightView::layout);
    nb::class_<KVView>(m, "KVView")
        .def(nb::init<nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>, std::string, int,
                      int, int, int>(),
             array("data"), "dtype"_a, "num_layers"_a, "num_kv_heads"_a, "block_size"_a,
             "head_dim"_a);
    nb::class_<BatchView>(m, "BatchView")
        .def(nb::init<const KVView&, Array<const int32_t, 1>, Array<const int32_t, 1>,
                      Array<const int64_t, 1>, Array<const int32_t, 2>>(),
             "kv"_a, array("positions"), array("seq_index"), array("slots"),
             array("block_tables"));
    nb::class_<NormView>(m, "Norm")
        .def(nb::init<Array<const float, 1>, float>(), array("weight"), "eps"_a);
    nb::class_<RopeView>(m, "Rope")
        .def(nb::init<Array<const float, 2>, Array<const float, 2>>(), array("cos"), array("sin"));
    nb::class_<LowRankView>(m, "LowRank")
        .def(nb::init<const WeightView&, AnyMatrix, OptionalVector, Array<const int32_t, 2>>(),
             "a"_a, array("b"), array("scale").none(), array("spans"), nb::keep_alive<1, 2>())
        .def_prop_ro("num_bytes", &LowRankView::num_bytes);
    nb::class_<AdaptedRowsView>(m, "AdaptedRows")
        .def(nb::init<nb::list, Array<const int32_t, 2>>(), "adapters"_a, array("rows"));
    m.def("linear", &linear, array("x"), "weight"_a, array("out"), "is_added"_a,
          "norm"_a.none(), "adapters"_a.none(), "place"_a);
    m.def("gated_mlp", &gated_mlp, array("x"), "gate_up"_a, "down"_a, "gate"_a, array("out"),
          "is_added"_a, "norm"_a.none(), "adapters"_a.none(), "gate_up_place"_a, "down_place"_a);
    m.def("experts", &experts, array("x"), array("router"), "gate_up"_a, "down"_a, "top_k"_a,
          "alpha"_a, "limit"_a, array("out"));
    m.def("rms_norm", &rms_norm, array("x"), "norm"_a, array("out"));
    m.def("rope_and_store", &rope_and_store, "kv"_a, "layer"_a, array("qkv"), "batch"_a,
          "rope"_a, "q_norm"_a.none(), "k_norm"_a.none());
    m.def("attention", &attention, "kv"_a, "layer"_a, array("qkv"), "batch"_a, "scale"_a,
          array("out"), "window"_a, array("sinks").none(), "softcap"_a);
    m.def("packed_size_int8", &packed_size_int8, "n"_a, "k"_a);
    m.def("packed_size_f32", &packed_size_f32, "n"_a, "k"_a);
    m.def("packed_size_mxfp4", &packed_size_mxfp4, "n"_a, "k"_a);
    m.def("pack_int8", &pack_int8_array, array("w"), array("out"));
    m.def("pack_f32", &pack_f32_array, array("w"), array("out"));
    m.def("pack_mxfp4", &pack_mxfp4_array, array("blocks"), array("exponents"), array("out"));
    m.def("layout_name", &layout_name, "is_int8"_a);
    m.def("available_kernels", [] {
        std::vector<std::string> names;
        for (const Kernels* set : available_kernels()) names.emplace_back(set->name);
        return names;
    });
    m.def("kernel_name", [] { return std::string(kernels().name); });
    m.def("select_kernels", [](const std::string& name) {
        check(select_kernels(name), "kernels '" + name + "' cannot run on this processor");
    });
    m.def("cpu_features", &cpu_features);
    m.def(
        "measure_peaks",
        [](double seconds) {
            const Peaks peaks = measure_peaks(seconds);
            return std::make_tuple(peaks.int8_ops, peaks.float_ops, peaks.memory_bytes);
        },
        "seconds"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("set_num_threads", [](int n) {
        check(n >= 1 && n <= 1024, "threads is " + std::to_string(n) + "; it must be 1 to 1024");
        nb::gil_scoped_release release;
        set_num_threads(n);
    });
    m.def("num_threads", &num_threads);
}

}  // namespace anaphora

// The only file that knows Python: checks shapes and bounds, releases the GIL, calls kernels.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace anaphora {
namespace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
// Rows may lie apart (a slice of a wider matrix); the last dimension must be contiguous.
template <class T, int N>
using Rows = nb::ndarray<T, nb::ndim<N>, nb::device::cpu>;

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

void check(bool ok, const std::string& message) {
    if (!ok) fail(message);
}

std::string shape(const std::string& name, size_t found, size_t expected) {
    return name + " is " + std::to_string(found) + ", expected " + std::to_string(expected);
}

template <class A>
int dim(const A& array, int axis) {
    return static_cast<int>(array.shape(axis));
}

// head_dim elements side by side and heads side by side; returns the distance between rows.
template <class A>
int64_t row_stride(const A& x, const char* name) {
    check(x.stride(2) == 1 && x.stride(1) == static_cast<int64_t>(x.shape(2)),
          std::string(name) + " must have its heads side by side in each row");
    return x.stride(0);
}

KVLayout layout(const nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>& data,
                int num_layers, int num_kv_heads, int block_size, int head_dim) {
    const bool is_half = data.dtype() == nb::dlpack::dtype{2, 16, 1};
    check(is_half || data.dtype() == nb::dtype<float>(), "kv must be float16 or float32");
    const KVLayout kv{data.data(),  is_half,    static_cast<int64_t>(data.shape(0)),
                      num_layers,   num_kv_heads, block_size,
                      head_dim};
    check(num_layers > 0 && num_kv_heads > 0, "num_layers and num_kv_heads must be above 0");
    check(block_size > 0 && kPartition % block_size == 0 && block_size % kPanel == 0,
          "block_size is " + std::to_string(block_size) + "; it must divide 512 and be a multiple "
          "of 16");
    check(head_dim % 8 == 0 && head_dim > 0,
          "head_dim is " + std::to_string(head_dim) + "; it must be a multiple of 8");
    check(static_cast<int64_t>(data.shape(1)) == kv.block_elements(),
          shape("kv's block length", data.shape(1), kv.block_elements()));
    return kv;
}

struct KVView {
    nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu> data;
    KVLayout layout;
};

void check_layer(const KVLayout& kv, int layer) {
    check(layer >= 0 && layer < kv.num_layers,
          "layer is " + std::to_string(layer) + " of " + std::to_string(kv.num_layers));
}

void quantize_rows(Array<const float, 2> x, int qmax, Array<int16_t, 2> q, Array<float, 1> scale) {
    const int m = dim(x, 0), k = dim(x, 1);
    check(qmax >= 1 && qmax <= 32767, "qmax is " + std::to_string(qmax));
    check(dim(q, 0) == m && dim(q, 1) == k + k % 2 && dim(scale, 0) == m,
          "q and scale must have x's rows, q's rows an even length");
    nb::gil_scoped_release release;
    kernels().quantize_rows(x.data(), m, k, qmax, q.data(), scale.data());
}

// Per-channel vectors are read sixteen at a time, so they are padded like the weights.
int64_t padded(int n) { return (int64_t{n} + kPanel - 1) / kPanel * kPanel; }

void gemm_int8(Array<const int16_t, 2> q, Array<const float, 1> scale, int k,
               Array<const int8_t, 1> w, Array<const float, 1> w_scale,
               std::optional<Array<const float, 1>> bias, Array<float, 2> out) {
    const int m = dim(q, 0), n = dim(out, 1);
    check(dim(q, 1) == k + k % 2, shape("q's row length", q.shape(1), k + k % 2));
    check(dim(scale, 0) == m && dim(out, 0) == m, "q, scale and out must have the same rows");
    check(static_cast<int64_t>(w.shape(0)) == packed_size_int8(n, k),
          shape("packed weight's length", w.shape(0), packed_size_int8(n, k)));
    check(static_cast<int64_t>(w_scale.shape(0)) == padded(n),
          shape("w_scale's length", w_scale.shape(0), padded(n)));
    check(!bias || static_cast<int64_t>(bias->shape(0)) == padded(n), "bias must be padded to 16");
    nb::gil_scoped_release release;
    kernels().gemm_int8(q.data(), scale.data(), m, k, w.data(), w_scale.data(),
                        bias ? bias->data() : nullptr, n, out.data());
}

void gemm_f32(Array<const float, 2> x, Array<const float, 1> w,
              std::optional<Array<const float, 1>> bias, Array<float, 2> out) {
    const int m = dim(x, 0), k = dim(x, 1), n = dim(out, 1);
    check(dim(out, 0) == m, shape("out's rows", out.shape(0), m));
    check(static_cast<int64_t>(w.shape(0)) == packed_size_f32(n, k),
          shape("packed weight's length", w.shape(0), packed_size_f32(n, k)));
    check(!bias || static_cast<int64_t>(bias->shape(0)) == padded(n), "bias must be padded to 16");
    nb::gil_scoped_release release;
    kernels().gemm_f32(x.data(), m, k, w.data(), bias ? bias->data() : nullptr, n, out.data());
}

void rms_norm(Array<const float, 2> x, Array<const float, 1> weight, float eps,
              Array<float, 2> out) {
    check(weight.shape(0) == x.shape(1), shape("weight's length", weight.shape(0), x.shape(1)));
    check(out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1), "out must have x's shape");
    nb::gil_scoped_release release;
    kernels().rms_norm(x.data(), weight.data(), eps, dim(x, 0), dim(x, 1), out.data());
}

void rope(Rows<float, 3> x, Array<const int32_t, 1> positions, Array<const float, 2> cos,
          Array<const float, 2> sin) {
    const int64_t stride = row_stride(x, "x");
    check(positions.shape(0) == x.shape(0), "positions must have x's rows");
    check(2 * cos.shape(1) == x.shape(2), shape("cos' width", cos.shape(1), x.shape(2) / 2));
    check(sin.shape(0) == cos.shape(0) && sin.shape(1) == cos.shape(1), "sin must match cos");
    for (size_t i = 0; i < positions.shape(0); ++i)
        if (positions.data()[i] < 0 || positions.data()[i] >= dim(cos, 0))
            fail("position " + std::to_string(positions.data()[i]) + " has no angles");
    nb::gil_scoped_release release;
    kernels().rope(x.data(), stride, positions.data(), dim(x, 0), dim(x, 1), dim(x, 2), cos.data(),
                   sin.data());
}

void store_kv(const KVView& kv, int layer, Rows<const float, 3> k, Rows<const float, 3> v,
              Array<const int64_t, 1> slots) {
    check_layer(kv.layout, layer);
    const int64_t stride = row_stride(k, "k");
    check(row_stride(v, "v") == stride, "k and v must have their rows equally far apart");
    check(dim(k, 1) == kv.layout.num_kv_heads && dim(k, 2) == kv.layout.head_dim &&
              dim(v, 1) == dim(k, 1) && dim(v, 2) == dim(k, 2) && v.shape(0) == k.shape(0),
          "k and v must be [T, num_kv_heads, head_dim] of the store");
    check(slots.shape(0) == k.shape(0), "slots must have k's rows");
    const int64_t num_slots = kv.layout.num_blocks * kv.layout.block_size;
    for (size_t i = 0; i < slots.shape(0); ++i)
        if (slots.data()[i] < 0 || slots.data()[i] >= num_slots)
            fail("slot " + std::to_string(slots.data()[i]) + " is outside the store");
    nb::gil_scoped_release release;
    kernels().store_kv(kv.layout, layer, k.data(), v.data(), stride, slots.data(), dim(k, 0));
}

void attention(const KVView& kv, int layer, Rows<const float, 3> q,
               Array<const int32_t, 1> positions, Array<const int32_t, 1> seq_index,
               Array<const int32_t, 2> block_tables, float scale, Array<float, 3> out) {
    check_layer(kv.layout, layer);
    const int64_t stride = row_stride(q, "q");
    const int rows = dim(q, 0), num_heads = dim(q, 1);
    check(num_heads % kv.layout.num_kv_heads == 0 && dim(q, 2) == kv.layout.head_dim,
          "q must be [T, num_heads, head_dim] with whole groups of the store's K/V heads");
    check(dim(out, 0) == rows && dim(out, 1) == num_heads && dim(out, 2) == dim(q, 2),
          "out must have q's shape");
    check(dim(positions, 0) == rows && dim(seq_index, 0) == rows,
          "positions and seq_index must have q's rows");
    const int num_seqs = dim(block_tables, 0), max_blocks = dim(block_tables, 1);
    for (int i = 0; i < rows; ++i) {
        const int seq = seq_index.data()[i], position = positions.data()[i];
        if (seq < 0 || seq >= num_seqs || position < 0 ||
            position / kv.layout.block_size >= max_blocks)
            fail("row " + std::to_string(i) + " has no block for its position");
        if (i + 1 < rows && seq_index.data()[i + 1] == seq) {
            if (positions.data()[i + 1] != position + 1)
                fail("a sequence's neighbouring rows must have consecutive positions");
            continue;
        }
        for (int b = 0; b <= position / kv.layout.block_size; ++b) {
            const int32_t id = block_tables.data()[int64_t{seq} * max_blocks + b];
            if (id < 0 || id >= kv.layout.num_blocks)
                fail("block " + std::to_string(id) + " is outside the store");
        }
    }
    nb::gil_scoped_release release;
    const AttentionBatch batch{rows, max_blocks, positions.data(), seq_index.data(),
                               block_tables.data()};
    kernels().attention(kv.layout, layer, batch, q.data(), stride, num_heads, scale, out.data());
}

void silu_and_mul(Array<const float, 2> x, Array<float, 2> out) {
    check(x.shape(1) == 2 * out.shape(1) && x.shape(0) == out.shape(0),
          "x must be [M, 2 K] for out [M, K]");
    nb::gil_scoped_release release;
    kernels().silu_and_mul(x.data(), dim(x, 0), dim(out, 1), out.data());
}

void pack_int8_array(Array<const int8_t, 2> w, Array<int8_t, 1> out) {
    const int n = dim(w, 0), k = dim(w, 1);
    check(static_cast<int64_t>(out.shape(0)) == packed_size_int8(n, k),
          shape("out's length", out.shape(0), packed_size_int8(n, k)));
    nb::gil_scoped_release release;
    pack_int8(w.data(), n, k, out.data());
}

void pack_f32_array(Array<const float, 2> w, Array<float, 1> out) {
    const int n = dim(w, 0), k = dim(w, 1);
    check(static_cast<int64_t>(out.shape(0)) == packed_size_f32(n, k),
          shape("out's length", out.shape(0), packed_size_f32(n, k)));
    nb::gil_scoped_release release;
    pack_f32(w.data(), n, k, out.data());
}

}  // namespace

NB_MODULE(_native, m) {
    m.attr("PANEL") = kPanel;
    m.attr("PARTITION") = kPartition;
    nb::class_<KVView>(m, "KVView")
        .def(
            "__init__",
            [](KVView* self, nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu> data,
               int num_layers, int num_kv_heads, int block_size, int head_dim) {
                const KVLayout kv = layout(data, num_layers, num_kv_heads, block_size, head_dim);
                new (self) KVView{std::move(data), kv};
            },
            nb::arg("data").noconvert(), "num_layers"_a, "num_kv_heads"_a, "block_size"_a, "head_dim"_a);
    // Arrays are never converted: a kernel that wrote to a converted copy would lose its result.
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
    m.def("quantize_rows", &quantize_rows, array("x"), "qmax"_a, array("q"), array("scale"));
    m.def("gemm_int8", &gemm_int8, array("q"), array("scale"), "k"_a, array("w"),
          array("w_scale"), array("bias").none(), array("out"));
    m.def("gemm_f32", &gemm_f32, array("x"), array("w"), array("bias").none(), array("out"));
    m.def("rms_norm", &rms_norm, array("x"), array("weight"), "eps"_a, array("out"));
    m.def("rope", &rope, array("x"), array("positions"), array("cos"), array("sin"));
    m.def("store_kv", &store_kv, "kv"_a, "layer"_a, array("k"), array("v"), array("slots"));
    m.def("attention", &attention, "kv"_a, "layer"_a, array("q"), array("positions"),
          array("seq_index"), array("block_tables"), "scale"_a, array("out"));
    m.def("silu_and_mul", &silu_and_mul, array("x"), array("out"));
    m.def("packed_size_int8", &packed_size_int8);
    m.def("packed_size_f32", &packed_size_f32);
    m.def("pack_int8", &pack_int8_array, array("w"), array("out"));
    m.def("pack_f32", &pack_f32_array, array("w"), array("out"));
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
    m.def("set_num_threads", [](int n) {
        check(n >= 1 && n <= 1024, "threads is " + std::to_string(n) + "; it must be 1 to 1024");
        nb::gil_scoped_release release;
        set_num_threads(n);
    });
    m.def("num_threads", &num_threads);
}

}  // namespace anaphora

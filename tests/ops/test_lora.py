"""What adapters add, native against its NumPy twin, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from anaphora import _native
from anaphora.ops.lora import AdaptedRows, Adapter, Part, spans
from anaphora.ops.native import NativeOps
from anaphora.ops.reference import ReferenceOps
from tests.ops.test_parity import normal

# Outputs of the parts of a linear, and ranks of three adapters for each; 0: this part has none.
PARTS = [
    ([5], [[1], [16], [0]]),
    ([64], [[17], [5], [33]]),
    ([40, 8, 8], [[3, 0, 17], [16, 16, 16], [0, 0, 1]]),  # panels between two parts
    ([20, 7, 9], [[16, 5, 33], [0, 2, 0], [1, 1, 1]]),
    ([144, 48, 48], [[16, 16, 16], [0, 64, 0], [8, 9, 10]]),
]
# Rows, and which adapter some of them have.
SEGMENTS = [
    (1, [(0, 0, 1)]),
    (9, [(0, 0, 2), (1, 3, 8), (2, 8, 9)]),
    (9, []),
    (131, [(2, 1, 130)]),
    (300, [(1, 100, 140), (0, 140, 290)]),
]


def make_parts(rng, sizes, ranks, k):
    return [
        Part(out_features=size, a=normal(rng, rank, k), b=normal(rng, size, rank))
        if rank
        else Part(out_features=size)
        for size, rank in zip(sizes, ranks, strict=True)
    ]


def make_adapter(ops, *deltas):
    """``deltas``: of each place, a list of parts, inputs, and whether they are gate | up."""
    packed = [
        ops.pack_delta(parts, k, is_gate_up=is_gated) if any(p.num_ranks for p in parts) else None
        for parts, k, is_gated in deltas
    ]
    return Adapter(digest="", rank=1, deltas=tuple(packed))


def adapted_rows(adapters, segments):
    return AdaptedRows(tuple((adapters[i], first, end) for i, first, end in segments))


@pytest.mark.parametrize(("m", "segments"), SEGMENTS)
@pytest.mark.parametrize(("sizes", "ranks"), PARTS)
@pytest.mark.parametrize("k", [1, 33, 200])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_linear(kernels, rng, dtype, k, sizes, ranks, m, segments):
    n = sum(sizes)
    weight, bias, x = normal(rng, n, k), normal(rng, n), normal(rng, m, k)
    norm_weight, parts = normal(rng, k), [make_parts(rng, sizes, each, k) for each in ranks]
    results = []
    for ops in (NativeOps(dtype, 2), ReferenceOps(dtype)):
        linear = dataclasses.replace(ops.pack_linear(weight, bias), place=0)
        adapters = [make_adapter(ops, (each, k, False)) for each in parts]
        rows = adapted_rows(adapters, segments)
        plain = ops.linear(x, linear, adapters=rows)
        added = normal(np.random.default_rng(1), m, n)
        ops.linear(x, linear, add_to=added, adapters=rows)
        normed = ops.linear(x, linear, norm=ops.load_norm(norm_weight, 1e-5), adapters=rows)
        results.append((plain, added, normed))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-4 * np.abs(expected).max())
    if dtype == "int8":
        np.testing.assert_array_equal(results[0][0], results[1][0])
        np.testing.assert_array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize(("m", "segments"), SEGMENTS)
@pytest.mark.parametrize("inner", [16, 20, 104])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_gated_mlp(kernels, rng, dtype, inner, m, segments):
    k = 40
    x, norm_weight = normal(rng, m, k), normal(rng, k)
    weights = normal(rng, 2 * inner, k), normal(rng, k, inner)
    ups = [make_parts(rng, [inner, inner], each, k) for each in ([4, 4], [0, 17], [0, 0])]
    downs = [make_parts(rng, [k], [each], inner) for each in (4, 0, 20)]
    results = []
    for ops in (NativeOps(dtype, 2), ReferenceOps(dtype)):
        gate_up = dataclasses.replace(ops.pack_gate_up(weights[0]), place=0)
        down = dataclasses.replace(ops.pack_linear(weights[1]), place=1)
        adapters = [
            make_adapter(ops, (up, k, True), (down_parts, inner, False))
            for up, down_parts in zip(ups, downs, strict=True)
        ]
        out = x.copy()
        norm = ops.load_norm(norm_weight, 1e-5)
        rows = adapted_rows(adapters, segments)
        ops.gated_mlp(x, gate_up, down, norm=norm, add_to=out, adapters=rows)
        results.append(out)
    atol = (0.03 if dtype == "int8" else 2e-4) * np.abs(results[1]).max()
    np.testing.assert_allclose(*results, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_a_row_depends_on_no_other_row_or_adapter(kernels, rng, dtype):
    """Rows of the base, and of each adapter, beside others and alone: the same bits."""
    k, inner, sizes = 72, 104, [40, 8, 8]
    ops = NativeOps(dtype, 2)
    qkv = dataclasses.replace(ops.pack_linear(normal(rng, sum(sizes), k)), place=0)
    gate_up = dataclasses.replace(ops.pack_gate_up(normal(rng, 2 * inner, k)), place=1)
    down = dataclasses.replace(ops.pack_linear(normal(rng, k, inner)), place=2)
    norm = ops.load_norm(normal(rng, k), 1e-5)
    adapters = [
        make_adapter(
            ops,
            (make_parts(rng, sizes, [rank, 0, 2 * rank], k), k, False),
            (make_parts(rng, [inner, inner], [rank, rank + 1], k), k, True),
            (make_parts(rng, [k], [rank], inner), inner, False),
        )
        for rank in (1, 5, 16, 30)
    ]
    m = 150
    x = normal(rng, m, k)
    owner = np.repeat([-1, 0, 1, -1, 2, 3, -1], [7, 1, 70, 3, 2, 60, 7])
    bounds = np.flatnonzero(np.diff(owner, prepend=-2, append=-2))
    segments = [
        (owner[first], first, end) for first, end in itertools.pairwise(bounds) if owner[first] >= 0
    ]

    def compute(rows, adapters):
        mlp = rows.copy()
        ops.gated_mlp(rows, gate_up, down, norm=norm, add_to=mlp, adapters=adapters)
        return ops.linear(rows, qkv, norm=norm, adapters=adapters), mlp

    together = compute(x, adapted_rows(adapters, segments))
    for row in range(m):
        alone = [(owner[row], 0, 1)] if owner[row] >= 0 else []
        rows = adapted_rows(adapters, alone) if alone else None
        for found, expected in zip(compute(x[row : row + 1], rows), together, strict=True):
            np.testing.assert_array_equal(
                found[0].view(np.uint32), expected[row].view(np.uint32), str(row)
            )


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_a_damaged_row_shows_and_harms_no_other(kernels, rng, dtype):
    ops = NativeOps(dtype, 2)
    linear = dataclasses.replace(ops.pack_linear(normal(rng, 20, 40)), place=0)
    rows = adapted_rows(
        [make_adapter(ops, (make_parts(rng, [20], [3], 40), 40, False))], [(0, 0, 3)]
    )
    x = normal(rng, 3, 40)
    clean = ops.linear(x, linear, adapters=rows)
    x[1, 2] = np.nan
    found = ops.linear(x, linear, adapters=rows)
    assert not np.isfinite(found[1]).any()
    np.testing.assert_array_equal(found[[0, 2]], clean[[0, 2]])


def test_spans_of_panels():
    parts = make_parts(np.random.default_rng(0), [20, 7, 9], [16, 5, 33], 4)
    assert spans(parts, 16).tolist() == [[0, 16], [0, 80], [32, 48]]
    pair = make_parts(np.random.default_rng(0), [20, 20], [3, 17], 4)
    assert spans(pair, 16, in_turn=True).tolist() == [[0, 16], [16, 32]] * 2


def test_kernels_refuse_what_does_not_fit():
    generator = np.random.default_rng(0)
    ops = NativeOps("float32", 1)
    linear = dataclasses.replace(ops.pack_linear(normal(generator, 20, 40)), place=0)
    fitting = make_adapter(ops, (make_parts(generator, [20], [3], 40), 40, False))
    x = normal(generator, 3, 40)
    with pytest.raises(ValueError, match="outside the batch"):
        ops.linear(x, linear, adapters=adapted_rows([fitting], [(0, 2, 4)]))
    with pytest.raises(ValueError, match="without overlap"):
        ops.linear(x, linear, adapters=adapted_rows([fitting], [(0, 0, 2), (0, 1, 3)]))
    for sizes, k in (([36], 40), ([20], 41)):
        other = make_adapter(ops, (make_parts(generator, sizes, [3], k), k, False))
        with pytest.raises(ValueError, match="another matrix"):
            ops.linear(x, linear, adapters=adapted_rows([other], [(0, 0, 1)]))
    a = ops.pack_linear(np.zeros((16, 8), np.float32)).handle
    b = np.zeros((16, 16), np.float32)
    for bad in ([[0, 32]], [[8, 8]], [[-16, 16]]):
        with pytest.raises(ValueError, match="a span must be"):
            _native.LowRank(a, b, None, np.array(bad, np.int32))
    for wrong in (b.astype(np.int8), b[:, :8].copy()):
        with pytest.raises(ValueError, match=r"b must be|b's ranks"):
            _native.LowRank(a, wrong, None, np.array([[0, 16]], np.int32))

"""The mixture of experts and its four-bit weights against their NumPy twin."""

from __future__ import annotations

import numpy as np
import pytest

from anaphora import _native
from anaphora.ops.native import NativeOps
from anaphora.ops.quant import MXFP4
from anaphora.ops.reference import ReferenceOps
from tests.ops.test_parity import normal

LIMITS = {"alpha": 1.702, "limit": 0.8}


def random_mxfp4(rng, n, k):
    blocks = rng.integers(0, 256, (n, k // 32, 16), np.uint8)
    return MXFP4(blocks, rng.integers(118, 124, (n, k // 32), np.uint8))


def pack(ops, rng, form, count, hidden, inner, has_bias=True):
    """The two stacks of ``count`` experts; the same numbers for a generator of the same seed."""
    stacks = []
    for n, k, is_gated in ((2 * inner, hidden, True), (hidden, inner, False)):
        if form == "mxfp4":
            matrices = [random_mxfp4(rng, n, k) for _ in range(count)]
        else:
            matrices = [normal(rng, n, k) / np.float32(k**0.5) for _ in range(count)]
        bias = normal(rng, count, n) if has_bias else None
        stacks.append(ops.pack_experts(count, matrices.__getitem__, bias, is_gated=is_gated))
    return stacks


def run(ops, x, router, stacks, top_k):
    out = np.ones_like(x)
    ops.experts(x, router, *stacks, top_k=top_k, **LIMITS, add_to=out)
    return out


@pytest.mark.parametrize("form", ["float32", "int8", "mxfp4", "mxfp4 in float32"])
@pytest.mark.parametrize("m", [1, 2, 5, 131])
@pytest.mark.parametrize(
    ("count", "top_k", "hidden", "inner"), [(1, 1, 32, 32), (4, 2, 64, 96), (7, 4, 96, 160)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts(kernels, form, m, count, top_k, hidden, inner, has_bias):
    dtype = "float32" if "float32" in form else "int8"
    rng = np.random.default_rng(5)
    x, router = normal(rng, m, hidden), normal(rng, m, count)
    results = []
    for ops in (NativeOps(dtype, 2), ReferenceOps(dtype)):
        weights = np.random.default_rng(6)
        stacks = pack(ops, weights, form.split()[0], count, hidden, inner, has_bias)
        results.append(run(ops, x, router, stacks, top_k))
    # an exponential's last bit may round an activation of the second product the other way
    atol = 2e-4 if dtype == "float32" else 0.02 * np.abs(results[1]).max()
    np.testing.assert_allclose(*results, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 6, 131])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 32), (17, 64), (130, 96), (48, 576)])
def test_mxfp4_products_are_bit_equal(kernels, rng, m, n, k):
    x, weight, bias = normal(rng, m, k), random_mxfp4(rng, n, k), normal(rng, 1, n)
    weight.exponents[0, 0] = 0  # too small to count
    found, expected = (
        ops.linear(x, ops.pack_experts(1, lambda _: weight, bias))
        for ops in (NativeOps("int8", 2), ReferenceOps("int8"))
    )
    np.testing.assert_array_equal(found, expected)
    floats = NativeOps("float32", 2)
    exact = floats.linear(x, floats.pack_experts(1, lambda _: weight, bias))
    np.testing.assert_allclose(exact, x @ weight.dequantized().T + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["float32", "int8", "mxfp4"])
def test_a_row_does_not_depend_on_its_neighbours(kernels, rng, form):
    ops = NativeOps("float32" if form == "float32" else "int8", 2)
    stacks = pack(ops, rng, form, 6, 64, 96)
    x, router = normal(rng, 150, 64), normal(rng, 150, 6)
    together = run(ops, x, router, stacks, 3)
    for row in (0, 1, 77, 149):
        alone = run(ops, x[row : row + 1], router[row : row + 1], stacks, 3)
        np.testing.assert_array_equal(together[row], alone[0])
    ops = NativeOps(ops.dtype, 5)
    np.testing.assert_array_equal(run(ops, x, router, stacks, 3), together)


@pytest.mark.parametrize("form", ["float32", "int8", "mxfp4"])
def test_instruction_sets_agree_bit_for_bit(form):
    before, results = _native.kernel_name(), []
    for name in _native.available_kernels():
        if name == "portable":  # where multiply-add may not be fused
            continue
        _native.select_kernels(name)
        rng = np.random.default_rng(3)
        ops = NativeOps("float32" if form == "float32" else "int8", 2)
        stacks = pack(ops, rng, form, 5, 96, 64)
        results.append(run(ops, normal(rng, 40, 96), normal(rng, 40, 5), stacks, 2))
    _native.select_kernels(before)
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))


def test_equal_logits_choose_the_first_experts(kernels, rng):
    ops = NativeOps("float32", 1)
    stacks = pack(ops, rng, "float32", 4, 32, 32)
    x = normal(rng, 1, 32)
    even = run(ops, x, np.zeros((1, 4), np.float32), stacks, 2)
    first = run(ops, x, np.array([[0, 0, -9, -9]], np.float32), stacks, 2)
    np.testing.assert_array_equal(even, first)


def test_a_damaged_row_shows_and_harms_no_other(kernels, rng):
    ops = NativeOps("int8", 2)
    stacks = pack(ops, rng, "mxfp4", 4, 64, 32)
    x, router = normal(rng, 3, 64), normal(rng, 3, 4)
    clean = run(ops, x, router, stacks, 2)
    x[1, 5] = np.nan
    found = run(ops, x, router, stacks, 2)
    assert not np.isfinite(found[1]).any()
    np.testing.assert_array_equal(found[[0, 2]], clean[[0, 2]])


def test_what_does_not_fit_is_refused(rng):
    ops = NativeOps("int8", 1)
    stacks = pack(ops, rng, "mxfp4", 4, 64, 32)
    x = normal(rng, 2, 64)
    with pytest.raises(ValueError, match="number of matrices is 4, expected 3"):
        run(ops, x, np.zeros((2, 3), np.float32), stacks, 2)
    with pytest.raises(ValueError, match="top_k must be"):
        run(ops, x, np.zeros((2, 4), np.float32), stacks, 5)
    with pytest.raises(ValueError, match="router's rows is 1, expected 2"):
        run(ops, x, np.zeros((1, 4), np.float32), stacks, 2)

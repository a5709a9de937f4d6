"""Each native kernel against its NumPy twin, at sizes around the vector width and the tiles."""

from __future__ import annotations

import numpy as np
import pytest

from anaphora import _native
from anaphora.ops.batch import Batch
from anaphora.ops.kv_store import KVLayout
from anaphora.ops.native import NativeOps
from anaphora.ops.quant import ACTIVATION_MAX, activation_max
from anaphora.ops.reference import ReferenceOps, quantize_rows

SIZES = [1, 2, 7, 15, 16, 17, 31, 33, 64, 65]
ROWS = [1, 2, 3, 4, 5, 8, 13, 128, 131]


@pytest.fixture(params=_native.available_kernels())
def kernels(request):
    """Runs the test on every kernel set that this processor can run."""
    before = _native.kernel_name()
    _native.select_kernels(request.param)
    yield request.param
    _native.select_kernels(before)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("k", SIZES)
def test_quantize_rows_is_bit_equal(kernels, rng, k):
    x = normal(rng, 5, k)
    x[2] = 0
    q = np.empty((5, k + k % 2), np.int16)
    scale = np.empty(5, np.float32)
    _native.quantize_rows(x, ACTIVATION_MAX, q, scale)
    expected_q, expected_scale = quantize_rows(x, ACTIVATION_MAX)
    np.testing.assert_array_equal(q[:, :k], expected_q)
    np.testing.assert_array_equal(scale, expected_scale)
    assert not q[:, k:].any()


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 16), (17, 33), (65, 8), (130, 65), (64, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_int8_linear_is_bit_equal(kernels, rng, m, n, k, has_bias):
    weight, x = normal(rng, n, k), normal(rng, m, k)
    bias = normal(rng, n) if has_bias else None
    native, reference = NativeOps("int8", 2), ReferenceOps("int8")
    found = native.linear(x, native.pack_linear(weight, bias))
    expected = reference.linear(x, reference.pack_linear(weight, bias))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 16), (17, 33), (65, 8), (130, 65), (64, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_float_linear(kernels, rng, m, n, k, has_bias):
    weight, x = normal(rng, n, k), normal(rng, m, k)
    bias = normal(rng, n) if has_bias else None
    native, reference = NativeOps("float32", 2), ReferenceOps("float32")
    found = native.linear(x, native.pack_linear(weight, bias))
    expected = reference.linear(x, reference.pack_linear(weight, bias))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [1, 64, 8258, 8259, 28672, 53248, 1_000_000])
def test_int8_sums_never_overflow(kernels, k):
    qmax = activation_max(k)
    assert qmax >= 1
    assert qmax * 127 * k < 2**31
    if k > 60_000:
        return  # 16 columns of a million rows: the bound above is the test
    native = NativeOps("int8", 1)
    weight = np.full((16, k), -1, np.float32)
    found = native.linear(np.full((1, k), 1, np.float32), native.pack_linear(weight))
    np.testing.assert_allclose(found, -k, rtol=1e-5)


@pytest.mark.parametrize("k", SIZES)
def test_rms_norm(kernels, rng, k):
    x, weight = normal(rng, 19, k), normal(rng, k)
    native, reference = NativeOps("int8", 2), ReferenceOps("int8")
    np.testing.assert_allclose(
        native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=2e-5
    )


@pytest.mark.parametrize("n", SIZES)
def test_silu_and_mul(kernels, rng, n):
    x = normal(rng, 19, 2 * n) * 30
    native, reference = NativeOps("int8", 2), ReferenceOps("int8")
    np.testing.assert_allclose(
        native.silu_and_mul(x), reference.silu_and_mul(x), rtol=1e-5, atol=1e-30
    )


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 72, 128])
def test_rope_rotates_only_the_given_heads(kernels, rng, head_dim):
    qkv = normal(rng, 18, 5, head_dim)
    positions = np.arange(3, 21, dtype=np.int32)
    angles = normal(rng, 32, head_dim // 2)
    cos, sin = np.cos(angles), np.sin(angles)
    found, expected = qkv.copy(), qkv.copy()
    NativeOps("int8", 2).rope(found[:, :3], positions, cos, sin)
    ReferenceOps("int8").rope(expected[:, :3], positions, cos, sin)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[:, 3:], qkv[:, 3:])


def make_batch(rng, lengths, chunks, block_size):
    """The last ``chunks[i]`` tokens of sequences with ``lengths[i]`` tokens, blocks shuffled."""
    width = -(-max(lengths) // block_size)
    ids = rng.permutation(len(lengths) * width).astype(np.int32)
    tables = ids.reshape(len(lengths), width)
    positions = [np.arange(n - c, n) for n, c in zip(lengths, chunks, strict=True)]
    seq_index = np.repeat(np.arange(len(lengths)), chunks).astype(np.int32)
    flat = np.concatenate(positions).astype(np.int32)
    slots = tables[seq_index, flat // block_size].astype(np.int64) * block_size
    slots += flat % block_size
    return Batch(
        token_ids=np.zeros(len(flat), np.int32),
        positions=flat,
        seq_index=seq_index,
        slots=slots,
        block_tables=tables,
        logit_rows=np.arange(len(flat), dtype=np.int32),
    )


@pytest.mark.parametrize("head_dim", [8, 24, 64, 128])
@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2), (9, 3), (5, 1)])
def test_attention(kernels, rng, head_dim, kv_dtype, num_heads, num_kv_heads):
    lengths = [1, 16, 17, 70, 530, 1100]
    layout = KVLayout(
        num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16, dtype=kv_dtype
    )
    everything = make_batch(rng, lengths, lengths, 16)
    chunks = [1, 16, 5, 1, 40, 7]
    keep = np.concatenate(
        [np.flatnonzero(everything.seq_index == i)[-c:] for i, c in enumerate(chunks)]
    )
    batch = Batch(
        token_ids=everything.token_ids[keep],
        positions=everything.positions[keep],
        seq_index=everything.seq_index[keep],
        slots=everything.slots[keep],
        block_tables=everything.block_tables,
        logit_rows=everything.logit_rows[: len(keep)],
    )
    k = normal(rng, len(everything), num_kv_heads, head_dim)
    v = normal(rng, len(everything), num_kv_heads, head_dim)
    q = normal(rng, len(batch), num_heads, head_dim)
    results = []
    for ops in (NativeOps("int8", 2), ReferenceOps("int8")):
        store = ops.create_kv_store(layout, everything.block_tables.size)
        store.data[:] = np.nan  # what a row may not see must not reach it, even times zero
        ops.store_kv(store, 1, k, v, everything)
        results.append(ops.attention(q, store, 1, batch, head_dim**-0.5))
    np.testing.assert_allclose(*results, rtol=2e-4, atol=2e-5)


def test_native_kernels_refuse_what_is_out_of_bounds():
    ops = NativeOps("int8", 1)
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float16")
    store = ops.create_kv_store(layout, 2)
    batch = make_batch(np.random.default_rng(0), [33], [1], 16)
    row = np.zeros((1, 1, 8), np.float32)
    with pytest.raises(ValueError, match="outside the store"):
        ops.attention(row, store, 0, batch, 1.0)
    with pytest.raises(ValueError, match="layer is 1 of 1"):
        ops.attention(row, store, 1, batch, 1.0)
    far = np.array([99 * 16], np.int64)
    with pytest.raises(ValueError, match="slot 1584 is outside the store"):
        _native.store_kv(store.view, 0, row, row, far)
    with pytest.raises(ValueError, match="cannot run"):
        _native.select_kernels("abacus")

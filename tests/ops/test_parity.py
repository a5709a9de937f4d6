"""Each native kernel against its NumPy twin, at sizes around the vector width and the tiles."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("k", "at"), [(64, 3), (64, 60), (33, 32), (5, 0)])
def test_a_damaged_row_shows_and_harms_no_other(kernels, rng, bad, k, at):
    x = normal(rng, 3, k)
    clean = x.copy()
    x[1, at] = bad
    for dtype in ("int8", "float32"):
        ops = NativeOps(dtype, 2)
        weight = ops.pack_linear(normal(rng, 20, k))
        found = ops.linear(x, weight)
        assert not np.isfinite(found[1]).any()
        np.testing.assert_array_equal(found[[0, 2]], ops.linear(clean, weight)[[0, 2]])


def test_damaged_keys_and_queries_show(kernels, rng):
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float16")
    ops = NativeOps("int8", 1)
    batch = make_batch(rng, [20], [20], 16)
    k, v, q = (normal(rng, 20, 1, 8) for _ in range(3))
    for broken, large in ((k, 1e6), (q, np.nan), (v, np.inf)):
        before = broken[4, 0, 2]
        broken[4, 0, 2] = large  # 1e6 is infinite in float16
        store = ops.create_kv_store(layout, 2)
        ops.store_kv(store, 0, k, v, batch)
        out = ops.attention(q, store, 0, batch, 1.0)
        assert np.isfinite(out[:4]).all()
        assert not np.isfinite(out[4]).all()
        broken[4, 0, 2] = before


def test_arrays_are_never_converted():
    x = np.ones((2, 8), np.float32)
    weight = np.ones(8, np.float32)
    for out in (np.zeros((2, 8)), np.zeros((2, 16), np.float32)[:, ::2]):
        with pytest.raises(TypeError):
            _native.rms_norm(x, weight, 1e-5, out)
    with pytest.raises(ValueError, match="above 0"):
        _native.KVView(np.zeros((1, 0), np.float32), 1, 0, 16, 8)


def test_threads_may_change_while_another_thread_computes():
    ops = NativeOps("int8", 2)
    weight = ops.pack_linear(np.ones((64, 64), np.float32))
    x = np.ones((64, 64), np.float32)
    expected = ops.linear(x, weight)
    results = []
    worker = threading.Thread(
        target=lambda: results.extend(ops.linear(x, weight) for _ in range(300))
    )
    worker.start()
    for i in range(100):
        _native.set_num_threads(1 + i % 5)
    worker.join()
    assert len(results) == 300
    for found in results:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_computes_and_can_set_threads():
    ops = NativeOps("int8", 3)
    weight = ops.pack_linear(np.ones((64, 64), np.float32))
    x = np.ones((64, 64), np.float32)
    expected = ops.linear(x, weight)
    pid = os.fork()
    if pid == 0:
        same = np.array_equal(ops.linear(x, weight), expected)
        _native.set_num_threads(2)
        same &= np.array_equal(ops.linear(x, weight), expected)
        os._exit(0 if same else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_pool_that_cannot_be_had_is_an_error():
    code = """
        import resource
        from anaphora import _native
        resource.setrlimit(resource.RLIMIT_NPROC, (50, 50))
        resource.setrlimit(resource.RLIMIT_AS, (400 * 2**20, 400 * 2**20))
        try:
            _native.set_num_threads(1000)
        except RuntimeError as error:
            print("refused", error)
        print(_native.num_threads())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("refused"), done.stderr
    assert done.stdout.splitlines()[-1] == "1"


def test_instruction_sets_agree_bit_for_bit(rng):
    """Sixteen lanes, one reduction tree: only where multiply-add is not fused may bits differ."""
    x, weight, norm = normal(rng, 37, 200), normal(rng, 70, 200), normal(rng, 200)
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=24, block_size=16, dtype="float16")
    batch = make_batch(rng, [40, 600], [40, 600], 16)
    k, v, q = (normal(rng, 640, heads, 24) for heads in (2, 2, 6))
    before, results = _native.kernel_name(), []
    for name in _native.available_kernels():
        if name == "portable":
            continue
        _native.select_kernels(name)
        ops = NativeOps("float32", 2)
        store = ops.create_kv_store(layout, batch.block_tables.size)
        ops.store_kv(store, 0, k, v, batch)
        parts = [
            ops.linear(x, ops.pack_linear(weight)),
            ops.rms_norm(x, norm, 1e-5),
            ops.silu_and_mul(x),
            ops.attention(q, store, 0, batch, 0.2),
        ]
        results.append(np.concatenate([part.ravel() for part in parts]))
    _native.select_kernels(before)
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))

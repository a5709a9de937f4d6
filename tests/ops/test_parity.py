"""Each native kernel against its NumPy twin, at sizes around the vector width and the tiles."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from anaphora import _native
from anaphora.ops.batch import Batch
from anaphora.ops.kv_store import STORAGE, KVLayout
from anaphora.ops.native import NativeOps, measure_peaks
from anaphora.ops.reference import ReferenceOps

SIZES = [1, 2, 7, 15, 16, 17, 31, 33, 64, 65]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 128, 131]


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


SHAPES = [(1, 1), (16, 16), (17, 33), (65, 8), (130, 65), (64, 576)]  # of weights, out and in


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_int8_linear_is_bit_equal(kernels, rng, m, n, k, has_bias):
    weight, x = normal(rng, n, k), normal(rng, m, k)
    x[m // 2, : k // 2] = 0
    x[-1] *= 1e-33  # below what is told from zero
    bias = normal(rng, n) if has_bias else None
    native, reference = NativeOps("int8", 2), ReferenceOps("int8")
    found = native.linear(x, native.pack_linear(weight, bias))
    expected = reference.linear(x, reference.pack_linear(weight, bias))
    np.testing.assert_array_equal(found, expected)
    added = normal(rng, m, n)
    total = added + expected
    assert native.linear(x, native.pack_linear(weight, bias), add_to=added) is added
    np.testing.assert_array_equal(added, total)


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


@pytest.mark.parametrize("k", [1, 64, 53248])
def test_int8_sums_never_overflow(kernels, k):
    native = NativeOps("int8", 1)
    weight = np.full((16, k), -1, np.float32)
    found = native.linear(np.full((1, k), 1, np.float32), native.pack_linear(weight))
    np.testing.assert_allclose(found, -k, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("k", SIZES)
def test_norm_before_a_product(kernels, rng, dtype, k):
    """The normalised row is never written down; it must be the one that rms_norm gives."""
    x, weight = normal(rng, 19, k), normal(rng, 33, k)
    ops = NativeOps(dtype, 2)
    norm = ops.load_norm(normal(rng, k), 1e-5)
    packed = ops.pack_linear(weight)
    np.testing.assert_array_equal(
        ops.linear(x, packed, norm=norm), ops.linear(ops.rms_norm(x, norm), packed)
    )


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("m", [1, 5, 131])
@pytest.mark.parametrize("n", [*SIZES, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_mlp(kernels, rng, dtype, m, n, has_bias):
    k = 40
    x, norm_weight = normal(rng, m, k), normal(rng, k)
    weights = normal(rng, 2 * n, k), normal(rng, k, n)
    biases = (normal(rng, 2 * n), normal(rng, k)) if has_bias else (None, None)
    results = []
    for ops in (NativeOps(dtype, 2), ReferenceOps(dtype)):
        gate_up = ops.pack_gate_up(weights[0], biases[0])
        down = ops.pack_linear(weights[1], biases[1])
        out = np.ones((m, k), np.float32)
        norm = ops.load_norm(norm_weight, 1e-5)
        ops.gated_mlp(x, gate_up, down, norm=norm, add_to=out)
        in_place = x.copy()
        ops.gated_mlp(in_place, gate_up, down, norm=norm, add_to=in_place)
        np.testing.assert_allclose(in_place - x, out - 1, rtol=1e-4, atol=1e-4)
        results.append(out)
    # in int8 a last-bit difference of an exponential may round an activation the other way
    atol = 0.02 * np.abs(results[1]).max() if dtype == "int8" else 2e-4
    np.testing.assert_allclose(*results, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("k", SIZES)
def test_rms_norm(kernels, rng, k):
    x, weight = normal(rng, 19, k), normal(rng, k)
    found, expected = (
        ops.rms_norm(x, ops.load_norm(weight, 1e-5))
        for ops in (NativeOps("int8", 2), ReferenceOps("int8"))
    )
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 72, 128])
def test_rope_rotates_queries_and_keys_only(kernels, rng, head_dim):
    qkv = normal(rng, 18, 5, head_dim)  # 3 queries, a key, a value
    batch = make_batch(rng, [21], [18], 16)
    angles = normal(rng, 32, head_dim // 2)
    layout = KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=head_dim, block_size=16, dtype="float32"
    )
    results, stores = [], []
    for ops in (NativeOps("int8", 2), ReferenceOps("int8")):
        rotated = qkv.copy()
        store = ops.create_kv_store(layout, 2)
        ops.rope_and_store(rotated, ops.load_rope(np.cos(angles), np.sin(angles)), store, 0, batch)
        results.append(rotated)
        stores.append(store.data)
        np.testing.assert_array_equal(rotated[:, 4], qkv[:, 4])
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(*stores, rtol=1e-5, atol=1e-6)


def no_rope(ops, head_dim):
    """Angles that rotate nothing."""
    return ops.load_rope(
        np.ones((2048, head_dim // 2), np.float32), np.zeros((2048, head_dim // 2), np.float32)
    )


def store_kv(ops, store, layer, k, v, batch):
    """Stores k and v [T, kv_heads, head_dim] as they are."""
    q = np.zeros_like(k)
    rope = no_rope(ops, k.shape[2])
    ops.rope_and_store(np.concatenate([q, k, v], axis=1), rope, store, layer, batch)


def attention(ops, q, store, layer, batch, **params):
    """Attention of q [T, heads, head_dim]."""
    num_kv_heads, head_dim = store.layout.num_kv_heads, store.layout.head_dim
    rest = np.zeros((len(q), 2 * num_kv_heads, head_dim), np.float32)
    return ops.attention(np.concatenate([q, rest], axis=1), store, layer, batch, **params)


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


def fill(array):
    """What a row may not see must not reach it, even times zero."""
    array[:] = np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max


def part_of(batch, chunks):
    """The last ``chunks[i]`` tokens of each sequence of the batch."""
    keep = np.concatenate([np.flatnonzero(batch.seq_index == i)[-c:] for i, c in enumerate(chunks)])
    return Batch(
        token_ids=batch.token_ids[keep],
        positions=batch.positions[keep],
        seq_index=batch.seq_index[keep],
        slots=batch.slots[keep],
        block_tables=batch.block_tables,
        logit_rows=batch.logit_rows[: len(keep)],
    )


@pytest.mark.parametrize("head_dim", [8, 24, 64, 128])
@pytest.mark.parametrize("kv_dtype", list(STORAGE))
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2), (9, 3), (5, 1)])
@pytest.mark.parametrize(("window", "has_sinks", "block_size"), [(0, False, 16), (20, True, 32)])
def test_attention(
    kernels, rng, head_dim, kv_dtype, num_heads, num_kv_heads, window, has_sinks, block_size
):
    lengths = [1, 16, 17, 70, 530, 1100]
    layout = KVLayout(
        num_layers=2,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=kv_dtype,
    )
    everything = make_batch(rng, lengths, lengths, block_size)
    batch = part_of(everything, [1, 16, 5, 1, 40, 7])
    k = normal(rng, len(everything), num_kv_heads, head_dim)
    v = normal(rng, len(everything), num_kv_heads, head_dim)
    q = normal(rng, len(batch), num_heads, head_dim)
    sinks = normal(rng, num_heads) if has_sinks else None
    results, stores = [], []
    for ops in (NativeOps("int8", 2), ReferenceOps("int8")):
        store = ops.create_kv_store(layout, everything.block_tables.size)
        fill(store.data)
        store_kv(ops, store, 1, k, v, everything)
        results.append(
            attention(ops, q, store, 1, batch, scale=head_dim**-0.5, window=window, sinks=sinks)
        )
        stores.append(store.data)
    np.testing.assert_array_equal(*stores)
    np.testing.assert_allclose(*results, rtol=2e-4, atol=5e-5)


@pytest.mark.parametrize("kv_dtype", list(STORAGE))
@pytest.mark.parametrize("window", [0, 300])
def test_shared_blocks_do_not_change_a_row(kernels, rng, kv_dtype, window):
    """Rows of a prefix tree together, bit for bit what each gives alone with blocks of its own."""
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=24, block_size=16, dtype=kv_dtype)
    lengths = [700, 650, 40, 690, 700, 520]
    shared = [0, 0, 0, 40, 20, 32]  # blocks in common with sequence 0
    batch = make_batch(rng, lengths, lengths, 16)
    tables = batch.block_tables.copy()
    token_k, token_v = normal(rng, len(batch), 2, 24), normal(rng, len(batch), 2, 24)
    first = np.flatnonzero(batch.seq_index == 0)
    for seq, count in enumerate(shared):
        rows = np.flatnonzero(batch.seq_index == seq)[: 16 * count]
        for x in (token_k, token_v):
            x[rows] = x[first[: len(rows)]]
        tables[seq, :count] = tables[0, :count]
    ops = NativeOps("int8", 2)
    store = ops.create_kv_store(layout, batch.block_tables.size)
    store_kv(ops, store, 0, token_k, token_v, batch)
    chunk = part_of(batch, [1, 30, 2, 1, 5, 1])
    together = dataclasses.replace(chunk, block_tables=tables)
    q = normal(rng, len(chunk), 6, 24)
    found = attention(ops, q, store, 0, together, scale=0.2, window=window)
    for row in range(len(chunk)):
        alone = Batch(
            token_ids=chunk.token_ids[row : row + 1],
            positions=chunk.positions[row : row + 1],
            seq_index=np.zeros(1, np.int32),
            slots=chunk.slots[row : row + 1],
            block_tables=batch.block_tables[chunk.seq_index[row]][None].copy(),
            logit_rows=np.zeros(1, np.int32),
        )
        expected = attention(ops, q[row : row + 1], store, 0, alone, scale=0.2, window=window)
        np.testing.assert_array_equal(found[row], expected[0])


def test_native_kernels_refuse_what_is_out_of_bounds():
    ops = NativeOps("int8", 1)
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float16")
    store = ops.create_kv_store(layout, 2)
    batch = make_batch(np.random.default_rng(0), [33], [1], 16)
    good = make_batch(np.random.default_rng(0), [32], [1], 16)
    row = np.zeros((1, 1, 8), np.float32)
    with pytest.raises(ValueError, match="outside the store"):
        attention(ops, row, store, 0, batch, scale=1.0)
    with pytest.raises(ValueError, match="layer is 1 of 1"):
        attention(ops, row, store, 1, good, scale=1.0)
    far = dataclasses.replace(good, slots=np.array([99 * 16], np.int64))
    with pytest.raises(ValueError, match="slot 1584 is outside the store"):
        store_kv(ops, store, 0, row, row, far)
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


@pytest.mark.parametrize("kv_dtype", list(STORAGE))
def test_damaged_keys_and_queries_show(kernels, rng, kv_dtype):
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype=kv_dtype)
    ops = NativeOps("int8", 1)
    batch = make_batch(rng, [20], [20], 16)
    k, v, q = (normal(rng, 20, 1, 8) for _ in range(3))
    too_large = 1e6 if kv_dtype == "float16" else np.inf  # 1e6 is infinite in float16
    for broken, large in ((k, too_large), (q, np.nan), (v, np.inf), (k, np.nan), (v, np.nan)):
        before = broken[4, 0, 2]
        broken[4, 0, 2] = large
        store = ops.create_kv_store(layout, 2)
        store_kv(ops, store, 0, k, v, batch)
        out = attention(ops, q, store, 0, batch, scale=1.0)
        assert np.isfinite(out[:4]).all()
        assert not np.isfinite(out[4]).all()
        broken[4, 0, 2] = before


def test_arrays_are_never_converted():
    x = np.ones((2, 8), np.float32)
    norm = _native.Norm(np.ones(8, np.float32), 1e-5)
    for out in (np.zeros((2, 8)), np.zeros((2, 16), np.float32)[:, ::2]):
        with pytest.raises(TypeError):
            _native.rms_norm(x, norm, out)
    with pytest.raises(ValueError, match="above 0"):
        _native.KVView(np.zeros((1, 0), np.float32), "float32", 1, 0, 16, 8)


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


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("kv_dtype", list(STORAGE))
def test_instruction_sets_agree_bit_for_bit(rng, dtype, kv_dtype):
    """Sixteen lanes, one reduction tree: only where multiply-add is not fused may bits differ."""
    x, weight, norm_weight = normal(rng, 37, 200), normal(rng, 70, 200), normal(rng, 200)
    gate_up, down = normal(rng, 100, 200), normal(rng, 200, 50)
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=24, block_size=16, dtype=kv_dtype)
    batch = make_batch(rng, [40, 600], [40, 600], 16)
    k, v, q = (normal(rng, 640, heads, 24) for heads in (2, 2, 6))
    before, results = _native.kernel_name(), []
    for name in _native.available_kernels():
        if name == "portable":
            continue
        _native.select_kernels(name)
        ops = NativeOps(dtype, 2)
        store = ops.create_kv_store(layout, batch.block_tables.size)
        store_kv(ops, store, 0, k, v, batch)
        norm = ops.load_norm(norm_weight, 1e-5)
        mlp = x.copy()
        ops.gated_mlp(x, ops.pack_gate_up(gate_up), ops.pack_linear(down), norm=norm, add_to=mlp)
        parts = [
            ops.linear(x, ops.pack_linear(weight), norm=norm),
            mlp,
            ops.rms_norm(x, norm),
            attention(ops, q, store, 0, batch, scale=0.2),
            attention(ops, q, store, 0, batch, scale=0.2, window=70, sinks=norm_weight[:6]),
        ]
        results.append(np.concatenate([part.ravel() for part in parts]))
    _native.select_kernels(before)
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))


def test_weights_packed_for_other_kernels_are_refused():
    first, *_, last = _native.available_kernels()
    before = _native.kernel_name()
    x, weight = np.ones((1, 32), np.float32), np.ones((16, 32), np.float32)
    _native.select_kernels(first)
    packed = NativeOps("int8", 1).pack_linear(weight)
    _native.select_kernels(last)
    try:
        if first != last and "depth 4" in packed.handle.layout:
            with pytest.raises(ValueError, match="cannot be used by kernels"):
                NativeOps("int8", 1).linear(x, packed)
    finally:
        _native.select_kernels(before)


def test_peaks_are_measured(kernels):
    peaks = dataclasses.asdict(measure_peaks(threads=2, seconds=0.01))
    assert all(np.isfinite(peak) and peak > 1e6 for peak in peaks.values())

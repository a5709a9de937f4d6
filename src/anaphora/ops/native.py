"""The C++ kernels behind the common interface: allocates results, keeps packed weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from anaphora import _native
from anaphora.config import Dtype
from anaphora.machine import usable_cores
from anaphora.ops.api import Array, Linear
from anaphora.ops.batch import Batch, Int32
from anaphora.ops.kv_store import KVLayout, KVStore
from anaphora.ops.quant import activation_max, quantize_weight


class NativeKVStore(KVStore):
    """A store with the view of it that the kernels read."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.view = _native.KVView(
            self.data, layout.num_layers, layout.num_kv_heads, layout.block_size, layout.head_dim
        )


class NativeOps:
    """See ``ops.api.Ops``. ``threads`` None takes the cores this process may use."""

    def __init__(self, dtype: Dtype, threads: int | None = None) -> None:
        self.dtype = dtype
        self.name = f"native {_native.kernel_name()}"
        _native.set_num_threads(threads or usable_cores())

    def pack_linear(self, weight: Array, bias: Array | None = None) -> Linear:
        n, k = weight.shape
        scale: Array | None = None
        if self.dtype == "int8":
            quantized, scale = quantize_weight(weight)
            data: npt.NDArray[Any] = np.empty(_native.packed_size_int8(n, k), np.int8)
            _native.pack_int8(quantized, data)
            scale = _pad(scale)
        else:
            data = np.empty(_native.packed_size_f32(n, k), np.float32)
            _native.pack_f32(np.ascontiguousarray(weight), data)
        bias = None if bias is None else _pad(bias)
        return Linear(in_features=k, out_features=n, data=data, scale=scale, bias=bias)

    def pack_embedding(self, weight: Array) -> npt.NDArray[Any]:
        # A lookup reads few rows, so half precision is for memory, not for speed.
        return weight.astype(np.float16) if self.dtype == "int8" else weight

    def create_kv_store(self, layout: KVLayout, num_blocks: int) -> KVStore:
        return NativeKVStore(layout, num_blocks)

    def embed(self, table: npt.NDArray[Any], token_ids: Int32) -> Array:
        return table[token_ids].astype(np.float32)

    def linear(self, x: Array, weight: Linear) -> Array:
        m, k = x.shape
        out = np.empty((m, weight.out_features), np.float32)
        if weight.scale is None:
            _native.gemm_f32(x, weight.data, weight.bias, out)
            return out
        quantized = np.empty((m, k + k % 2), np.int16)
        scale = np.empty(m, np.float32)
        _native.quantize_rows(x, activation_max(k), quantized, scale)
        _native.gemm_int8(quantized, scale, k, weight.data, weight.scale, weight.bias, out)
        return out

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        out = np.empty_like(x)
        _native.rms_norm(x, weight, eps, out)
        return out

    def rope(self, x: Array, positions: Int32, cos: Array, sin: Array) -> None:
        _native.rope(x, positions, cos, sin)

    def store_kv(self, store: KVStore, layer: int, k: Array, v: Array, batch: Batch) -> None:
        assert isinstance(store, NativeKVStore)
        _native.store_kv(store.view, layer, k, v, batch.slots)

    def attention(self, q: Array, store: KVStore, layer: int, batch: Batch, scale: float) -> Array:
        assert isinstance(store, NativeKVStore)
        out = np.empty(q.shape, np.float32)
        _native.attention(
            store.view, layer, q, batch.positions, batch.seq_index, batch.block_tables, scale, out
        )
        return out.reshape(len(q), -1)

    def silu_and_mul(self, x: Array) -> Array:
        out = np.empty((len(x), x.shape[1] // 2), np.float32)
        _native.silu_and_mul(x, out)
        return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """What this machine can do at most, all threads together; multiply and add are two."""

    int8_ops_per_second: float
    float_ops_per_second: float
    memory_bytes_per_second: float


def measure_peaks() -> Peaks:
    """Stub until the real measurement is merged: fixed numbers of a plausible machine."""
    return Peaks(int8_ops_per_second=4e11, float_ops_per_second=2e11, memory_bytes_per_second=3e10)


def cpu_features() -> list[str]:
    """The instruction sets of this processor that matter here."""
    return _native.cpu_features()


def available_kernels() -> list[str]:
    """The kernel sets that this processor can run, best first."""
    return _native.available_kernels()


def kernel_name() -> str:
    """The kernel set in use, for example ``avx2``."""
    return _native.kernel_name()


def _pad(vector: Array) -> Array:
    """Zeros up to a whole panel: the kernels read per-channel vectors sixteen at a time."""
    padded = np.zeros(-(-len(vector) // _native.PANEL) * _native.PANEL, np.float32)
    padded[: len(vector)] = vector
    return padded

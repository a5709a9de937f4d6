"""The C++ kernels behind the common interface: allocates results, keeps packed weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anaphora import _native
from anaphora.config import Dtype
from anaphora.machine import usable_cores
from anaphora.ops.api import Array, Gate, Linear, Norm, Rope
from anaphora.ops.batch import Batch, Int32
from anaphora.ops.kv_store import KVLayout, KVStore
from anaphora.ops.lora import AdaptedRows, Delta, Part, spans, stack
from anaphora.ops.quant import MXFP4, quantize_weight

_ALIGNMENT = 64  # bytes; a vector register, so that no load crosses a cache line


class NativeKVStore(KVStore):
    """A store with the view of it that the kernels read."""

    def __init__(self, layout: KVLayout, num_blocks: int, *, lock: bool = False) -> None:
        super().__init__(layout, num_blocks, lock=lock)
        self.view = _native.KVView(
            self.data,
            layout.dtype,
            layout.num_layers,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )


class NativeOps:
    """See ``ops.api.Ops``. ``threads`` None takes the cores this process may use."""

    def __init__(self, dtype: Dtype, threads: int | None = None) -> None:
        self.dtype = dtype
        self.name = f"native {_native.kernel_name()}"
        self.layout = _native.layout_name(dtype == "int8")
        self._batch: tuple[Batch, KVStore] | None = None
        self._views: dict[int, _native.BatchView] = {}  # of that batch, by block table
        _native.set_num_threads(threads or usable_cores())

    def pack_linear(
        self, weight: Array, bias: Array | None = None, *, dtype: Dtype | None = None
    ) -> Linear:
        return self._pack(1, lambda _: weight, None if bias is None else bias[None], dtype=dtype)

    def pack_experts(
        self,
        count: int,
        read: Callable[[int], Array | MXFP4],
        bias: Array | None = None,
        *,
        is_gated: bool = False,
    ) -> Linear:
        return self._pack(count, read, bias, is_gated=is_gated)

    def _pack(
        self,
        count: int,
        read: Callable[[int], Array | MXFP4],
        bias: Array | None,
        *,
        is_gated: bool = False,
        dtype: Dtype | None = None,
    ) -> Linear:
        """A stack of matrices, read and packed one by one into memory made for all."""
        is_int8 = (dtype or self.dtype) == "int8"
        data: npt.NDArray[Any] = np.empty(0)
        scales: list[Array] = []
        n = k = 0
        for index in range(count):
            weight = read(index)
            if is_gated:
                weight = _gated(weight)
            if not is_int8 and isinstance(weight, MXFP4):
                weight = weight.dequantized()
            n, k = weight.shape
            if index == 0:
                size, kind = _packed_form(weight, is_int8)
                data = _aligned(count * size, kind)
            out = data[index * size : (index + 1) * size]
            if isinstance(weight, MXFP4):
                _native.pack_mxfp4(weight.blocks, weight.exponents, out)
            elif is_int8:
                quantized, scale = quantize_weight(weight)
                _native.pack_int8(quantized, out)
                scales.append(_pad(scale))
            else:
                _native.pack_f32(np.ascontiguousarray(weight), out)
        biases = None
        if bias is not None:
            biases = np.concatenate([_pad(_take_turns(b) if is_gated else b) for b in bias])
        return self.load_linear(
            k, n, data, np.concatenate(scales) if scales else None, biases, count
        )

    def load_linear(
        self,
        in_features: int,
        out_features: int,
        data: npt.NDArray[Any],
        scale: Array | None,
        bias: Array | None,
        count: int = 1,
    ) -> Linear:
        layout = _native.layout_name(data.dtype != np.float32)
        return Linear(
            in_features=in_features,
            out_features=out_features,
            data=data,
            scale=scale,
            bias=bias,
            count=count,
            handle=_native.Weight(data, scale, bias, out_features, in_features, layout, count),
        )

    def pack_gate_up(self, weight: Array, bias: Array | None = None) -> Linear:
        # Panels of gate and up take turns, so that a tile has both halves of its columns.
        return self.pack_linear(_take_turns(weight), None if bias is None else _take_turns(bias))

    def pack_delta(
        self, parts: Sequence[Part], in_features: int, *, is_gate_up: bool = False
    ) -> Delta:
        a, b = stack(parts, in_features)
        linear = self.pack_linear(a)
        data: npt.NDArray[Any] = _take_turns(b) if is_gate_up else b
        scale: Array | None = None
        if self.dtype == "int8":
            data, scale = quantize_weight(data)
            scale = _pad(scale)
        handle = _native.LowRank(
            linear.handle, data, scale, spans(parts, _native.PANEL, in_turn=is_gate_up)
        )
        num_bytes = linear.num_bytes + handle.num_bytes
        return Delta(a=linear, b=None, num_bytes=num_bytes, handle=handle)

    def pack_embedding(self, weight: Array) -> npt.NDArray[Any]:
        # A lookup reads few rows, so half precision is for memory, not for speed.
        return weight.astype(np.float16) if self.dtype == "int8" else weight

    def load_norm(self, weight: Array, eps: float) -> Norm:
        return Norm(weight=weight, eps=eps, handle=_native.Norm(weight, eps))

    def load_rope(self, cos: Array, sin: Array) -> Rope:
        return Rope(cos=cos, sin=sin, handle=_native.Rope(cos, sin))

    def create_kv_store(self, layout: KVLayout, num_blocks: int, *, lock: bool = False) -> KVStore:
        return NativeKVStore(layout, num_blocks, lock=lock)

    def embed(self, table: npt.NDArray[Any], token_ids: Int32) -> Array:
        return table[token_ids].astype(np.float32)

    def linear(
        self,
        x: Array,
        weight: Linear,
        *,
        norm: Norm | None = None,
        add_to: Array | None = None,
        out: Array | None = None,
        adapters: AdaptedRows | None = None,
    ) -> Array:
        before = None if norm is None else norm.handle
        rows = None if adapters is None else _adapted_rows(adapters)
        if add_to is not None:
            _native.linear(x, weight.handle, add_to, True, before, rows, weight.place)
            return add_to
        if out is None:
            out = np.empty((len(x), weight.out_features), np.float32)
        _native.linear(x, weight.handle, out, False, before, rows, weight.place)
        return out

    def gated_mlp(
        self,
        x: Array,
        gate_up: Linear,
        down: Linear,
        *,
        norm: Norm,
        gate: Gate = "silu",
        add_to: Array | None = None,
        adapters: AdaptedRows | None = None,
    ) -> Array:
        rows = None if adapters is None else _adapted_rows(adapters)
        out = np.empty((len(x), down.out_features), np.float32) if add_to is None else add_to
        is_added = add_to is not None
        _native.gated_mlp(
            x,
            gate_up.handle,
            down.handle,
            gate,
            out,
            is_added,
            norm.handle,
            rows,
            gate_up.place,
            down.place,
        )
        return out

    def experts(
        self,
        x: Array,
        router: Array,
        gate_up: Linear,
        down: Linear,
        *,
        top_k: int,
        alpha: float,
        limit: float,
        add_to: Array,
    ) -> None:
        _native.experts(x, router, gate_up.handle, down.handle, top_k, alpha, limit, add_to)

    def rms_norm(self, x: Array, norm: Norm) -> Array:
        out = np.empty_like(x)
        _native.rms_norm(x, norm.handle, out)
        return out

    def rope_and_store(
        self,
        qkv: Array,
        rope: Rope,
        store: KVStore,
        layer: int,
        batch: Batch,
        *,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> None:
        assert isinstance(store, NativeKVStore)
        table, layer = store.layout.place(layer)
        view = self._view(batch, store, table)
        norms = [None if norm is None else norm.handle for norm in (q_norm, k_norm)]
        _native.rope_and_store(store.view, layer, qkv, view, rope.handle, *norms)

    def attention(
        self,
        qkv: Array,
        store: KVStore,
        layer: int,
        batch: Batch,
        *,
        scale: float,
        window: int = 0,
        sinks: Array | None = None,
        softcap: float = 0.0,
        out: Array | None = None,
    ) -> Array:
        assert isinstance(store, NativeKVStore)
        if out is None:
            num_tokens, num_heads, head_dim = qkv.shape
            num_heads -= 2 * store.layout.num_kv_heads
            out = np.empty((num_tokens, num_heads * head_dim), np.float32)
        table, layer = store.layout.place(layer)
        view = self._view(batch, store, table)
        _native.attention(store.view, layer, qkv, view, scale, out, window, sinks, softcap)
        return out

    def _view(self, batch: Batch, store: NativeKVStore, table: int) -> _native.BatchView:
        """The batch as the kernels read it, checked and ordered once for all layers of a table."""
        if self._batch is None or self._batch[0] is not batch or self._batch[1] is not store:
            self._batch = (batch, store)
            self._views.clear()
        if table not in self._views:
            slots, block_tables = batch.table(table)
            self._views[table] = _native.BatchView(
                store.view, batch.positions, batch.seq_index, slots, block_tables
            )
        return self._views[table]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """What this machine can do at most, all threads together; a multiply-add is two operations."""

    int8_ops_per_second: float
    float_ops_per_second: float
    memory_bytes_per_second: float


def measure_peaks(threads: int | None = None, seconds: float = 0.5) -> Peaks:
    """Measures for about ``seconds`` each, with the kernels in use and so many threads."""
    _native.set_num_threads(threads or usable_cores())
    int8_ops, float_ops, memory_bytes = _native.measure_peaks(seconds)
    return Peaks(
        int8_ops_per_second=int8_ops,
        float_ops_per_second=float_ops,
        memory_bytes_per_second=memory_bytes,
    )


def cpu_features() -> list[str]:
    """The instruction sets of this processor that matter here."""
    return _native.cpu_features()


def available_kernels() -> list[str]:
    """The kernel sets that this processor can run, best first."""
    return _native.available_kernels()


def kernel_name() -> str:
    """The kernel set in use, for example ``avx2``."""
    return _native.kernel_name()


def _adapted_rows(adapters: AdaptedRows) -> _native.AdaptedRows:
    """The rows as the kernels read them, made once for all layers of a step."""
    if adapters.handle is None:
        deltas = [
            [None if delta is None else delta.handle for delta in adapter.deltas]
            for adapter, _, _ in adapters.segments
        ]
        rows = np.array([segment[1:] for segment in adapters.segments], np.int32).reshape(-1, 2)
        adapters.handle = _native.AdaptedRows(deltas, rows)
    handle: _native.AdaptedRows = adapters.handle
    return handle


def _aligned(size: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """An uninitialised vector [size] that begins at a multiple of ``_ALIGNMENT`` bytes."""
    num_bytes = size * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype)


def _pad(vector: Array) -> Array:
    """Zeros up to a whole panel: the kernels read per-channel vectors sixteen at a time."""
    padded = np.zeros(-(-len(vector) // _native.PANEL) * _native.PANEL, np.float32)
    padded[: len(vector)] = vector
    return padded


def _packed_form(weight: Array | MXFP4, is_int8: bool) -> tuple[int, type[np.generic]]:
    """Elements of a packed matrix, and their type."""
    if isinstance(weight, MXFP4):
        return _native.packed_size_mxfp4(*weight.shape), np.uint8
    if is_int8:
        return _native.packed_size_int8(*weight.shape), np.int8
    return _native.packed_size_f32(*weight.shape), np.float32


def _gated(weight: Array | MXFP4) -> Array | MXFP4:
    if isinstance(weight, MXFP4):
        return MXFP4(_take_turns(weight.blocks), _take_turns(weight.exponents))
    return _take_turns(weight)


def _take_turns(gate_up: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """gate | up rows [2 * n, ...] with whole panels of the two in turn, padded with zeros."""
    n = len(gate_up) // 2
    panels = -(-n // _native.PANEL)
    halves = np.zeros((2, panels * _native.PANEL, *gate_up.shape[1:]), gate_up.dtype)
    halves[:, :n] = gate_up.reshape(2, n, *gate_up.shape[1:])
    in_turn = halves.reshape(2, panels, _native.PANEL, *gate_up.shape[1:]).swapaxes(0, 1)
    return np.ascontiguousarray(in_turn).reshape(-1, *gate_up.shape[1:])

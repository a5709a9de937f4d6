"""Every operation in plain NumPy, written to be read. Tests hold ``native`` to this.

NumPy's float products round differently at different sizes, so here a hit equals a miss only up to
rounding; bit for bit it does in ``native``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anaphora.config import ATTENTION_PARTITION, Dtype
from anaphora.ops.api import Array, Gate, Linear, Norm, Rope
from anaphora.ops.batch import NO_SLOT, Batch, Int32
from anaphora.ops.kv_store import PANEL, KVLayout, KVStore
from anaphora.ops.lora import RANKS, AdaptedRows, Delta, Part, stack
from anaphora.ops.quant import GROUP, MXFP4, quantize_groups, quantize_weight


class ReferenceOps:
    """See ``ops.api.Ops``."""

    name = "reference"
    layout = None

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype

    def pack_linear(
        self, weight: Array, bias: Array | None = None, *, dtype: Dtype | None = None
    ) -> Linear:
        data: npt.NDArray[Any] = weight
        scale = None
        if (dtype or self.dtype) == "int8":
            data, scale = quantize_weight(weight)
        n, k = weight.shape
        return self.load_linear(k, n, data, scale, bias)

    def pack_experts(
        self,
        count: int,
        read: Callable[[int], Array | MXFP4],
        bias: Array | None = None,
        *,
        is_gated: bool = False,  # noqa: ARG002 - gate and up stay side by side here
    ) -> Linear:
        data: list[Any] = []
        scales = []
        for index in range(count):
            weight = read(index)
            if isinstance(weight, MXFP4):
                if self.dtype == "int8":
                    data.append(weight.halves().reshape(len(weight.blocks), -1))
                    scales.append(weight.scales())
                    continue
                weight = weight.dequantized()
            packed = self.pack_linear(weight)
            data.append(packed.data)
            if packed.scale is not None:
                scales.append(packed.scale)
        n, k = data[0].shape
        scale = np.stack(scales) if scales else None
        return self.load_linear(k, n, np.stack(data), scale, bias, count)

    def load_linear(
        self,
        in_features: int,
        out_features: int,
        data: npt.NDArray[Any],
        scale: Array | None,
        bias: Array | None,
        count: int = 1,
    ) -> Linear:
        return Linear(
            in_features=in_features,
            out_features=out_features,
            data=data,
            scale=scale,
            bias=bias,
            count=count,
        )

    def pack_gate_up(self, weight: Array, bias: Array | None = None) -> Linear:
        return self.pack_linear(weight, bias)

    def pack_delta(
        self,
        parts: Sequence[Part],
        in_features: int,
        *,
        is_gate_up: bool = False,  # noqa: ARG002  packed alike
    ) -> Delta:
        a, b = map(self.pack_linear, stack(parts, in_features))
        return Delta(a=a, b=b, num_bytes=a.num_bytes + b.num_bytes)

    def pack_embedding(self, weight: Array) -> npt.NDArray[Any]:
        return weight.astype(np.float16) if self.dtype == "int8" else weight

    def load_norm(self, weight: Array, eps: float) -> Norm:
        return Norm(weight=weight, eps=eps)

    def load_rope(self, cos: Array, sin: Array) -> Rope:
        return Rope(cos=cos, sin=sin)

    def create_kv_store(self, layout: KVLayout, num_blocks: int, *, lock: bool = False) -> KVStore:
        return KVStore(layout, num_blocks, lock=lock)

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
        x = x if norm is None else self.rms_norm(x, norm)
        if weight.data.ndim == 3:  # a stack of one
            weight = _nth(weight, 0)
        product = _product(x, weight)
        if weight.bias is not None:
            product = product + weight.bias
        if add_to is not None:
            add_to += product
            product = add_to
        elif out is not None:
            out[:] = product
            product = out
        if adapters is not None and weight.place >= 0:
            for adapter, first, end in adapters.segments:
                delta = adapter.deltas[weight.place]
                if delta is not None and delta.b is not None:
                    ranks = _product(x[first:end], delta.a)
                    product[first:end] += _product(ranks, delta.b, group=RANKS)
        return product

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
        g, up = np.split(self.linear(x, gate_up, norm=norm, adapters=adapters), 2, axis=-1)
        if gate == "silu":
            hidden = g * _sigmoid(g) * up
        else:  # 0.5 g (1 + tanh(y)) = g sigmoid(2 y)
            y = np.float32(np.sqrt(2 / np.pi)) * (g + np.float32(0.044715) * g**3)
            hidden = g * _sigmoid(2 * y) * up
        return self.linear(hidden, down, add_to=add_to, adapters=adapters)

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
        for row, logits in enumerate(router):
            chosen = np.sort(np.argsort(-logits, kind="stable")[:top_k])
            weights = np.exp(logits[chosen] - logits[chosen].max())
            weights /= weights.sum()
            total = np.zeros(down.out_features, np.float32)
            for expert, weight in zip(chosen, weights, strict=True):
                product = self.linear(x[row : row + 1], _nth(gate_up, expert))
                g, up = np.split(product, 2, axis=-1)
                g, up = np.minimum(g, np.float32(limit)), np.clip(up, -limit, limit)
                hidden = (up + 1) * (g * _sigmoid(np.float32(alpha) * g))
                total += self.linear(hidden, _nth(down, expert))[0] * weight
            add_to[row] += total

    def rms_norm(self, x: Array, norm: Norm) -> Array:
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        inverse: Array = 1 / np.sqrt(mean + np.float32(norm.eps))
        return x * inverse * norm.weight

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
        num_kv = store.layout.num_kv_heads
        qk, k, v = qkv[:, :-num_kv], qkv[:, -2 * num_kv : -num_kv], qkv[:, -num_kv:]
        if q_norm is not None:
            q = qkv[:, : -2 * num_kv]
            q[:] = self.rms_norm(q, q_norm)
        if k_norm is not None:
            k[:] = self.rms_norm(k, k_norm)
        c, s = rope.cos[batch.positions][:, None], rope.sin[batch.positions][:, None]
        first, second = np.split(qk, 2, axis=-1)  # [T, heads, head_dim / 2]
        qk[:] = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
        self._store(store, layer, k, v, batch)

    def _store(self, store: KVStore, layer: int, k: Array, v: Array, batch: Batch) -> None:
        lay = store.layout
        table, layer = lay.place(layer)
        slots, _ = batch.table(table)
        limits = (key_max(lay.head_dim), VALUE_MAX)
        for index, x in enumerate((k, v)):
            part = store.parts(layer)[index]
            stored: npt.NDArray[Any] = x
            if lay.dtype == "int16":
                rows = x.reshape(-1, lay.head_dim)
                stored, steps = quantize_groups(rows, limits[index], lay.head_dim)
                steps = steps.reshape(x.shape[:2])
            elif lay.dtype == "bfloat16":
                stored = to_bfloat16(x)
            stored = stored.reshape(len(x), lay.num_kv_heads, *part.shape[4:])
            for row, slot in enumerate(slots):
                if slot == NO_SLOT:
                    continue
                block, offset = divmod(int(slot), lay.block_size)
                part[block, :, offset // part.shape[3], offset % part.shape[3]] = stored[row]
                if lay.dtype == "int16":
                    store.scales(layer)[index][block, :, offset] = steps[row]

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
        q = qkv[:, : -2 * store.layout.num_kv_heads]
        num_tokens, num_heads, head_dim = q.shape
        group = num_heads // store.layout.num_kv_heads
        if out is None:
            out = np.empty((num_tokens, num_heads * head_dim), np.float32)
        heads = out.reshape(num_tokens, num_heads, head_dim)
        for row in range(num_tokens):
            end = int(batch.positions[row]) + 1
            begin = max(0, end - window) if window else 0
            keys, values = self._gather(store, layer, batch, row)
            for head in range(num_heads):
                query = q[row, head] * np.float32(scale)
                k, v = keys[:, head // group], values[:, head // group]
                sink = None if sinks is None else sinks[head]
                heads[row, head] = _attend(query, k, v, begin, sink, softcap)
        return out

    def _gather(self, store: KVStore, layer: int, batch: Batch, row: int) -> list[Vectors]:
        """K and V of the row's sequence up to its position, [keys, kv_heads, head_dim]."""
        lay = store.layout
        index, layer = lay.place(layer)
        _, block_tables = batch.table(index)
        num_keys = int(batch.positions[row]) + 1
        table = block_tables[batch.seq_index[row], : -(-num_keys // lay.block_size)]
        gathered = []
        for index, part in enumerate(store.parts(layer)):
            x = part[table].reshape(len(table), lay.num_kv_heads, lay.block_size, lay.head_dim)
            x = from_bfloat16(x) if lay.dtype == "bfloat16" else x.astype(np.float32)
            # [blocks, heads, block_size, dim] to [keys, heads, dim]
            x = x.swapaxes(1, 2).reshape(-1, lay.num_kv_heads, lay.head_dim)[:num_keys]
            scales = None
            if lay.dtype == "int16":
                scales = store.scales(layer)[index][table].swapaxes(1, 2)
                scales = scales.reshape(-1, lay.num_kv_heads)[:num_keys]
            gathered.append(Vectors(x, scales))
        return gathered


def key_max(head_dim: int) -> int:
    """Largest key and query of the int16 store: ``head_dim`` products of two fit int32."""
    return min(32767, int(np.sqrt(2147483647 / head_dim)))


# Largest value of the int16 store and largest probability it is multiplied with, as in
# csrc/kernels.h: sixteen products of two fit int32.
VALUE_MAX = 4095
PROBABILITY_MAX = 32767


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Keys or values: whole numbers with a scale each, or floats."""

    elements: Array  # [..., head_dim]
    scales: Array | None

    def __getitem__(self, index: Any) -> Vectors:
        return Vectors(self.elements[index], None if self.scales is None else self.scales[index])


def to_bfloat16(x: Array) -> npt.NDArray[np.uint16]:
    """The upper half of each float, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bfloat16(x: npt.NDArray[np.uint16]) -> Array:
    """The floats whose upper halves are ``x``."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def _product(x: Array, weight: Linear, group: int = GROUP) -> Array:
    """In int8 group by group, each rounded to float32 as the kernels do it."""
    if weight.scale is None:
        product: Array = x @ weight.data.T
        return product
    if weight.scale.ndim == 2:
        return _mxfp4_product(x, weight)
    rounded, scale = quantize_groups(x, group=group)  # [M, G, group], [M, G]
    w = np.zeros((weight.out_features, rounded.shape[1] * group), np.float32)
    w[:, : weight.in_features] = weight.data
    w = w.reshape(weight.out_features, -1, group)
    total = np.zeros((len(x), weight.out_features), np.float32)
    for g in range(rounded.shape[1]):
        # exact in float32: at most 32 * 127 * 127 in magnitude
        total = total + (rounded[:, g] @ w[:, g].T) * scale[:, g, None]
    return total * weight.scale


def _mxfp4_product(x: Array, weight: Linear) -> Array:
    """As ``_product`` in int8, but each group of a column has a power of two as its scale."""
    rounded, scale = quantize_groups(x)  # [M, G, 32], [M, G]
    w = weight.data.reshape(weight.out_features, -1, GROUP).astype(np.float32)
    assert weight.scale is not None
    total = np.zeros((len(x), weight.out_features), np.float32)
    for g in range(rounded.shape[1]):
        total = total + (rounded[:, g] @ w[:, g].T) * scale[:, g, None] * weight.scale[:, g]
    return total


def _nth(stack: Linear, index: int) -> Linear:
    """One matrix of a stack."""
    return dataclasses.replace(
        stack,
        data=stack.data[index],
        scale=None if stack.scale is None else stack.scale[index],
        bias=None if stack.bias is None else stack.bias[index],
        count=1,
    )


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) = inf is right: the sigmoid is 0
        sigmoid: Array = np.float32(1) / (np.float32(1) + np.exp(-x))
    return sigmoid


def _attend(
    q: Array, keys: Vectors, values: Vectors, begin: int, sink: Any, softcap: float
) -> Array:
    """softmax(q K^T) V over the keys from ``begin``, in partitions that are merged in order.

    q [d], keys and values [n, d].
    """
    if keys.scales is not None:
        rounded, step = quantize_groups(q[None], key_max(len(q)), len(q))
        exact = keys.elements.astype(np.float64) @ rounded[0, 0]  # of whole numbers
        scores = exact.astype(np.float32) * keys.scales * step[0, 0]
    else:
        scores = keys.elements @ q
    if softcap:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    m, total, acc = np.float32(-np.inf), np.float32(0), np.zeros_like(q)
    for start in range(
        begin // ATTENTION_PARTITION * ATTENTION_PARTITION, len(scores), ATTENTION_PARTITION
    ):
        part = slice(max(start, begin), start + ATTENTION_PARTITION)
        part_m = scores[part].max()
        p = np.exp(scores[part] - part_m)
        new_m = np.maximum(m, part_m)
        old, new = np.exp(m - new_m), np.exp(part_m - new_m)
        total = total * old + p.sum() * new
        acc = acc * old + _weigh(p, values[part], part.start) * new
        m = new_m
    if sink is not None:
        total = total + np.exp(np.float32(sink) - m)
    return acc / total


def _weigh(p: Array, values: Vectors, start: int) -> Array:
    """p V for p [n] and values [n, d] of the keys from position ``start``.

    Values in int16 take rounded probabilities, with one scale for each panel of keys.
    """
    if values.scales is None:
        return p @ values.elements
    acc = np.zeros(values.elements.shape[1], np.float32)
    bounds = [0, *range(PANEL - start % PANEL, len(p), PANEL), len(p)]
    for low, high in itertools.pairwise(bounds):
        scales = values.scales[low:high]
        largest = scales.max()
        inverse = np.float32(PROBABILITY_MAX) / largest if largest > 1e-30 else np.float32(0)
        rounded = np.rint(p[low:high] * (scales * inverse))
        exact = rounded.astype(np.float64) @ values.elements[low:high]
        acc = acc + exact.astype(np.float32) * (largest / np.float32(PROBABILITY_MAX))
    return acc

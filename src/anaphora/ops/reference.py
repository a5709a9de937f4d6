"""Every operation in plain NumPy, written to be read. Tests hold ``native`` to this.

NumPy's float products round differently at different sizes, so here a hit equals a miss only up to
rounding; bit for bit it does in ``native``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anaphora.config import ATTENTION_PARTITION, Dtype
from anaphora.ops.api import Array, Linear
from anaphora.ops.batch import Batch, Int32
from anaphora.ops.kv_store import PANEL, KVLayout, KVStore
from anaphora.ops.quant import activation_max, quantize_weight


class ReferenceOps:
    """See ``ops.api.Ops``."""

    name = "reference"

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype

    def pack_linear(self, weight: Array, bias: Array | None = None) -> Linear:
        data: npt.NDArray[Any] = weight
        scale = None
        if self.dtype == "int8":
            data, scale = quantize_weight(weight)
        n, k = weight.shape
        return Linear(in_features=k, out_features=n, data=data, scale=scale, bias=bias)

    def pack_embedding(self, weight: Array) -> npt.NDArray[Any]:
        return weight.astype(np.float16) if self.dtype == "int8" else weight

    def create_kv_store(self, layout: KVLayout, num_blocks: int) -> KVStore:
        return KVStore(layout, num_blocks)

    def embed(self, table: npt.NDArray[Any], token_ids: Int32) -> Array:
        return table[token_ids].astype(np.float32)

    def linear(self, x: Array, weight: Linear) -> Array:
        if weight.scale is None:
            out: Array = x @ weight.data.T
        else:
            quantized, scale = quantize_rows(x, activation_max(weight.in_features))
            # float64 holds these integer sums exactly, and its product is a fast library call
            total = quantized.astype(np.float64) @ weight.data.T.astype(np.float64)
            out = total.astype(np.float32) * scale[:, None] * weight.scale
        return out if weight.bias is None else out + weight.bias

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        inverse: Array = 1 / np.sqrt(mean + np.float32(eps))
        return x * inverse * weight

    def rope(self, x: Array, positions: Int32, cos: Array, sin: Array) -> None:
        c, s = cos[positions][:, None], sin[positions][:, None]  # [T, 1, head_dim / 2]
        first, second = np.split(x, 2, axis=-1)
        x[:] = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    def store_kv(self, store: KVStore, layer: int, k: Array, v: Array, batch: Batch) -> None:
        lay = store.layout
        parts = store.data.reshape(store.num_blocks, lay.num_layers, 2, -1)
        panels = lay.block_size // PANEL
        keys = parts[:, layer, 0].reshape(-1, lay.num_kv_heads, panels, lay.head_dim, PANEL)
        values = parts[:, layer, 1].reshape(-1, lay.num_kv_heads, lay.block_size, lay.head_dim)
        for row, slot in enumerate(batch.slots):
            block, offset = divmod(int(slot), lay.block_size)
            keys[block, :, offset // PANEL, :, offset % PANEL] = k[row]
            values[block, :, offset] = v[row]

    def attention(self, q: Array, store: KVStore, layer: int, batch: Batch, scale: float) -> Array:
        num_tokens, num_heads, head_dim = q.shape
        group = num_heads // store.layout.num_kv_heads
        out = np.empty((num_tokens, num_heads * head_dim), np.float32)
        for row in range(num_tokens):
            keys, values = self._gather(store, layer, batch, row)  # [keys, kv_heads, head_dim]
            heads = [
                _attend(q[row, head] * np.float32(scale), keys[:, kv], values[:, kv])
                for head in range(num_heads)
                for kv in [head // group]
            ]
            out[row] = np.concatenate(heads)
        return out

    def _gather(self, store: KVStore, layer: int, batch: Batch, row: int) -> tuple[Array, Array]:
        num_keys = int(batch.positions[row]) + 1
        num_blocks = -(-num_keys // store.layout.block_size)
        table = batch.block_tables[batch.seq_index[row], :num_blocks]
        blocks = [store.keys_and_values(int(block_id)) for block_id in table]
        k = np.concatenate([b[0][layer].swapaxes(0, 1) for b in blocks])[:num_keys]
        v = np.concatenate([b[1][layer].swapaxes(0, 1) for b in blocks])[:num_keys]
        return k, v

    def silu_and_mul(self, x: Array) -> Array:
        gate, up = np.split(x, 2, axis=-1)
        with np.errstate(over="ignore"):  # exp(-gate) = inf is right: the sigmoid is 0
            sigmoid = 1 / (1 + np.exp(-gate))
        return (gate * sigmoid * up).astype(np.float32, copy=False)


def quantize_rows(x: Array, qmax: int) -> tuple[npt.NDArray[np.int16], Array]:
    """x [M, K] as int16 [M, K] within +-qmax and scales [M] with x ~ int16 * scale.

    A row with an infinite or NaN value gets the scale NaN, so that the damage shows.
    """
    is_sound = np.asarray(np.isfinite(x).all(axis=1))
    x = np.where(is_sound[:, None], x, 0)
    largest = np.abs(x).max(axis=1)
    inverse = np.divide(np.float32(qmax), largest, out=np.zeros_like(largest), where=largest > 0)
    quantized = np.clip(np.rint(x * inverse[:, None]), -qmax, qmax).astype(np.int16)
    return quantized, np.where(is_sound, largest / np.float32(qmax), np.float32(np.nan))


def _attend(q: Array, keys: Array, values: Array) -> Array:
    """softmax(q K^T) V in partitions that are merged in order: q [d], keys and values [n, d]."""
    m, total, acc = np.float32(-np.inf), np.float32(0), np.zeros_like(q)
    for start in range(0, len(keys), ATTENTION_PARTITION):
        part = slice(start, start + ATTENTION_PARTITION)
        scores = keys[part] @ q
        new_m = np.maximum(m, scores.max())
        p = np.exp(scores - new_m)
        correction = np.exp(m - new_m)
        total = total * correction + p.sum()
        acc = acc * correction + p @ values[part]
        m = new_m
    return acc / total

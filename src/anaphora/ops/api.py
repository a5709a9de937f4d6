"""The operations that every backend agrees on. ``reference`` is the plain truth, ``native`` the
fast path; a model is written against this page and nothing else.

Promise: a token's result depends on its own row (and, in attention, on its own sequence's keys
up to its position) and on nothing else: not on other rows, their number, or threads.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from anaphora.ops.batch import Batch, Int32
from anaphora.ops.kv_store import KVLayout, KVStore

Array = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """A weight as its backend packed it. Only that backend looks inside ``data``."""

    in_features: int
    out_features: int
    data: npt.NDArray[Any]
    scale: Array | None  # per output channel, int8 only
    bias: Array | None

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""
        return sum(a.nbytes for a in (self.data, self.scale, self.bias) if a is not None)


class Ops(Protocol):
    """A backend. Activations are float32 and row-major; T is the number of tokens."""

    name: str

    def pack_linear(self, weight: Array, bias: Array | None = None) -> Linear:
        """Packs ``weight`` [out, in] and ``bias`` [out] in this backend's precision."""

    def pack_embedding(self, weight: Array) -> npt.NDArray[Any]:
        """The table [vocab, hidden] that ``embed`` reads, in this backend's precision."""

    def create_kv_store(self, layout: KVLayout, num_blocks: int) -> KVStore:
        """Memory for ``num_blocks`` blocks."""

    def embed(self, table: npt.NDArray[Any], token_ids: Int32) -> Array:
        """Rows of ``table`` as [T, hidden]."""

    def linear(self, x: Array, weight: Linear) -> Array:
        """x [T, in] times the weight, plus its bias, as [T, out]."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x [T, hidden] / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019)."""

    def rope(self, x: Array, positions: Int32, cos: Array, sin: Array) -> None:
        """Rotates each head of x [T, heads, head_dim] in place: pairs (i, i + head_dim / 2).

        ``cos`` and ``sin`` are [positions, head_dim / 2] (Su et al., 2021).
        """

    def store_kv(self, store: KVStore, layer: int, k: Array, v: Array, batch: Batch) -> None:
        """Writes k and v [T, kv_heads, head_dim] to the batch's slots."""

    def attention(self, q: Array, store: KVStore, layer: int, batch: Batch, scale: float) -> Array:
        """Attention of q [T, heads, head_dim] over the store, as [T, heads * head_dim].

        K and V of the batch's own tokens must have been stored: nothing is read from elsewhere.
        """

    def silu_and_mul(self, x: Array) -> Array:
        """silu(gate) * up for x [T, 2 * n] = gate | up, as [T, n]."""

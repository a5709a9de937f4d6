"""The operations that every backend agrees on. ``reference`` is the plain truth, ``native`` the
fast path; a model is written against this page and nothing else.

Promise: a token's result depends on its own row (and, in attention, on its own sequence's keys
up to its position) and on nothing else: not on other rows, their number, or threads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from anaphora.config import Dtype
from anaphora.ops.batch import Batch, Int32
from anaphora.ops.kv_store import KVLayout, KVStore
from anaphora.ops.lora import AdaptedRows, Delta, Part
from anaphora.ops.quant import MXFP4

Array = npt.NDArray[np.float32]
Gate = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """A weight as its backend packed it. Only that backend looks inside ``data`` and ``handle``.

    A stack has ``count`` matrices of this size, one for each expert.
    """

    in_features: int
    out_features: int
    data: npt.NDArray[Any]
    scale: Array | None  # per output channel, int8 only
    bias: Array | None
    count: int = 1
    handle: Any = None
    place: int = -1  # what finds an adapter's delta for it; none has one for -1

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""
        return sum(a.nbytes for a in (self.data, self.scale, self.bias) if a is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """Root mean square normalisation: x / sqrt(mean(x^2) + eps) * weight."""

    weight: Array  # [hidden]
    eps: float
    handle: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Angles of rotary positions (Su et al., 2021), each [positions, head_dim / 2]."""

    cos: Array
    sin: Array
    handle: Any = None


class Ops(Protocol):
    """A backend. Activations are float32 and row-major; T is the number of tokens."""

    name: str

    @property
    def layout(self) -> str | None:
        """Names the form of packed weights; None if packing them costs nothing."""

    def load_linear(
        self,
        in_features: int,
        out_features: int,
        data: npt.NDArray[Any],
        scale: Array | None,
        bias: Array | None,
        count: int = 1,
    ) -> Linear:
        """The weight that was once packed in the same ``layout``, from its arrays."""

    def pack_linear(
        self, weight: Array, bias: Array | None = None, *, dtype: Dtype | None = None
    ) -> Linear:
        """Packs ``weight`` [out, in] and ``bias`` [out], in ``dtype`` or this backend's own."""

    def pack_gate_up(self, weight: Array, bias: Array | None = None) -> Linear:
        """As ``pack_linear`` for gate | up rows [2 * n, in], to be used by ``gated_mlp``."""

    def pack_experts(
        self,
        count: int,
        read: Callable[[int], Array | MXFP4],
        bias: Array | None = None,
        *,
        is_gated: bool = False,
    ) -> Linear:
        """A stack of the ``count`` matrices that ``read`` gives; ``bias`` [count, out].

        Rows are gate | up rows if ``is_gated``. Four-bit floats stay as they are beside int8.
        """

    def pack_delta(
        self, parts: Sequence[Part], in_features: int, *, is_gate_up: bool = False
    ) -> Delta:
        """What an adapter adds to a linear of these parts; ``is_gate_up`` for ``pack_gate_up``."""

    def pack_embedding(self, weight: Array) -> npt.NDArray[Any]:
        """The table [vocab, hidden] that ``embed`` reads, in this backend's precision."""

    def load_norm(self, weight: Array, eps: float) -> Norm:
        """A norm that this backend's operations take."""

    def load_rope(self, cos: Array, sin: Array) -> Rope:
        """Angles that this backend's operations take."""

    def create_kv_store(self, layout: KVLayout, num_blocks: int, *, lock: bool = False) -> KVStore:
        """Memory for ``num_blocks`` blocks; ``lock`` keeps it from being swapped out."""

    def embed(self, table: npt.NDArray[Any], token_ids: Int32) -> Array:
        """Rows of ``table`` as [T, hidden]."""

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
        """x [T, in], normalised first if ``norm`` is given, times the weight plus its bias.

        The result [T, out] is new, written to ``out``, or added to ``add_to`` in place. What
        ``adapters`` add to their rows comes last.
        """

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
        """gate(gate) * up times ``down``, for gate | up = norm(x) times ``gate_up``.

        The result [T, hidden] is new or added to ``add_to`` in place, which may be ``x``.
        ``adapters`` as in ``linear``, for both.
        """

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
        """Adds what each row's experts give, weighted by the softmax of their logits.

        ``router`` [T, experts] has the logits, of which the ``top_k`` largest (of equals the first)
        choose the experts. An expert is (up + 1) gate sigmoid(alpha gate) times ``down``, with gate
        at most ``limit`` and up within it, for gate | up = x times ``gate_up``.
        """

    def rms_norm(self, x: Array, norm: Norm) -> Array:
        """x [T, hidden] normalised (Zhang and Sennrich, 2019)."""

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
        """Rotates q and k of qkv [T, heads + 2 * kv_heads, head_dim] in place by their positions.

        Each head is normalised before, if asked for. Pairs are (i, i + head_dim / 2). k and v then
        go to the batch's slots of the store.
        """

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
        """Attention of q, the first heads of qkv, over the store, as [T, heads * head_dim].

        K and V of the batch's own tokens must have been stored: nothing is read from elsewhere.
        A token sees the last ``window`` keys up to its own (0: all). ``sinks`` [heads] are logits
        of keys without values, which take their share of the softmax (Xiao et al., 2023). With a
        ``softcap`` above 0 scores s become softcap * tanh(s / softcap).
        """

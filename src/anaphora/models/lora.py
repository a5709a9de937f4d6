"""Which matrices of a model adapters may change, and an adapter made ready for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from anaphora.errors import UnusableAdapter
from anaphora.loaders.adapter import Pair, read_adapter
from anaphora.models.config import ModelConfig
from anaphora.ops.api import Ops
from anaphora.ops.lora import RANKS, Adapter, Delta, Part
from anaphora.ops.quant import GROUP

_COLUMN_BYTES = 16  # a scale, and its part of a panel's span


class AdapterPlace(NamedTuple):
    """A linear that adapters may change; its position among them is its ``Linear.place``."""

    in_features: int
    parts: tuple[tuple[str, int], ...]  # the checkpoint's modules in it, and their outputs
    is_gate_up: bool


@runtime_checkable
class AdaptableModel(Protocol):
    """An architecture that takes adapters: it hands a batch's to its linears."""

    config: ModelConfig
    ops: Ops
    adapter_places: list[AdapterPlace]


def check_adaptable(model: object, architecture: str) -> AdaptableModel:
    """``model`` itself. Raises ``UnusableAdapter`` if its architecture takes no adapters."""
    if not isinstance(model, AdaptableModel):
        raise UnusableAdapter(
            f"model_type {architecture!r} takes no LoRA adapters yet; leave --lora-modules and "
            "--max-loras out"
        )
    return model


def load_adapter(path: Path, model: AdaptableModel, *, max_rank: int) -> Adapter:
    """The PEFT adapter in ``path``, packed. Raises ``UnusableAdapter``, naming the fault."""
    places = model.adapter_places
    modules = {name: (size, place.in_features) for place in places for name, size in place.parts}
    file = read_adapter(path, modules, max_rank=max_rank)
    return Adapter(
        digest=file.digest,
        rank=max(len(pair.a) for pair in file.pairs.values()),
        deltas=tuple(_pack(place, file.pairs, model.ops) for place in places),
    )


def _pack(place: AdapterPlace, pairs: Mapping[str, Pair], ops: Ops) -> Delta | None:
    if not any(name in pairs for name, _ in place.parts):
        return None
    parts = [
        Part(out_features=size, a=pairs[name].a, b=pairs[name].b)
        if name in pairs
        else Part(out_features=size)
        for name, size in place.parts
    ]
    return ops.pack_delta(parts, place.in_features, is_gate_up=place.is_gate_up)


def max_adapter_bytes(model: AdaptableModel, *, rank: int, weight_bytes: int) -> int:
    """Most memory of an adapter of ``rank`` for every module; ``weight_bytes``: of one weight."""
    ranks = -(-rank // RANKS) * RANKS
    total = 0
    for place in model.adapter_places:
        num_parts = len(place.parts)
        in_features = -(-place.in_features // GROUP) * GROUP
        # A panel between two parts has the ranks of both.
        columns = sum(-(-size // RANKS) * RANKS for _, size in place.parts) + RANKS * num_parts
        weights = ranks * (num_parts * in_features + columns)
        total += weights * weight_bytes + _COLUMN_BYTES * (columns + num_parts * ranks)
    return total

"""Which file implements which ``model_type``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from anaphora.loaders.checkpoint import Checkpoint
from anaphora.loaders.packed import PackedWeights
from anaphora.models.config import ModelConfig
from anaphora.models.gemma3 import Gemma3
from anaphora.models.gpt_oss import GptOss
from anaphora.models.layers import ModelSizes
from anaphora.models.llama import Llama
from anaphora.ops.api import Array, Ops
from anaphora.ops.batch import Batch
from anaphora.ops.kv_store import KVStore


class Model(Protocol):
    """What the engine needs of an architecture."""

    config: ModelConfig
    sizes: ModelSizes

    def set_max_model_len(self, max_model_len: int) -> None:
        """To be called before ``forward``: positions are below this."""

    def forward(self, batch: Batch, store: KVStore) -> Array:
        """Hidden states [T, hidden] of the batch's tokens; their K/V end in ``store``."""

    def logits(self, hidden: Array) -> Array:
        """Logits [R, vocab] of so many hidden states, each row from that row alone."""


MODELS: dict[str, Callable[[ModelConfig, Checkpoint, Ops, PackedWeights], Model]] = {
    "llama": Llama,
    "gemma3": Gemma3,
    "gpt_oss": GptOss,
}


def load_model(checkpoint: Checkpoint, ops: Ops, packed_dir: Path | None = None) -> Model:
    """The checkpoint's architecture with its weights packed for ``ops``, kept in ``packed_dir``."""
    config = checkpoint.config
    digest = checkpoint.digest if packed_dir else b""
    with PackedWeights(packed_dir, digest, ops) as packed:
        return MODELS[config.model_type](config, checkpoint, ops, packed)

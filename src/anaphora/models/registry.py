"""Which file implements which ``model_type``."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from anaphora.errors import UnsupportedModel
from anaphora.loaders.checkpoint import Checkpoint
from anaphora.loaders.packed import PackedWeights
from anaphora.models.config import ModelConfig
from anaphora.models.llama import Llama
from anaphora.ops.api import Array, Ops
from anaphora.ops.batch import Batch
from anaphora.ops.kv_store import KVStore


class Model(Protocol):
    """What the engine needs of an architecture."""

    config: ModelConfig

    def set_max_model_len(self, max_model_len: int) -> None:
        """To be called before ``forward``: positions are below this."""

    def forward(self, batch: Batch, store: KVStore) -> Array:
        """Logits [R, vocab] of the batch's logit rows; K/V of its tokens end in ``store``."""

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""

    @property
    def num_multiplied_weights(self) -> int:
        """Weights that every token is multiplied with, without the head."""

    @property
    def num_head_weights(self) -> int:
        """Weights that a token is multiplied with when its logits are wanted."""

    @property
    def step_weight_bytes(self) -> int:
        """Memory of the weights that a step over one token reads."""


MODELS = {"llama": Llama}


def load_model(checkpoint: Checkpoint, ops: Ops, packed_dir: Path | None = None) -> Model:
    """The checkpoint's architecture with its weights packed for ``ops``, kept in ``packed_dir``."""
    config = checkpoint.config
    if config.model_type not in MODELS:
        raise UnsupportedModel(
            f"model_type {config.model_type!r} is not implemented; "
            f"Anaphora has {', '.join(sorted(MODELS))}"
        )
    digest = checkpoint.digest if packed_dir else b""
    with PackedWeights(packed_dir, digest, ops) as packed:
        return MODELS[config.model_type](config, checkpoint, ops, packed)

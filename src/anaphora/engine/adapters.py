"""The LoRA adapters in an engine's memory, by their digests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from anaphora.config import EngineConfig
from anaphora.errors import UnknownModel
from anaphora.models.lora import check_adaptable, load_adapter, max_adapter_bytes
from anaphora.models.registry import Model
from anaphora.ops.lora import Adapter
from anaphora.types import AdapterInfo


class LoadedAdapters:
    """An adapter stays in memory until the last sequence that uses it ends."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        """Raises ``UnusableAdapter`` if adapters are wanted and the architecture takes none."""
        self._model = model
        self._max_rank = config.max_lora_rank
        self._adapters: dict[str, Adapter] = {}  # by digest
        self._num_uses: Counter[str] = Counter()  # sequences, also of unloaded ones
        self.reserved_bytes = 0
        if num := config.num_adapters:
            adaptable = check_adaptable(model, model.config.model_type)
            self.reserved_bytes = num * max_adapter_bytes(
                adaptable,
                rank=config.max_lora_rank,
                weight_bytes=1 if config.dtype == "int8" else 4,
            )

    def load(self, path: str) -> AdapterInfo:
        """Reads and packs an adapter. Raises ``UnusableAdapter``."""
        model = check_adaptable(self._model, self._model.config.model_type)
        adapter = load_adapter(Path(path), model, max_rank=self._max_rank)
        adapter = self._adapters.setdefault(adapter.digest, adapter)
        return AdapterInfo(
            path=path, digest=adapter.digest, rank=adapter.rank, num_bytes=adapter.num_bytes
        )

    def unload(self, digest: str) -> None:
        """No new sequence gets it."""
        self._adapters.pop(digest, None)

    def hold(self, digest: str) -> Adapter | None:
        """The adapter for one more sequence; None for the empty digest. Raises ``UnknownModel``."""
        if not digest:
            return None
        if digest not in self._adapters:
            raise UnknownModel("the adapter has been unloaded", param="model")
        self._num_uses[digest] += 1
        return self._adapters[digest]

    def release(self, digest: str) -> bool:
        """A sequence ends; whether it was the last one of an adapter that has been unloaded."""
        if not digest:
            return False
        self._num_uses[digest] -= 1
        if self._num_uses[digest]:
            return False
        del self._num_uses[digest]
        return digest not in self._adapters

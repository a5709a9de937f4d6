"""Which name stands for which LoRA adapter: kept by whoever owns an engine, which knows digests."""

from __future__ import annotations

import msgspec

from anaphora.config import ADAPTER_NAME
from anaphora.errors import InvalidRequest, UnknownModel
from anaphora.types import AdapterInfo, CacheScope

_MAX_SHOWN_CHARS = 100


class AdapterNames:
    """Several names may share one adapter."""

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self.infos: dict[str, AdapterInfo] = {}

    def check_new(self, name: str, *, load_inplace: bool) -> None:
        """Raises ``InvalidRequest`` if ``name`` is unusable, taken, or one too many."""
        if not ADAPTER_NAME.fullmatch(name):
            raise InvalidRequest(
                f"lora_name is {name[:_MAX_SHOWN_CHARS]!r}; use 1 to 128 printable ASCII "
                "characters without spaces and '='",
                param="lora_name",
            )
        if name in self.infos:
            if not load_inplace:
                raise InvalidRequest(
                    f"lora_name is {name!r}, and an adapter of this name is loaded already; unload "
                    "it first, or set load_inplace",
                    param="lora_name",
                )
        elif len(self.infos) >= self._max_adapters:
            raise InvalidRequest(
                f"{len(self.infos)} adapters are loaded and --max-loras is {self._max_adapters}; "
                "unload one, or start with a higher --max-loras",
                param="lora_name",
            )

    def set(self, name: str, info: AdapterInfo) -> str | None:
        """Gives ``name`` to an adapter; the digest of another that no name stands for any more."""
        before = self.infos.get(name)
        self.infos[name] = info
        return None if before is None else self._unnamed(before.digest)

    def remove(self, name: str) -> str | None:
        """Takes ``name`` away; the digest as in ``set``. Raises ``UnknownModel``."""
        if name not in self.infos:
            raise UnknownModel(
                f"lora_name is {name[:_MAX_SHOWN_CHARS]!r}; no adapter of this name is loaded",
                param="lora_name",
            )
        return self._unnamed(self.infos.pop(name).digest)

    def _unnamed(self, digest: str) -> str | None:
        return None if self._has(digest) else digest

    def scope(self, scope: CacheScope, name: str | None) -> CacheScope:
        """``scope`` with the adapter of this name, if one is given. Raises ``UnknownModel``."""
        if name is None:
            return scope
        if name not in self.infos:
            raise UnknownModel(
                f"adapter is {name[:_MAX_SHOWN_CHARS]!r}; loaded are: "
                f"{', '.join(self.infos) or 'none'}",
                param="adapter",
            )
        return msgspec.structs.replace(scope, adapter=self.infos[name].digest)

    def check_loaded(self, scope: CacheScope) -> None:
        """Raises ``UnknownModel`` if the adapter of ``scope`` has no name (any more)."""
        if scope.adapter and not self._has(scope.adapter):
            raise UnknownModel("this adapter is not loaded, or not any more", param="model")

    def _has(self, digest: str) -> bool:
        return any(info.digest == digest for info in self.infos.values())

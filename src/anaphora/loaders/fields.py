"""Checked access to a checkpoint's metadata: a wrong field is named with its value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anaphora.errors import CorruptCheckpoint, UnsupportedModel
from anaphora.models.config import ModelConfig

MAX_SIZE = 2**31 - 1  # of any dimension
MAX_LAYERS = 4096
MAX_TOP_K = 16  # experts of a token, as in csrc/bindings.cpp
_SMALLEST, _LARGEST = 1e-15, 1e15  # beyond these, float32 has no room to compute with a number


@dataclasses.dataclass(frozen=True)
class Fields:
    """Metadata that came from ``path``. Methods raise ``CorruptCheckpoint`` naming the field."""

    values: Mapping[str, Any]
    path: Path
    prefix: str = ""  # put before each key, as "llama." in GGUF files

    def get(self, key: str) -> Any:
        """The value as it is, None when absent or null."""
        return self.values.get(self.prefix + key)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number; ``default`` when absent, required when that is None."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_SIZE:
            raise self._wrong(key, value, "a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; ``default`` when absent, required when that is None."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        if not _SMALLEST <= value <= _LARGEST:
            raise self._wrong(key, value, f"between {_SMALLEST:g} and {_LARGEST:g}")
        return float(value)

    def layers(self, key: str, default: int | None = None) -> int:
        """A number of layers, as ``size``."""
        value = self.size(key, default)
        if value > MAX_LAYERS:
            raise self._wrong(key, value, f"at most {MAX_LAYERS}")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings, empty when absent."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of strings")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false; ``default`` when absent."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def inner(self, key: str) -> Fields:
        """The fields of the object ``key``, none when it is absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        prefix = f"{self.prefix}{key}."
        return Fields(
            {prefix + name: item for name, item in (value or {}).items()}, self.path, prefix
        )

    def token_id(self, key: str) -> int | None:
        """A token id, None when absent."""
        ids = self.token_ids(key)
        return ids[0] if ids else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one number or a list, () when absent."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self._wrong(key, value, "a token id or a list of them")
        return tuple(ids)

    def refuse(self, key: str, *harmless: Any) -> None:
        """Raises ``UnsupportedModel`` when the field is set, unless it has a harmless value."""
        value = self.get(key)
        if value is not None and value not in harmless:
            hint = f"; only {', '.join(map(repr, harmless))} is supported" if harmless else ""
            raise self.unsupported(key, value, hint)

    def unsupported(self, key: str, value: Any, hint: str = "") -> UnsupportedModel:
        """The error for a field that we do not implement."""
        return UnsupportedModel(f"{self.path}: {self.prefix}{key} is {value!r}{hint}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise CorruptCheckpoint(f"{self.path}: required field {self.prefix}{key} is missing")
        return value

    def _wrong(self, key: str, value: Any, wanted: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"{self.path}: {self.prefix}{key} is {str(value)[:100]}; it must be {wanted}"
        )


def check_config(config: ModelConfig, path: Path) -> ModelConfig:
    """``config`` itself. Raises ``CorruptCheckpoint`` when its sizes contradict each other."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise CorruptCheckpoint(
            f"{path}: {heads} attention heads cannot share {kv_heads} key/value heads evenly"
        )
    top_k, experts = config.num_experts_per_tok, config.num_local_experts
    if top_k > min(experts, MAX_TOP_K):
        raise CorruptCheckpoint(
            f"{path}: {top_k} experts for each token of {experts} cannot be served; it must be at "
            f"most {min(experts, MAX_TOP_K)}"
        )
    _check_rope(config, path)
    if config.head_dim % 2:
        raise CorruptCheckpoint(
            f"{path}: head_dim is {config.head_dim}; rotary positions need an even number"
        )
    special = [config.bos_token_id, *config.eos_token_ids]
    for token_id in special:
        if token_id is not None and token_id >= config.vocab_size:
            raise CorruptCheckpoint(
                f"{path}: special token id {token_id} is outside the vocabulary of "
                f"{config.vocab_size}"
            )
    return config


def _check_rope(config: ModelConfig, path: Path) -> None:
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return
    if config.rope_theta <= 1 or not 0.001 <= scaling.beta_slow < scaling.beta_fast <= 1e6:
        raise CorruptCheckpoint(
            f"{path}: yarn with rope_theta {config.rope_theta}, beta_slow {scaling.beta_slow} and "
            f"beta_fast {scaling.beta_fast} has no meaning"
        )


def head_dim(fields: Fields, key: str, hidden_size: int, num_heads: int) -> int:
    """The field ``key``, or what each head gets of ``hidden_size``."""
    if fields.get(key) is None and hidden_size % num_heads:
        raise CorruptCheckpoint(
            f"{fields.path}: {num_heads} heads cannot share hidden size {hidden_size} evenly; "
            f"{fields.prefix}{key} is missing"
        )
    return fields.size(key, hidden_size // num_heads)

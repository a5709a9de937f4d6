"""What the operator chooses. Frozen; derived values are properties; sizes as people write them."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from anaphora.errors import ConfigError

Dtype = Literal["int8", "float32"]
EvictionPolicyName = Literal["reuse", "lru"]
KVCacheDtype = Literal["auto", "int16", "float16", "bfloat16", "float32"]

DEFAULT_MODEL = "smollm2"
ATTENTION_PARTITION = 512  # tokens; attention sums in partitions of this size, see csrc/kernels.h
BLOCK_SIZES = (16, 32, 64, 128, 256)  # they divide a partition

_LIMITS = {
    "max_model_len": 2**31 - 1,
    "max_num_seqs": 2**31 - 1,
    "max_num_batched_tokens": 2**31 - 1,
    "kv_cache_memory": 2**63 - 1,
    "threads": 1024,  # as csrc/bindings.cpp
    "disk_cache_size": 2**63 - 1,
    "max_lora_rank": 4096,
}

ADAPTER_NAME = re.compile(r"[!-<>-~]{1,128}")  # printable ASCII without space and '='

_SIZES = ("kv_cache_memory", "disk_cache_size")

_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_size(text: str, option: str = "") -> int:
    """Bytes of a size such as ``96MiB``, ``2GiB`` or ``1.5 GB``; a bare number means GiB.

    An error names ``option``.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].lower() if match else ""
    if not match or (unit and unit not in _UNITS):
        raise ConfigError(
            f"{option + ': ' if option else ''}{text!r} is not a size; write for example 96MiB or "
            "2GiB (a bare number means GiB)"
        )
    return int(min(float(match[1]) * _UNITS[unit or "gib"], 2.0**64))  # beyond all limits


def format_size(num_bytes: int) -> str:
    """``num_bytes`` for people, in binary units."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """What a token costs beside a prompt's token that is computed, which costs 1."""

    cached: float = 0.1  # a prompt's token that was found
    output: float = 2.0  # a generated one


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoughtCapacity:
    """What an endpoint of provisioned throughput bought, in tokens as ``Weights`` counts them."""

    endpoint: str
    tokens_per_second: float
    may_burst: bool = False  # beyond it, as interactive work; else what is beyond waits


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that decides how a model is run. Raises ``ConfigError`` that names the option."""

    model: str = DEFAULT_MODEL
    dtype: Dtype = "int8"
    kv_cache_dtype: KVCacheDtype = "auto"
    max_model_len: int | None = None  # None: what the model and the cache allow
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 128  # more prefills no faster, and others wait longer
    block_size: int = 16
    kv_cache_memory: int | None = None  # bytes; None: what gpu_memory_utilization leaves
    gpu_memory_utilization: float = 0.5
    enable_prefix_caching: bool = True
    eviction_policy: EvictionPolicyName = "reuse"
    swap_space: int = 0  # bytes of host memory below the K/V store
    disk_cache: str | None = None  # directory of the disk tier, if there is to be one
    disk_cache_size: int | None = None  # bytes
    disk_cache_persist: bool = False
    disk_cache_key_file: str | None = None
    disk_cache_ttl: float = 7 * 86400.0  # seconds that a persisted block may be used for
    lock_memory: bool = False
    cache_share: tuple[str, ...] = ()  # see cache.shares.Share.parse
    pin_quota: float = 0.1  # part of tier 1 that one tenant may pin
    public_prefix: tuple[str, ...] = ()  # system prompts whose blocks all tenants share
    chat_date: str | None = None  # YYYY-MM-DD for chat templates that print it; None: today
    lora_modules: tuple[str, ...] = ()  # adapters loaded at start, each NAME=PATH
    max_loras: int | None = None  # loaded at a time; None: as many as lora_modules has
    max_lora_rank: int = 64
    audit_hits: float = 0.0  # part of the hits that are computed again and compared
    threads: int | None = None  # None: the cores this process may use
    weights: Weights = Weights()
    bought_capacity: tuple[BoughtCapacity, ...] = ()

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, ("int8", "float32"))
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDtype))
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int | None):
                raise ConfigError(
                    f"{name} is {value!r}; it must be a whole number"
                    + (" of bytes, see parse_size" if name in _SIZES else "")
                )
            if value is not None and not 1 <= value <= limit:
                raise ConfigError(
                    f"{_flag(name)} is {value}; it must be at least 1 and at most {limit}"
                )
        if self.max_model_len == 1:
            raise ConfigError("--max-model-len is 1; prompt and output need at least 2 tokens")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, less than "
                f"--max-num-seqs ({self.max_num_seqs}), so that not every sequence could get its "
                "token in a step; raise the first or lower the second"
            )
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(
                f"--block-size is {self.block_size}; it must be 16, 32, 64, 128 or 256"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; "
                "it must be above 0 and at most 1"
            )

        self._check_tiers()
        self.template_date  # noqa: B018  raises
        self._check_adapters()

    def _check_adapters(self) -> None:
        names = [name for name, _ in self.adapters]
        for module, (name, path) in zip(self.lora_modules, self.adapters, strict=True):
            if not ADAPTER_NAME.fullmatch(name) or not path:
                raise ConfigError(
                    f"--lora-modules is {module!r}; write NAME=PATH with a name of 1 to 128 "
                    "printable ASCII characters without spaces"
                )
            if names.count(name) > 1:
                raise ConfigError(f"--lora-modules has {name!r} twice; give each adapter a name")
        if self.max_loras is None:
            return
        if isinstance(self.max_loras, bool) or not isinstance(self.max_loras, int):
            raise ConfigError(f"max_loras is {self.max_loras!r}; it must be a whole number")
        if not len(names) <= self.max_loras <= 4096:
            raise ConfigError(
                f"--max-loras is {self.max_loras}; it must be at least {len(names)}, the number of "
                "--lora-modules, and at most 4096"
            )

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """Name and path of each adapter that is loaded at start."""
        parts = [module.partition("=") for module in self.lora_modules]
        return [(name, path) for name, _, path in parts]

    @property
    def num_adapters(self) -> int:
        """How many may be loaded at a time."""
        return len(self.lora_modules) if self.max_loras is None else self.max_loras

    @property
    def template_date(self) -> datetime.date | None:
        """``chat_date`` as a date. Raises ``ConfigError``."""
        if self.chat_date is None:
            return None
        try:
            day = datetime.date.fromisoformat(self.chat_date)
        except (TypeError, ValueError):
            day = None
        if day is None or day.isoformat() != self.chat_date:
            raise ConfigError(f"--chat-date is {self.chat_date!r}; write a date as YYYY-MM-DD")
        return day

    def _check_tiers(self) -> None:
        if isinstance(self.swap_space, bool) or not isinstance(self.swap_space, int):
            raise ConfigError(f"swap_space is {self.swap_space!r}; give bytes, see parse_size")
        if not 0 <= self.swap_space < 2**63:
            raise ConfigError(f"--swap-space is {self.swap_space}; it must be 0 or more bytes")
        lower = self.swap_space or self.disk_cache is not None
        if lower and not self.enable_prefix_caching:
            raise ConfigError(
                "--swap-space and --disk-cache keep blocks of the prefix cache, which "
                "--no-enable-prefix-caching turns off; leave one of them out"
            )
        if (self.disk_cache is None) != (self.disk_cache_size is None):
            raise ConfigError(
                "--disk-cache and --disk-cache-size belong together; give a directory and how much "
                "of it may be used, for example --disk-cache /var/cache/anaphora "
                "--disk-cache-size 20GiB"
            )
        if self.disk_cache_persist and (not self.disk_cache or not self.disk_cache_key_file):
            raise ConfigError(
                "--disk-cache-persist needs --disk-cache and --disk-cache-key-file: blocks that "
                "outlive the process are encrypted under a key of yours"
            )
        if self.disk_cache_key_file and not self.disk_cache_persist:
            raise ConfigError(
                "--disk-cache-key-file is given without --disk-cache-persist; a disk cache that "
                "ends with the process has a key of its own"
            )
        _check_positive("disk_cache_ttl", self.disk_cache_ttl)
        _check_fraction("pin_quota", self.pin_quota)
        _check_fraction("audit_hits", self.audit_hits)
        _check_choice("eviction_policy", self.eviction_policy, get_args(EvictionPolicyName))

    @classmethod
    def of(cls, model: str | EngineConfig, options: Mapping[str, Any]) -> EngineConfig:
        """A configuration as it is, or one made of a model's name and the fields' values."""
        if isinstance(model, EngineConfig):
            return dataclasses.replace(model, **options)
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(
                f"there is no option {unknown[0]!r}; there are {', '.join(sorted(known))}"
            )
        return cls(model=model, **options)

    @property
    def resolved_kv_cache_dtype(self) -> str:
        """``auto`` keeps K/V in float32 beside float32 weights and in int16 beside int8."""
        if self.kv_cache_dtype != "auto":
            return self.kv_cache_dtype
        return "float32" if self.dtype == "float32" else "int16"


def _check_fraction(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{_flag(name)} is {value!r}; it must be from 0 to 1")


def _check_positive(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{_flag(name)} is {value!r}; it must be above 0")


def _flag(name: str) -> str:
    """As the command line spells a field."""
    return "--" + name.replace("_", "-")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{_flag(name)} is {value!r}; choose one of {', '.join(choices)}")

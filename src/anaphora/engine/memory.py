"""How many blocks the cache gets in each tier, and how long a context that allows."""

from __future__ import annotations

from pathlib import Path

from anaphora.cache.disk import DiskStorage
from anaphora.cache.tiers import HostMemory, Storage
from anaphora.cache.windows import Window
from anaphora.config import EngineConfig, format_size
from anaphora.errors import ConfigError
from anaphora.machine import usable_memory


def plan_num_blocks(
    config: EngineConfig, *, weight_bytes: int, block_bytes: int, adapter_bytes: int = 0
) -> int:
    """Blocks that fit the budget; raises ``ConfigError`` if not even one does.

    ``adapter_bytes`` are kept free for adapters that are loaded later.
    """
    if config.kv_cache_memory is not None:
        budget = config.kv_cache_memory
        remedy = "raise --kv-cache-memory"
    else:
        usable = usable_memory()
        budget = int(usable * config.gpu_memory_utilization) - weight_bytes - adapter_bytes
        remedy = (
            f"raise --gpu-memory-utilization ({config.gpu_memory_utilization} of "
            f"{format_size(usable)}, and the weights take {format_size(weight_bytes)}"
            + (f", --max-loras adapters {format_size(adapter_bytes)}" if adapter_bytes else "")
            + ")"
        )
    num_blocks = budget // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"{format_size(max(budget, 0))} for the K/V cache do not hold one block of "
            f"{config.block_size} tokens ({format_size(block_bytes)}); {remedy}"
        )
    return num_blocks


def plan_max_model_len(
    config: EngineConfig,
    *,
    max_position_embeddings: int,
    num_blocks: int,
    window: Window | None = None,
) -> int:
    """Tokens that prompt and output of a request may have together.

    A lone sequence must always fit the cache: that is what makes every preemption recoverable.
    Raises ``ConfigError`` if that leaves not even one block.
    """
    if window is not None:
        # Up to so many blocks each has a window part, from there on the last ones.
        num_pages = 1 + window.num_pages
        num_whole = min(num_blocks // num_pages, window.max_parts)
        num_blocks = num_whole + (
            num_blocks - num_whole * num_pages if num_whole == window.max_parts else 0
        )
        if num_blocks < 1:
            raise ConfigError(
                f"the K/V cache does not hold one block of {config.block_size} tokens with what "
                "windowed layers have of it; raise --kv-cache-memory"
            )
    num_cache_tokens = num_blocks * config.block_size
    asked = config.max_model_len
    if asked is None:
        return min(max_position_embeddings, num_cache_tokens)
    if asked > max_position_embeddings:
        raise ConfigError(
            f"--max-model-len is {asked}, but the model was trained for "
            f"{max_position_embeddings} tokens; lower it"
        )
    if asked > num_cache_tokens:
        raise ConfigError(
            f"--max-model-len is {asked}, but the K/V cache holds {num_cache_tokens} tokens; "
            "lower it or raise --kv-cache-memory"
        )
    return asked


def create_storages(
    config: EngineConfig,
    *,
    taken_bytes: int,
    block_bytes: int,
    disk_key: bytes | None,
    identity: bytes,
) -> dict[str, Storage]:
    """The tiers below the K/V store, the highest first. Raises ``ConfigError``.

    ``taken_bytes``: memory that weights and K/V store need. ``disk_key``: the operator's, if blocks
    are to be found after a restart. ``identity``: what the bytes in a block depend on besides its
    key.
    """
    storages: dict[str, Storage] = {}
    if config.swap_space:
        usable = usable_memory()
        if taken_bytes + config.swap_space > usable:
            raise ConfigError(
                f"--swap-space is {format_size(config.swap_space)}, but weights and K/V cache take "
                f"{format_size(taken_bytes)} of {format_size(usable)} of memory; lower it, or "
                "lower --kv-cache-memory"
            )
        if config.swap_space < block_bytes:
            raise ConfigError(
                f"--swap-space is {format_size(config.swap_space)} and does not hold one block of "
                f"{config.block_size} tokens ({format_size(block_bytes)}); raise it"
            )
        storages["host"] = HostMemory(config.swap_space, block_bytes, lock=config.lock_memory)
    if config.disk_cache is not None and config.disk_cache_size is not None:
        directory, size = Path(config.disk_cache), config.disk_cache_size
        if disk_key is None:
            storages["disk"] = DiskStorage.volatile(directory, size, block_bytes)
        else:
            storages["disk"] = DiskStorage.persistent(
                directory,
                size,
                block_bytes,
                key=disk_key,
                identity=identity,
                ttl_seconds=config.disk_cache_ttl,
            )
    return storages

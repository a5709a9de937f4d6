"""How many blocks the cache gets, and how long a context that allows."""

from __future__ import annotations

from anaphora.config import EngineConfig, format_size
from anaphora.errors import ConfigError
from anaphora.machine import usable_memory


def plan_num_blocks(config: EngineConfig, *, weight_bytes: int, block_bytes: int) -> int:
    """Blocks that fit the budget; raises ``ConfigError`` if not even one does."""
    if config.kv_cache_memory is not None:
        budget = config.kv_cache_memory
        remedy = "raise --kv-cache-memory"
    else:
        usable = usable_memory()
        budget = int(usable * config.gpu_memory_utilization) - weight_bytes
        remedy = (
            f"raise --gpu-memory-utilization ({config.gpu_memory_utilization} of "
            f"{format_size(usable)}, and the weights take {format_size(weight_bytes)})"
        )
    num_blocks = budget // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"{format_size(max(budget, 0))} for the K/V cache do not hold one block of "
            f"{config.block_size} tokens ({format_size(block_bytes)}); {remedy}"
        )
    return num_blocks


def plan_max_model_len(
    config: EngineConfig, *, max_position_embeddings: int, num_cache_tokens: int
) -> int:
    """Tokens that prompt and output of a request may have together.

    A lone sequence must always fit the cache: that is what makes every preemption recoverable.
    """
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

"""What the cache gets of the memory, and what context that allows."""

from __future__ import annotations

import pytest

from anaphora.cache.windows import Window
from anaphora.config import EngineConfig
from anaphora.engine import memory
from anaphora.engine.memory import plan_max_model_len, plan_num_blocks
from anaphora.errors import ConfigError
from anaphora.ops.kv_store import KVLayout, KVStore

GIB = 2**30


def test_weights_and_cache_share_the_utilization(monkeypatch):
    monkeypatch.setattr(memory, "usable_memory", lambda: 10 * GIB)
    config = EngineConfig(gpu_memory_utilization=0.4)
    assert plan_num_blocks(config, weight_bytes=GIB, block_bytes=2**20) == 3 * 1024
    explicit = EngineConfig(gpu_memory_utilization=0.4, kv_cache_memory=2**25)
    assert plan_num_blocks(explicit, weight_bytes=GIB, block_bytes=2**20) == 32


def test_too_little_memory_names_the_flag(monkeypatch):
    monkeypatch.setattr(memory, "usable_memory", lambda: GIB)
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization \(0.5 of 1.0 GiB"):
        plan_num_blocks(EngineConfig(), weight_bytes=GIB, block_bytes=2**20)
    with pytest.raises(ConfigError, match="raise --kv-cache-memory"):
        plan_num_blocks(EngineConfig(kv_cache_memory=5), weight_bytes=0, block_bytes=2**20)


def test_the_context_never_exceeds_the_cache():
    def plan(asked, num_blocks, window=None):
        config = EngineConfig(max_model_len=asked)
        return plan_max_model_len(
            config, max_position_embeddings=1000, num_blocks=num_blocks, window=window
        )

    assert plan(None, 320) == 1000
    assert plan(None, 50) == 800
    assert plan(600, 50) == 600
    with pytest.raises(ConfigError, match="trained for 1000"):
        plan(1001, 320)
    with pytest.raises(ConfigError, match="holds 480 tokens"):
        plan(600, 30)
    # With windowed layers the last blocks take more: 7 hold 3 each, the others one.
    window = Window(num_tokens=48, num_pages=2, block_size=16, max_chunk=32)
    assert window.max_parts == 7
    assert plan(None, 7 * 3 + 10, window) == 17 * 16
    assert plan(None, 8, window) == 2 * 16
    with pytest.raises(ConfigError, match="raise --kv-cache-memory"):
        plan(None, 2, window)


def test_a_store_that_cannot_be_had_is_a_clear_error():
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_size=16, dtype="float16")
    with pytest.raises(ConfigError, match="lower --kv-cache-memory"):
        KVStore(layout, 2**50)

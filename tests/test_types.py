from __future__ import annotations

from anaphora.types import EngineStats, TierCounters, add_stats


def test_counters_go_on_over_engines_and_gauges_do_not() -> None:
    tier = TierCounters(num_blocks=9, num_cached_blocks=5, hit_tokens=32)
    old = EngineStats(
        num_steps=3, num_used_blocks=2, tiers={"device": tier}, tenant_hits={"a": 1, "b": 2}
    )
    fresh = add_stats(old, EngineStats())  # it has told nothing yet
    assert (fresh.num_steps, fresh.num_used_blocks) == (3, 0)
    assert fresh.tiers == {"device": TierCounters(hit_tokens=32)}
    assert fresh.tenant_hits == {"a": 1, "b": 2}
    new = EngineStats(num_steps=1, tiers={"device": tier, "host": tier}, tenant_hits={"b": 5})
    both = add_stats(old, new)
    assert both.tiers["device"] == TierCounters(num_blocks=9, num_cached_blocks=5, hit_tokens=64)
    assert both.tiers["host"] == tier
    assert both.tenant_hits == {"a": 1, "b": 7}

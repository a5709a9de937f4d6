"""What ``/metrics`` shows of the engine and its cache, read at scrape time: nothing has to push.

Every series exists from the start, at zero, so that a rate over it is never missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from anaphora.server.served import ServedLLM
from anaphora.types import MISS_REASONS, WORKLOADS, EngineStats, TierCounters

OTHER_TENANTS = "other"

_GAUGES = (
    ("num_requests_running", "num_running", "Sequences being computed now."),
    ("num_requests_loading", "num_loading", "Sequences whose blocks come from a lower tier now."),
    ("num_requests_waiting", "num_waiting", "Sequences waiting for room."),
    ("kv_blocks", "num_total_blocks", "K/V blocks in the store."),
    ("kv_blocks_used", "num_used_blocks", "K/V blocks held by sequences."),
    ("kv_blocks_cached", "num_cached_blocks", "K/V blocks that a later prompt can reuse."),
    ("kv_blocks_window", "num_window_blocks", "K/V blocks of windowed layers beside them."),
    ("kv_blocks_pinned", "num_pinned_blocks", "K/V blocks that somebody asked to keep."),
)
_COUNTERS = (
    (
        "prefix_cache_queries",
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache (tokens, not requests).",
    ),
    (
        "prefix_cache_hits",
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache, whose computation was skipped.",
    ),
    (
        "prefill_seconds_saved",
        "prefill_seconds_saved",
        "Time that computing those would have taken, at the speed of prefill when they were found.",
    ),
    ("kv_blocks_evicted", "num_evicted_blocks", "Cached blocks given up for new ones."),
    ("num_preemptions", "num_preemptions", "Sequences set back for lack of blocks."),
    ("engine_steps", "num_steps", "Passes through the model."),
    (
        "computed_tokens",
        "num_computed_tokens",
        "Tokens run through the model, recomputation after preemption included.",
    ),
    ("engine_restarts", "num_engine_restarts", "Engine processes lost and replaced."),
    ("audited_blocks", "num_audited_blocks", "Cached blocks computed again and compared."),
    (
        "audits_skipped",
        "num_audits_skipped",
        "Cached blocks chosen for that, for which there was no time or room.",
    ),
    ("audit_mismatches", "num_audit_mismatches", "Compared blocks that were not equal: a fault."),
)
_TIER_GAUGES = (
    ("blocks", "num_blocks", "Blocks of the tier."),
    ("cached_blocks", "num_cached_blocks", "Blocks of the tier that a later prompt can reuse."),
)
_TIER_COUNTERS = (
    ("hit_tokens", "Prompt tokens whose computation was skipped thanks to the tier."),
    ("evicted_blocks", "Cached blocks given up for new ones."),
    (
        "refused_blocks",
        "Times that a prompt's next block, and so all after it, was not kept, because its owner "
        "has its maximum share already.",
    ),
    ("guarantees_broken", "Blocks taken from a guaranteed share, or pinned, for want of others."),
    ("stored_blocks", "Blocks copied down into the tier."),
    ("stored_bytes", "Bytes copied down into the tier."),
    ("store_seconds", "Time that took."),
    ("dropped_blocks", "Blocks not copied down, for want of time."),
    ("failed_stores", "Blocks that could not be stored."),
    ("loaded_blocks", "Blocks fetched up from the tier."),
    ("loaded_bytes", "Bytes fetched up from the tier."),
    ("load_seconds", "Time that took."),
    ("failed_loads", "Blocks that were damaged or could not be read: each a miss."),
    ("recomputed_blocks", "Blocks not fetched, because computing them was quicker."),
)


class EngineCollector(Collector):
    """The engine's counters.

    ``num_tenants``: so many tenants, the first ones seen, are labels; all others are one.
    """

    def __init__(self, llm: ServedLLM, *, num_tenants: int = 0) -> None:
        self._llm = llm
        self._num_tenants = num_tenants
        self._named_tenants: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        """One sample of everything the engine counts."""
        stats = self._llm.stats()
        for name, field, text in _GAUGES:
            yield _gauge(name, text, getattr(stats, field))
        for name, field, text in _COUNTERS:
            yield CounterMetricFamily(f"anaphora_{name}", text, value=getattr(stats, field))
        yield _gauge(
            "kv_cache_usage_ratio",
            "Share of the K/V blocks held by sequences, 0 to 1.",
            _ratio(stats.num_used_blocks, stats.num_total_blocks),
        )
        yield _gauge(
            "engine_up",
            "1 while an engine takes requests, 0 while one is starting.",
            float(self._llm.is_ready),
        )
        yield _gauge(
            "smallest_cacheable_prefix_tokens",
            "Tokens in a block: a prefix is cached in whole blocks.",
            self._llm.info.block_size,
        )
        yield _gauge("lora_adapters", "LoRA adapters that are loaded.", len(self._llm.adapters))
        tiers = {name: stats.tiers.get(name, TierCounters()) for name in self._llm.info.tier_bytes}
        yield from _tiers(tiers)
        yield from _lookups(
            "workload",
            {name: stats.workload_queries.get(name, 0) for name in WORKLOADS},
            {name: stats.workload_hits.get(name, 0) for name in WORKLOADS},
        )
        yield _counters(
            "prefix_cache_missed_tokens",
            "Prompt tokens that had to be computed, by the reason that the first of them missed.",
            "reason",
            {reason: stats.missed_tokens.get(reason, 0) for reason in MISS_REASONS},
        )
        yield _counters(
            "served_tokens",
            "Tokens computed and found, weighted by what they cost, by the class they were served "
            "in.",
            "class",
            {name: stats.served_tokens.get(name, 0) for name in WORKLOADS},
        )
        yield _counters(
            "bought_tokens",
            "Of anaphora_served_tokens_total, what endpoints had of their bought capacity.",
            "endpoint",
            stats.bought_tokens,
        )
        if self._num_tenants:
            queries, hits = stats.tenant_queries, stats.tenant_hits
            yield from _lookups("tenant", self._group(queries), self._group(hits))
        yield from _hit_rates(stats, tiers)

    def _group(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Counts by tenant, with those beyond the first few as one."""
        grouped = {OTHER_TENANTS: 0}
        for tenant, count in counts.items():
            if len(self._named_tenants) < self._num_tenants:
                self._named_tenants.add(tenant)
            label = tenant if tenant in self._named_tenants else OTHER_TENANTS
            grouped[label] = grouped.get(label, 0) + count
        return grouped


def _tiers(tiers: Mapping[str, TierCounters]) -> Iterator[Metric]:
    for name, field, text in _TIER_GAUGES:
        family = GaugeMetricFamily(f"anaphora_cache_tier_{name}", text, labels=["tier"])
        for tier, counters in tiers.items():
            family.add_metric([tier], getattr(counters, field))
        yield family
    for name, text in _TIER_COUNTERS:
        counts = {tier: getattr(counters, name) for tier, counters in tiers.items()}
        yield _counters(f"cache_tier_{name}", text, "tier", counts)


def _lookups(label: str, queries: Mapping[str, int], hits: Mapping[str, int]) -> Iterator[Metric]:
    """The two counters of the prefix cache, by one label."""
    yield _counters(
        f"prefix_cache_{label}_queries",
        f"Prompt tokens of each {label}; those of prefix_cache_queries.",
        label,
        queries,
    )
    yield _counters(
        f"prefix_cache_{label}_hits",
        f"Of these, tokens whose computation was skipped, by {label}.",
        label,
        hits,
    )


def _hit_rates(stats: EngineStats, tiers: Mapping[str, TierCounters]) -> Iterator[Metric]:
    queries = stats.prefix_cache_queries
    yield _gauge(
        "prefix_cache_hit_rate",
        "Hits divided by queries since the engine's start, in tokens, all tiers; 0 before the "
        "first query.",
        _ratio(stats.prefix_cache_hits, queries),
    )
    device, host = tiers.get("device", TierCounters()), tiers.get("host", TierCounters())
    yield GaugeMetricFamily(
        "vllm:gpu_prefix_cache_hit_rate",
        "As anaphora_prefix_cache_hit_rate for the first tier: the memory that attention reads, on "
        "a CPU as well. Named as in vLLM for existing dashboards.",
        value=_ratio(device.hit_tokens, queries),
    )
    yield GaugeMetricFamily(
        "vllm:cpu_prefix_cache_hit_rate",
        "As above for the second tier, host memory behind the first; 0 while there is none.",
        value=_ratio(host.hit_tokens, queries),
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"anaphora_{name}", text, value=value)


def _counters(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"anaphora_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

"""What ``/metrics`` shows. No tenant, model input or output is ever a label."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from anaphora.server.served import ServedLLM
from anaphora.types import EngineStats, FinishReason

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, *_SECONDS[:11])


class Metrics:
    """One app's counters, in a registry of their own so that two apps can share a process."""

    def __init__(self, llm: ServedLLM) -> None:
        # without a second series for each counter, which nobody plots
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(llm))
        self.prompt_tokens = Counter(
            "anaphora_prompt_tokens",
            "Prompt tokens of requests that produced output, cached ones included; with n > 1 a "
            "prompt counts once.",
            registry=self._registry,
        )
        self.cached_prompt_tokens = Counter(
            "anaphora_cached_prompt_tokens",
            "Of anaphora_prompt_tokens_total, those reported as cached_tokens.",
            registry=self._registry,
        )
        self.generation_tokens = Counter(
            "anaphora_generation_tokens",
            "Generated tokens, those of requests that were later aborted included.",
            registry=self._registry,
        )
        self._choices = Counter(
            "anaphora_choices",
            "Finished answers by finish_reason; a request with n = 3 counts 3, an abandoned one 0.",
            ["finished_reason"],
            registry=self._registry,
        )
        self._responses = Counter(
            "anaphora_http_responses",
            "HTTP responses by route and status. 499: the client left before the answer began.",
            ["route", "status"],
            registry=self._registry,
        )
        self.time_to_first_token = Histogram(
            "anaphora_time_to_first_token_seconds",
            "From a parsed request to its first output, waiting included.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.inter_token_latency = Histogram(
            "anaphora_inter_token_latency_seconds",
            "Between two outputs of one choice, divided by the tokens that the later one brings.",
            buckets=_TOKEN_SECONDS,
            registry=self._registry,
        )
        self.request_duration = Histogram(
            "anaphora_e2e_request_latency_seconds",
            "From a parsed request to its last output; only requests that finished.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def count_choice(self, reason: FinishReason) -> None:
        """One choice is complete."""
        self._choices.labels(finished_reason=reason).inc()

    def count_response(self, route: str, status: int) -> None:
        """One HTTP exchange is over. ``route`` is the template, never the path as sent."""
        self._responses.labels(route=route, status=str(status)).inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


_GAUGES = (
    ("anaphora_num_requests_running", "num_running", "Sequences being computed now."),
    ("anaphora_num_requests_waiting", "num_waiting", "Sequences waiting for room."),
    ("anaphora_kv_blocks", "num_total_blocks", "K/V blocks in the store."),
    ("anaphora_kv_blocks_used", "num_used_blocks", "K/V blocks held by sequences."),
    ("anaphora_kv_blocks_cached", "num_cached_blocks", "K/V blocks that a later prompt can reuse."),
)
_COUNTERS = (
    (
        "anaphora_prefix_cache_queries",
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache (tokens, not requests).",
    ),
    (
        "anaphora_prefix_cache_hits",
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache, whose computation was skipped.",
    ),
    ("anaphora_kv_blocks_evicted", "num_evicted_blocks", "Cached blocks given up for new ones."),
    ("anaphora_num_preemptions", "num_preemptions", "Sequences set back for lack of blocks."),
    ("anaphora_engine_steps", "num_steps", "Passes through the model."),
    (
        "anaphora_computed_tokens",
        "num_computed_tokens",
        "Tokens run through the model, recomputation after preemption included.",
    ),
    ("anaphora_engine_restarts", "num_engine_restarts", "Engine processes lost and replaced."),
)


class _EngineCollector(Collector):
    """Reads the engine's counters at scrape time, so nothing has to push them."""

    def __init__(self, llm: ServedLLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        """One sample of everything the engine counts."""
        stats = self._llm.stats()
        for name, field, text in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for name, field, text in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        yield GaugeMetricFamily(
            "anaphora_kv_cache_usage_ratio",
            "Share of the K/V blocks held by sequences, 0 to 1.",
            value=_ratio(stats.num_used_blocks, stats.num_total_blocks),
        )
        yield GaugeMetricFamily(
            "anaphora_engine_up",
            "1 while an engine takes requests, 0 while one is starting.",
            value=float(self._llm.is_ready),
        )
        yield from _hit_rates(stats)


def _hit_rates(stats: EngineStats) -> Iterator[Metric]:
    rate = _ratio(stats.prefix_cache_hits, stats.prefix_cache_queries)
    yield GaugeMetricFamily(
        "anaphora_prefix_cache_hit_rate",
        "Hits divided by queries since the engine's start, in tokens, all tiers; 0 before the "
        "first query.",
        value=rate,
    )
    yield GaugeMetricFamily(
        "vllm:gpu_prefix_cache_hit_rate",
        "As anaphora_prefix_cache_hit_rate for the first tier: the memory that attention reads, on "
        "a CPU as well. Named as in vLLM for existing dashboards.",
        value=rate,
    )
    yield GaugeMetricFamily(
        "vllm:cpu_prefix_cache_hit_rate",
        "As above for the second tier, host memory behind the first; 0 while there is none.",
        value=0.0,
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

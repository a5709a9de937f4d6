"""What ``/metrics`` shows. No model input or output is ever a label, and no tenant unless asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from anaphora.server.engine_metrics import EngineCollector
from anaphora.server.served import ServedLLM
from anaphora.server.usage import UsageLog
from anaphora.types import FinishReason, Workload

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, *_SECONDS[:11])


_TERMS = ("endpoint", "class")


@dataclasses.dataclass(frozen=True)
class RequestCounters:
    """What the requests of one endpoint and class have in common."""

    prompt_tokens: Counter
    cached_prompt_tokens: Counter
    generation_tokens: Counter
    end: Callable[[FinishReason], None]


class Metrics:
    """One app's counters, in a registry of their own so that two apps can share a process."""

    def __init__(self, llm: ServedLLM, *, num_tenants: int = 0) -> None:
        """``num_tenants``: see ``EngineCollector``."""
        # without a second series for each counter, which nobody plots
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(llm, num_tenants=num_tenants))
        self._prompt_tokens = Counter(
            "anaphora_prompt_tokens",
            "Prompt tokens of requests that produced output, cached ones included; with n > 1 a "
            "prompt counts once.",
            _TERMS,
            registry=self._registry,
        )
        self._cached_prompt_tokens = Counter(
            "anaphora_cached_prompt_tokens",
            "Of anaphora_prompt_tokens_total, those reported as cached_tokens.",
            _TERMS,
            registry=self._registry,
        )
        self._generation_tokens = Counter(
            "anaphora_generation_tokens",
            "Generated tokens, those of requests that were later aborted included.",
            _TERMS,
            registry=self._registry,
        )
        self._requests = Counter(
            "anaphora_requests",
            "Requests that were let in, when they end: as many as usage rows. abort: the client "
            "left.",
            [*_TERMS, "finished_reason"],
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

    def of(self, endpoint: str, workload: Workload) -> RequestCounters:
        """The counters of one endpoint's work of one kind."""
        terms = endpoint, workload
        return RequestCounters(
            self._prompt_tokens.labels(*terms),
            self._cached_prompt_tokens.labels(*terms),
            self._generation_tokens.labels(*terms),
            lambda reason: self._requests.labels(*terms, reason).inc(),
        )

    def watch(self, log: UsageLog) -> None:
        """Shows how the usage rows fare."""
        pending = Gauge(
            "anaphora_usage_rows_pending",
            "Usage rows that are not in the database yet.",
            registry=self._registry,
        )
        pending.set_function(lambda: log.num_pending)
        lost = Gauge(
            "anaphora_usage_rows_lost",
            "Usage rows given up because the database could not be written for too long.",
            registry=self._registry,
        )
        lost.set_function(lambda: log.num_lost)

    def count_choice(self, reason: FinishReason) -> None:
        """One choice is complete."""
        self._choices.labels(finished_reason=reason).inc()

    def count_response(self, route: str, status: int) -> None:
        """One HTTP exchange is over. ``route`` is the template, never the path as sent."""
        self._responses.labels(route=route, status=str(status)).inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

"""What ``/metrics`` shows. No model input or output is ever a label, and no tenant unless asked."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from anaphora.server.engine_metrics import EngineCollector
from anaphora.server.served import ServedLLM
from anaphora.types import FinishReason

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, *_SECONDS[:11])


class Metrics:
    """One app's counters, in a registry of their own so that two apps can share a process."""

    def __init__(self, llm: ServedLLM, *, num_tenants: int = 0) -> None:
        """``num_tenants``: see ``EngineCollector``."""
        # without a second series for each counter, which nobody plots
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(llm, num_tenants=num_tenants))
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

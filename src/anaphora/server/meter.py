"""What a request is let in for and what it used: limits, counters and usage row in one place."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping

from anaphora.config import Weights
from anaphora.server.endpoints import Endpoint
from anaphora.server.limits import Limiter, Reservation
from anaphora.server.metrics import Metrics
from anaphora.server.tenants import Caller
from anaphora.server.usage import UsageLog, UsageRow, now
from anaphora.types import CacheReport, FinishReason, Workload

_STATUS: Mapping[FinishReason, int] = {"stop": 200, "length": 200, "abort": 499, "error": 500}
_CLIENT_ERROR, _CLIENT_LEFT, _GIVEN_BACK = 400, 499, 503


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """Who asked for what, on which terms."""

    request_id: str
    caller: Caller
    endpoint: Endpoint
    workload: Workload
    adapter: str
    is_line: bool  # of a batch file
    num_input_tokens: int
    num_output_tokens: int  # at most


@dataclasses.dataclass
class Used:
    """Token counts of one request, as they grow."""

    input_tokens: int = 0  # of prompts that brought output
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    num_choices: int = 0  # that brought output
    ttft: float | None = None  # seconds


class Meter:
    """One request from ``begin`` to ``end``."""

    def __init__(
        self,
        asked: Asked,
        *,
        limiter: Limiter,
        metrics: Metrics,
        usage_log: UsageLog | None,
        weights: Weights,
    ) -> None:
        self.used = Used()
        self.asked = asked
        self._limiter = limiter
        self._counters = metrics.of(asked.endpoint.name, asked.workload)
        self._metrics = metrics
        self._usage_log = usage_log
        self._weights = weights
        self._reservation: Reservation | None = None
        self.finish_reason: FinishReason | None = None
        self._started = time.perf_counter()

    def begin(self) -> None:
        """Raises ``RateLimited``."""
        asked = self.asked
        self._reservation = self._limiter.admit(
            asked.caller.tenant,
            asked.endpoint.name,
            asked.num_input_tokens,
            asked.num_output_tokens,
            is_line=asked.is_line,
        )
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._started

    def headers(self) -> dict[str, str]:
        """What is left of the tenant's limits."""
        return self._reservation.headers if self._reservation else {}

    def add_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """A prompt has brought its first output."""
        used = self.used
        if used.ttft is None:
            used.ttft = self.seconds
            self._metrics.time_to_first_token.observe(used.ttft)
        used.input_tokens += num_tokens
        used.cached_tokens += num_cached_tokens
        self._counters.prompt_tokens.inc(num_tokens)
        self._counters.cached_prompt_tokens.inc(num_cached_tokens)

    def add_output(self, num_tokens: int, *, is_reasoning: bool) -> None:
        """Tokens were generated."""
        self.used.output_tokens += num_tokens
        self.used.reasoning_tokens += num_tokens if is_reasoning else 0
        self._counters.generation_tokens.inc(num_tokens)

    def charged_tokens(self) -> float:
        """What bought capacity is charged for it, in weighted tokens."""
        used, weights = self.used, self._weights
        num_computed_outputs = max(0, used.output_tokens - used.num_choices)  # see Accounts
        return (
            used.input_tokens
            - used.cached_tokens * (1 - weights.cached)
            + num_computed_outputs * weights.output
        )

    def log_fields(self) -> dict[str, str | int | float | None]:
        """For the line that the log has of each request."""
        used, asked = self.used, self.asked
        return {
            "key_id": asked.caller.key_id,
            "endpoint": asked.endpoint.name,
            "class": asked.workload,
            "input_tokens": used.input_tokens,
            "cached_tokens": used.cached_tokens,
            "output_tokens": used.output_tokens,
            "finish_reason": self.finish_reason,
            "ttft": used.ttft if used.ttft is None else round(used.ttft, 6),
        }

    def end(
        self, reason: FinishReason, reports: Iterable[CacheReport | None], status: int | None = None
    ) -> None:
        """The one end of every request that was let in."""
        if self._reservation is None or self.finish_reason is not None:
            return
        self.finish_reason = reason
        status = _STATUS[reason] if status is None else status
        if self.asked.is_line and status == _CLIENT_LEFT:
            status = _GIVEN_BACK  # a batch's line that will run again: nobody pays twice
        used, asked = self.used, self.asked
        self._reservation.settle(num_cached=used.cached_tokens, num_output=used.output_tokens)
        if _CLIENT_ERROR <= status < _CLIENT_LEFT and not used.input_tokens:
            return  # refused after all, as a constraint can be when it is tried
        self._counters.end(reason)
        if self._usage_log is None:
            return
        hits = [report.hits for report in reports if report is not None]
        self._usage_log.add(
            UsageRow(
                at=now(),
                request_id=asked.request_id,
                tenant=asked.caller.tenant,
                key_id=asked.caller.key_id,
                endpoint=asked.endpoint.name,
                workload=asked.workload,
                adapter=asked.adapter,
                input_tokens=used.input_tokens,
                cached_tokens=used.cached_tokens,
                cached_host_tokens=sum(hit.get("host", 0) for hit in hits),
                cached_disk_tokens=sum(hit.get("disk", 0) for hit in hits),
                output_tokens=used.output_tokens,
                reasoning_tokens=used.reasoning_tokens,
                charged_tokens=self.charged_tokens(),
                ttft=used.ttft,
                duration=self.seconds,
                finish_reason=reason,
                status=status,
            )
        )

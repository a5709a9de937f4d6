"""One HTTP request's generation: every prompt with its n choices, as one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from anaphora.errors import ContextTooLong, EngineDied
from anaphora.server.diagnostics import cache_headers, diagnostics
from anaphora.server.endpoints import Endpoint
from anaphora.server.fields import SERVED_TIERS
from anaphora.server.meter import Meter
from anaphora.server.metrics import Metrics
from anaphora.server.served import ServedLLM
from anaphora.types import (
    CacheReport,
    CacheScope,
    CompletionDelta,
    FinishReason,
    SamplingParams,
)

_MAX_PENDING_DELTAS = 64  # beyond this a request with many prompts waits for its reader


class Generation:
    """Runs ``prompts`` and counts their tokens.

    The constructor raises what ``ServedLLM.generate`` raises; ``deltas`` does the work, once, and
    raises ``RateLimited`` at its first step.
    """

    def __init__(
        self,
        llm: ServedLLM,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        scope: CacheScope,
        meter: Meter,
        metrics: Metrics,
        field: str,
        urgent_in: float | None = None,
    ) -> None:
        self.prompts = prompts
        self.scope = scope
        self.prompts = prompts
        self.scope = scope
        self._params = params
        self._metrics = metrics
        self._meter = meter
        self._prompt_lengths = [len(prompt) for prompt in prompts]
        self._reports: list[CacheReport | None] = [None] * len(prompts)
        self._last_output: dict[int, float] = {}  # choice → when it last brought tokens
        self._seen_prompts: set[int] = set()
        self._num_finished = 0
        self._reason: FinishReason = "stop"  # of the choices so far: length if one has it
        try:
            self._streams = [
                llm.generate(
                    prompt,
                    params,
                    scope=scope,
                    workload=meter.asked.workload,
                    endpoint=meter.asked.endpoint.name,
                    urgent_in=urgent_in,
                    request_id=f"{meter.asked.request_id}-{index}",
                )
                for index, prompt in enumerate(prompts)
            ]
        except ContextTooLong as error:
            if error.param == "prompt":
                error.param = field
            raise

    @property
    def endpoint(self) -> Endpoint:
        """What the request named as its model."""
        return self._meter.asked.endpoint

    @property
    def num_choices(self) -> int:
        """Choices of all prompts together."""
        return len(self._streams) * self._params.n

    @property
    def service_tier(self) -> str:
        """How OpenAI's answers name the class that it is served in."""
        return SERVED_TIERS[self._meter.asked.workload]

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object for what came out so far."""
        used = self._meter.used
        prompt_tokens = sum(self._prompt_lengths)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": used.output_tokens,
            "total_tokens": prompt_tokens + used.output_tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        }
        if self._params.output_format == "harmony":
            details = {"reasoning_tokens": used.reasoning_tokens}
            usage["completion_tokens_details"] = details
        if self._meter.asked.workload == "provisioned":
            usage["capacity_tokens"] = self._meter.charged_tokens()
        return usage

    def diagnostics(self) -> list[dict[str, Any]]:
        """What the cache did, for each prompt."""
        return [diagnostics(report) for report in self._reports]

    def headers(self) -> dict[str, str]:
        """The same in short, of the prompts that have brought output so far, and the limits."""
        return {**cache_headers(self._reports), **self._meter.headers()}

    async def deltas(self) -> AsyncGenerator[CompletionDelta, None]:
        """All output; ``index`` counts through all prompts. Closing it aborts what still runs."""
        self._meter.begin()
        reason: FinishReason = "abort"
        status: int | None = None
        try:
            async with aclosing(self._merge()) as merged:
                async for prompt_index, delta in merged:
                    index = prompt_index * self._params.n + delta.index
                    self._count(prompt_index, index, delta)
                    yield msgspec.structs.replace(delta, index=index)
            if self._num_finished < self.num_choices:
                raise EngineDied("the engine stopped before the answer was complete; send it again")
            reason = self._reason
            self._metrics.request_duration.observe(self._meter.seconds)
        except Exception as error:
            reason, status = "error", getattr(error, "status", 500)
            raise
        finally:
            self._meter.end(reason, self._reports, status)

    def _count(self, prompt_index: int, index: int, delta: CompletionDelta) -> None:
        if delta.finish_reason in ("abort", "error"):
            raise EngineDied("the engine gave up on this request; send it again")
        if delta.cache_report is not None:
            self._reports[prompt_index] = delta.cache_report
        if prompt_index not in self._seen_prompts:
            self._seen_prompts.add(prompt_index)
            self._meter.add_prompt(self._prompt_lengths[prompt_index], delta.num_cached_tokens)
        if num_tokens := len(delta.token_ids):
            now = time.perf_counter()
            self._meter.add_output(num_tokens, is_reasoning=delta.part == "reasoning")
            if index in self._last_output:
                gap = now - self._last_output[index]
                self._metrics.inter_token_latency.observe(gap / num_tokens)
            else:
                self._meter.used.num_choices += 1
            self._last_output[index] = now
        if delta.finish_reason is not None:
            self._num_finished += 1
            self._metrics.count_choice(delta.finish_reason)
            self._reason = "length" if delta.finish_reason == "length" else self._reason

    async def _merge(self) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
        if len(self._streams) == 1:
            async with aclosing(self._streams[0]) as stream:
                async for delta in stream:
                    yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, CompletionDelta | Exception | None]] = asyncio.Queue(
            _MAX_PENDING_DELTAS
        )
        tasks = [
            asyncio.create_task(_pump(index, stream, queue))
            for index, stream in enumerate(self._streams)
        ]
        try:
            num_open = len(tasks)
            while num_open:
                index, item = await queue.get()
                if item is None:
                    num_open -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int,
    stream: AsyncGenerator[CompletionDelta, None],
    queue: asyncio.Queue[tuple[int, CompletionDelta | Exception | None]],
) -> None:
    """Move one prompt's output to ``queue``, then None or the exception that ended it."""
    end: Exception | None = None
    try:
        async with aclosing(stream):
            async for delta in stream:
                await queue.put((index, delta))
    except Exception as error:
        end = error
    await queue.put((index, end))

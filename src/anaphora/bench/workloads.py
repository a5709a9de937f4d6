"""What is measured: seeded workloads, as plain data and a coroutine against one client.

Prompts are token ids, so that every system gets the same ones, and no two repeats share one. Every
answer is greedy, has a fixed length, and is checked: its length, and that nothing new was cached.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from itertools import chain
from typing import Protocol, Self

from anaphora.bench.client import Answer
from anaphora.errors import MeasurementError

FIRST_TOKEN_ID = 100  # control tokens usually come before


class Client(Protocol):
    """What a workload needs of a system."""

    async def complete(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """The greedy answer of exactly ``num_tokens`` tokens."""


class Prompts:
    """Token ids that depend only on ``labels``: equal for all systems, fresh for each repeat."""

    def __init__(self, vocab_size: int, *labels: object) -> None:
        if vocab_size <= FIRST_TOKEN_ID:
            raise MeasurementError(f"the vocabulary has {vocab_size} tokens, too few to draw from")
        self._random = random.Random("/".join(map(str, labels)))
        self._vocab_size = vocab_size

    def fresh(self, length: int) -> list[int]:
        """``length`` random ids."""
        return [self._random.randrange(FIRST_TOKEN_ID, self._vocab_size) for _ in range(length)]

    def choose(self, pool: Sequence[list[int]]) -> list[int]:
        """One of ``pool``."""
        return self._random.choice(pool)

    def gap(self, rate: float) -> float:
        """Seconds to the next of Poisson arrivals, ``rate`` a second."""
        return self._random.expovariate(rate)


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number that a workload gives."""

    name: str
    unit: str  # tok/s, s or x
    is_higher_better: bool
    is_cold: bool = False  # of requests that were checked to have nothing cached


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one repeat gave."""

    values: dict[str, float]  # by the figure's name
    cached_share: float | None  # of the prompt tokens; None: the server does not say


THROUGHPUT = Figure("throughput", "tok/s", is_higher_better=True)


class Workload(Protocol):
    """A frozen dataclass of sizes."""

    @property
    def name(self) -> str:
        """As ``--workload`` takes it."""

    @property
    def figures(self) -> tuple[Figure, ...]:
        """What ``measure`` gives."""

    def smaller(self) -> Self:
        """What a warm-up runs."""

    async def measure(self, client: Client, prompts: Prompts) -> Sample:
        """One repeat. Raises ``MeasurementError``."""


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Cold prompt tokens per second, from the TTFT of an answer of one token."""

    num_prompt_tokens: int
    figures = (THROUGHPUT,)

    @property
    def name(self) -> str:
        """For example prefill-512."""
        return f"prefill-{self.num_prompt_tokens}"

    def smaller(self) -> Self:
        """The same: one request."""
        return self

    async def measure(self, client: Client, prompts: Prompts) -> Sample:
        """One request."""
        answer = await _cold(client, prompts.fresh(self.num_prompt_tokens), 1)
        return _sample([answer], throughput=self.num_prompt_tokens / answer.ttft)


@dataclasses.dataclass(frozen=True)
class Hot:
    """TTFT of a prompt's first and second request."""

    num_prompt_tokens: int
    figures = (
        Figure("miss", "s", is_higher_better=False, is_cold=True),
        Figure("hit", "s", is_higher_better=False),
        Figure("miss / hit", "x", is_higher_better=True),
    )

    @property
    def name(self) -> str:
        """For example hot-2048."""
        return f"hot-{self.num_prompt_tokens}"

    def smaller(self) -> Self:
        """The same: two requests."""
        return self

    async def measure(self, client: Client, prompts: Prompts) -> Sample:
        """Two requests, one after the other."""
        prompt = prompts.fresh(self.num_prompt_tokens)
        miss = await _cold(client, prompt, 1)
        hit = await _ask(client, prompt, 1)
        values = {"miss": miss.ttft, "hit": hit.ttft, "miss / hit": miss.ttft / hit.ttft}
        return _sample([hit], **values)


@dataclasses.dataclass(frozen=True)
class Decode:
    """Tokens per second of all streams together, while all of them decode."""

    num_streams: int
    num_prompt_tokens: int = 64
    num_tokens: int = 65
    figures = (THROUGHPUT,)

    @property
    def name(self) -> str:
        """For example decode-8."""
        return f"decode-{self.num_streams}"

    def smaller(self) -> Self:
        """The same: shorter streams might end before all have begun."""
        return self

    async def measure(self, client: Client, prompts: Prompts) -> Sample:
        """All streams at once."""
        asked = [prompts.fresh(self.num_prompt_tokens) for _ in range(self.num_streams)]
        answers = await asyncio.gather(*(_cold(client, p, self.num_tokens) for p in asked))
        return _sample(answers, throughput=joint_decode_rate(answers))


def joint_decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second from the last stream's first token to the first stream's end.

    A piece of text can hold several tokens; each of a stream's pieces counts for as many.
    """
    start = max(answer.events[0] for answer in answers)
    end = min(answer.events[-1] for answer in answers)
    if end <= start:
        raise MeasurementError(
            f"the {len(answers)} streams never decoded together: one ended before another began"
        )
    num_tokens = 0.0
    for answer in answers:
        num_inside = sum(start < event <= end for event in answer.events)
        num_tokens += num_inside * (answer.num_tokens - 1) / (len(answer.events) - 1)
    return num_tokens / (end - start)


@dataclasses.dataclass(frozen=True)
class SharedPrefix:
    """Wall seconds of requests at once that begin with the same tokens."""

    num_requests: int = 16
    num_shared_tokens: int = 1024
    num_own_tokens: int = 64
    num_tokens: int = 32
    figures = (Figure("wall", "s", is_higher_better=False),)

    @property
    def name(self) -> str:
        """For example shared16."""
        return f"shared{self.num_requests}"

    def smaller(self) -> Self:
        """Two requests."""
        return dataclasses.replace(self, num_requests=2)

    async def measure(self, client: Client, prompts: Prompts) -> Sample:
        """All requests at once."""
        shared = prompts.fresh(self.num_shared_tokens)
        asked = [shared + prompts.fresh(self.num_own_tokens) for _ in range(self.num_requests)]
        answers = await asyncio.gather(*(_ask(client, p, self.num_tokens) for p in asked))
        wall = max(a.end for a in answers) - min(a.start for a in answers)
        return _sample(answers, wall=wall)


@dataclasses.dataclass(frozen=True)
class Chat:
    """TTFT in conversations that grow turn by turn, users side by side, one system prompt.

    A turn appends fresh tokens, standing for an answer and the next question: the ids of a
    model's own answer cannot be had from every system.
    """

    num_users: int = 8
    num_turns: int = 6
    num_system_tokens: int = 400
    num_turn_tokens: int = 60
    num_tokens: int = 32
    name = "chat"
    figures = (
        Figure("mean TTFT", "s", is_higher_better=False),
        Figure("median TTFT", "s", is_higher_better=False),
    )

    def smaller(self) -> Self:
        """One turn of two users."""
        return dataclasses.replace(self, num_users=2, num_turns=1)

    async def measure(self, client: Client, prompts: Prompts) -> Sample:
        """All conversations to their end."""
        system = prompts.fresh(self.num_system_tokens)

        async def converse(turns: list[list[int]]) -> list[Answer]:
            conversation, answers = list(system), []
            for turn in turns:
                conversation += turn
                answers.append(await _ask(client, conversation, self.num_tokens))
            return answers

        scripts = [
            [prompts.fresh(self.num_turn_tokens) for _ in range(self.num_turns)]
            for _ in range(self.num_users)
        ]
        answers = list(chain(*await asyncio.gather(*map(converse, scripts))))
        ttfts = [answer.ttft for answer in answers]
        values = {"mean TTFT": statistics.mean(ttfts), "median TTFT": statistics.median(ttfts)}
        return _sample(answers, **values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownPrefixes:
    """Prompts that begin with one of a few known prefixes: ``share`` of their tokens.

    480 tokens, so that the shares of the sweep end with a block of 16.
    """

    share: float
    num_requests: int
    num_prompt_tokens: int = 480
    num_prefixes: int = 8
    num_tokens: int = 16

    async def make_known(self, client: Client, prompts: Prompts) -> list[list[int]]:
        """The requests' prompts, after their prefixes have been sent once."""
        num_known = round(self.num_prompt_tokens * self.share)
        pool = [prompts.fresh(num_known) for _ in range(self.num_prefixes)]
        if num_known:
            # one token more: a prompt's last token is always computed
            await asyncio.gather(*(_cold(client, p + prompts.fresh(1), 1) for p in pool))
        num_fresh = self.num_prompt_tokens - num_known
        return [prompts.choose(pool) + prompts.fresh(num_fresh) for _ in range(self.num_requests)]


_LOOP_FIGURES = (THROUGHPUT, Figure("p50", "s", is_higher_better=False))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClosedLoop(KnownPrefixes):
    """Prompt tokens per second and median latency with so many clients, each always waiting."""

    num_clients: int
    figures = _LOOP_FIGURES

    @property
    def name(self) -> str:
        """For example hit-30-clients-8."""
        return f"hit-{round(100 * self.share)}-clients-{self.num_clients}"

    def smaller(self) -> Self:
        """Two requests."""
        return dataclasses.replace(self, num_requests=2, num_prefixes=2)

    async def measure(self, client: Client, prompts: Prompts) -> Sample:
        """All requests, as fast as the clients get their answers."""
        waiting = iter(await self.make_known(client, prompts))

        async def work() -> list[Answer]:
            return [await _ask(client, prompt, self.num_tokens) for prompt in waiting]

        answers = list(chain(*await asyncio.gather(*(work() for _ in range(self.num_clients)))))
        wall = max(a.end for a in answers) - min(a.start for a in answers)
        num_prompt_tokens = self.num_prompt_tokens * len(answers)
        p50 = statistics.median(answer.end - answer.start for answer in answers)
        return _sample(answers, throughput=num_prompt_tokens / wall, p50=p50)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenLoop(KnownPrefixes):
    """Median latency when requests arrive at random, whether or not earlier ones are done."""

    rate: float  # requests a second
    figures = _LOOP_FIGURES

    @property
    def name(self) -> str:
        """For example hit-30-open."""
        return f"hit-{round(100 * self.share)}-open"

    def smaller(self) -> Self:
        """Two requests."""
        return dataclasses.replace(self, num_requests=2, num_prefixes=2)

    async def measure(self, client: Client, prompts: Prompts) -> Sample:
        """A latency begins with the arrival, even if this client sends a little later."""
        asked = await self.make_known(client, prompts)
        arrivals = []
        arrival = time.perf_counter()
        for _ in asked:
            arrival += prompts.gap(self.rate)
            arrivals.append(arrival)

        async def arrive(arrival: float, prompt: list[int]) -> Answer:
            await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
            return await _ask(client, prompt, self.num_tokens)

        answers = await asyncio.gather(*map(arrive, arrivals, asked))
        latencies = [
            answer.end - arrival for answer, arrival in zip(answers, arrivals, strict=True)
        ]
        wall = max(answer.end for answer in answers) - arrivals[0]
        throughput = self.num_prompt_tokens * len(answers) / wall
        return _sample(answers, throughput=throughput, p50=statistics.median(latencies))


async def _ask(client: Client, prompt: Sequence[int], num_tokens: int) -> Answer:
    answer = await client.complete(prompt, num_tokens)
    if answer.num_tokens != num_tokens:
        raise MeasurementError(
            f"asked for exactly {num_tokens} tokens, got {answer.num_tokens}; does the server know "
            "ignore_eos?"
        )
    if answer.num_prompt_tokens not in (len(prompt), len(prompt) + 1):  # some add a first token
        raise MeasurementError(
            f"sent a prompt of {len(prompt)} token ids, but usage says {answer.num_prompt_tokens}"
        )
    return answer


async def _cold(client: Client, prompt: Sequence[int], num_tokens: int) -> Answer:
    answer = await _ask(client, prompt, num_tokens)
    if answer.num_cached_tokens:
        raise MeasurementError(
            f"a prompt nobody has sent before has {answer.num_cached_tokens} cached tokens; was "
            "this server measured with the same --seed before? Choose another one"
        )
    return answer


def _sample(answers: Sequence[Answer], **values: float) -> Sample:
    cached = [answer.num_cached_tokens for answer in answers]
    known = [num for num in cached if num is not None]
    total = sum(answer.num_prompt_tokens for answer in answers)
    return Sample(values, sum(known) / total if len(known) == len(cached) else None)


ALL: tuple[Workload, ...] = (
    Prefill(512),
    Prefill(2048),
    Hot(2048),
    Decode(1),
    Decode(8),
    Decode(32),
    SharedPrefix(),
    Chat(),
)

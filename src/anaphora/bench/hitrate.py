"""The hit-rate sweep: how much a cache gives at a known share of known tokens, and why.

Each share is compared with a baseline measured in the same repeat: the same server with its cache
off, or, for a server that is not ours, the same server with prompts that it has never seen.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

from anaphora.bench.rounds import Rounds
from anaphora.bench.workloads import Client, ClosedLoop, OpenLoop, Sample

SHARES = (0.0, 0.3, 0.5, 0.8)
LOAD = 0.9  # of the baseline's capacity, in the open loop


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many requests each loop sends."""

    num_closed: int = 32
    num_clients: int = 8
    num_alone: int = 12
    num_open: int = 48


@dataclasses.dataclass(frozen=True)
class Loops:
    """One server at one share, in one repeat. Latencies are medians in seconds."""

    throughput: float  # prompt tokens per second, closed loop
    p50_closed: float
    p50_alone: float  # one client: the service time
    p50_open: float
    cached_share: float | None


@dataclasses.dataclass(frozen=True)
class Gain:
    """How many times better a share is than its baseline, and what that is made of.

    Throughput gains by skipped compute times shared loads; open-loop latency by skipped compute
    times shorter queues.
    """

    throughput: float
    p50_closed: float
    p50_open: float
    skipped_compute: float

    @property
    def shared_loads(self) -> float:
        """What is left of the throughput's gain: requests computed together read memory once."""
        return self.throughput / self.skipped_compute

    @property
    def shorter_queues(self) -> float:
        """What is left of the open loop's gain: at the same arrivals, less waiting."""
        return self.p50_open / self.skipped_compute


def gain(loops: Loops, baseline: Loops) -> Gain:
    """``loops`` against ``baseline`` of the same repeat."""
    return Gain(
        throughput=loops.throughput / baseline.throughput,
        p50_closed=baseline.p50_closed / loops.p50_closed,
        p50_open=baseline.p50_open / loops.p50_open,
        skipped_compute=baseline.p50_alone / loops.p50_alone,
    )


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All repeats: the baseline's, and those of each share beside their gains."""

    baseline: list[Loops]
    shares: dict[float, list[Loops]]

    def median(self, share: float | None, value: Callable[[Loops], float]) -> float:
        """Of one number over the repeats; ``share`` None is the baseline."""
        return statistics.median(map(value, self.baseline if share is None else self.shares[share]))

    def median_gain(self, share: float, value: Callable[[Gain], float]) -> float:
        """Of one ratio, each taken within its repeat."""
        pairs = zip(self.shares[share], self.baseline, strict=True)
        return statistics.median(value(gain(loops, base)) for loops, base in pairs)


async def run_sweep(
    rounds: Rounds,
    cached: Client,
    uncached: Client | None,
    sizes: Sizes = Sizes(),
) -> Sweep:
    """Warm-up, then all repeats. ``uncached`` is the same server with its cache off, if there is
    one. Raises ``MeasurementError``.
    """
    warm_up = ClosedLoop(share=0.5, num_requests=2, num_clients=2)
    for client in filter(None, (cached, uncached)):
        await warm_up.smaller().measure(client, rounds.prompts("hit-rate", "warm-up"))
    sweep = Sweep([], {share: [] for share in SHARES})
    for repeat in range(rounds.repeats):
        one = _Repeat(rounds, repeat, sizes)
        if uncached is not None:
            # Without a cache a prompt's share of known tokens changes nothing.
            sweep.baseline.append(await one.loops("caching off", uncached, 0.3))
        for share in SHARES:
            loops = await one.loops("caching on", cached, share)
            if len(sweep.baseline) == repeat:
                sweep.baseline.append(loops)  # the share 0 of a server that is not ours
            sweep.shares[share].append(loops)
    return sweep


class _Repeat:
    """The first loops measured, the baseline's, set the open loop's arrivals for all others."""

    def __init__(self, rounds: Rounds, repeat: int, sizes: Sizes) -> None:
        self._rounds = rounds
        self._repeat = repeat
        self._sizes = sizes
        self._rate: float | None = None

    async def loops(self, system: str, client: Client, share: float) -> Loops:
        """Closed loop with several clients, with one, and open loop."""
        sizes = self._sizes
        closed = ClosedLoop(
            share=share, num_requests=sizes.num_closed, num_clients=sizes.num_clients
        )
        alone = ClosedLoop(share=share, num_requests=sizes.num_alone, num_clients=1)
        many = await self._measure(system, client, closed)
        single = await self._measure(system, client, alone)
        if self._rate is None:
            self._rate = LOAD * many.values["throughput"] / closed.num_prompt_tokens
        arriving = OpenLoop(share=share, num_requests=sizes.num_open, rate=self._rate)
        arrived = await self._measure(system, client, arriving)
        return Loops(
            throughput=many.values["throughput"],
            p50_closed=many.values["p50"],
            p50_alone=single.values["p50"],
            p50_open=arrived.values["p50"],
            cached_share=many.cached_share,
        )

    async def _measure(
        self, system: str, client: Client, workload: ClosedLoop | OpenLoop
    ) -> Sample:
        place = f"{self._repeat + 1} of {self._rounds.repeats}"
        self._rounds.notice(f"{workload.name}, {system}, {place}")
        prompts = self._rounds.prompts(workload.name, self._repeat)
        return await workload.measure(client, prompts)

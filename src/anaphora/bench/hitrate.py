"""The hit-rate sweep: how much a cache gives at a known share of known tokens, and why.

Each share is compared with a baseline measured in the same repeat: the same server with its cache
off, or, for a server that is not ours, the same server with prompts that it has never seen.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from anaphora.bench.rounds import CACHING_OFF, CACHING_ON, Rounds
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
    # Without a cache a prompt's share of known tokens changes nothing: any will do.
    servers: list[_Row] = [] if uncached is None else [(CACHING_OFF, uncached, SHARES[1])]
    servers += [(CACHING_ON, cached, share) for share in SHARES]
    for repeat in range(rounds.repeats):
        loops = await _Repeat(rounds, repeat, sizes).all_loops(servers)
        sweep.baseline.append(loops[0])  # of a server that is not ours, its share 0
        for share, found in zip(SHARES, loops[-len(SHARES) :], strict=True):
            sweep.shares[share].append(found)
    return sweep


_Row = tuple[str, Client, float]  # the system's name, the system, the share of known tokens


class _Repeat:
    """One kind of loop for all rows before the next kind: what is compared is close in time."""

    def __init__(self, rounds: Rounds, repeat: int, sizes: Sizes) -> None:
        self._rounds = rounds
        self._repeat = repeat
        self._sizes = sizes

    async def all_loops(self, rows: Sequence[_Row]) -> list[Loops]:
        """One for each row; the first one's capacity sets the arrivals for all."""
        sizes = self._sizes
        closed = [
            ClosedLoop(share=share, num_requests=sizes.num_closed, num_clients=sizes.num_clients)
            for _, _, share in rows
        ]
        alone = [
            ClosedLoop(share=share, num_requests=sizes.num_alone, num_clients=1)
            for _, _, share in rows
        ]
        many = [await self._measure(*row) for row in zip(rows, closed, strict=True)]
        single = [await self._measure(*row) for row in zip(rows, alone, strict=True)]
        rate = LOAD * many[0].values["throughput"] / closed[0].num_prompt_tokens
        arriving = [
            OpenLoop(share=share, num_requests=sizes.num_open, rate=rate) for _, _, share in rows
        ]
        arrived = [await self._measure(*row) for row in zip(rows, arriving, strict=True)]
        return [
            Loops(
                throughput=of_many.values["throughput"],
                p50_closed=of_many.values["p50"],
                p50_alone=of_one.values["p50"],
                p50_open=of_arrivals.values["p50"],
                cached_share=of_many.cached_share,
            )
            for of_many, of_one, of_arrivals in zip(many, single, arrived, strict=True)
        ]

    async def _measure(self, row: _Row, workload: ClosedLoop | OpenLoop) -> Sample:
        system, client, _ = row
        place = f"{self._repeat + 1} of {self._rounds.repeats}"
        self._rounds.notice(f"{workload.name}, {system}, {place}")
        prompts = self._rounds.prompts(workload.name, self._repeat)
        return await workload.measure(client, prompts)

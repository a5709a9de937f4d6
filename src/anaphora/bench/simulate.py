"""Replays a trace against the cache itself, without a model: what a policy finds in it.

The cache manager sees one token a block: it knows only ids, so nothing else changes. A request
matches, takes what it lacks, publishes it and ends before the next one comes.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import importlib.util
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from anaphora.bench.optimum import optimal_hits
from anaphora.bench.traces import ReadOptions, Trace, read_trace
from anaphora.cache.cacheable import Admission
from anaphora.cache.eviction import POLICIES, EvictionPolicy
from anaphora.cache.hashing import HASH_BYTES, BlockHash, BlockHasher, BlockKey
from anaphora.cache.hierarchy import Hierarchy
from anaphora.cache.manager import CacheManager
from anaphora.cache.pool import BlockRecord
from anaphora.cache.shares import Owner
from anaphora.cache.tiers import Mover, Pieces, Transfer
from anaphora.cache.windows import Window, WindowState
from anaphora.config import DEFAULT_MODEL
from anaphora.errors import ConfigError, RequestError
from anaphora.llm import TextSide
from anaphora.loaders.sources import resolve

_NO_ROOM = 1e-6  # of a hit rate
_OWNER = Owner("simulated", "interactive")
_ROOT = BlockHash(bytes(HASH_BYTES))
Notice = Callable[[int], None]  # called with the number of requests done


@dataclasses.dataclass(slots=True)
class _Sequence:
    """The least that the cache manager wants of one."""

    token_ids: list[int]
    block_keys: list[BlockKey]
    root_hash: BlockHash = _ROOT
    num_public_blocks: int = 0
    owner: Owner = _OWNER
    admission: Admission | None = None
    num_computed_tokens: int = 0
    num_found_tokens: int = 0
    block_table: array.array[int] = dataclasses.field(default_factory=lambda: array.array("i"))
    window: WindowState = dataclasses.field(default_factory=WindowState)


class _Slots:
    """A lower tier's storage of blocks without bytes."""

    is_memory = True

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def block_view(self, _block_id: int) -> memoryview:
        return memoryview(b"")

    def write(self, _slot: int, _record: BlockRecord, _data: memoryview, /) -> None:
        pass

    def read(self, _slot: int, _record: BlockRecord, _into: memoryview, /) -> None:
        pass

    def erase(self, _slot: int) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class _InstantMover(Mover):
    """Moves nothing, in no time."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived: list[Transfer] = []

    def submit(self, transfer: Transfer, _pieces: Pieces) -> None:
        self._arrived.append(transfer)

    def poll(self, _timeout: float | None = 0.0) -> list[Transfer]:
        arrived, self._arrived = self._arrived, []
        return arrived


@dataclasses.dataclass(frozen=True)
class TierTraffic:
    """What went to and from a second tier, in blocks over the whole trace."""

    capacity: int
    num_hits: int  # blocks that were fetched, so that they needed no computation
    num_stored: int
    num_evicted: int


@dataclasses.dataclass(frozen=True)
class Replay:
    """What one policy did with one capacity."""

    hits: list[int]  # blocks found, by request, in either tier
    host: TierTraffic | None
    num_evicted: int
    seconds: float  # it took


def make_keys(trace: Trace) -> list[BlockKey]:
    """A key for each block of a trace."""
    hashes = [
        BlockHash(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=HASH_BYTES).digest())
        for number in range(trace.num_unique)
    ]
    return [
        BlockKey(hashes[number], _ROOT if parent < 0 else hashes[parent], b"")
        for number, parent in enumerate(trace.parents)
    ]


def replay(
    trace: Trace,
    keys: Sequence[BlockKey],
    policy: Callable[[int], EvictionPolicy],
    capacity: int,
    notice: Notice = lambda _: None,
    *,
    host_capacity: int = 0,
    window: Window | None = None,
) -> Replay:
    """Sends all requests through a cache of ``capacity`` blocks, and ``host_capacity`` below them.

    Of a prompt that is larger than the cache, the beginning is computed there. With a ``window``
    (its sizes in blocks of the trace) blocks are of full layers alone.
    """
    hierarchy = Hierarchy(
        capacity,
        _Slots(capacity),
        {"host": _Slots(host_capacity)} if host_capacity else {},
        new_policy=policy,
        window=window,
        mover=_InstantMover(),
    )
    longest = capacity
    if window is not None:
        longest = max(1, capacity - window.num_pages * window.max_parts)
    manager = CacheManager(hierarchy, 1, BlockHasher(bytes(HASH_BYTES), {}))
    hits: list[int] = []
    start = time.perf_counter()
    for number, request in enumerate(trace.requests):
        block_keys = [keys[block] for block in request.blocks[:longest]]
        seq = _Sequence([0] * len(block_keys), block_keys)
        match = manager.match(seq)
        hits.append(len(match.found) + len(match.below))
        manager.start(seq, match)
        while match.below and not manager.poll():
            pass
        chunk = len(block_keys) if window is None else window.max_chunk
        while (num_before := seq.num_computed_tokens) < len(block_keys):
            end = min(num_before + chunk, len(block_keys))
            if not manager.allocate(seq, end):
                raise AssertionError("an idle cache has no room for what fits into it")
            seq.num_computed_tokens = end
            manager.commit(seq, num_before)
        manager.free(seq)
        if number % 64 == 0:
            notice(number)
    seconds = time.perf_counter() - start
    host = None
    for tier in hierarchy.lower:
        counters, evicted = tier.counters, tier.pool.num_evicted
        host = TierTraffic(host_capacity, counters.loaded_blocks, counters.stored_blocks, evicted)
    return Replay(hits, host, manager.pool.num_evicted, seconds)


def hit_rate(trace: Trace, hits: Sequence[int], first: int) -> float:
    """Tokens found of those asked for, from request ``first`` on."""
    pairs = list(zip(trace.requests, hits, strict=True))[first:]
    found = sum(trace.hit_tokens(request, num) for request, num in pairs)
    return found / max(1, sum(request.num_tokens for request, _ in pairs))


@dataclasses.dataclass(frozen=True)
class TimeToLive:
    """What a cache without limits does that forgets each block so long after its latest use."""

    hits: list[int]
    block_seconds: float  # that blocks were kept, until the trace ended


def replay_with_ttl(trace: Trace, ttl: float) -> TimeToLive:
    """``ttl`` in seconds. The trace must have times."""
    used_at = [float("-inf")] * trace.num_unique
    hits: list[int] = []
    block_seconds = 0.0
    for request in trace.requests:
        assert request.seconds is not None
        now, num_hits = request.seconds, 0
        for block in request.blocks:
            if now - used_at[block] > ttl:
                break
            num_hits += 1
        hits.append(num_hits)
        for block in request.blocks:
            block_seconds += min(ttl, now - used_at[block]) if used_at[block] >= 0 else 0.0
            used_at[block] = now
    end = trace.requests[-1].seconds or 0.0
    block_seconds += sum(min(ttl, end - then) for then in used_at)
    return TimeToLive(hits, block_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What the operator chooses. Raises ``ConfigError`` that names the option."""

    trace: str
    policy: str = "reuse"
    capacities: tuple[str, ...] = ("1%", "2%", "5%", "10%", "20%")  # blocks, or of the unique ones
    host_capacity: str | None = None  # as one of ``capacities``, of a second tier
    ttl: float | None = None  # seconds
    plot: Path | None = None
    model: str = DEFAULT_MODEL  # whose tokenizer reads logs of requests
    reading: ReadOptions = ReadOptions()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                f"--policy {self.policy}: there is no such policy; there are {', '.join(POLICIES)}"
            )
        if self.ttl is not None and not self.ttl > 0:
            raise ConfigError(f"--ttl is {self.ttl}; it must be more than 0 seconds")
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "--plot needs matplotlib, which is not installed: pip install 'anaphora[bench]'"
            )
        if self.reading.in_flight < 1:
            raise ConfigError(f"--in-flight is {self.reading.in_flight}; it must be at least 1")
        for capacity in self.capacities:
            parse_capacity(capacity, 1)
        if self.host_capacity is not None:
            parse_capacity(self.host_capacity, 1, "--host-capacity")


def parse_capacity(text: str, num_unique: int, option: str = "--capacity") -> int:
    """Blocks, from a number or from a share such as ``2.5%``. Raises ``ConfigError``."""
    match = re.fullmatch(r"(\d{1,12})|(\d{1,3}(?:\.\d+)?)%", text)
    if match is None or float(match[1] or match[2]) == 0:
        raise ConfigError(
            f"{option} {text}: give blocks, for example 3000, or a share of the trace's "
            "different blocks, for example 5%"
        )
    if match[1] is not None:
        return int(match[1])
    return max(1, round(float(match[2]) / 100 * num_unique))


@dataclasses.dataclass(frozen=True)
class Point:
    """One capacity. Hit rates are of tokens, over the last half of the requests."""

    capacity: int  # blocks
    policy: float
    lru: float
    optimum: float
    policy_all: float  # over all requests, an empty cache at the beginning
    lru_all: float
    optimum_all: float
    num_evicted: int  # blocks, by the policy
    host: TierTraffic | None  # the policy's
    microseconds_per_visit: float  # of a block by a request; the cache's share and the policy's

    @property
    def gap_closed(self) -> float | None:
        """Which part of what LRU leaves to the optimum the policy gets; None if LRU leaves none."""
        room = self.optimum - self.lru
        return None if room < _NO_ROOM else (self.policy - self.lru) / room


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """An unlimited cache with a time to live, over all requests."""

    ttl: float
    hit_rate: float
    block_seconds: float
    mean_blocks: float  # kept at a time


@dataclasses.dataclass(frozen=True)
class Simulation:
    """All that was found out about one trace."""

    trace: str
    policy: str
    block_size: int
    num_requests: int
    num_unique_blocks: int
    num_visits: int
    ceiling: float  # hit rate of a cache that has room for everything, over the last half
    points: list[Point]
    lifetime: Lifetime | None

    def show(self, console: Console) -> None:
        """As a table."""
        table = Table(
            box=SIMPLE_HEAD,
            title=f"{escape(self.trace)}: {self.num_requests:,} requests, "
            f"{self.num_unique_blocks:,} different blocks of {self.block_size} tokens",
        )
        for name in (
            "blocks",
            self.policy,
            "LRU",
            "optimum",
            "gap closed",
            "evicted",
            "µs a visit",
        ):
            table.add_column(name, justify="right")
        for point in self.points:
            gap = point.gap_closed
            table.add_row(
                f"{point.capacity:,}",
                *(f"{rate:.4f}" for rate in (point.policy, point.lru, point.optimum)),
                "-" if gap is None else f"{gap:.0%}",
                f"{point.num_evicted:,}",
                f"{point.microseconds_per_visit:.1f}",
            )
        console.print(table)
        console.print(
            f"Token hit rate over the last half of the requests, after the first half; with room "
            f"for everything it is {self.ceiling:.4f}."
        )
        for point in self.points:
            if point.host is not None:
                console.print(
                    f"Below {point.capacity:,} blocks, {point.host.capacity:,} in host memory: "
                    f"{point.host.num_stored:,} copied down, {point.host.num_hits:,} fetched "
                    f"again, {point.host.num_evicted:,} evicted there. The optimum is that of one "
                    "cache as large as both."
                )
        if self.lifetime is not None:
            console.print(
                f"Without a limit but with {self.lifetime.ttl:g} s to live since the latest use: "
                f"{self.lifetime.hit_rate:.4f} over all requests, "
                f"{self.lifetime.mean_blocks:,.0f} blocks kept on average."
            )

    def to_json(self) -> str:
        """One line."""
        document = dataclasses.asdict(self)
        for point, values in zip(self.points, document["points"], strict=True):
            values["gap_closed"] = point.gap_closed
        return msgspec.json.encode(document).decode()

    def plot(self, path: Path) -> list[Path]:
        """Hit rate over capacity, as ``path`` with .svg and with .png."""
        import matplotlib

        matplotlib.use("agg")
        matplotlib.rcParams["svg.hashsalt"] = "anaphora"  # the same picture, the same file
        matplotlib.rcParams["svg.fonttype"] = "none"
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        points = sorted(self.points, key=lambda point: point.capacity)
        shares = [100 * point.capacity / self.num_unique_blocks for point in points]
        lines = {
            "optimum, knows the future": ([point.optimum for point in points], "0.6", "--"),
            self.policy: ([point.policy for point in points], "tab:blue", "-"),
            "LRU": ([point.lru for point in points], "tab:orange", "-"),
        }
        for label, (rates, colour, style) in lines.items():
            axes.plot(shares, rates, style, color=colour, marker=".", label=label)
        axes.set(
            xscale="log",
            xlabel="capacity, % of the trace's different blocks",
            ylabel="token hit rate",
            title=self.trace,
            ylim=(0, None),
        )
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        written = [path.with_suffix(suffix) for suffix in (".svg", ".png")]
        for target in written:
            metadata = {"Date": None} if target.suffix == ".svg" else None
            figure.savefig(target, dpi=150, metadata=metadata)
        pyplot.close(figure)
        return written


def run(options: SimulateOptions) -> Simulation:
    """Reads the trace and replays it. Raises ``ConfigError``."""
    reading = dataclasses.replace(options.reading, encode=_Encoder(options.model))
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("reading", total=None)
        trace = read_trace(options.trace, reading)
        if options.ttl is not None and not trace.has_times:
            raise ConfigError(f"--ttl: {trace.name} does not say when its requests came")
        keys = make_keys(trace)
        progress.update(task, total=len(trace.requests))
        points = []
        for text in options.capacities:
            capacity = parse_capacity(text, trace.num_unique)
            host_capacity = (
                parse_capacity(options.host_capacity, trace.num_unique)
                if options.host_capacity is not None
                else 0
            )

            def replay_(
                name: str, capacity: int = capacity, host_capacity: int = host_capacity
            ) -> Replay:
                progress.update(task, description=f"{name}, {capacity:,} blocks")
                return replay(
                    trace,
                    keys,
                    POLICIES[name],
                    capacity,
                    lambda done: progress.update(task, completed=done),
                    host_capacity=host_capacity,
                )

            ours, lru = replay_(options.policy), replay_("lru")
            progress.update(task, description=f"optimum, {capacity:,} blocks")
            optimum = optimal_hits(trace, capacity + host_capacity)
            points.append(_point(trace, capacity, ours, lru, optimum))
    return Simulation(
        trace=trace.name,
        policy=options.policy,
        block_size=trace.block_size,
        num_requests=len(trace.requests),
        num_unique_blocks=trace.num_unique,
        num_visits=trace.num_visits,
        ceiling=hit_rate(trace, optimal_hits(trace, trace.num_unique), len(trace.requests) // 2),
        points=points,
        lifetime=None if options.ttl is None else _lifetime(trace, options.ttl),
    )


def _point(trace: Trace, capacity: int, ours: Replay, lru: Replay, optimum: list[int]) -> Point:
    first = len(trace.requests) // 2
    return Point(
        capacity=capacity,
        policy=hit_rate(trace, ours.hits, first),
        lru=hit_rate(trace, lru.hits, first),
        optimum=hit_rate(trace, optimum, first),
        policy_all=hit_rate(trace, ours.hits, 0),
        lru_all=hit_rate(trace, lru.hits, 0),
        optimum_all=hit_rate(trace, optimum, 0),
        num_evicted=ours.num_evicted,
        host=ours.host,
        microseconds_per_visit=ours.seconds / max(1, trace.num_visits) * 1e6,
    )


def _lifetime(trace: Trace, ttl: float) -> Lifetime:
    kept = replay_with_ttl(trace, ttl)
    duration = trace.requests[-1].seconds or 1.0
    return Lifetime(
        ttl, hit_rate(trace, kept.hits, 0), kept.block_seconds, kept.block_seconds / duration
    )


class _Encoder:
    """Token ids of a request's body; loads the tokenizer when the first one comes."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._text: TextSide | None = None

    def __call__(self, body: dict[str, Any]) -> list[int]:
        """Raises ``ValueError``."""
        if self._text is None:
            self._text = TextSide(resolve(self._model).path)
        try:
            if "messages" in body:
                if self._text.chat_template is None:
                    raise ConfigError(f"--model {self._model} has no chat template")
                return self._text.chat_template.encode(body["messages"], tools=body.get("tools"))
            return self._text.encode(body["prompt"])
        except RequestError as error:
            raise ValueError(str(error)) from error

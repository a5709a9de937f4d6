"""A batch whose token hit rate is 30 %: what the cache gives, and what other things give.

Prompts of 480 random tokens begin with one of eight known prefixes of 144 (30 %) and go through
`anaphora.batch.client.Client`, with the cache on and off, as a batch and one row at a time. Each
prefix is sent once before, unmeasured. Figures: input tokens per second, and the median time from
handing a row to the client's engine until its answer.

What a batch with a cache gains over rows sent one by one without one is a product:

- batching: a batch against one row at a time, both without a cache;
- skipped prefill: the cache's gain for one row at a time. If prefill were all there is, it would be
  1 / (1 - hit rate);
- together: what is left of the cache's gain in a batch. Above 1, rows that run together load what
  they share once, and shorter prompts let more of them run; below 1, batching helps misses more.

As many rows wait and run all the time, so a row's latency is their number over the throughput
(Little's law): the cache divides the median latency by what it multiplies the throughput with.

Usage: python benchmarks/batch_hit_rate.py [--rows 320] [--rows-alone 40] [--repeats 3]
           [--hit-rate 0.3] [--output 8] [--concurrency 64] [--plot FILE.svg]
The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from anaphora.batch.client import STEP_TOKENS, Client
from anaphora.config import EngineConfig

MODEL = "smollm2"
CACHE_BYTES = 2 << 30
PATH = "/v1/completions"
NUM_PROMPT = 480
NUM_PREFIXES = 8
BLOCK = 16  # prefixes are whole blocks
ALONE, BATCH = "one at a time", "a batch"
COLOURS = {"off": "#8b949e", "on": "#1f6feb"}

Found = dict[tuple[str, str], list["Measured"]]  # ALONE or BATCH, cache off or on


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run."""

    throughput: float  # tokens of prompts per second, cached ones included
    p50: float  # seconds
    hit_rate: float


@dataclasses.dataclass(frozen=True)
class Parts:
    """Of the throughput of a batch with a cache over rows one at a time without."""

    batching: float
    skipped_prefill: float
    together: float

    @property
    def cache(self) -> float:
        """What the cache gives a batch."""
        return self.skipped_prefill * self.together


class Prompts:
    """Seeded; the first of them are one for each prefix."""

    def __init__(self, seed: str, vocab_size: int, num_prefix: int) -> None:
        self._rng = random.Random(seed)
        self._ids = range(1000, vocab_size)
        self._prefixes = [self._draw(num_prefix) for _ in range(NUM_PREFIXES)]

    def _draw(self, num_tokens: int) -> list[int]:
        return self._rng.choices(self._ids, k=num_tokens)

    def first(self) -> list[list[int]]:
        return [prefix + self._draw(NUM_PROMPT - len(prefix)) for prefix in self._prefixes]

    def more(self, num_rows: int) -> list[list[int]]:
        prefixes = self._rng.choices(self._prefixes, k=num_rows)
        return [prefix + self._draw(NUM_PROMPT - len(prefix)) for prefix in prefixes]


def run(client: Client, prompts: list[list[int]], num_output: int) -> Measured:
    """All of them, as many at a time as the client takes."""
    begun: dict[int, float] = {}
    latencies: list[float] = []
    num_prompt = num_cached = 0

    def requests() -> Iterator[tuple[int, str, dict[str, Any]]]:
        for key, prompt in enumerate(prompts):
            begun[key] = time.perf_counter()
            body = {"prompt": prompt, "max_tokens": num_output, "temperature": 0}
            yield key, PATH, body | {"ignore_eos": True}

    begin = time.perf_counter()
    for key, reply in client.run(requests()):
        latencies.append(time.perf_counter() - begun[key])
        if reply.error:
            raise SystemExit(f"a row failed: {reply.error}")
        prompt, cached, _ = reply.usage()
        num_prompt += prompt
        num_cached += cached
    seconds = time.perf_counter() - begin
    return Measured(num_prompt / seconds, statistics.median(latencies), num_cached / num_prompt)


def measure(options: argparse.Namespace) -> Found:
    """All four ways in each repeat, with the same prompts for the cache off and on."""
    num_prefix = round(options.hit_rate * NUM_PROMPT / BLOCK) * BLOCK
    found: Found = {}
    console = Console(stderr=True)
    configs = {
        cache: EngineConfig(
            model=MODEL,
            kv_cache_memory=CACHE_BYTES,
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=cache == "on",
        )
        for cache in ("off", "on")
    }
    with Client(configs["off"]) as off, Client(configs["on"]) as on:
        assert off.info is not None
        vocab_size = off.info.vocab_size
        sizes = {ALONE: (1, options.rows_alone), BATCH: (options.concurrency, options.rows)}
        for repeat in range(options.repeats):
            for way, (concurrency, num_rows) in sizes.items():
                for cache, client in (("off", off), ("on", on)):
                    seed = f"{options.seed}, {repeat}, {way}"
                    prompts = Prompts(seed, vocab_size, num_prefix)
                    client.concurrency = concurrency
                    run(client, prompts.first(), options.output)
                    one = run(client, prompts.more(num_rows), options.output)
                    found.setdefault((way, cache), []).append(one)
                    console.print(
                        f"{way}, cache {cache}, repeat {repeat + 1}: {one.throughput:,.0f} tok/s, "
                        f"P50 {one.p50:.2f} s, hit rate {one.hit_rate:.1%}"
                    )
    return found


def parts(found: Found) -> Parts:
    """Medians of ratios, each within its repeat."""

    def ratio(one: tuple[str, str], other: tuple[str, str]) -> float:
        pairs = zip(found[one], found[other], strict=True)
        return statistics.median(a.throughput / b.throughput for a, b in pairs)

    skipped_prefill = ratio((ALONE, "on"), (ALONE, "off"))
    return Parts(
        batching=ratio((BATCH, "off"), (ALONE, "off")),
        skipped_prefill=skipped_prefill,
        together=ratio((BATCH, "on"), (BATCH, "off")) / skipped_prefill,
    )


def report(found: Found, made_of: Parts, bound: float) -> None:
    shown = Table(title="Medians", title_justify="left")
    for name in ("rows", "cache", "hit rate", "input tok/s", "spread", "P50 of a row"):
        shown.add_column(name, justify="left" if name in ("rows", "cache") else "right")
    for (way, cache), runs in found.items():
        rates = [run.throughput for run in runs]
        median = statistics.median(rates)
        shown.add_row(
            way,
            cache,
            f"{statistics.median(run.hit_rate for run in runs):.1%}",
            f"{median:,.0f}",
            f"{(max(rates) - min(rates)) / median:.0%}",
            f"{statistics.median(run.p50 for run in runs):.2f} s",
        )
    console = Console(width=110)
    console.print(shown)
    p50 = {cache: statistics.median(r.p50 for r in found[BATCH, cache]) for cache in ("off", "on")}
    console.print(
        f"The cache gives a batch {made_of.cache:.2f} x the input tokens a second and "
        f"{p50['off'] / p50['on']:.2f} x shorter rows; skipped prefill alone cannot give more than "
        f"{bound:.2f} x.\nAgainst one row at a time without a cache: batching "
        f"{made_of.batching:.2f} x, skipped prefill {made_of.skipped_prefill:.2f} x, together "
        f"{made_of.together:.2f} x: {made_of.batching * made_of.cache:.2f} x."
    )


def plot(found: Found, made_of: Parts, bound: float, path: Path) -> None:
    """Left: throughput of all four; right: the parts, multiplied."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "anaphora"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for i, way in enumerate((ALONE, BATCH)):
        for j, cache in enumerate(("off", "on")):
            runs = found[way, cache]
            x = i + (j - 0.5) * 0.38
            rates = [run.throughput for run in runs]
            label = f"cache {cache}" if i == 0 else None
            left.bar(
                x, statistics.median(rates), width=0.34, color=COLOURS[cache], label=label, zorder=2
            )
            left.scatter([x] * len(runs), rates, s=8, color="black", zorder=3)
            p50 = statistics.median(run.p50 for run in runs)
            left.annotate(f"P50 {p50:.2f} s", (x, max(rates)), textcoords="offset points",
                          xytext=(0, 5), ha="center", fontsize=7.5)  # fmt: skip
    left.set_xticks((0, 1), (ALONE, BATCH))
    left.set_ylabel("input tokens per second")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    left.set_ylim(0, 1.15 * left.get_ylim()[1])
    values = {
        "batching": made_of.batching,
        "skipped\nprefill": made_of.skipped_prefill,
        "together": made_of.together,
    }
    low = 1.0
    for i, (name, value) in enumerate(values.items()):
        right.bar(i, low * value - low, bottom=low, width=0.6, color="#6ea8fe", zorder=2)
        right.annotate(f"{value:.2f} x", (i, max(low, low * value)), textcoords="offset points",
                       xytext=(0, 4), ha="center", fontsize=8)  # fmt: skip
        if name.startswith("skipped"):
            right.plot((i - 0.36, i + 0.36), (low * bound, low * bound), color="black", ls="--",
                       lw=1, label=f"1 / (1 - hit rate) = {bound:.2f} x")  # fmt: skip
        low *= value
    right.bar(3, low - 1, bottom=1, width=0.6, color="#1f6feb", zorder=2)
    right.annotate(f"{low:.2f} x", (3, low), textcoords="offset points", xytext=(0, 4),
                   ha="center", fontsize=8)  # fmt: skip
    right.set_xticks(range(4), [*values, "all"])
    right.set_ylim(min(1.0, right.get_ylim()[0]), 1.12 * right.get_ylim()[1])
    right.set_ylabel("times the throughput of one row\nat a time without a cache")
    right.legend(frameon=False, fontsize=8, loc="upper left")
    for axes in (left, right):
        axes.grid(axis="y", color="#dddddd", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=320, help="of a batch")
    parser.add_argument("--rows-alone", type=int, default=40, help="sent one at a time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hit-rate", type=float, default=0.3)
    parser.add_argument("--output", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--concurrency", type=int, default=64, help="rows handed over at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="SVG file")
    options = parser.parse_args()
    found = measure(options)
    made_of = parts(found)
    hit_rate = statistics.median(run.hit_rate for run in found[BATCH, "on"])
    bound = 1 / (1 - hit_rate)
    report(found, made_of, bound)
    if options.plot:
        plot(found, made_of, bound, options.plot)
    figures = {f"{way}, cache {cache}": [dataclasses.asdict(run) for run in runs]
               for (way, cache), runs in found.items()}  # fmt: skip
    document = {"parts": dataclasses.asdict(made_of), "bound": bound, "figures": figures}
    print(json.dumps(document))


if __name__ == "__main__":
    main()

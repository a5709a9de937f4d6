"""The figures in the README: `make bench`.

Everything runs through ``AsyncLLM``, so with the engine's process and its messages. Each figure is
the median of several runs after a warm-up, and comparisons are made in the same run: a hit against
its miss, caching on against caching off. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from anaphora.async_llm import AsyncLLM
from anaphora.config import EngineConfig
from anaphora.types import CacheScope, SamplingParams

REPEATS = 7
NUM_CACHE_BYTES = 2 * 2**30


@dataclasses.dataclass(frozen=True)
class Timing:
    """One request, in seconds."""

    ttft: float
    total: float
    num_tokens: int
    num_cached_tokens: int

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        return (self.num_tokens - 1) / (self.total - self.ttft)


class Bench:
    """One engine and a stream of prompts that it has never seen."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self._rng = np.random.default_rng(0)

    def prompt(self, length: int) -> list[int]:
        """Fresh random tokens: no two calls share a block."""
        return self._rng.integers(100, self.llm.info.vocab_size, length).tolist()

    async def run(self, prompt: Sequence[int], num_tokens: int) -> Timing:
        """One greedy request of exactly ``num_tokens`` tokens."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        start, first, num_cached = time.perf_counter(), None, 0
        async for delta in self.llm.generate(prompt, params, scope=CacheScope()):
            first = first or time.perf_counter()
            num_cached = delta.num_cached_tokens
        assert first is not None
        return Timing(first - start, time.perf_counter() - start, num_tokens, num_cached)

    async def prefill_rate(self, length: int) -> float:
        """Cold prompt tokens per second."""
        timings = [await self.run(self.prompt(length), 1) for _ in range(REPEATS)]
        assert not any(timing.num_cached_tokens for timing in timings)
        return length / statistics.median(timing.ttft for timing in timings)

    async def decode_rate(self, num_streams: int) -> float:
        """Tokens per second of ``num_streams`` streams together, each after 64 prompt tokens."""
        rates = []
        for _ in range(REPEATS):
            streams = [self.run(self.prompt(64), 65) for _ in range(num_streams)]
            timings = await asyncio.gather(*streams)
            rates.append(sum(timing.decode_rate for timing in timings))
        return statistics.median(rates)

    async def miss_and_hit(self, length: int) -> tuple[float, float]:
        """Median TTFT in seconds of a prompt's first and second request."""
        misses, hits = [], []
        for _ in range(REPEATS):
            prompt = self.prompt(length)
            misses.append((await self.run(prompt, 1)).ttft)
            hits.append((await self.run(prompt, 1)).ttft)
        return statistics.median(misses), statistics.median(hits)

    async def shared_prefix(self) -> float:
        """Seconds for 16 requests at once over 1,024 shared tokens, 64 of their own, 32 out."""
        walls = []
        for _ in range(3):
            shared = self.prompt(1024)
            start = time.perf_counter()
            await asyncio.gather(*(self.run(shared + self.prompt(64), 32) for _ in range(16)))
            walls.append(time.perf_counter() - start)
        return statistics.median(walls)


async def measure(dtype: str, progress: Progress) -> dict[str, float]:
    """All figures of one precision."""
    config = EngineConfig(dtype=dtype, kv_cache_memory=NUM_CACHE_BYTES)
    uncached = dataclasses.replace(config, enable_prefix_caching=False)
    task = progress.add_task(dtype, total=7)
    figures: dict[str, float] = {}
    llm = AsyncLLM(config)
    await llm.start()
    bench = Bench(llm)
    await bench.run(bench.prompt(600), 8)  # warm-up
    for length in (512, 2048):
        figures[f"prefill_{length}_tokens_per_second"] = await bench.prefill_rate(length)
        progress.advance(task)
    for num_streams in (1, 8):
        rate = await bench.decode_rate(num_streams)
        figures[f"decode_{num_streams}_tokens_per_second"] = rate
        progress.advance(task)
    miss, hit = await bench.miss_and_hit(2048)
    figures |= {"miss_2048_ttft_seconds": miss, "hit_2048_ttft_seconds": hit}
    figures["hit_2048_speedup"] = miss / hit
    progress.advance(task)
    figures["shared16_seconds"] = await bench.shared_prefix()
    progress.advance(task)
    await llm.close()
    llm = AsyncLLM(uncached)
    await llm.start()
    bench = Bench(llm)
    await bench.run(bench.prompt(600), 8)
    figures["shared16_uncached_seconds"] = await bench.shared_prefix()
    figures["shared16_speedup"] = figures["shared16_uncached_seconds"] / figures["shared16_seconds"]
    progress.advance(task)
    await llm.close()
    return figures


def main() -> None:
    """Measure, show, print the JSON line."""
    parser = argparse.ArgumentParser(description="Measure the README's figures.")
    parser.add_argument("--dtype", choices=["int8", "float32"], action="append")
    dtypes = parser.parse_args().dtype or ["int8", "float32"]
    console = Console()
    with Progress(console=console, transient=True) as progress:
        results = {dtype: asyncio.run(measure(dtype, progress)) for dtype in dtypes}
    table = Table(title="SmolLM2-135M on this machine, medians", title_justify="left")
    table.add_column("figure")
    for dtype in dtypes:
        table.add_column(dtype, justify="right")
    for name in results[dtypes[0]]:
        table.add_row(name.replace("_", " "), *(f"{results[d][name]:,.4g}" for d in dtypes))
    console.print(table)
    print(json.dumps(results))


if __name__ == "__main__":
    main()

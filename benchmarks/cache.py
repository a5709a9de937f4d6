"""What the cache's promises cost and bring on this machine, with the default model.

    python benchmarks/cache.py [overheads] [restore] [sweep]

overheads: hashing and matching a 32k-token prompt; a step's bookkeeping at 64 sequences.
restore:   a 2,048-token prefix from host memory and from disk, against computing it; the shortest
           prefix that is worth fetching.
sweep:     an interactive conversation while 500 unique prompts stream through, with the default
           eviction policy, with LRU, and with nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import track

from anaphora.async_llm import AsyncLLM
from anaphora.cache.eviction import POLICIES
from anaphora.cache.hashing import BlockHasher
from anaphora.cache.hierarchy import Hierarchy
from anaphora.cache.manager import CacheManager
from anaphora.cache.shares import Owner
from anaphora.config import EngineConfig, Weights
from anaphora.engine.accounts import Accounts
from anaphora.engine.engine import Engine
from anaphora.engine.scheduler import Scheduler
from anaphora.engine.sequence import Sequence
from anaphora.loaders.sources import resolve
from anaphora.types import CacheScope, EngineRequest, SamplingParams

VOCABULARY = 49_000
console = Console()


def tokens(seed: object, count: int) -> list[int]:
    return random.Random(repr(seed)).choices(range(100, VOCABULARY), k=count)


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


# ---- overheads


def new_manager(num_blocks: int) -> CacheManager:
    hierarchy = Hierarchy(num_blocks, new_policy=POLICIES["reuse"])
    return CacheManager(hierarchy, 16, BlockHasher(bytes(32), {}))


def new_sequence(
    cache: CacheManager, token_ids: list[int], index: int = 0, accounts: Accounts | None = None
) -> Sequence:
    params = SamplingParams(max_tokens=10_000)
    root = cache.root(CacheScope())
    owner = Owner("tenant", "interactive")
    account = (accounts or Accounts(Weights())).of(owner, "")
    return Sequence(
        "r", index, token_ids, params, root, max_tokens=10_000, owner=owner, account=account
    )


def overheads() -> list[str]:
    cache = new_manager(4096)
    hashing, matching = [], []
    for _ in range(20):
        seq = new_sequence(cache, tokens(1, 32_768))
        start = time.perf_counter()
        cache.compute_keys(seq)
        hashing.append(time.perf_counter() - start)
        start = time.perf_counter()
        match = cache.match(seq)
        matching.append(time.perf_counter() - start)
        cache.start(seq, match)
        cache.allocate(seq, len(seq.token_ids))
        before, seq.num_computed_tokens = seq.num_computed_tokens, len(seq.token_ids)
        cache.commit(seq, before)
        cache.free(seq)
    lines = [
        f"hash 32,768 tokens: {median_ms(hashing):.2f} ms; match them: {median_ms(matching):.2f} ms"
    ]

    cache = new_manager(4096)
    scheduler = Scheduler(cache, max_num_seqs=64, max_num_batched_tokens=128)
    for index in range(64):
        scheduler.add(new_sequence(cache, tokens(index, 300), index, scheduler.accounts))
    steps, in_cache = [], []
    for _ in range(600):
        start = time.perf_counter()
        chunks = scheduler.schedule()
        for chunk in chunks:
            scheduler.complete(chunk)
        seconds = time.perf_counter() - start
        is_decode = len(chunks) == 64 and all(chunk.num_tokens == 1 for chunk in chunks)
        for chunk in chunks:
            if chunk.seq.num_computed_tokens == len(chunk.seq.token_ids):
                chunk.seq.token_ids.append(5)
        if is_decode:
            steps.append(seconds)
            in_cache.append(cache_part(cache, [chunk.seq for chunk in chunks]))
    lines.append(
        f"a decode step of 64 sequences: scheduling {median_ms(steps) * 1e3:.0f} us, of it the "
        f"cache {median_ms(in_cache) * 1e3:.0f} us"
    )
    return lines


def cache_part(cache: CacheManager, seqs: list[Sequence]) -> float:
    """The same calls once more: one token more for each, most of which fill no block."""
    start = time.perf_counter()
    cache.poll()
    for seq in seqs:
        cache.allocate(seq, seq.num_computed_tokens)
    for seq in seqs:
        cache.commit(seq, seq.num_computed_tokens - 1)
    cache.prepare()
    return time.perf_counter() - start


# ---- restore


def run(engine: Engine, name: str, prompt: list[int]) -> tuple[float, dict[str, int]]:
    """Seconds to the first token, and what was found where."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    start = time.perf_counter()
    engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params))
    report = None
    while engine.has_work:
        for output in engine.step():
            report = output.cache_report or report
    seconds = time.perf_counter() - start
    while engine.has_spare_work:
        engine.step()
    return seconds, {} if report is None else report.hits


def restore(repeats: int = 7) -> list[str]:
    model = str(resolve("smollm2").path)
    lines = []
    with tempfile.TemporaryDirectory(dir=Path.home()) as directory:
        tiers = {
            # no more than is soon full: a page that was never written costs more than its copy
            "host": {"swap_space": 600 * 380_000},
            "disk": {"disk_cache": directory, "disk_cache_size": 600 * 400_000},
        }
        for tier, options in tiers.items():
            # lru, so that the prompt is pushed out of tier 1 for certain
            config = EngineConfig(
                model=model, kv_cache_memory=200 * 380_000, eviction_policy="lru", **options
            )
            engine = Engine(config)
            cold, warm, back = [], [], []
            for index in track(range(repeats), f"restore from {tier}", console=console):
                prompt = tokens((tier, index), 2_048 + 17)
                cold.append(run(engine, f"cold{index}", prompt)[0])
                warm.append(run(engine, f"warm{index}", prompt)[0])
                run(engine, f"other{index}", tokens((tier, "other", index), 3_120))  # pushes it out
                seconds, hits = run(engine, f"back{index}", prompt)
                assert hits.get(tier, 0) > 1_800, hits
                back.append(seconds)
            cost = engine.cache.hierarchy.lower[0].load_time.seconds or 0.0
            compute = (engine.cache.compute_time.seconds or 0.0) * 16
            lines.append(
                f"2,048 tokens: computed {median_ms(cold):.0f} ms, from {tier} "
                f"{median_ms(back):.1f} ms ({median_ms(cold) / median_ms(back):.0f}x), "
                f"from tier 1 {median_ms(warm):.1f} ms; a block: computed {compute * 1e3:.2f} ms, "
                f"from {tier} {cost * 1e3:.3f} ms; worth fetching from {break_even(engine)} blocks"
            )
            engine.close()
    return lines


def break_even(engine: Engine) -> int | None:
    """The shortest run of blocks below tier 1 that the rule fetches now."""
    hierarchy, cache = engine.cache.hierarchy, engine.cache
    [tier] = hierarchy.lower
    slot = next(tier.pool.findable())
    seconds = None if cache.compute_time.seconds is None else cache.compute_time.seconds * 16
    return next(
        (n for n in range(1, 2049) if hierarchy.num_worth_loading([(tier, slot)] * n, seconds)),
        None,
    )


# ---- sweep

NUM_UNIQUE, UNIQUE_TOKENS, IN_FLIGHT = 500, 256, 8
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 1_500, 400, 24


async def first_token(llm: AsyncLLM, prompt: list[int], count: int, workload: str) -> tuple:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    seconds, answer, cached = None, [], 0
    async for delta in llm.generate(prompt, params, workload=workload):
        seconds = seconds or time.perf_counter() - start
        answer += delta.token_ids
        cached = delta.num_cached_tokens
    return seconds, answer, cached


async def conversation(llm: AsyncLLM, seed: str, until: asyncio.Event | None) -> list[tuple]:
    """Turns of one user with a fixed system prompt, a new conversation every fourth turn."""
    system, found, turn, history = tokens((seed, "system"), SYSTEM_TOKENS), [], 0, []
    while (until is None and turn < 16) or (until is not None and not until.is_set()):
        if turn % 4 == 0:
            history = list(system)
        prompt = history + tokens((seed, turn), TURN_TOKENS)
        seconds, answer, cached = await first_token(llm, prompt, ANSWER_TOKENS, "interactive")
        found.append((seconds, cached, turn % 4))
        history = prompt + answer
        turn += 1
        await asyncio.sleep(1.0)  # the user reads
    return found[4:]  # the first conversation warms up


async def batch(llm: AsyncLLM, seed: str, done: asyncio.Event, workload: str) -> None:
    queue = iter(range(NUM_UNIQUE))

    async def worker() -> None:
        for index in queue:
            await first_token(llm, tokens((seed, "row", index), UNIQUE_TOKENS), 4, workload)

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    done.set()


async def one_sweep(policy: str, workload: str, num_blocks: int) -> tuple[list, list]:
    llm = AsyncLLM("smollm2", kv_cache_memory=num_blocks * 373_248, eviction_policy=policy)
    await llm.start()
    try:
        alone = await conversation(llm, f"{policy}-alone", None)
        done = asyncio.Event()
        sweep = asyncio.create_task(batch(llm, policy, done, workload))
        beside = await conversation(llm, f"{policy}-beside", done)
        await sweep
        return alone, beside
    finally:
        await llm.close()


def sweep() -> Iterator[str]:
    cases = [("reuse", "batch"), ("lru", "interactive"), ("lru", "batch")]
    for policy, workload in track(cases, "batch sweep", console=console):
        alone, beside = asyncio.run(one_sweep(policy, workload, num_blocks=240))
        ttft = [median_ms([seconds for seconds, _, _ in turns]) for turns in (alone, beside)]
        hits = [statistics.mean(cached for _, cached, _ in turns) for turns in (alone, beside)]
        yield (
            f"{policy}, rows sent as {workload}: TTFT alone {ttft[0]:.0f} ms, beside the rows "
            f"{ttft[1]:.0f} ms ({ttft[1] / ttft[0] - 1:+.0%}); cached tokens a turn "
            f"{hits[0]:,.0f} alone, {hits[1]:,.0f} beside ({len(beside)} turns)"
        )


PARTS = {"overheads": overheads, "restore": restore, "sweep": sweep}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    names = parser.parse_args().parts or list(PARTS)
    if unknown := set(names) - set(PARTS):
        parser.error(f"there is no part {sorted(unknown)[0]!r}; choose of {', '.join(PARTS)}")
    for name in names:
        for line in PARTS[name]():
            console.print(f"{name}: {line}", soft_wrap=True)


if __name__ == "__main__":
    main()

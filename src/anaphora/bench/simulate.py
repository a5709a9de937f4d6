"""Replays a trace against the cache itself, without a model: what a policy finds in it.

The cache manager sees one token a block: it knows only ids, so nothing else changes. A request
matches, takes what it lacks, publishes it and ends before the next one comes.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence

from anaphora.bench.traces import Trace
from anaphora.cache.eviction import LRU, EvictionPolicy, LeastExpectedReuse
from anaphora.cache.hashing import HASH_BYTES, BlockHash, BlockHasher, BlockKey
from anaphora.cache.hierarchy import Hierarchy
from anaphora.cache.manager import Admission, CacheManager
from anaphora.cache.shares import Owner

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "reuse": LeastExpectedReuse,
    "lru": LRU,
}
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


@dataclasses.dataclass(frozen=True)
class Replay:
    """What one policy did with one capacity."""

    hits: list[int]  # blocks found, by request
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
) -> Replay:
    """Sends all requests through a cache of ``capacity`` blocks.

    Of a prompt that is larger than the cache, the beginning is computed there.
    """
    manager = CacheManager(
        Hierarchy(capacity, new_policy=policy), 1, BlockHasher(bytes(HASH_BYTES), {})
    )
    hits: list[int] = []
    start = time.perf_counter()
    for number, request in enumerate(trace.requests):
        block_keys = [keys[block] for block in request.blocks[:capacity]]
        seq = _Sequence([0] * len(block_keys), block_keys)
        match = manager.match(seq)
        hits.append(len(match.found))
        manager.start(seq, match)
        if not manager.allocate(seq, len(block_keys)):
            raise AssertionError("an idle cache has no room for what fits into it")
        num_before, seq.num_computed_tokens = seq.num_computed_tokens, len(block_keys)
        manager.commit(seq, num_before)
        manager.free(seq)
        if number % 64 == 0:
            notice(number)
    return Replay(hits, manager.pool.num_evicted, time.perf_counter() - start)


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

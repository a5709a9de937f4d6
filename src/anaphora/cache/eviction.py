"""Which cached block goes first when room is needed."""

from __future__ import annotations

import dataclasses
import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, Self

from anaphora.cache.forecast import NUM_CELLS, NUM_CLASSES, NUM_RESTS, WIDTHS, ReuseForecast

if TYPE_CHECKING:
    from anaphora.cache.pool import Block


class EvictionPolicy(Protocol):
    """Orders the evictable blocks of one pool. Made with the pool's number of blocks.

    Evictable is a block that nobody holds, that is findable and has no findable child: a prefix is
    given up from its end, so nothing is ever stranded behind a gap. A policy keeps what it wants to
    know of a block in ``block.state``.
    """

    def sibling(self) -> Self:
        """An empty policy whose scores can be compared with this one's."""

    def admit(self, block: Block) -> None:
        """``block`` became findable; it is held."""

    def hit(self, block: Block) -> None:
        """A request found ``block``; head first, once for each request. It is held by now."""

    def released(self, block: Block) -> None:
        """The last holder of a findable block has left; tail first."""

    def add(self, block: Block) -> None:
        """``block`` is evictable from now on."""

    def discard(self, block: Block) -> None:
        """``block`` is not evictable any more: held again, extended, or about to be forgotten."""

    def peek(self) -> tuple[float, Block] | None:
        """The next victim and its score; the lowest score goes first."""

    def forget(self, block: Block, *, evicted: bool) -> None:
        """``block`` is not findable any more, evicted or else purged. Its key is still set."""


class LRU:
    """Least recently used first: the baseline. Each operation is O(log n)."""

    def __init__(self, _capacity: int = 0, clock: list[int] | None = None) -> None:
        self._clock = clock or [0]  # ticks at each use; shared between siblings
        self._heap: list[tuple[int, int, Block]] = []  # with entries that are no longer true
        self._evictable: set[int] = set()  # block ids

    def sibling(self) -> LRU:
        """As ``EvictionPolicy`` says."""
        return LRU(clock=self._clock)

    def admit(self, block: Block) -> None:
        """As ``EvictionPolicy`` says."""

    def hit(self, block: Block) -> None:
        """As ``EvictionPolicy`` says."""

    def released(self, block: Block) -> None:
        """A use ends, and the later it ends the longer the block stays."""
        self._clock[0] += 1
        block.state = self._clock[0]

    def add(self, block: Block) -> None:
        """As ``EvictionPolicy`` says."""
        self._evictable.add(block.block_id)
        heapq.heappush(self._heap, (block.state, block.block_id, block))

    def discard(self, block: Block) -> None:
        """As ``EvictionPolicy`` says."""
        self._evictable.remove(block.block_id)
        if len(self._heap) > 2 * len(self._evictable) + 64:  # mostly entries of the past
            self._heap = [entry for entry in self._heap if self._is_true(entry)]
            heapq.heapify(self._heap)

    def peek(self) -> tuple[float, Block] | None:
        """As ``EvictionPolicy`` says."""
        while self._heap and not self._is_true(self._heap[0]):
            heapq.heappop(self._heap)
        return (self._heap[0][0], self._heap[0][2]) if self._heap else None

    def forget(self, block: Block, *, evicted: bool) -> None:
        """As ``EvictionPolicy`` says."""

    def _is_true(self, entry: tuple[int, int, Block]) -> bool:
        state, block_id, block = entry
        return block_id in self._evictable and block.state == state


@dataclasses.dataclass(slots=True)
class _Uses:
    """What ``LeastExpectedReuse`` knows of a block."""

    num_reuses: int
    used_at: int  # requests so far at the latest use
    cell: int = 0  # where it is queued


class LeastExpectedReuse:
    """First goes the block with the fewest expected uses per request that it stays.

    Its forecast depends on two things: how often the block was used again, and how long it has
    rested. A burst of prompts that nobody repeats fills only the classes that are rarely used
    again, and leaves the others alone. Blocks with one forecast share a queue, so that the next
    victim is at one end of the first queue that is not empty: each operation is O(1) amortised.
    """

    def __init__(self, capacity: int, forecast: ReuseForecast | None = None) -> None:
        self._forecast = forecast or ReuseForecast(capacity)  # shared between siblings
        self._capacity = capacity
        self._queues: list[OrderedDict[int, Block]] = [OrderedDict() for _ in range(NUM_CELLS)]
        self._ranks: list[int] = []  # of queues that are not empty, the lowest first
        self._version = self._forecast.version  # that the ranks are of
        self._latest: bytes = b""  # hash of the block used last
        self._aged_at = 0  # requests so far
        self._next_check = [0] * NUM_RESTS  # when blocks may have rested for longer than their kind

    def sibling(self) -> LeastExpectedReuse:
        """As ``EvictionPolicy`` says."""
        return LeastExpectedReuse(self._capacity, self._forecast)

    def admit(self, block: Block) -> None:
        """As ``EvictionPolicy`` says."""
        assert block.key is not None
        if block.depth == 0:
            self._forecast.now += 1
        block_hash = self._latest = block.key.block_hash
        num_reuses = self._forecast.recall(block_hash)
        block.state = _Uses(num_reuses, self._forecast.now)
        self._forecast.use(block_hash, num_reuses)

    def hit(self, block: Block) -> None:
        """A hit that does not follow the block used before it is of another request."""
        assert block.key is not None
        if block.depth == 0 or block.key.parent != self._latest:
            self._forecast.now += 1
        uses: _Uses = block.state
        uses.num_reuses += 1
        uses.used_at = self._forecast.now
        self._latest = block.key.block_hash
        self._forecast.use(self._latest, uses.num_reuses)

    def released(self, block: Block) -> None:
        """As ``EvictionPolicy`` says."""

    def add(self, block: Block) -> None:
        """As ``EvictionPolicy`` says."""
        uses: _Uses = block.state
        self._enqueue(block, self._forecast.cell(uses.num_reuses, uses.used_at))

    def discard(self, block: Block) -> None:
        """As ``EvictionPolicy`` says."""
        cell: int = block.state.cell
        queue = self._queues[cell]
        if len(queue) == 1:
            self._sort()
            del self._ranks[bisect_left(self._ranks, self._forecast.ranks[cell])]
        del queue[block.block_id]

    def peek(self) -> tuple[float, Block] | None:
        """As ``EvictionPolicy`` says."""
        forecast = self._forecast
        if self._version != forecast.version:
            self._sort()
        if self._aged_at != forecast.now:
            self._age()
        if not self._ranks:
            return None
        cell = forecast.cells[self._ranks[0]]
        queue = self._queues[cell]
        # Of one kind of rest the worst goes first: the newest if resting makes blocks better.
        block_id = next(reversed(queue) if forecast.is_rising[cell] else iter(queue))
        return forecast.scores[cell], queue[block_id]

    def forget(self, block: Block, *, evicted: bool) -> None:
        """As ``EvictionPolicy`` says."""
        assert block.key is not None
        if evicted:
            self._forecast.remember(block.key.block_hash, block.state.num_reuses)
        else:
            self._forecast.forget(block.key.block_hash)

    def _enqueue(self, block: Block, cell: int) -> None:
        block.state.cell = cell
        queue = self._queues[cell]
        if not queue:
            self._sort()
            insort(self._ranks, self._forecast.ranks[cell])
        queue[block.block_id] = block

    def _sort(self) -> None:
        """After the forecast was renewed: its queues have other ranks."""
        forecast = self._forecast
        if self._version != forecast.version:
            self._version = forecast.version
            self._ranks = sorted(forecast.ranks[c] for c in range(NUM_CELLS) if self._queues[c])

    def _age(self) -> None:
        """Moves on the blocks that have rested for longer than their queue says, long rests first.

        A queue is looked at four times while a block is in it, so a few are in each request.
        """
        forecast = self._forecast
        now = self._aged_at = forecast.now
        for rest in range(NUM_RESTS - 2, -1, -1):
            if self._next_check[rest] > now:
                continue
            self._next_check[rest] = now + max(1, WIDTHS[rest] // 4)
            for cell in range(rest, NUM_CLASSES * NUM_RESTS, NUM_RESTS):
                queue = self._queues[cell]
                while queue:
                    block = queue[next(iter(queue))]
                    longer = forecast.rest(block.state.used_at)
                    if longer <= rest:
                        break
                    self.discard(block)
                    self._enqueue(block, cell - rest + longer)


# By the name that operators use: each makes a policy for a pool of so many blocks.
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"reuse": LeastExpectedReuse, "lru": LRU}

"""Which cached block goes first when room is needed."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol, Self

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

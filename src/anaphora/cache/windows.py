"""What windowed layers keep of a block, apart from the block: old parts go, the chain stays.

Layers that see only the last W tokens need K and V of those alone. What they have of a block is its
window part: a few blocks more of the same pool, held by the part. A prefix is found by its blocks;
it is of use up to a point where the W tokens before it have their parts as well.
"""

from __future__ import annotations

import array
import collections
import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

from anaphora.cache.pool import Block, BlockPool, WindowPart
from anaphora.cache.shares import Owner

_CHECKPOINT = 8  # one window's worth of parts in so many stays as long as its blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """How much windowed layers see, and what that takes."""

    num_tokens: int  # that a token sees, itself included
    num_pages: int  # blocks of the pool that a part takes
    block_size: int
    is_ragged: bool = False  # the last page of a part has layers that nobody writes
    max_chunk: int  # tokens that one step computes at most

    @property
    def max_parts(self) -> int:
        """Parts that one sequence holds at most."""
        return -(-(self.num_tokens + self.max_chunk) // self.block_size) + 2


@dataclasses.dataclass(slots=True, eq=False)
class WindowState:
    """The parts of one sequence: its further block tables, beside the one of the pool."""

    tables: list[array.array[int]] = dataclasses.field(default_factory=list)
    parts: collections.deque[WindowPart] = dataclasses.field(default_factory=collections.deque)
    num_passed: int = 0  # blocks before the first part that it holds
    num_wanted: int = 0  # blocks that were there at its start, up to where a part was missing
    num_prompt_blocks: int = 0  # where the same prompt would go on


class Windows:
    """All window parts of tier 1."""

    def __init__(self, pool: BlockPool, window: Window) -> None:
        self.window = window
        self._pool = pool
        self._block_size = window.block_size
        # Parts that nobody reads, in the order in which they came to be so: those in the middle of
        # what was computed, and those where a prefix ended or may end.
        self._passed: OrderedDict[int, WindowPart] = OrderedDict()
        self._kept: OrderedDict[int, WindowPart] = OrderedDict()
        self.num_pages = 0  # that all parts have together
        pool.on_forget = self._forgotten
        pool.reclaim = self._reclaim

    def first_seen(self, position: int) -> int:
        """The first block that windowed layers of the token at ``position`` see."""
        return max(0, position - self.window.num_tokens + 1) // self._block_size

    def first_needed(self, num_blocks: int, num_tokens: int) -> int:
        """The first block that windowed layers see when a sequence of ``num_tokens`` goes on after
        ``num_blocks``; its last token is always computed."""
        return self.first_seen(min(num_blocks * self._block_size, num_tokens - 1))

    def cut(self, has_part: Sequence[bool], num_tokens: int) -> int:
        """The most blocks of a run that a sequence of ``num_tokens`` can go on after."""
        num_blocks = len(has_part)
        while num_blocks:
            first = self.first_needed(num_blocks, num_tokens)
            missing = next(
                (i for i in range(num_blocks - 1, first - 1, -1) if not has_part[i]), None
            )
            if missing is None:
                break
            num_blocks = missing
        return num_blocks

    def num_new_pages(self, num_blocks: int, found: Sequence[Block]) -> int:
        """Pages that a sequence of ``num_blocks`` blocks takes which finds ``found`` and goes on
        after them; those that could be reclaimed before are counted."""
        window = self.window
        held = sum(block.window is not None and block.window.num_readers > 0 for block in found)
        return (max(min(num_blocks, window.max_parts), len(found)) - held) * window.num_pages

    def begin(self, state: WindowState, found: Sequence[Block], first: int) -> None:
        """Holds the parts of a sequence's first blocks, from block ``first`` on."""
        self._prepare(state)
        state.num_passed = min(first, len(found))
        for table in state.tables:
            table.extend([0] * state.num_passed)
        for block in found[state.num_passed :]:
            part = block.window
            assert part is not None
            self.hold(part)
            part.is_kept = True
            self._append(state, part)

    def extend(self, state: WindowState, block: Block, owner: Owner) -> None:
        """A part for a block that a sequence is going to write."""
        self._prepare(state)
        part = WindowPart(self._take_pages(owner), block)
        if self.window.is_ragged:  # what was there before must not go where the part goes
            self._pool.erase(part.pages[-1].block_id)
        self.attach(part, block)
        self._append(state, part)

    def extend_without(self, state: WindowState) -> None:
        """A block of which the sequence will see nothing in windowed layers."""
        self._prepare(state)
        assert not state.parts
        state.num_passed += 1
        for table in state.tables:
            table.append(0)

    def share(self, state: WindowState, index: int, block: Block) -> None:
        """The sequence's block ``index`` is a copy of ``block``: it goes on with that one.

        Its part stays if ``block`` has none.
        """
        at = index - state.num_passed
        if not 0 <= at < len(state.parts):
            return
        mine = state.parts[at]
        if block.window is None:
            self._detach(mine)
            self.attach(mine, block)
            return
        self.hold(block.window)
        state.parts[at] = block.window
        for table, page in zip(state.tables, block.window.pages, strict=True):
            table[index] = page.block_id
        self.release(mine)

    def slide(self, state: WindowState, position: int) -> None:
        """Gives back the parts that no token from ``position`` on sees."""
        first = self.first_seen(position)
        while state.parts and state.num_passed < first:
            part = state.parts.popleft()
            if self._may_end_a_prefix(state, state.num_passed):
                part.is_kept = True
            self.release(part)
            state.num_passed += 1

    def _may_end_a_prefix(self, state: WindowState, index: int) -> bool:
        """Whether block ``index`` is before the end of the prompt, before a point where a hit was
        cut, or before a checkpoint: where a prefix whose end is gone can still be gone on after."""
        for end in (state.num_prompt_blocks, state.num_wanted):
            if self.first_seen(end * self._block_size - 1) <= index < end:
                return True
        width = -(-self.window.num_tokens // self._block_size) + 1
        return index // width % _CHECKPOINT == _CHECKPOINT - 1

    def end(self, state: WindowState) -> None:
        """Gives back all parts of a sequence; the next one may go on where it ended."""
        while state.parts:
            part = state.parts.pop()
            part.is_kept = True
            self.release(part)
        state.tables.clear()
        state.num_passed = 0

    def hold(self, part: WindowPart) -> None:
        """One more reader."""
        if part.num_readers == 0:
            self._listed(part).pop(id(part))
            self._pool.num_reclaimable -= len(part.pages)
        part.num_readers += 1

    def release(self, part: WindowPart) -> None:
        """One reader less. A part whose block cannot be found is of no use without one."""
        part.num_readers -= 1
        assert part.num_readers >= 0
        if part.num_readers:
            return
        if part.block is None or part.block.key is None:
            self._detach(part)
            self._free(part)
            return
        part.unused_since = self._pool.tick()
        self._listed(part)[id(part)] = part
        self._pool.num_reclaimable += len(part.pages)

    def attach(self, part: WindowPart, block: Block) -> None:
        """``part`` is what windowed layers have of ``block``."""
        assert block.window is None
        part.block, block.window = block, part
        if block.key is not None:
            self._pool.count_pages(block, len(part.pages))

    def _detach(self, part: WindowPart) -> None:
        block = part.block
        if block is not None:
            if block.key is not None:
                self._pool.count_pages(block, -len(part.pages))
            block.window = part.block = None

    def _take_pages(self, owner: Owner) -> tuple[Block, ...]:
        self.num_pages += self.window.num_pages
        return tuple(self._pool.take(owner) for _ in range(self.window.num_pages))

    def _forgotten(self, block: Block) -> None:
        """``block`` is going to be nobody's, or to be found no more: so is its part."""
        part = block.window
        if part is None:
            return
        for page in part.pages:
            page.must_erase |= block.must_erase
        if part.num_readers == 0:
            self._drop(part)
        else:
            self._detach(part)

    def _reclaim(self, before: int | None) -> bool:
        """Frees the pages of a passed part that was not used since ``before``.

        Where a prefix ended, a part goes with its block: without it, all blocks before would be of
        no use. Only if nothing else is left (None), any part goes.
        """
        part = next(iter(self._passed.values()), None)
        if part is None and before is None:
            part = next(iter(self._kept.values()), None)
        if part is None or (before is not None and part.unused_since >= before):
            return False
        self._drop(part)
        return True

    def _drop(self, part: WindowPart) -> None:
        """Frees a part that nobody reads."""
        del self._listed(part)[id(part)]
        self._pool.num_reclaimable -= len(part.pages)
        self._detach(part)
        self._free(part)

    def _free(self, part: WindowPart) -> None:
        self.num_pages -= len(part.pages)
        self._pool.release(part.pages)

    def _listed(self, part: WindowPart) -> OrderedDict[int, WindowPart]:
        return self._kept if part.is_kept else self._passed

    def _append(self, state: WindowState, part: WindowPart) -> None:
        state.parts.append(part)
        for table, page in zip(state.tables, part.pages, strict=True):
            table.append(page.block_id)

    def _prepare(self, state: WindowState) -> None:
        while len(state.tables) < self.window.num_pages:
            state.tables.append(array.array("i"))

    def check(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        listed = [*self._passed.values(), *self._kept.values()]
        assert self._pool.num_reclaimable == sum(len(part.pages) for part in listed)
        for part in listed:
            assert part.num_readers == 0
            assert part.block is not None
            assert part.block.window is part
            assert part.block.key is not None
        for block in self._pool.blocks:
            if block.window is not None:
                assert block.window.block is block
                assert all(page.ref_count == 1 for page in block.window.pages)
                assert all(page.key is None for page in block.window.pages)

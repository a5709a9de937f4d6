"""The tiers together: blocks move down when they are evicted and come up when they are hit."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from anaphora.cache.eviction import LRU, EvictionPolicy
from anaphora.cache.hashing import BlockHash, BlockKey
from anaphora.cache.history import History, LossReason
from anaphora.cache.pool import Block, BlockPool, BlockRecord
from anaphora.cache.shares import Limits, Share
from anaphora.cache.tiers import (
    LowerTier,
    Memory,
    Mover,
    Pieces,
    Storage,
    Tier,
    Transfer,
)
from anaphora.cache.windows import Window, Windows
from anaphora.errors import DamagedBlock

logger = logging.getLogger(__name__)

_FLUSH_POLL_SECONDS = 0.1
_REMEMBERED = 2  # lost blocks, for each that fits
_MAX_PENDING_STORES = 64  # of one tier; more would only be copied to be overtaken by eviction


class Hierarchy:
    """Tier 1, which attention reads, and those below it. The step loop owns it.

    A block is in one or several tiers, and its parent is in at least one as long as it is: nothing
    is stranded. A block that is in the next lower tier already is evicted without a copy.
    """

    def __init__(
        self,
        num_blocks: int,
        memory: Memory | None = None,
        storages: Mapping[str, Storage] | None = None,
        *,
        shares: Sequence[Share] = (),
        new_policy: Callable[[int], EvictionPolicy] = LRU,
        reserve: int = 0,
        window: Window | None = None,
        mover: Mover | None = None,
    ) -> None:
        """``num_blocks`` blocks of tier 1, whose bytes are in ``memory``; without it, only who has
        which block is kept, as for a simulation.

        ``storages``: the lower tiers, the highest first. ``new_policy`` makes one for a tier of
        that many blocks. ``reserve``: blocks that a step may take, so that as many are copied down
        beforehand. ``window``: if layers see only so much, and have blocks of their own.
        """

        def pool(size: int) -> BlockPool:
            return BlockPool(size, new_policy(size), Limits(shares, size))

        self.device = Tier("device", pool(num_blocks))
        self.windows = None if window is None else Windows(self.device.pool, window)
        self.lower = tuple(
            LowerTier(name, pool(storage.num_slots), storage)
            for name, storage in (storages or {}).items()
        )
        self.tiers: tuple[Tier, ...] = (self.device, *self.lower)
        self.history = History(_REMEMBERED * sum(len(tier.pool.blocks) for tier in self.tiers))
        self._memory = memory
        self._mover = mover or Mover()
        self._reserve = reserve
        for tier in self.tiers:
            tier.pool.on_evict = functools.partial(self._leave, tier)
            tier.pool.erase = functools.partial(self._erase, tier)
        self.device.pool.erase_for_others = True  # slots below are written as a whole
        self.device.pool.on_starved = functools.partial(self.poll, None)

    def _erase(self, tier: Tier, block_id: int) -> None:
        if not isinstance(tier, LowerTier):
            if self._memory is not None:
                view = self._memory.block_view(block_id)
                view[:] = bytes(len(view))
        elif tier.storage.is_memory:
            tier.storage.erase(block_id)
        else:
            self._mover.erase(tier.storage, block_id)

    @property
    def num_under_way(self) -> int:
        """Blocks that are being moved."""
        return self._mover.num_under_way

    @property
    def is_storing(self) -> bool:
        """Whether blocks are on their way down."""
        return any(tier.num_pending for tier in self.lower)

    def find_below(self, key: BlockKey) -> tuple[LowerTier, Block] | None:
        """The highest lower tier that has the block."""
        for tier in self.lower:
            block = tier.pool.find(key)
            if block is not None:
                return tier, block
        return None

    def is_findable(self, block_hash: BlockHash) -> bool:
        """Whether any tier has it."""
        return any(tier.pool.is_findable(block_hash) for tier in self.tiers)

    def children(self, parent: BlockHash) -> Iterable[Block]:
        """Blocks of all tiers that come right after ``parent``; one in two tiers comes twice."""
        for tier in self.tiers:
            yield from tier.pool.children(parent)

    def num_worth_loading(
        self, found: Sequence[tuple[LowerTier, Block]], seconds_to_compute: float | None
    ) -> int:
        """How many of ``found`` to fetch, from the first on, so that the prompt is ready soonest.

        ``seconds_to_compute`` is of one block. What was never measured is taken for free to fetch.
        """
        if seconds_to_compute is None:
            return len(found)
        saved = best = 0.0
        num_best = 0
        for index, (tier, _) in enumerate(found):
            load = tier.load_time.seconds or 0.0
            if index == 0:  # it waits for those that are under way
                saved -= self._mover.num_loading * load
            saved += seconds_to_compute - load
            if saved > best:
                best, num_best = saved, index + 1
        return num_best

    def decline(self, found: Sequence[tuple[LowerTier, Block]]) -> None:
        """These are going to be computed again, because fetching them takes longer."""
        for tier, _ in found:
            tier.load_time.hope()
            tier.counters.recomputed_blocks += 1

    def load(
        self,
        tier: LowerTier,
        slot: Block,
        record: BlockRecord,
        into: Block,
        on_end: Callable[[Transfer], None],
    ) -> None:
        """Fetches a block from a held slot into a held, unwritten block of tier 1.

        ``poll`` calls ``on_end`` and then releases the slot.
        """
        self.device.pool.hold(into)
        transfer = Transfer(True, self.device, into, tier, slot, record, on_end)
        self._mover.submit(transfer, self._pieces(transfer))

    def prepare(self) -> None:
        """Starts to copy down what is going to be evicted, the lowest tier first."""
        room_below = None  # on its way: what the tier below copies down itself
        for upper, lower in reversed(list(zip(self.tiers, self.lower, strict=False))):
            wanted = min(self._reserve, len(upper.pool.blocks) // 4)
            while wanted - upper.pool.num_ready > lower.num_pending < _MAX_PENDING_STORES:
                victim = upper.pool.peek_victim()
                if victim is None or (room_below and not lower.pool.num_ready):
                    break  # what would make room now would be lost
                if not self._send_down(upper, victim, lower):
                    break
            room_below = lower.num_pending

    def _send_down(self, upper: Tier, block: Block, lower: LowerTier) -> bool:
        assert block.key is not None
        if lower.pool.is_findable(block.key.block_hash):  # never copied twice
            upper.pool.start_leaving(block)
            upper.pool.release([block])
            return True
        if not lower.pool.can_take:
            return False
        upper.pool.start_leaving(block)
        self._store(upper, block, lower)
        return True

    def _store(self, upper: Tier, block: Block, lower: LowerTier) -> None:
        """Copies a block that is held for it."""
        assert block.key is not None
        slot = lower.pool.take(block.owner)
        if block.key is None:  # the room was its parent's, without which it is lost
            lower.pool.release([slot])
            upper.pool.release([block])
            return
        lower.num_pending += 1
        transfer = Transfer(False, upper, block, lower, slot, block.record, _ignore)
        self._mover.submit(transfer, self._pieces(transfer))

    def _pieces(self, transfer: Transfer) -> Pieces:
        """Where the upper tier has the bytes. A window part has a reader until ``_end_pieces``."""
        tier, block = transfer.upper, transfer.block
        memory = tier.storage if isinstance(tier, LowerTier) else self._memory
        assert isinstance(memory, Memory)
        views = [memory.block_view(block.block_id)]
        if self.windows is None or isinstance(tier, LowerTier):
            return Pieces(tuple(views), len(views[0]))
        num_bytes = len(views[0]) * (1 + self.windows.window.num_pages)
        if block.window is not None:
            transfer.part = block.window
            self.windows.hold(block.window)
            views += [memory.block_view(page.block_id) for page in block.window.pages]
        return Pieces(tuple(views), num_bytes)

    def _end_pieces(self, transfer: Transfer) -> None:
        if self.windows is not None and transfer.part is not None:
            self.windows.release(transfer.part)

    def poll(self, timeout: float | None = 0.0) -> None:
        """Takes note of transfers that have ended; waits up to ``timeout`` seconds for one, with
        None as long as it takes."""
        for transfer in self._mover.poll(timeout):
            if transfer.is_load:
                self._end_load(transfer)
            else:
                self._end_store(transfer)

    def _end_store(self, transfer: Transfer) -> None:
        upper, lower, slot, block = transfer.upper, transfer.lower, transfer.slot, transfer.block
        lower.num_pending -= 1
        key = transfer.record.key
        if transfer.error is not None:
            lower.counters.failed_stores += 1
            logger.warning("a block could not be stored in tier %s: %s", lower.name, transfer.error)
        elif block.key is not key or not self._has_parent(transfer.record):
            slot.must_erase = True  # purged on the way
        elif self._publish_below(lower, slot, transfer.record):
            lower.counters.stored_blocks += 1
            lower.counters.store_seconds += transfer.seconds
        lower.pool.release([slot])
        self._end_pieces(transfer)
        upper.pool.release([block])

    def _end_load(self, transfer: Transfer) -> None:
        lower, slot, key = transfer.lower, transfer.slot, transfer.record.key
        if slot.key is not key:
            transfer.error = DamagedBlock("purged on the way")
        elif transfer.error is not None:
            lower.counters.failed_loads += 1
            logger.warning("a block of tier %s is lost: %s", lower.name, transfer.error)
            slot.must_erase = True
            lower.pool.forget(slot)
            if not self.is_findable(key.block_hash):
                self._lose(key.block_hash, "damaged", lower)
        else:
            lower.load_time.add(transfer.seconds)
            lower.counters.loaded_blocks += 1
            lower.counters.load_seconds += transfer.seconds
            lower.pool.hit(slot, transfer.record.owner)
        transfer.on_end(transfer)
        lower.pool.release([slot])
        self._end_pieces(transfer)
        self.device.pool.release([transfer.block])

    def _publish_below(self, lower: LowerTier, slot: Block, record: BlockRecord) -> bool:
        if not lower.pool.publish(slot, *record):
            return False
        if self._has_parent(record):
            return True
        lower.pool.forget(slot)  # its owner has its maximum, and the room was its parent's
        return False

    def _has_parent(self, record: BlockRecord) -> bool:
        return record.depth == 0 or self.is_findable(record.key.parent)

    def _leave(self, tier: Tier, block: Block) -> None:
        """``tier`` is about to give up a free block for want of room."""
        assert block.key is not None
        key = block.key
        index = self.tiers.index(tier)
        lower = self.lower[index] if index < len(self.lower) else None
        if lower is not None and not lower.pool.is_findable(key.block_hash):
            self._store_now(tier, block, lower)
        is_lost = sum(other.pool.is_findable(key.block_hash) for other in self.tiers) == 1
        if block.key is not None and is_lost:
            self._lose(key.block_hash, "evicted", tier)

    def _store_now(self, tier: Tier, block: Block, lower: LowerTier) -> None:
        """More blocks are needed than were prepared: memory is quick enough, a disk is not."""
        if not lower.storage.is_memory or not lower.pool.can_take:
            lower.counters.dropped_blocks += 1
            return
        record, slot = block.record, lower.pool.take(block.owner)
        transfer = Transfer(False, tier, block, lower, slot, record, _ignore)
        transfer.run(self._pieces(transfer))
        self._end_pieces(transfer)
        # The room may have been its parent's, without which it is lost.
        if block.key is not None and self._publish_below(lower, slot, record):
            lower.counters.stored_blocks += 1
            lower.counters.store_seconds += transfer.seconds
        lower.pool.release([slot])

    def _lose(self, block_hash: BlockHash, reason: LossReason, tier: Tier) -> None:
        """The last copy of a block goes, so what comes after it can never be reached."""
        self.history.record(block_hash, reason, tier.name)
        for other, block in self.descendants(block_hash):
            assert block.key is not None
            self.history.record(block.key.block_hash, reason, other.name)
            other.pool.forget(block)

    def drop(self, key: BlockKey) -> None:
        """Forgets and erases a block in all tiers because its bytes are wrong, and all that was
        computed from them: a tier that is kept must not give it back after a restart."""
        found = [(tier, tier.pool.find(key)) for tier in self.tiers]
        for tier, block in [*found, *self.descendants(key.block_hash)]:
            if block is not None and block.key is not None:
                self.history.record(block.key.block_hash, "damaged", tier.name)
                block.must_erase = True
                tier.pool.forget(block)

    def descendants(self, block_hash: BlockHash) -> list[tuple[Tier, Block]]:
        """All copies of all blocks that come after this one."""
        found: list[tuple[Tier, Block]] = []
        to_visit, seen = [block_hash], {block_hash}
        while to_visit:
            parent = to_visit.pop()
            for tier in self.tiers:
                for block in tier.pool.children(parent):
                    assert block.key is not None
                    found.append((tier, block))
                    if block.key.block_hash not in seen:
                        seen.add(block.key.block_hash)
                        to_visit.append(block.key.block_hash)
        return found

    def purge(self, is_wanted: Callable[[Block], bool]) -> dict[str, tuple[int, int]]:
        """Forgets and erases blocks in all tiers: how many in each, and how many are in use.

        Those in use are found by nobody any more, and erased when their sequences end.
        """
        counts: dict[str, tuple[int, int]] = {}
        for tier in self.tiers:
            for block in tier.pool.findable():
                if is_wanted(block) and block.key is not None:
                    self.history.record(block.key.block_hash, "purged", tier.name)
            counts[tier.name] = tier.pool.purge(is_wanted)
            if isinstance(tier, LowerTier) and not tier.storage.is_memory:
                self._mover.sync(tier.storage)
        return counts

    def restore(self, name: str, entries: Iterable[tuple[int, BlockRecord]]) -> int:
        """Takes over what a tier's storage kept from an earlier process, oldest first; how many.

        Blocks whose beginning is missing could never be reached, and are left out.
        """
        tier = next(tier for tier in self.lower if tier.name == name)
        found = list(entries)
        ages = {slot: age for age, (slot, _) in enumerate(found)}
        whole: list[tuple[int, BlockRecord]] = []
        hashes: set[BlockHash] = set()
        for slot, record in sorted(found, key=lambda entry: entry[1].depth):
            if record.depth == 0 or record.key.parent in hashes:
                hashes.add(record.key.block_hash)
                whole.append((slot, record))
        blocks = tier.pool.restore(whole)
        for slot in ages.keys() - {block.block_id for block in blocks}:
            self._mover.erase(tier.storage, slot)
        blocks.sort(key=lambda block: ages[block.block_id], reverse=True)
        tier.pool.release(blocks)  # the last of the list first: the oldest
        return len(blocks)

    def flush(self, seconds: float) -> None:
        """Copies to the lowest tier what is only above it, for at most ``seconds``."""
        lowest, deadline = self.tiers[-1], time.monotonic() + seconds
        assert isinstance(lowest, LowerTier)
        above = [(tier, block) for tier in self.tiers[:-1] for block in tier.pool.findable()]
        for tier, block in sorted(above, key=lambda pair: pair[1].depth):  # parents first
            while lowest.num_pending >= _MAX_PENDING_STORES and time.monotonic() < deadline:
                self.poll(_FLUSH_POLL_SECONDS)
            if time.monotonic() > deadline or not lowest.pool.num_ready:
                break
            if block.key is not None and not lowest.pool.is_findable(block.key.block_hash):
                tier.pool.hold(block)
                self._store(tier, block, lowest)
        while lowest.num_pending and time.monotonic() < deadline:
            self.poll(_FLUSH_POLL_SECONDS)

    def close(self) -> None:
        """Ends the threads and gives the lower tiers' storage back."""
        self._mover.close()
        for tier in self.lower:
            tier.storage.close()

    def check(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        if self.windows is not None:
            self.windows.check()
        for tier in self.tiers:
            tier.pool.check()
            for block in tier.pool.findable():
                assert block.key is not None
                assert block.depth == 0 or self.is_findable(block.key.parent)
        for block in self.device.pool.findable():
            assert block.key is not None
            is_whole = block.depth == 0 or self.device.pool.is_findable(block.key.parent)
            assert is_whole or block.is_leaving


def _ignore(_: Transfer) -> None:
    pass

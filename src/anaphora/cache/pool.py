"""The blocks of one tier: who holds them, which are findable, and which free one is taken next."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from anaphora.cache.eviction import LRU, EvictionPolicy
from anaphora.cache.hashing import BlockHash, BlockKey
from anaphora.cache.shares import Limit, Limits, Owner
from anaphora.types import WORKLOADS

_Group = tuple[Limit, ...]
NOBODY = Owner("", "interactive")  # also of a block that has never been written


def _nothing(_: Any) -> None:
    pass


def _no_parts(_: int | None) -> bool:
    return False


def _fail() -> None:
    raise AssertionError("free blocks, but none can be taken")


class BlockRecord(NamedTuple):
    """What a block is: kept beside its bytes wherever they go."""

    key: BlockKey
    depth: int  # blocks before it in its prefix
    owner: Owner
    has_window: bool = False  # whether what windowed layers have of it is there too


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """One block of a tier. ``key`` is set exactly while it is findable."""

    block_id: int
    ref_count: int = 0
    key: BlockKey | None = None
    depth: int = 0  # blocks before it in its prefix
    owner: Owner = NOBODY
    state: Any = None  # of the eviction policy
    is_evictable: bool = False
    is_leaving: bool = False  # chosen as a victim, and its bytes go or have gone a tier down
    must_erase: bool = False  # before anyone else gets it
    unused_since: int = 0  # on the pool's clock
    window: WindowPart | None = None  # tier 1: if there is one
    has_window: bool = False  # lower tiers: whether that lies beside it

    @property
    def record(self) -> BlockRecord:
        """Of a findable block."""
        assert self.key is not None
        has_window = self.has_window or self.window is not None
        return BlockRecord(self.key, self.depth, self.owner, has_window)

    @property
    def num_pages(self) -> int:
        """Blocks that it takes of its pool, with its window part."""
        return 1 if self.window is None else 1 + len(self.window.pages)


@dataclasses.dataclass(slots=True, eq=False)
class WindowPart:
    """What windowed layers have of a block (``windows.py``). Its pages are held by it alone."""

    pages: tuple[Block, ...]
    block: Block | None  # None once that was forgotten
    num_readers: int = 1  # sequences that still see it, and transfers
    is_kept: bool = False  # a prefix ended here, or may do so again
    unused_since: int = 0  # on the pool's clock


class BlockPool:
    """A fixed number of blocks. Every operation is O(log n) at most, but for the purge's.

    A block is held (ref_count > 0) or free. A free block keeps its bytes and stays findable until
    it is taken again. ``take`` gives, in this order::

        empty | leaving: copied a tier down | evictable, by policy | guaranteed | pinned

    Window parts that nobody reads (``windows.py``) go instead of a block that was used later.

    Free + held = total, always. A sequence holds the whole prefix of every block that it holds, so
    the free blocks have a leaf: what is free can be taken, if need be when a copy has ended.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: EvictionPolicy | None = None,
        limits: Limits | None = None,
    ) -> None:
        # Called with a block that is about to be forgotten for want of room.
        self.on_evict: Callable[[Block], None] = _nothing
        # Called with the id of a block whose bytes must not stay.
        self.erase: Callable[[int], None] = _nothing
        # Called until a block can be taken: all free ones wait for one that is being copied.
        self.on_starved: Callable[[], None] = _fail
        # Called with a block that is going to be findable no more.
        self.on_forget: Callable[[Block], None] = _nothing
        # Frees a window part unused since before the given time, of any age if that is None;
        # whether there was one.
        self.reclaim: Callable[[int | None], bool] = _no_parts
        self.num_reclaimable = 0  # held blocks that ``reclaim`` can free
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.limits = limits or Limits()
        self.num_free = num_blocks
        self.num_evicted = 0
        self.num_refused = 0  # blocks not kept because their owner has its maximum already
        self.num_guarantees_broken = 0  # else a running sequence could not have gone on
        self.erase_for_others = False  # blocks that change their tenant
        self._clock = 0
        self._empty = self.blocks[::-1]
        self._leaving: OrderedDict[int, Block] = OrderedDict()  # free ones, in the order of leaving
        self._pinned: OrderedDict[int, Block] = OrderedDict()  # free leaves that have pins
        self._num_pins: dict[BlockHash, int] = {}  # of blocks that may be gone for a while
        self._findable: dict[BlockHash, Block] = {}
        self._children: dict[BlockHash, dict[int, Block]] = {}  # by the parent's hash
        self._num_staying: dict[BlockHash, int] = {}  # of these, how many are not leaving
        self._policy = policy or LRU()
        self._policies: dict[_Group, EvictionPolicy] = {}

    @property
    def num_findable(self) -> int:
        """Blocks that ``find`` can give, held or free."""
        return len(self._findable)

    @property
    def num_pinned(self) -> int:
        """Different blocks that have pins, here or not."""
        return len(self._num_pins)

    @property
    def num_ready(self) -> int:
        """Blocks that ``take`` gives without choosing a victim."""
        return len(self._empty) + len(self._leaving)

    @property
    def num_available(self) -> int:
        """Blocks that ``take`` could give, one after the other."""
        return self.num_free + self.num_reclaimable

    @property
    def can_take(self) -> bool:
        """Whether ``take`` can give a block at once: a free one may have to wait for a block after
        it that is being read or copied."""
        return bool(
            self.num_ready
            or self._pinned
            or self.num_reclaimable
            or any(p.peek() for p in self._policies.values())
        )

    def find(self, key: BlockKey) -> Block | None:
        """The block published under ``key``. Changes nothing.

        Compares the tokens too, so that even a hash collision cannot serve wrong K/V.
        """
        block = self._findable.get(key.block_hash)
        return block if block is not None and block.key == key else None

    def is_findable(self, block_hash: BlockHash) -> bool:
        """Whether a block has been published under this hash."""
        return block_hash in self._findable

    def is_staying(self, block_hash: BlockHash) -> bool:
        """Whether it is findable and not about to be given up."""
        block = self._findable.get(block_hash)
        return block is not None and not block.is_leaving

    def children(self, parent: BlockHash) -> Iterable[Block]:
        """Findable blocks that come right after ``parent``, which need not be here."""
        return self._children.get(parent, {}).values()

    def hit(self, block: Block, owner: Owner) -> None:
        """A request of ``owner`` found ``block``, which it holds."""
        self._policy_of(block).hit(block)
        if WORKLOADS.index(owner.workload) < WORKLOADS.index(block.owner.workload):
            self._give(block, block.owner._replace(workload=owner.workload))

    def hold(self, block: Block) -> None:
        """One more holder for a block that ``find`` gave."""
        if block.ref_count == 0:
            self.num_free -= 1
            if block.is_leaving:
                del self._leaving[block.block_id]
            self._unsettle(block)
        if block.is_leaving:
            block.is_leaving = False
            self._count_staying(block, 1)
        block.ref_count += 1

    def take(self, owner: Owner = NOBODY) -> Block:
        """A block to write to, with one holder. Evicts one if there is no empty one."""
        assert self.num_available, "take() without a block; ask num_available first"
        while not self.can_take:
            self.on_starved()
        if not self._empty:
            self._make_empty(self.limits.of(owner))
        block = self._empty.pop()
        if self.erase_for_others and block.owner.tenant not in ("", owner.tenant):
            self.erase(block.block_id)  # it may stay partly unwritten
        block.ref_count = 1
        block.owner = owner
        self.num_free -= 1
        return block

    def publish(
        self,
        block: Block,
        key: BlockKey,
        depth: int,
        owner: Owner = NOBODY,
        has_window: bool = False,
    ) -> bool:
        """Makes a held, completely written block findable.

        False if its hash already finds another one, or ``owner`` has all that it may have and none
        of it is free.
        """
        assert block.ref_count > 0
        assert block.key is None
        if key.block_hash in self._findable or not self._make_room(owner):
            return False
        block.key, block.depth, block.owner, block.has_window = key, depth, owner, has_window
        self._findable[key.block_hash] = block
        self.limits.count(self.limits.of(owner), block.num_pages)
        self._link(block)
        self._policy_of(block).admit(block)
        return True

    def release(self, blocks: Sequence[Block]) -> None:
        """One holder less for each of ``blocks``, given in the order of the sequence."""
        for block in reversed(blocks):
            assert block.ref_count > 0, f"block {block.block_id} is released but nobody holds it"
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            self.num_free += 1
            block.unused_since = self.tick()
            if block.key is None:
                self._empty_out(block)
            elif block.is_leaving:
                self._leaving[block.block_id] = block
            else:
                self._policy_of(block).released(block)
                self._settle(block)

    def start_leaving(self, block: Block) -> None:
        """Holds the next victim while its bytes are copied a tier down.

        After ``release`` it is taken before others; a hit before that keeps it.
        """
        self._unsettle(block)
        block.is_leaving = True
        block.ref_count = 1
        self.num_free -= 1
        self._count_staying(block, -1)

    def peek_victim(self) -> Block | None:
        """The block that goes next among those that may go."""
        return self._choose(lambda group: not self.limits.is_guaranteed(group, ()))

    def pin(self, block_hash: BlockHash, change: int) -> None:
        """One pin more (1) or less (-1) on a block. Those that have pins go last of all."""
        block = self._findable.get(block_hash)
        is_settled = block is not None and (block.is_evictable or block.block_id in self._pinned)
        if block is not None and is_settled:
            self._unsettle(block)
        num_pins = self._num_pins.get(block_hash, 0) + change
        if num_pins:
            self._num_pins[block_hash] = num_pins
        else:
            del self._num_pins[block_hash]
        if block is not None and is_settled:
            self._settle(block)

    def forget(self, block: Block, *, evicted: bool = False) -> None:
        """Makes ``block`` findable no more, whoever holds it; a free one becomes empty."""
        assert block.key is not None
        self.on_forget(block)
        if block.ref_count == 0:
            self._leaving.pop(block.block_id, None)
            self._unsettle(block)
        self._policy_of(block).forget(block, evicted=evicted)
        self._unlink(block)
        self.limits.count(self.limits.of(block.owner), -1)
        del self._findable[block.key.block_hash]
        block.key = None
        block.is_leaving = False
        if block.ref_count == 0:
            self._empty_out(block)

    def purge(self, is_wanted: Callable[[Block], bool]) -> tuple[int, int]:
        """Forgets and erases the wanted blocks; held ones are erased when they are released.

        Blocks that are not findable, but may still hold bytes, are asked about as well. How many
        were findable, and how many of these are held.
        """
        num_purged = num_held = 0
        for block in self.blocks:
            if block.owner is NOBODY or not is_wanted(block):
                continue
            block.must_erase = True
            if block.key is not None:
                num_purged += 1
                num_held += block.ref_count > 0
                self.forget(block)
            elif block.ref_count == 0:
                self._clean(block)
        return num_purged, num_held

    def restore(self, entries: Iterable[tuple[int, BlockRecord]]) -> list[Block]:
        """Publishes empty blocks whose bytes are known to be there, parents first; held."""
        restored: list[Block] = []
        for block_id, record in entries:
            block = self.blocks[block_id]
            block.ref_count = 1
            if self.publish(block, *record):
                restored.append(block)
            else:
                block.ref_count = 0
        self._empty = [block for block in self._empty if block.ref_count == 0]
        self.num_free -= len(restored)
        return restored

    def tick(self) -> int:
        """The pool's time: it goes on by one."""
        self._clock += 1
        return self._clock

    def count_pages(self, block: Block, change: int) -> None:
        """A findable block's window part comes to count for its owner, or does so no more."""
        self.limits.count(self.limits.of(block.owner), change)

    def findable(self) -> Iterator[Block]:
        """All findable blocks, in no order that means anything."""
        return iter(self._findable.values())

    def _policy_of(self, block: Block) -> EvictionPolicy:
        group = self.limits.of(block.owner)
        if group not in self._policies:
            self._policies[group] = self._policy.sibling()
        return self._policies[group]

    def _give(self, block: Block, owner: Owner) -> None:
        """Changes a held block's owner, if the new one has room."""
        group = self.limits.of(owner)
        if group == self.limits.of(block.owner):
            block.owner = owner
        elif self.limits.passed(group) is None:
            self._policy_of(block).forget(block, evicted=False)
            self.limits.count(self.limits.of(block.owner), -block.num_pages)
            block.owner = owner
            self.limits.count(group, block.num_pages)
            self._policy_of(block).admit(block)

    def _make_room(self, owner: Owner) -> bool:
        """Whether ``owner`` may have one more findable block, after giving up others of its own."""
        group = self.limits.of(owner)
        while (subject := self.limits.passed(group)) is not None:
            victim = self._choose(lambda other: any(limit.subject == subject for limit in other))
            if victim is None:
                self.num_refused += 1
                return False
            self._evict(victim)
        return True

    def _make_empty(self, taker: _Group) -> None:
        """Evicts a block, or frees a window part."""
        if self._leaving:
            self._evict(next(iter(self._leaving.values())))
            return
        victim = self._choose(lambda group: not self.limits.is_guaranteed(group, taker))
        if self.reclaim(None if victim is None else victim.unused_since):
            return
        if victim is None:
            self.num_guarantees_broken += 1
            victim = self._choose(lambda _: True) or next(iter(self._pinned.values()))
        self._evict(victim)

    def _choose(self, may_go: Callable[[_Group], bool]) -> Block | None:
        """The lowest score over all groups that may lose a block."""
        best: tuple[float, Block] | None = None
        for group, policy in self._policies.items():
            if may_go(group):
                found = policy.peek()
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
        return None if best is None else best[1]

    def _evict(self, block: Block) -> None:
        self.num_evicted += 1
        self.on_evict(block)
        if block.key is not None:
            self.forget(block, evicted=True)

    def _empty_out(self, block: Block) -> None:
        assert block.window is None
        if block.must_erase:
            self._clean(block)
        self._empty.append(block)

    def _clean(self, block: Block) -> None:
        self.erase(block.block_id)
        block.must_erase = False
        block.owner = NOBODY

    def _settle(self, block: Block) -> None:
        """Puts a free findable block among those that can go, if nothing findable follows it."""
        assert block.key is not None
        if block.key.block_hash in self._num_staying:
            return
        if block.key.block_hash in self._num_pins:
            self._pinned[block.block_id] = block
        else:
            block.is_evictable = True
            self._policy_of(block).add(block)

    def _unsettle(self, block: Block) -> None:
        if block.is_evictable:
            block.is_evictable = False
            self._policy_of(block).discard(block)
        else:
            self._pinned.pop(block.block_id, None)

    def _link(self, block: Block) -> None:
        assert block.key is not None
        self._children.setdefault(block.key.parent, {})[block.block_id] = block
        self._count_staying(block, 1)

    def _unlink(self, block: Block) -> None:
        assert block.key is not None
        siblings = self._children[block.key.parent]
        del siblings[block.block_id]
        if not siblings:
            del self._children[block.key.parent]
        if not block.is_leaving:
            self._count_staying(block, -1)

    def _count_staying(self, child: Block, change: int) -> None:
        """Keeps a parent from going before its children, and lets it go after them."""
        assert child.key is not None
        num_before = self._num_staying.get(child.key.parent, 0)
        if num_before + change:
            self._num_staying[child.key.parent] = num_before + change
        else:
            del self._num_staying[child.key.parent]
        parent = self._findable.get(child.key.parent)
        if parent is None or parent.ref_count > 0 or parent.is_leaving:
            return
        if num_before == 0:
            self._unsettle(parent)
        elif num_before + change == 0:
            self._settle(parent)

    def check(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests and idle moments."""
        assert self.num_free == sum(b.ref_count == 0 for b in self.blocks)
        assert len({b.block_id for b in self._empty}) == len(self._empty)
        assert all(b.ref_count == 0 and b.key is None for b in self._empty)
        used: dict[str, int] = {}
        num_idle = 0
        for block in self.blocks:
            assert block.ref_count >= 0
            is_free_leaf = has_pins = False
            if block.key is not None:
                assert self._findable[block.key.block_hash] is block
                assert self._children[block.key.parent][block.block_id] is block
                is_free_leaf = (
                    block.ref_count == 0
                    and not block.is_leaving
                    and block.key.block_hash not in self._num_staying
                )
                has_pins = block.key.block_hash in self._num_pins
                for limit in self.limits.of(block.owner):
                    used[limit.subject] = used.get(limit.subject, 0) + block.num_pages
            assert block.is_evictable == (is_free_leaf and not has_pins)
            assert (block.block_id in self._pinned) == (is_free_leaf and has_pins)
            is_gone = block.ref_count == 0 and block.is_leaving
            assert (block.block_id in self._leaving) == is_gone
            num_idle += block.ref_count == 0 and block.key is None
        assert num_idle == len(self._empty)
        assert len(self._findable) == sum(b.key is not None for b in self.blocks)
        assert sum(map(len, self._children.values())) == len(self._findable)
        assert self._num_staying == {
            parent: num
            for parent, children in self._children.items()
            if (num := sum(not child.is_leaving for child in children.values()))
        }
        assert used == {subject: n for subject, n in self.limits.num_used.items() if n}

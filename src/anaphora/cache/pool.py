"""The blocks: who holds them, which are findable, and in which order free ones are taken."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

from anaphora.cache.hashing import BlockHash, BlockKey


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """One block of the K/V store. ``key`` is set exactly while it is findable."""

    block_id: int
    ref_count: int = 0
    key: BlockKey | None = None


class BlockPool:
    """A fixed number of blocks. Every operation on a block is O(1).

    A block is held (ref_count > 0) or free. A free block keeps its K/V and stays findable until it
    is taken again. Free blocks are taken from the front of one queue:

        front [ not findable | findable, least recently freed ... most recently freed ] back

    A sequence frees its blocks tail first, so the tail of a prompt lies nearer to the front than
    its head, and shared heads live longest. Free + held = total, always.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: OrderedDict[int, Block] = OrderedDict((b.block_id, b) for b in self.blocks)
        self._findable: dict[BlockHash, Block] = {}
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Blocks that ``take`` can give, findable ones included."""
        return len(self._free)

    @property
    def num_findable(self) -> int:
        """Blocks that ``find`` can give, held or free."""
        return len(self._findable)

    def find(self, key: BlockKey) -> Block | None:
        """The block published under ``key``. Changes nothing.

        Compares the tokens too, so that even a hash collision cannot serve wrong K/V.
        """
        block = self._findable.get(key.block_hash)
        return block if block is not None and block.key == key else None

    def hold(self, block: Block) -> None:
        """One more holder for a block that ``find`` gave."""
        if block.ref_count == 0:
            del self._free[block.block_id]
        block.ref_count += 1

    def take(self) -> Block:
        """A block to write to, with one holder. Evicts the front of the queue if need be."""
        assert self._free, "take() without a free block; ask num_free first"
        _, block = self._free.popitem(last=False)
        if block.key is not None:
            self._forget(block)
            self.num_evicted += 1
        block.ref_count = 1
        return block

    def publish(self, block: Block, key: BlockKey) -> bool:
        """Makes a held, completely computed block findable; False if another one already is."""
        assert block.ref_count > 0
        assert block.key is None
        if key.block_hash in self._findable:
            return False  # two sequences computed the same: the first one serves
        block.key = key
        self._findable[key.block_hash] = block
        return True

    def release(self, blocks: Sequence[Block]) -> None:
        """One holder less for each of ``blocks``, given in the order of the sequence."""
        for block in reversed(blocks):
            assert block.ref_count > 0, f"block {block.block_id} is released but nobody holds it"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block.block_id] = block
                if block.key is None:  # of no use to anyone: take it first
                    self._free.move_to_end(block.block_id, last=False)

    def forget_all(self) -> int:
        """Makes no block findable any more, whoever holds them; how many there were."""
        count = len(self._findable)
        for block in list(self._findable.values()):
            self._forget(block)
        return count

    def _forget(self, block: Block) -> None:
        assert block.key is not None
        del self._findable[block.key.block_hash]
        block.key = None

    def check(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests and idle moments."""
        assert len(self._free) == sum(b.ref_count == 0 for b in self.blocks)
        for block in self.blocks:
            assert block.ref_count >= 0
            assert (block.ref_count == 0) == (block.block_id in self._free)
            if block.key is not None:
                assert self._findable[block.key.block_hash] is block
        assert len(self._findable) == sum(b.key is not None for b in self.blocks)

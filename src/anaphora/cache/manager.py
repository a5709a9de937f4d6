"""The scheduler's door to the cache: match, allocate, commit, free, stats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from anaphora.cache.hashing import BlockHash, BlockHasher, encode_tokens
from anaphora.cache.pool import Block, BlockPool

# The last token of a prompt is always computed: its logits choose the first new token.
NUM_ALWAYS_COMPUTED = 1


class Cacheable(Protocol):
    """What the manager needs of a sequence. It fills ``blocks`` and ``block_hashes``."""

    token_ids: list[int]
    num_computed_tokens: int  # K and V exist for these
    root_hash: BlockHash
    blocks: list[Block]
    block_hashes: list[BlockHash]  # of its full blocks, computed once


@dataclasses.dataclass(slots=True)
class CacheStats:
    """Counters in tokens since the start."""

    num_queries: int = 0
    num_hits: int = 0


class CacheManager:
    """Finds, gives and takes back the blocks of sequences.

    Knows no tensors: block ids and opaque token bytes only. Not thread-safe; the step loop owns it.
    """

    def __init__(
        self, num_blocks: int, block_size: int, hasher: BlockHasher, *, enable_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks)
        self.stats = CacheStats()
        self._hasher = hasher
        # Blocks that a running sequence is about to compute: others wait for them (single flight).
        self._computing: dict[BlockHash, Cacheable] = {}

    def match(self, seq: Cacheable) -> list[Block]:
        """The longest run of findable blocks at the start of ``seq``. Changes no block.

        Stops so that at least ``NUM_ALWAYS_COMPUTED`` tokens remain to be computed.
        """
        if not self.enable_caching:
            return []
        matched: list[Block] = []
        for index in range(self._num_matchable(seq)):
            block = self.pool.find(self._block_hash(seq, index), self._tokens(seq, index))
            if block is None:
                break
            matched.append(block)
        return matched

    def is_being_computed(self, seq: Cacheable, index: int) -> bool:
        """Whether another sequence is about to compute the block ``index`` of ``seq``."""
        if not self.enable_caching or index >= self._num_matchable(seq):
            return False
        leader = self._computing.get(self._block_hash(seq, index))
        return leader is not None and leader is not seq

    def can_start(self, matched: Sequence[Block], num_tokens: int) -> bool:
        """Whether a sequence can have ``matched`` and new blocks for ``num_tokens`` in all."""
        new = -(-num_tokens // self.block_size) - len(matched)
        revived = sum(block.ref_count == 0 for block in matched)  # free now, not after start
        return new + revived <= self.pool.num_free

    def start(self, seq: Cacheable, matched: Sequence[Block], *, count: bool) -> None:
        """Gives ``matched`` (from ``match``, just now) to ``seq`` and announces what it computes.

        ``count``: whether this is the request's first start; a preempted one is not counted again.
        """
        assert not seq.blocks
        for block in matched:
            self.pool.hold(block)
        seq.blocks.extend(matched)
        seq.num_computed_tokens = len(matched) * self.block_size
        if not self.enable_caching:
            return
        if count:
            self.stats.num_queries += len(seq.token_ids)
            self.stats.num_hits += seq.num_computed_tokens
        for index in range(len(matched), self._num_matchable(seq)):
            self._computing.setdefault(self._block_hash(seq, index), seq)

    def num_missing_blocks(self, seq: Cacheable, num_tokens: int) -> int:
        """Blocks that ``seq`` lacks to hold ``num_tokens`` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(seq.blocks))

    def allocate(self, seq: Cacheable, num_tokens: int) -> bool:
        """Gives ``seq`` blocks for its first ``num_tokens`` tokens, or nothing and False."""
        missing = self.num_missing_blocks(seq, num_tokens)
        if missing > self.pool.num_free:
            return False
        seq.blocks.extend(self.pool.take() for _ in range(missing))
        return True

    def commit(self, seq: Cacheable, num_computed_before: int) -> None:
        """Makes the blocks findable that became full since ``num_computed_before``."""
        if not self.enable_caching:
            return
        full = seq.num_computed_tokens // self.block_size
        for index in range(num_computed_before // self.block_size, full):
            block_hash = self._block_hash(seq, index)
            self.pool.publish(seq.blocks[index], block_hash, self._tokens(seq, index))
            if self._computing.get(block_hash) is seq:
                del self._computing[block_hash]

    def free(self, seq: Cacheable) -> None:
        """Takes everything back from ``seq``: finished, aborted, failed or preempted."""
        self.pool.release(seq.blocks)
        seq.blocks.clear()
        seq.num_computed_tokens = 0
        for block_hash in seq.block_hashes:  # followers take over what it did not finish
            if self._computing.get(block_hash) is seq:
                del self._computing[block_hash]

    def _num_matchable(self, seq: Cacheable) -> int:
        return (len(seq.token_ids) - NUM_ALWAYS_COMPUTED) // self.block_size

    def _tokens(self, seq: Cacheable, index: int) -> bytes:
        start = index * self.block_size
        return encode_tokens(seq.token_ids[start : start + self.block_size])

    def _block_hash(self, seq: Cacheable, index: int) -> BlockHash:
        """The key of block ``index``; hashes of a sequence are computed once and in order."""
        while len(seq.block_hashes) <= index:
            known = len(seq.block_hashes)
            parent = seq.block_hashes[-1] if known else seq.root_hash
            seq.block_hashes.append(self._hasher.child(parent, self._tokens(seq, known)))
        return seq.block_hashes[index]

    def check(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        self.pool.check()
        for block_hash, seq in self._computing.items():
            assert block_hash in seq.block_hashes
            assert seq.blocks, "a sequence without blocks is announced as computing"

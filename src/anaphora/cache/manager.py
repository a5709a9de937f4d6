"""The scheduler's door to the cache: match, allocate, commit, free, stats."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Sequence
from typing import Protocol

from anaphora.cache.hashing import BlockHash, BlockHasher, BlockKey, encode_tokens
from anaphora.cache.pool import Block, BlockPool

# The last token of a prompt is always computed: its logits choose the first new token.
NUM_ALWAYS_COMPUTED = 1


class Cacheable(Protocol):
    """What the manager needs of a sequence. It fills ``block_table`` and ``block_keys``."""

    token_ids: list[int]
    num_computed_tokens: int  # K and V exist for these, and the next step goes on after them
    num_found_tokens: int  # in blocks that it found, which it never writes
    root_hash: BlockHash
    block_table: array.array[int]  # ids of the blocks it holds, in order
    block_keys: list[BlockKey]  # of its full blocks, each computed once


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

        It may cover all tokens; ``start`` leaves the last one to be computed all the same.
        """
        matched: list[Block] = []
        for index in range(self._num_matchable(seq)):
            block = self.pool.find(self._key(seq, index))
            if block is None:
                break
            matched.append(block)
        return matched

    def find_awaited(self, seq: Cacheable, num_matched: int) -> BlockHash | None:
        """The last block of the run after the matched ones that others are about to compute.

        None if nobody computes the next block: then ``seq`` has to do it itself.
        """
        awaited = None
        for index in range(num_matched, self._num_matchable(seq)):
            block_hash = self._key(seq, index).block_hash
            if block_hash not in self._computing:
                break
            awaited = block_hash
        return awaited

    def is_being_computed(self, block_hash: BlockHash | None) -> bool:
        """Whether a running sequence is about to compute this block."""
        return block_hash in self._computing

    def can_start(self, matched: Sequence[Block], num_tokens: int) -> bool:
        """Whether a sequence can have ``matched`` and new blocks for ``num_tokens`` in all."""
        new = -(-num_tokens // self.block_size) - len(matched)
        revived = sum(block.ref_count == 0 for block in matched)  # free now, not after start
        return new + revived <= self.pool.num_free

    def num_cached_tokens(self, seq: Cacheable, matched: Sequence[Block]) -> int:
        """Tokens of ``seq`` that need no computation with ``matched``: all but the last at most."""
        found = len(matched) * self.block_size
        return min(found, len(seq.token_ids) - NUM_ALWAYS_COMPUTED)

    def start(self, seq: Cacheable, matched: Sequence[Block], *, count: bool) -> None:
        """Gives ``matched`` (from ``match``, just now) to ``seq`` and announces what it computes.

        ``count``: whether this is the request's first start; a preempted one is not counted again.
        """
        assert not seq.block_table
        for block in matched:
            self.pool.hold(block)
        seq.block_table.extend(block.block_id for block in matched)
        seq.num_found_tokens = len(matched) * self.block_size
        seq.num_computed_tokens = self.num_cached_tokens(seq, matched)
        if count and self.enable_caching:
            self.stats.num_queries += len(seq.token_ids)
            self.stats.num_hits += seq.num_computed_tokens
        for index in range(len(matched), self._num_matchable(seq)):
            self._computing.setdefault(self._key(seq, index).block_hash, seq)

    def allocate(self, seq: Cacheable, num_tokens: int) -> bool:
        """Gives ``seq`` blocks for its first ``num_tokens`` tokens, or nothing and False."""
        missing = -(-num_tokens // self.block_size) - len(seq.block_table)
        if missing > self.pool.num_free:
            return False
        seq.block_table.extend(self.pool.take().block_id for _ in range(missing))
        return True

    def commit(self, seq: Cacheable, num_computed_before: int) -> None:
        """Makes the blocks findable that became full since ``num_computed_before``."""
        if not self.enable_caching:
            return
        full = seq.num_computed_tokens // self.block_size
        first = max(num_computed_before, seq.num_found_tokens) // self.block_size
        for index in range(first, full):
            key = self._key(seq, index)
            self.pool.publish(self.pool.blocks[seq.block_table[index]], key)
            self._retract(seq, key)

    def free(self, seq: Cacheable) -> None:
        """Takes everything back from ``seq``: finished, aborted, failed or preempted."""
        self.pool.release([self.pool.blocks[block_id] for block_id in seq.block_table])
        del seq.block_table[:]
        seq.num_computed_tokens = seq.num_found_tokens = 0
        for key in seq.block_keys:  # followers take over what it did not finish
            self._retract(seq, key)

    def compute_keys(self, seq: Cacheable) -> None:
        """Hashes all that can be matched of ``seq``, for others with the same tokens to copy."""
        if num_keys := self._num_matchable(seq):
            self._key(seq, num_keys - 1)

    def _retract(self, seq: Cacheable, key: BlockKey) -> None:
        if self._computing.get(key.block_hash) is seq:
            del self._computing[key.block_hash]

    def _num_matchable(self, seq: Cacheable) -> int:
        if not self.enable_caching:
            return 0
        return len(seq.token_ids) // self.block_size

    def _key(self, seq: Cacheable, index: int) -> BlockKey:
        """The key of block ``index``; the keys of a sequence are computed once and in order."""
        keys = seq.block_keys
        while len(keys) <= index:
            start = len(keys) * self.block_size
            parent = keys[-1].block_hash if keys else seq.root_hash
            tokens = encode_tokens(seq.token_ids[start : start + self.block_size])
            keys.append(BlockKey(self._hasher.child(parent, tokens), parent, tokens))
        return keys[index]

    def check(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        self.pool.check()
        for block_hash, seq in self._computing.items():
            assert any(key.block_hash == block_hash for key in seq.block_keys)
            assert seq.block_table, "a sequence without blocks is announced as computing"

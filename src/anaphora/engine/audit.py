"""A sample of the hits is computed again in spare time: promise 2, checked while we serve."""

from __future__ import annotations

import logging
import os
import random

from anaphora.cache.hashing import HASH_BYTES, BlockHash
from anaphora.cache.manager import CacheManager
from anaphora.cache.pool import Block
from anaphora.engine.runner import ModelRunner
from anaphora.engine.scheduler import Chunk
from anaphora.engine.sequence import Sequence
from anaphora.types import SamplingParams

logger = logging.getLogger(__name__)


class Auditor:
    """Recomputes the found blocks of one request at a time and compares them bit for bit.

    It holds the blocks it looks at, and as many to compute into, so the scheduler can take them all
    back with ``cancel`` at any time.
    """

    def __init__(
        self, cache: CacheManager, runner: ModelRunner, rate: float, max_num_tokens: int
    ) -> None:
        """``rate``: part of the hits that is looked at. ``max_num_tokens``: of one step."""
        self.num_blocks = 0  # compared so far
        self.num_skipped = 0  # sampled, but another audit was under way or there was no room
        self.num_mismatches = 0
        self._cache = cache
        self._runner = runner
        self._rate = rate
        self._max_num_tokens = max_num_tokens
        self._random = random.Random(os.urandom(8))  # nobody should guess which hits are looked at
        self._found: list[Block] = []
        self._copy: Sequence | None = None

    @property
    def has_work(self) -> bool:
        """Whether an audit is under way."""
        return self._copy is not None

    def sample(self, seq: Sequence) -> None:
        """Perhaps begins an audit of the blocks that ``seq`` has just found."""
        num_blocks = seq.num_found_tokens // self._cache.block_size
        if num_blocks == 0 or self._random.random() >= self._rate:
            return
        pool = self._cache.pool
        blocks = [pool.blocks[block_id] for block_id in seq.block_table[:num_blocks]]
        if self.has_work or any(block.key is None for block in blocks):
            self.num_skipped += 1
            return
        for block in blocks:
            pool.hold(block)
        self._found = blocks
        self._copy = Sequence(
            "audit",
            0,
            seq.token_ids[: seq.num_found_tokens],
            SamplingParams(max_tokens=1),
            BlockHash(os.urandom(HASH_BYTES)),  # finds nothing, and is found by nobody
            max_tokens=1,
            owner=seq.owner,
            account=seq.account,
            adapter=seq.adapter,
        )

    def step(self) -> None:
        """Computes some more tokens; after the last one it compares."""
        seq = self._copy
        assert seq is not None
        num_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, self._max_num_tokens)
        if not self._cache.allocate(seq, seq.num_computed_tokens + num_tokens):
            self.num_skipped += 1
            self.cancel()
            return
        self._runner.run([Chunk(seq, num_tokens)])
        seq.num_computed_tokens += num_tokens
        self._cache.slide(seq)
        if seq.num_computed_tokens == len(seq.token_ids):
            self._compare(seq)
            self.cancel()

    def cancel(self) -> bool:
        """Gives all blocks back; False if there were none."""
        if self._copy is None:
            return False
        self._cache.free(self._copy)
        self._cache.pool.release(self._found)
        self._found, self._copy = [], None
        return True

    def _compare(self, seq: Sequence) -> None:
        for index, (block, copy) in enumerate(zip(self._found, seq.block_table, strict=True)):
            self.num_blocks += 1
            if block.key is None or self._is_equal(block, copy):
                continue  # purged meanwhile, or well
            self.num_mismatches += 1
            logger.error(
                "AUDIT: a cached block differs from what the model computes now (block %d of its "
                "prefix); it and all that comes after it are dropped. Answers that used it may be "
                "wrong: look for memory errors, and report this",
                index,
            )
            self._cache.hierarchy.drop(block.key)
            return  # what comes after was computed from it

    def _is_equal(self, block: Block, copy_id: int) -> bool:
        """Also what windowed layers still have of both."""
        view = self._runner.store.block_view
        copy = self._cache.pool.blocks[copy_id]
        pairs = [(block, copy)]
        if block.window is not None and copy.window is not None:
            pairs += zip(block.window.pages, copy.window.pages, strict=True)
        return all(view(a.block_id) == view(b.block_id) for a, b in pairs)

"""What became of blocks that were here: only their hashes are kept, and of the latest only."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Literal, NamedTuple

from anaphora.cache.hashing import BlockHash

LossReason = Literal["evicted", "over_share", "purged", "damaged"]


class Loss(NamedTuple):
    """How a block got lost, from its last tier."""

    reason: LossReason
    tier: str
    seconds: float  # time.monotonic()


class History:
    """The last ``capacity`` blocks that can be found no more."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._losses: OrderedDict[BlockHash, Loss] = OrderedDict()

    def record(self, block_hash: BlockHash, reason: LossReason, tier: str) -> None:
        """The last copy of a block is gone."""
        self._losses[block_hash] = Loss(reason, tier, time.monotonic())
        self._losses.move_to_end(block_hash)
        if len(self._losses) > self._capacity:
            self._losses.popitem(last=False)

    def find(self, block_hash: BlockHash) -> Loss | None:
        """How this block got lost, if that is known."""
        return self._losses.get(block_hash)

    def discard(self, block_hash: BlockHash) -> None:
        """The block is here again."""
        self._losses.pop(block_hash, None)

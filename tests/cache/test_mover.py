"""The threads between the tiers: nothing submitted is lost, and order is kept."""

from __future__ import annotations

import pytest

from anaphora.cache.hashing import BlockHash, BlockKey
from anaphora.cache.pool import Block, BlockPool, BlockRecord
from anaphora.cache.shares import Owner
from anaphora.cache.tiers import LowerTier, Mover, Pieces, Tier, Transfer


class Recorder:
    """Notes what is asked of it; one slot fails."""

    is_memory = False
    num_slots = 500

    def __init__(self):
        self.calls = []

    def write(self, slot, record, data):
        self.calls.append(("write", slot))
        if slot == 13:
            raise OSError("full")

    def read(self, slot, record, into):
        self.calls.append(("read", slot))

    def erase(self, slot):
        self.calls.append(("erase", slot))
        raise OSError("that is logged")

    def close(self):
        pass


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 65, 300])
@pytest.mark.parametrize("is_load", [False, True])
def test_all_that_is_submitted_ends(count, is_load):
    storage = Recorder()
    mover = Mover()
    upper, lower = Tier("device", BlockPool(1)), LowerTier("disk", BlockPool(1), storage)
    record = BlockRecord(BlockKey(BlockHash(b""), BlockHash(b""), b""), 0, Owner("t", "batch"))
    for slot in range(count):
        transfer = Transfer(is_load, upper, Block(slot), lower, Block(slot), record, print)
        mover.submit(transfer, Pieces((memoryview(b""),), 0))
        if not is_load and slot % 50 == 7:
            mover.erase(storage, slot)
    ended = []
    while mover.num_under_way:
        assert (mover.num_loading > 0) == is_load
        ended += mover.poll(10.0)
    assert [transfer.slot.block_id for transfer in ended] == list(range(count))
    failed = [transfer.slot.block_id for transfer in ended if transfer.error is not None]
    assert failed == ([] if is_load or count <= 13 else [13])
    assert mover.poll(None) == mover.poll() == []
    mover.close()
    kind = "read" if is_load else "write"
    assert [slot for name, slot in storage.calls if name == kind] == list(range(count))
    for name, slot in storage.calls:
        if name == "erase":  # after the store before it
            assert storage.calls.index(("write", slot)) < storage.calls.index(("erase", slot))

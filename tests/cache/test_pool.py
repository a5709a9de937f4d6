"""The block pool's order and its invariants under random operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anaphora.cache.hashing import BlockHash, BlockKey
from anaphora.cache.pool import BlockPool
from anaphora.cache.shares import Owner

ROOT = BlockHash(b"root" * 8)
ALICE = Owner("alice", "interactive")


def key(i):
    return BlockKey(BlockHash(i.to_bytes(32, "little")), ROOT, bytes([i]))


def published(pool, i):
    block = pool.take()
    assert pool.publish(block, key(i), 0, ALICE)
    return block


def test_free_blocks_are_taken_tail_first():
    pool = BlockPool(4)
    blocks = [published(pool, i) for i in range(4)]
    pool.release(blocks)
    assert [pool.take() for _ in range(4)] == blocks[::-1]
    assert pool.num_evicted == 4


def test_blocks_without_a_key_are_taken_before_findable_ones():
    pool = BlockPool(3)
    findable, plain, other = published(pool, 0), pool.take(), published(pool, 1)
    pool.release([findable])
    pool.release([plain])
    pool.release([other])
    assert pool.take() is plain
    assert pool.num_evicted == 0
    assert pool.take() is findable


def test_a_held_block_is_never_taken():
    pool = BlockPool(2)
    block = published(pool, 0)
    pool.release([block])
    found = pool.find(key(0))
    pool.hold(found)
    pool.hold(found)
    assert pool.take() is not block
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_a_hash_collision_is_a_miss():
    pool = BlockPool(2)
    published(pool, 0)
    assert pool.find(BlockKey(key(0).block_hash, ROOT, b"other tokens")) is None


def test_the_first_of_two_equal_blocks_serves():
    pool = BlockPool(2)
    first, second = published(pool, 0), pool.take()
    assert not pool.publish(second, key(0), 0)
    assert pool.find(key(0)) is first
    pool.check()


def test_a_purge_leaves_holders_their_blocks_and_erases_them_later():
    pool = BlockPool(3)
    erased = []
    pool.erase = erased.append
    held, free = published(pool, 0), published(pool, 1)
    pool.release([free])
    assert pool.purge(lambda block: block.owner == ALICE) == (2, 1)
    assert pool.find(key(0)) is None
    assert erased == [free.block_id]
    assert held.ref_count == 1
    assert pool.num_free == 2
    pool.check()
    pool.release([held])
    assert erased == [free.block_id, held.block_id]
    pool.check()


def test_release_without_a_holder_is_caught():
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release([pool.blocks[0]])


class PoolMachine(RuleBasedStateMachine):
    """Random take, find, publish, release against a model: what was published can be found with
    the same tokens until it is taken again, and nothing else can."""

    @initialize(num_blocks=st.integers(1, 12))
    def create(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.held = []  # one entry per holder
        self.content = {}  # block id -> key it was published under

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def take(self):
        block = self.pool.take()
        assert block not in self.held
        self.content.pop(block.block_id, None)
        self.held.append(block)

    @rule(i=st.integers(0, 15))
    def find_and_hold(self, i):
        block = self.pool.find(key(i))
        expected = [b for b, k in self.content.items() if k == i]
        assert ([] if block is None else [block.block_id]) == expected
        if block is not None:
            self.pool.hold(block)
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), i=st.integers(0, 15))
    def publish(self, data, i):
        block = data.draw(st.sampled_from(self.held))
        if block.key is None:
            is_new = i not in self.content.values()
            assert self.pool.publish(block, key(i), 0, ALICE) == is_new
            if is_new:
                self.content[block.block_id] = i

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        count = data.draw(st.integers(1, len(self.held)))
        blocks, self.held = self.held[:count], self.held[count:]
        self.pool.release(blocks)

    @rule()
    def purge(self):
        assert self.pool.purge(lambda _: True)[0] == len(self.content)
        self.content.clear()

    @invariant()
    def accounts_balance(self):
        self.pool.check()
        assert self.pool.num_free + len(set(map(id, self.held))) == len(self.pool.blocks)
        assert self.pool.num_findable == len(self.content)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)

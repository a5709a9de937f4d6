"""What the eviction policies keep, and their order under random operations."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anaphora.bench.simulate import hit_rate, make_keys, replay
from anaphora.bench.traces import Trace
from anaphora.cache.eviction import LRU, LeastExpectedReuse
from anaphora.cache.forecast import NUM_RESTS, ReuseForecast
from anaphora.cache.hashing import BlockHash, BlockKey
from anaphora.cache.pool import BlockPool
from tests.cache.test_pool import ROOT


def rate(trace, policy, capacity):
    hits = replay(trace, make_keys(trace), policy, capacity).hits
    return hit_rate(trace, hits, len(hits) // 2)


def test_a_burst_of_prompts_that_nobody_repeats_flushes_nothing_in_daily_use():
    trace, choose = Trace("bursts", 16), random.Random(1)
    for number in range(6000):
        if number % 300 < 100:  # a third of the time only strangers come
            trace.add([("stranger", number, index) for index in range(10)], 160)
        else:
            daily = choose.randrange(10)
            trace.add([("daily", daily, index) for index in range(10)], 160)
    assert rate(trace, LRU, 200) < 0.65
    assert rate(trace, LeastExpectedReuse, 200) > 0.66  # all but the strangers


def test_a_loop_longer_than_the_cache_is_kept_in_part():
    trace = Trace("loop", 16)
    for number in range(4000):
        trace.add([(number % 20, index) for index in range(10)], 160)
    assert rate(trace, LRU, 100) == 0
    assert rate(trace, LeastExpectedReuse, 100) > 0.3  # the optimum: 0.5, less what passes through


def test_the_same_requests_give_the_same_evictions():
    trace, choose = Trace("random", 16), random.Random(2)
    for _ in range(2000):
        trace.add([choose.randrange(4) for _ in range(6)], 96)
    keys = make_keys(trace)
    assert (
        replay(trace, keys, LeastExpectedReuse, 60).hits
        == replay(trace, keys, LeastExpectedReuse, 60).hits
    )


@pytest.mark.parametrize("capacity", [1, 2, 10])
def test_tiny_caches_work(capacity):
    trace = Trace("tiny", 16)
    for number in range(3000):
        trace.add([number % 3, number % 5, number % 7], 48)
    assert 0 <= rate(trace, LeastExpectedReuse, capacity) <= 1


def test_a_rest_that_is_always_followed_by_a_use_is_worth_more_the_longer_it_lasts():
    forecast = ReuseForecast(100)
    for number in range(3000):  # ten blocks in a loop
        forecast.now += 1
        forecast.use(BlockHash(bytes([number % 10]) * 32), min(number // 10, 5))
    scores = [forecast.scores[5 * NUM_RESTS + rest] for rest in range(6)]  # 1, 2, 3, 4, 6, 8
    assert scores == sorted(scores)
    assert scores[0] < 0.2 < scores[-1]


def test_memory_is_bounded_by_the_capacity():
    forecast = ReuseForecast(50)
    for number in range(5000):
        forecast.now += 1
        block_hash = BlockHash(number.to_bytes(32, "little"))
        forecast.use(block_hash, 0)
        forecast.remember(block_hash, 3)
    assert len(forecast._watched) == 8 * 50
    assert len(forecast._ghosts) == 2 * 50
    assert forecast.recall(BlockHash((4999).to_bytes(32, "little"))) == 4
    assert forecast.recall(BlockHash((0).to_bytes(32, "little"))) == 0


def test_what_is_purged_is_not_remembered():
    forecast = ReuseForecast(50)
    block_hash = BlockHash(bytes(32))
    forecast.use(block_hash, 2)
    forecast.forget(block_hash)
    assert forecast.recall(block_hash) == 0


class Pool(RuleBasedStateMachine):
    """Chains of blocks are computed, held, found, released and purged."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12, LeastExpectedReuse(12))
        self.held = []

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def run(self, path):
        keys, parent = [], ROOT
        for name in path:
            block_hash = BlockHash(bytes([name]) + parent[:31])
            keys.append(BlockKey(block_hash, parent, b""))
            parent = block_hash
        found = []
        for key in keys:
            if (block := self.pool.find(key)) is None:
                break
            found.append(block)
        for block in found:
            self.pool.hold(block)
            self.pool.hit(block, block.owner)
        if self.pool.num_free < len(keys) - len(found):
            self.pool.release(found)
            return
        new = [self.pool.take() for _ in keys[len(found) :]]
        assert not {block.block_id for block in new} & {
            block.block_id for blocks in self.held for block in blocks
        }
        for depth, (block, key) in enumerate(zip(new, keys[len(found) :], strict=True), len(found)):
            assert self.pool.publish(block, key, depth)
        self.held.append(found + new)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(name=st.integers(0, 2))
    def forget(self, name):
        for block in list(self.pool.findable()):
            if block.key.block_hash[0] == name and block.is_evictable:
                self.pool.forget(block)
                return

    @invariant()
    def the_next_victim_is_evictable(self):
        self.pool.check()
        victim = self.pool.peek_victim()
        assert (victim is None) == (not any(block.is_evictable for block in self.pool.blocks))
        assert victim is None or (victim.is_evictable and victim.ref_count == 0)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""Why did it miss? Each reason is told when it is the true one."""

from __future__ import annotations

import pytest

from anaphora.cache.cacheable import Match
from anaphora.cache.eviction import LRU
from anaphora.cache.hashing import BlockHasher
from anaphora.cache.hierarchy import Hierarchy
from anaphora.cache.manager import CacheManager
from anaphora.cache.shares import parse_shares
from anaphora.cache.windows import Window
from anaphora.types import MISS_REASONS, CacheScope
from tests.cache.test_manager import Cache, Seq

PROMPT = [5, 5, 6, 6, 7, 7, 8, 8, 9]


def test_each_reason_is_told():
    told = set()

    def tell(report, reason, **more):
        assert report.miss_reason == reason
        assert report.num_missed_tokens + sum(report.hits.values()) == len(PROMPT)
        for name, value in more.items():
            assert getattr(report, name) == value
        told.add(reason)

    cache = Cache(12, [4], policy=LRU)
    tell(cache.run(PROMPT), "never_seen")
    tell(cache.run(PROMPT), "no_full_block", hits={"device": 8, "host": 0})
    tell(cache.run([5, 5, 6, 4, *PROMPT[4:]]), "diverged", first_differing_token=3)
    tell(cache.run([5, 1, *PROMPT[2:]]), "diverged", first_differing_token=1)
    tell(cache.run([1, *PROMPT[1:]]), "never_seen")
    tell(cache.run(PROMPT, salt="s"), "other_scope")
    tell(cache.run(PROMPT, tenant="bob"), "never_seen")
    for number in range(5):
        cache.run([100 + number, *[1] * 8], tenant="bob")
    report = cache.run(PROMPT)
    tell(report, "evicted", lost_from="host")
    assert 0 <= report.lost_seconds_ago < 60
    cache.manager.purge(tenant="alice")
    tell(cache.run(PROMPT), "purged", lost_from="device")

    cache = Cache(6, [12], policy=LRU)  # its second tier has all that the first one gives up
    cache.run(PROMPT)
    cache.run([100, *[1] * 8])
    [host] = cache.hierarchy.lower
    host.load_time.seconds, cache.manager.compute_time.seconds = 10.0, 1e-9
    tell(cache.run(PROMPT), "recompute_cheaper")
    cache.run([101, *[1] * 8])
    host.load_time.seconds = 0.0
    seq = cache.start(PROMPT)
    cache.mover.run_next(loads=True, fail=True)
    cache.settle()
    tell(cache.manager.report(seq), "damaged", lost_from="host")
    cache.manager.free(seq)

    cache = Cache(12, [], shares=parse_shares(["class:batch=0:10"]))
    cache.run(PROMPT, workload="batch")
    tell(cache.run(PROMPT, workload="batch"), "over_share", hits={"device": 2})

    window = Window(num_tokens=3, num_pages=1, block_size=2, max_chunk=4)
    cache = Cache(40, [], window=window)
    cache.run(PROMPT)
    while cache.manager.pool.reclaim(None):
        pass
    tell(cache.run(PROMPT), "window_lost", hits={"device": 0})
    tell(cache.run(PROMPT), "no_full_block", hits={"device": 8})

    seq = Seq(cache.manager, PROMPT, CacheScope("alice"))
    cache.manager.start(seq, Match([], [], [], is_unwanted=True))
    tell(cache.manager.report(seq), "prompt_logprobs", hits={"device": 0})
    cache.manager.free(seq)

    off = CacheManager(Hierarchy(12), 2, BlockHasher(bytes(32), {}), enable_caching=False)
    seq = Seq(off, PROMPT, CacheScope())
    off.start(seq, off.match(seq))
    tell(off.report(seq), "disabled")
    assert told == set(MISS_REASONS) - {"other_adapter"}


def test_another_adapter_is_told_apart_from_another_scope():
    cache = Cache(20, []).manager
    for adapter in ("", "digest"):
        seq = Seq(cache, PROMPT, CacheScope("alice", adapter=adapter))
        seq.owner = seq.owner._replace(adapter=adapter)
        cache.start(seq, cache.match(seq))
        report = cache.report(seq)
        cache.allocate(seq, len(PROMPT))
        seq.num_computed_tokens = len(PROMPT)
        cache.commit(seq, 0)
        cache.free(seq)
    assert report.miss_reason == "other_adapter"
    assert cache.purge(adapter="digest")["device"].blocks == 4
    assert cache.pool.num_findable == 4


def test_the_counters_are_the_sum_of_the_reports():
    cache = Cache(12, [4])
    reports = [cache.run(PROMPT[:length]) for length in (9, 9, 5, 1, 3, 9)]
    stats = cache.manager.stats
    assert stats.num_hits == sum(sum(report.hits.values()) for report in reports)
    assert stats.num_queries == 9 + 9 + 5 + 1 + 3 + 9
    assert sum(stats.missed_because.values()) == stats.num_queries - stats.num_hits
    assert sum(tier.counters.hit_tokens for tier in cache.hierarchy.tiers) == stats.num_hits


def test_what_follows_a_public_prefix_is_not_compared_between_tenants():
    cache = Cache(20, [], public=[[5, 5, 6, 6]])
    cache.run(PROMPT, tenant="alice")
    report = cache.run([5, 5, 6, 6, 7, 1, 1], tenant="bob")
    assert report.hits == {"device": 4}
    assert report.miss_reason == "never_seen"
    assert cache.run([5, 5, 6, 6, 7, 2, 2], tenant="bob").first_differing_token == 5


def test_looking_at_a_thousand_siblings_stops_early():
    cache = Cache(3000, [])
    for number in range(200):
        cache.run([5, 5, 100 + number, 1, 1])
    compared = []
    children = cache.hierarchy.children

    def count(parent):
        for block in children(parent):
            compared.append(block)
            yield block

    cache.hierarchy.children = count
    assert cache.run([5, 5, 99, 1, 1]).miss_reason == "diverged"
    assert len(compared) <= 65


@pytest.mark.parametrize("length", range(1, 10))
def test_hits_are_never_the_whole_prompt(length):
    cache = Cache(12, [])
    cache.run(PROMPT)
    report = cache.run(PROMPT[:length])
    assert sum(report.hits.values()) == min(length // 2 * 2, length - 1)

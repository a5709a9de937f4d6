"""Shares and pins: who may fill how much, who is kept from whom, and what the quotas refuse."""

from __future__ import annotations

import pytest

from anaphora.cache.shares import Share, parse_shares
from anaphora.errors import ConfigError, InvalidRequest, QuotaExceeded
from anaphora.types import CacheScope
from tests.cache.test_manager import Cache


def unique(number):
    """Three blocks that nobody else has."""
    return [100 + number, 1, 1, 1, 1, 1, 1]


def num_cached(cache, wanted):
    return sum(wanted(block.owner) for block in cache.manager.pool.findable())


def test_a_class_never_passes_its_maximum():
    cache = Cache(20, [], shares=parse_shares(["class:batch=0:20"]))
    for number in range(10):
        cache.run(unique(number), workload="batch")
        assert num_cached(cache, lambda owner: owner.workload == "batch") <= 4
        cache.check()
    assert num_cached(cache, lambda owner: owner.workload == "batch") >= 3
    # what it may not keep is no reason to evict others, and it still runs
    cache.run([5, 5, 6, 6, 7, 7, 7])
    for number in range(10, 30):
        cache.run(unique(number), workload="batch")
    assert sum(cache.run([5, 5, 6, 6, 7, 7, 7]).hits.values()) == 6


def test_a_guarantee_is_kept_from_others():
    cache = Cache(20, [], shares=parse_shares(["tenant:alice=30:100"]))
    alice = [5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 9]  # five blocks, less than her 30 %
    cache.run(alice)
    for number in range(30):
        cache.run(unique(number), tenant="bob")
    assert sum(cache.run(alice).hits.values()) == 10
    assert cache.manager.pool.num_guarantees_broken == 0


def test_a_guarantee_gives_way_before_a_request_fails():
    """Shares are of what is kept: a lone sequence may always have the whole store."""
    cache = Cache(6, [], shares=parse_shares(["tenant:alice=60:100"]))
    cache.run([5, 5, 6, 6, 7, 7, 7])
    cache.run([100, *[1] * 10], tenant="bob")
    assert cache.manager.pool.num_guarantees_broken > 0
    cache.check()


def test_each_tenant_has_its_own_maximum():
    cache = Cache(20, [], shares=parse_shares(["tenant:*=0:30", "tenant:bob=0:50"]))
    for number in range(8):
        for tenant in ("alice", "bob", "carol"):
            cache.run(unique(number), tenant=tenant)
    counts = {
        tenant: num_cached(cache, lambda owner, tenant=tenant: owner.tenant == tenant)
        for tenant in ("alice", "bob", "carol")
    }
    assert counts["alice"] <= 6
    assert counts["carol"] <= 6
    assert counts["bob"] <= 10
    assert sum(counts.values()) > 12


def test_a_hit_makes_a_batchs_block_an_interactive_one():
    cache = Cache(20, [], shares=parse_shares(["class:batch=0:20"]))
    cache.run(unique(1), workload="batch")
    cache.run(unique(1), workload="interactive")
    assert num_cached(cache, lambda owner: owner.workload == "batch") == 0
    cache.run(unique(1), workload="batch")  # and a batch's hit does not take it back
    assert num_cached(cache, lambda owner: owner.workload == "interactive") == 3


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["batch=0:10"], "write class:NAME=MIN:MAX"),
        (["class:batch=0"], "in percent"),
        (["class:nightly=0:10"], "there is no class 'nightly'"),
        (["class:batch=20:10"], "MIN <= MAX <= 100"),
        (["class:batch=0:101"], "MIN <= MAX <= 100"),
        (["tenant:a=0:10", "tenant:a=0:20"], "tenant:a twice"),
        (["tenant:a=60:100", "tenant:b=50:100"], "guarantees 110%"),
    ],
)
def test_shares_that_make_no_sense(texts, message):
    with pytest.raises(ConfigError, match=message):
        parse_shares(texts)


def test_percent_signs_and_fractions():
    assert Share.parse("class:batch=0.5%:12.5%") == Share("class:batch", 0.005, 0.125)


def test_a_pinned_prefix_outlives_any_burst():
    cache = Cache(20, [], pin_quota=0.25)
    prompt = [5, 5, 6, 6, 7, 7, 7]
    cache.run(prompt)
    pin = cache.manager.pin(CacheScope("alice"), prompt, 1000.0)
    assert pin.num_tokens == 6
    for number in range(40):
        cache.run(unique(number), tenant="bob")
    assert sum(cache.run(prompt).hits.values()) == 6
    assert cache.manager.pins.remove("bob", pin.pin_id) is False
    assert cache.manager.pins.remove("alice", pin.pin_id) is True
    for number in range(40, 90):
        cache.run(unique(number), tenant="bob")
    assert sum(cache.run(prompt).hits.values()) == 0


def test_pins_have_a_quota_and_an_end():
    cache = Cache(20, [], pin_quota=0.25)  # five blocks
    for tokens in ([5, 5, 6, 6, 7, 7, 7], [8, 8, 9, 9, 8, 8, 8]):
        cache.run(tokens)
    manager = cache.manager
    manager.pin(CacheScope("alice"), [5, 5, 6, 6, 7, 7], 1000.0)
    with pytest.raises(QuotaExceeded, match="a tenant may pin 10 tokens; 6 are pinned"):
        manager.pin(CacheScope("alice"), [8, 8, 9, 9, 8, 8], 1000.0)
    manager.pin(CacheScope("alice"), [5, 5, 6, 6], 1000.0)  # the same blocks count once
    assert manager.pool.num_pinned == 3
    with pytest.raises(InvalidRequest, match="nothing of this prefix is cached"):
        manager.pin(CacheScope("bob"), [5, 5, 6, 6, 7, 7], 1000.0)
    now = [0.0]
    manager.pins._clock = lambda: now[0]
    [old, _] = manager.pins.list("alice")
    brief = manager.pin(CacheScope("alice"), [8, 8], 5.0)
    assert {pin.pin_id for pin in manager.pins.list("alice")} >= {brief.pin_id, old.pin_id}
    now[0] = 5.0
    manager.poll()
    assert brief.pin_id not in {pin.pin_id for pin in manager.pins.list("alice")}
    manager.purge(tenant="alice")
    assert manager.pins.list("alice") == []
    cache.check()


def test_pins_give_way_before_a_request_fails():
    cache = Cache(6, [], pin_quota=0.5)
    cache.run([5, 5, 6, 6, 7, 7, 7])
    cache.manager.pin(CacheScope("alice"), [5, 5, 6, 6, 7, 7], 1000.0)
    cache.run([100, *[1] * 10], tenant="bob")
    assert cache.manager.pool.num_guarantees_broken > 0
    cache.run([5, 5, 6, 6, 7, 7, 7])  # computed again, it is pinned again
    for number in range(20):
        cache.run(unique(number)[:5], tenant="bob")
    assert sum(cache.run([5, 5, 6, 6, 7, 7, 7]).hits.values()) == 6


def test_a_public_prefix_is_purged_with_what_comes_after_it():
    cache = Cache(30, [8], public=[[5, 5, 6, 6]])
    for tenant in ("alice", "bob"):
        cache.run([5, 5, 6, 6, 7, 7, 7], tenant=tenant)
        cache.run([8, 8, 9], tenant=tenant)
    assert cache.manager.purge(tenant="*")["device"].blocks == 2 + 2
    cache.check()
    assert sum(cache.run([8, 8, 9]).hits.values()) == 2
    assert sum(cache.run([5, 5, 6, 6, 7, 7, 7]).hits.values()) == 0

"""Promise 3: what one tenant asked shows in nothing that another one can see or measure."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.cache.hashing import BlockHasher
from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.types import CacheScope, PurgeCache
from tests.engine.driving import Driver, PatientDriver, assert_bit_equal, make_driver, prompt

TIERS = {
    "device": {"num_blocks": 400},
    "host": {"num_blocks": 40, "swap_space": 2**24},
    "disk": {"num_blocks": 40, "disk_cache_size": 2**24},
}
NUM_PAIRS = 250


def open_tier(tiny_path, tmp_path, name):
    options = dict(TIERS[name])
    if name == "disk":
        options["disk_cache"] = str(tmp_path)
    driver = PatientDriver(make_driver(tiny_path, **options).engine)
    driver.engine.cache.compute_time.seconds = 1.0  # so that nothing is too near to be fetched
    return driver


def first_report(driver, tokens, tenant, **params):
    request_id = driver.add(tokens, scope=CacheScope(tenant=tenant), **params)
    driver.finish()
    return driver.outputs[f"{request_id}/0"][0].cache_report, driver.result(request_id)


@pytest.mark.parametrize("name", TIERS)
def test_a_tenant_is_told_the_same_whether_another_one_asked_before(tiny_path, tmp_path, name):
    driver = open_tier(tiny_path, tmp_path, name)
    for seed in range(5):
        asked, unasked = prompt(seed, 200), prompt(100 + seed, 200)
        for _ in range(2):
            first_report(driver, asked, "alice")
        for filler in range(4):  # moves it down where there is a lower tier
            first_report(driver, prompt(1000 + 10 * seed + filler, 300), "alice")
        after, logits = first_report(driver, asked, "bob")
        without, _ = first_report(driver, unasked, "bob")
        assert sum(after.hits.values()) == sum(without.hits.values()) == 0
        assert after.miss_reason in ("never_seen", "diverged")
        assert after.lost_from is None
        # alice's prompt is hers still, from whatever tier, with the same bits
        hers, hers_logits = first_report(driver, asked, "alice")
        assert sum(hers.hits.values()) == 192
        assert_bit_equal(hers_logits, logits)


def kolmogorov_smirnov(one, other):
    """Largest distance of the two empirical distributions."""
    values = np.sort(np.concatenate([one, other]))
    at = [np.searchsorted(np.sort(sample), values, side="right") for sample in (one, other)]
    return np.abs(at[0] / len(one) - at[1] / len(other)).max()


@pytest.mark.parametrize("name", TIERS)
def test_time_to_first_token_tells_nothing(tiny_path, tmp_path, name):
    """A two-sample test on 250 pairs: prompts that alice asked before, and fresh ones."""
    driver = open_tier(tiny_path, tmp_path, name)
    rng = random.Random(1)

    def seconds(tokens, tenant):
        start = time.perf_counter()
        driver.add(tokens, scope=CacheScope(tenant=tenant), max_tokens=1)
        driver.finish()
        return time.perf_counter() - start

    asked, fresh, own = [], [], []
    for pair in range(NUM_PAIRS):
        known, unknown = prompt(2 * pair, 160), prompt(2 * pair + 1, 160)
        seconds(known, "alice")
        both = [(known, asked), (unknown, fresh)]
        rng.shuffle(both)
        for tokens, times in both:
            times.append(seconds(tokens, "bob"))
        own.append(seconds(known, "bob"))
    # the chance to exceed it by accident is one in ten thousand
    limit = math.sqrt(-math.log(1e-4 / 2) / 2) * math.sqrt(2 / NUM_PAIRS)
    assert kolmogorov_smirnov(asked, fresh) < limit
    assert kolmogorov_smirnov(asked, own) > 3 * limit  # the test can see a hit


def test_what_follows_a_public_prefix_stays_private(tiny_path):
    house = prompt(7, 100)
    config = EngineConfig(model=str(tiny_path), dtype="float32", threads=1, kv_cache_memory=2**21)
    driver = Driver(Engine(config, [house]))
    alice, _ = first_report(driver, house + prompt(1, 100), "alice")
    assert alice.hits["device"] == 0
    bob, _ = first_report(driver, house + prompt(1, 100), "bob")
    assert bob.hits["device"] == 100 // 16 * 16  # the house's system prompt and nothing else
    assert bob.miss_reason == "never_seen"  # not "diverged": what alice wrote is not looked at
    again, _ = first_report(driver, house + prompt(1, 100), "bob")
    assert again.hits["device"] == 192
    # a request that narrows its sharing shares nothing
    request_id = driver.add(house + prompt(1, 100), scope=CacheScope("bob", cache_salt="x"))
    driver.finish()
    assert driver.num_cached(request_id) == 0
    # a tenant's purge takes its own blocks only
    driver.engine.command(PurgeCache(tenant="bob"))
    kept, _ = first_report(driver, house + prompt(2, 100), "bob")
    assert kept.hits["device"] == 96
    assert first_report(driver, house + prompt(1, 100), "alice")[0].hits["device"] == 192


FIELDS = st.dictionaries(
    st.sampled_from(["tenant", "adapter", "cache_salt", "prompt_cache_key"]),
    st.text("abx", max_size=3).map(str.encode),
)


@given(FIELDS, FIELDS)
@settings(max_examples=300, deadline=None)
def test_no_two_scopes_have_one_root(one, other):
    hasher = BlockHasher(bytes(32), {"weights": b"w"})
    assert (hasher.root(one) == hasher.root(other)) == (one == other)


def test_scopes_that_look_alike_are_apart(tiny_path):
    """Adapter "x" against salt "x", tenant "ab" + "c" against "a" + "bc", two models."""
    driver = make_driver(tiny_path)
    root = driver.engine.cache.root
    scopes = [
        CacheScope("t"),
        CacheScope("t", adapter="x"),
        CacheScope("t", cache_salt="x"),
        CacheScope("t", prompt_cache_key="x"),
        CacheScope("ab", cache_salt="c"),
        CacheScope("a", cache_salt="bc"),
        CacheScope("abc"),
    ]
    roots = [root(scope) for scope in scopes]
    roots += [BlockHasher(bytes(32), {"block_size": size}).root({}) for size in (b"\x10", b"\x20")]
    assert len(set(roots)) == len(roots)

"""The audit finds a wrong block, costs nobody anything, and gives its blocks back."""

from __future__ import annotations

import pytest

from anaphora.types import PurgeCache
from tests.engine.driving import assert_bit_equal, make_driver, prompt


@pytest.fixture
def driver(tiny_path):
    return make_driver(tiny_path, num_blocks=64, audit_hits=1.0, swap_space=2**22)


def idle(driver):
    """What an engine process does while it has no request."""
    while driver.engine.has_spare_work:
        assert driver.engine.step() == []
    driver.engine.scheduler.check()


def run(driver, *args, **params):
    request_id = driver.add(*args, **params)
    while driver.engine.has_work:
        driver.step()
    return driver.result(request_id), driver.num_cached(request_id)


def test_a_good_hit_passes(driver):
    run(driver, prompt(1, 300))
    idle(driver)
    assert driver.engine.stats().num_audited_blocks == 0  # nothing was found
    run(driver, prompt(1, 300))
    idle(driver)
    stats = driver.engine.stats()
    assert stats.num_audited_blocks == 300 // 16
    assert stats.num_audit_mismatches == stats.num_audits_skipped == 0
    assert driver.engine.cache.pool.num_free == 64


def test_a_wrong_block_is_found_dropped_and_computed_again(driver, caplog):
    right, _ = run(driver, prompt(1, 300))
    pool = driver.engine.cache.pool
    bad = next(b for b in pool.blocks if b.key is not None and b.depth == 7)
    driver.engine.runner.store.block_view(bad.block_id)[100] ^= 1
    run(driver, prompt(1, 300))
    idle(driver)
    stats = driver.engine.stats()
    assert stats.num_audit_mismatches == 1
    assert "AUDIT" in caplog.text
    logits, num_cached = run(driver, prompt(1, 300))
    assert num_cached == 7 * 16
    assert_bit_equal(logits, right)
    idle(driver)
    assert driver.engine.stats().num_audit_mismatches == 1


def test_what_was_computed_from_a_wrong_block_is_erased_below_as_well(driver):
    """Else a disk that is kept would give it back after a restart."""
    run(driver, prompt(1, 300))
    hierarchy = driver.engine.cache.hierarchy
    pool, [host] = hierarchy.device.pool, hierarchy.lower
    for block in list(pool.findable()):
        hierarchy._store_now(hierarchy.device, block, host)
    assert host.pool.num_findable == pool.num_findable == 19
    bad = next(block for block in pool.blocks if block.key is not None and block.depth == 7)
    hierarchy.drop(bad.key)
    hierarchy.check()
    for tier, view in (
        (hierarchy.device, driver.engine.runner.store.block_view),
        (host, host.storage.block_view),
    ):
        assert {block.depth for block in tier.pool.findable()} == set(range(7))
        written = [b for b in tier.pool.blocks if b.key is None and b.depth >= 7]
        assert len(written) == 12
        assert not any(any(view(block.block_id)) for block in written)


def test_requests_come_first(driver):
    """An audit waits while there is work, and gives way when blocks are short."""
    run(driver, prompt(1, 400))
    run(driver, prompt(1, 400))
    assert driver.engine.auditor.has_work
    driver.engine.step()
    run(driver, prompt(2, 900), max_tokens=60)  # needs nearly all blocks
    assert not driver.engine.auditor.has_work
    assert driver.engine.stats().num_preemptions == 0
    assert driver.engine.cache.pool.num_free == 64


def test_a_sampled_hit_that_is_purged_is_no_mismatch(driver):
    run(driver, prompt(1, 300))
    run(driver, prompt(1, 300))
    driver.engine.step()
    driver.engine.command(PurgeCache())
    idle(driver)
    assert driver.engine.stats().num_audit_mismatches == 0
    assert driver.engine.cache.pool.num_free == 64
    assert not driver.engine.runner.store.data.any()


def test_without_the_option_nothing_is_sampled(tiny_path):
    driver = make_driver(tiny_path, num_blocks=64)
    for _ in range(3):
        run(driver, prompt(1, 300))
    assert not driver.engine.auditor.has_work
    assert driver.engine.stats().num_audits_skipped == 0

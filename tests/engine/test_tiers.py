"""Promise 2 through every tier, over a restart, and with a disk that fails in every way."""

from __future__ import annotations

import errno
import itertools
import os
import random

import numpy as np
import pytest

from anaphora.cache.tiers import HostMemory
from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.errors import ConfigError, DamagedBlock
from anaphora.types import CacheScope
from tests.engine.driving import Always, PatientDriver, assert_bit_equal
from tests.models.tiny import write_tiny_llama

DTYPES = ("int8", "float32")
NUM_PROMPT = 333  # 20 full blocks and a rest
NUM_BLOCKS = 32  # one prompt and its answer fit, two do not
BIG = 2**24


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def open_driver(path, dtype="int8", num_blocks=NUM_BLOCKS, **options):
    """An engine whose first tier holds ``num_blocks``."""
    probe = EngineConfig(model=str(path), dtype=dtype, threads=1, kv_cache_memory=2**20)
    block_bytes = Engine(probe)._block_bytes
    if options.get("swap_space") == "52 blocks":
        options["swap_space"] = 52 * block_bytes
    config = EngineConfig(
        model=str(path),
        dtype=dtype,
        threads=1,
        kv_cache_memory=num_blocks * block_bytes,
        **options,
    )
    driver = PatientDriver(Engine(config))
    # The tiny model computes as quickly as a disk reads: without this, fetching is often refused.
    driver.engine.cache.compute_time = Always(1.0)
    return driver


def make_prompt(seed, length=NUM_PROMPT):
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


def tier(driver, name):
    return driver.engine.stats().tiers[name]


LOWER = {
    "host": lambda path: {"swap_space": BIG},
    "disk": lambda path: {"disk_cache": str(path), "disk_cache_size": BIG},
    "both": lambda path: {
        "swap_space": "52 blocks",
        "disk_cache": str(path),
        "disk_cache_size": BIG,
    },
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lower", LOWER)
def test_restored_equals_cold(path, tmp_path, dtype, lower):
    """Four prompts take turns in a store that holds one: each comes back from below."""
    prompts = [make_prompt(seed) for seed in range(4)]
    reference = open_driver(path, dtype, num_blocks=200)
    cold = [reference.run(prompt)[0] for prompt in prompts]
    driver = open_driver(path, dtype, **LOWER[lower](tmp_path))
    for round_ in range(3):
        for prompt, expected in zip(prompts, cold, strict=True):
            logits, num_cached = driver.run(prompt)
            assert_bit_equal(logits, expected)
            if round_ > 0:
                assert num_cached == NUM_PROMPT // 16 * 16
    tiers = driver.engine.stats().tiers
    assert sum(t.loaded_blocks for name, t in tiers.items()) >= 2 * 3 * 16
    driver.engine.close()


def test_a_follower_shares_what_the_leader_loads(path):
    """Two requests for the same evicted prefix: each block is fetched once."""
    driver = open_driver(path, num_blocks=64, swap_space=BIG)
    prompt = make_prompt(1)
    expected, _ = driver.run(prompt)
    for seed in range(2, 6):
        driver.run(make_prompt(seed))
    before = tier(driver, "host").loaded_blocks
    first, second = driver.add(prompt), driver.add(prompt)
    driver.finish()
    assert_bit_equal(driver.result(first), expected)
    assert_bit_equal(driver.result(second), expected)
    assert tier(driver, "host").loaded_blocks - before <= NUM_PROMPT // 16


def test_an_abort_while_loading_loses_no_block(path):
    driver = open_driver(path, num_blocks=64, swap_space=BIG)
    prompt = make_prompt(1)
    expected, _ = driver.run(prompt)
    for seed in range(2, 6):
        driver.run(make_prompt(seed))
    for _ in range(5):
        request_id = driver.add(prompt)
        driver.step()
        driver.engine.abort(request_id)
        driver.finish()
    logits, _ = driver.run(prompt)
    assert_bit_equal(logits, expected)


def test_a_hit_that_costs_more_than_computing_is_not_taken(path):
    """Never worse: fetching is refused once it is known to be slow, and tried again later."""
    driver = open_driver(path, num_blocks=NUM_BLOCKS, swap_space=BIG)
    prompt = make_prompt(1)
    cold, _ = driver.run(prompt)
    [host] = driver.engine.cache.hierarchy.lower
    driver.run(make_prompt(2))
    host.load_time.seconds = 1e6  # as if the last ones had taken so long
    report = driver.add(prompt)
    driver.finish()
    assert_bit_equal(driver.result(report), cold)
    cached = driver.outputs[f"{report}/0"][0].cache_report
    assert cached.hits["host"] == 0
    assert cached.miss_reason == "recompute_cheaper"
    assert tier(driver, "host").recomputed_blocks > 0
    assert host.load_time.seconds < 1e6  # so that it is not refused for ever
    host.load_time.seconds = 1e-9
    driver.run(make_prompt(3))
    again = driver.add(prompt)
    driver.finish()
    assert driver.outputs[f"{again}/0"][0].cache_report.hits["host"] > 0
    assert_bit_equal(driver.result(again), cold)


class FaultyStorage:
    """A disk on which every access can fail, be short or give other bytes."""

    is_memory = False

    def __init__(self, storage, seed, write_faults, read_faults):
        self._storage = storage
        self._rng = random.Random(seed)
        self._write_faults, self._read_faults = write_faults, read_faults
        self.num_slots = storage.num_slots

    def write(self, slot, record, data):
        fault = self._rng.choice(self._write_faults)
        if fault is not None:
            raise fault()
        self._storage.write(slot, record, data)

    def read(self, slot, record, into):
        fault = self._rng.choice(self._read_faults)
        self._storage.read(slot, record, into)
        if fault is not None:
            into[:64] = os.urandom(64)
            raise fault()

    def erase(self, slot):
        self._storage.erase(slot)

    def sync(self):
        self._storage.sync()

    def close(self):
        self._storage.close()


FAULTS = {
    "full": lambda: OSError(errno.ENOSPC, "no space left"),
    "broken": lambda: OSError(errno.EIO, "input/output error"),
    "flipped": lambda: DamagedBlock("flipped"),
    "bug": lambda: ZeroDivisionError("a bug"),
}


@pytest.mark.parametrize("seed", range(3))
def test_a_disk_that_fails_costs_hits_and_nothing_else(path, tmp_path, seed, caplog):
    driver = open_driver(path, **LOWER["disk"](tmp_path))
    [disk] = driver.engine.cache.hierarchy.lower
    disk.storage = FaultyStorage(
        disk.storage,
        seed,
        [*[None] * 30, FAULTS["full"], FAULTS["broken"], FAULTS["bug"]],
        [*[None] * 15, FAULTS["broken"], FAULTS["flipped"], FAULTS["bug"]],
    )
    prompts = [make_prompt(s) for s in range(3)]
    reference = open_driver(path, num_blocks=200)
    cold = [reference.run(prompt)[0] for prompt in prompts]
    rng = random.Random(seed)
    for _ in range(12):
        index = rng.randrange(3)
        request_id = driver.add(prompts[index])
        if rng.random() < 0.2:
            driver.step()
            driver.engine.abort(request_id)
            driver.finish()
            continue
        driver.finish()
        assert_bit_equal(driver.result(request_id), cold[index])
    counters = tier(driver, "disk")
    assert counters.failed_stores > 0
    assert counters.failed_loads > 0
    assert "is lost" in caplog.text
    driver.engine.close()


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "key"
    file.write_text("0123456789abcdef" * 4)
    file.chmod(0o600)
    return file


def persistent(tmp_path, key_file, **more):
    options = {"disk_cache": str(tmp_path), "disk_cache_size": BIG, "disk_cache_persist": True}
    return {**options, "disk_cache_key_file": str(key_file), **more}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_restart_keeps_blocks_and_bits(path, tmp_path, key_file, dtype):
    prompts = [make_prompt(seed) for seed in range(3)]
    first = open_driver(path, dtype, **persistent(tmp_path, key_file))
    cold = [first.run(prompt)[0] for prompt in prompts]
    first.engine.close()
    second = open_driver(path, dtype, **persistent(tmp_path, key_file))
    for prompt, expected in zip(prompts, cold, strict=True):
        logits, num_cached = second.run(prompt)
        assert num_cached == NUM_PROMPT // 16 * 16
        assert_bit_equal(logits, expected)
    assert tier(second, "disk").hit_tokens > 0
    # a tenant of the first life is the same tenant in the second, and nobody else is
    assert second.run(prompts[0], scope=CacheScope(tenant="other"))[1] == 0
    second.engine.close()


def test_a_changed_model_key_or_precision_never_hits(path, tmp_path, key_file, tmp_path_factory):
    prompt = make_prompt(1)
    options = persistent(tmp_path, key_file)
    first = open_driver(path, **options)
    first.run(prompt)
    first.engine.close()
    other = write_tiny_llama(tmp_path_factory.mktemp("other"), seed=5)
    for changed, more in (
        (other, {}),
        (path, {"dtype": "float32"}),
        (path, {"kv_cache_dtype": "float16"}),
        (path, {"block_size": 32}),
    ):
        driver = open_driver(changed, **{**options, **more})
        assert driver.run(prompt)[1] == 0
        driver.engine.close()
        again = open_driver(path, **options)
        again.run(prompt)
        again.engine.close()
    key_file.write_text("f" * 64)
    driver = open_driver(path, **options)
    assert driver.run(prompt)[1] == 0
    driver.engine.close()


def test_a_kept_block_expires(path, tmp_path, key_file):
    prompt = make_prompt(1)
    first = open_driver(path, **persistent(tmp_path, key_file))
    first.run(prompt)
    first.engine.close()
    later = open_driver(path, **persistent(tmp_path, key_file, disk_cache_ttl=1e-6))
    assert later.run(prompt)[1] == 0
    later.engine.close()


def test_a_damaged_file_is_a_miss(path, tmp_path, key_file):
    prompt = make_prompt(1)
    options = persistent(tmp_path, key_file)
    first = open_driver(path, **options)
    cold, _ = first.run(prompt)
    first.engine.close()
    [file] = [p for p in tmp_path.iterdir() if p != key_file]
    content = bytearray(file.read_bytes())
    rng = random.Random(1)
    for _ in range(60):
        content[rng.randrange(len(content) // 50, len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    second = open_driver(path, **options)
    assert_bit_equal(second.run(prompt)[0], cold)
    second.engine.close()


def test_a_purge_reaches_every_tier_and_leaves_no_bytes(path, tmp_path):
    driver = open_driver(path, **LOWER["both"](tmp_path))
    for seed in range(8):
        driver.run(make_prompt(seed), scope=CacheScope(tenant="alice" if seed % 2 else "bob"))
    hierarchy = driver.engine.cache.hierarchy
    assert all(tier.pool.num_findable for tier in hierarchy.tiers)
    counts = driver.engine.cache.purge(tenant="alice")
    assert sum(count.blocks for count in counts.values()) > 0
    for seed in range(8):
        tenant = "alice" if seed % 2 else "bob"
        for t in hierarchy.tiers:
            assert not any(b.owner.tenant == "alice" for b in t.pool.findable())
        if tenant == "alice":
            _, num_cached = driver.run(make_prompt(seed), scope=CacheScope(tenant=tenant))
            assert num_cached == 0
            driver.engine.cache.purge(tenant="alice")
    counts = driver.engine.cache.purge()
    assert counts["device"].in_use == 0
    assert not driver.engine.runner.store.data.any()
    host = next(t.storage for t in hierarchy.lower if isinstance(t.storage, HostMemory))
    for slot, at in itertools.product(range(host.num_slots), (0, 8, -1)):
        assert host.block_view(slot)[at] == 0


def test_a_purge_while_a_request_runs(path):
    """It goes on with the same bits; what it computed before is found by nobody, and erased."""
    driver = open_driver(path, num_blocks=64)
    prompt = make_prompt(1)
    cold, _ = driver.run(prompt, max_tokens=30)
    driver.forget()
    request_id = driver.add(prompt, max_tokens=30)
    for _ in range(8):
        driver.step()
    counts = driver.engine.cache.purge(tenant="default")
    assert counts["device"].in_use == counts["device"].blocks > 0
    driver.finish()
    assert_bit_equal(driver.result(request_id), cold)
    assert driver.run(prompt)[1] == 0
    driver.engine.cache.purge()
    assert not driver.engine.runner.store.data.any()


def test_what_the_host_tier_is_asked_for_is_what_it_has(path):
    driver = open_driver(path, swap_space=BIG)
    size = driver.engine.info.tier_bytes
    assert BIG * 0.97 <= size["host"] <= BIG
    with pytest.raises(ConfigError, match=r"--swap-space is .* does not hold one block"):
        open_driver(path, swap_space=100)
    with pytest.raises(ConfigError, match=r"--swap-space is .* of memory; lower it"):
        open_driver(path, swap_space=2**50)

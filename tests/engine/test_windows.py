"""Windowed layers have blocks of their own: old ones go, hits stay exact."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.engine.scheduler import Step
from anaphora.errors import QuotaExceeded
from anaphora.ops.kv_store import KVLayout
from anaphora.types import CacheScope, PurgeCache
from tests.engine.driving import Always, PatientDriver, assert_bit_equal
from tests.models.families import GEMMA3, GPT_OSS, write_family

MODELS = {
    "gemma3": GEMMA3 | {"sliding_window": 40, "sliding_window_pattern": 5},  # 1 full, 4 windowed
    "gpt_oss": GPT_OSS | {"sliding_window": 40},
    # 2 full, 3 windowed: the last page of a part has a layer that nobody writes
    "ragged": GEMMA3
    | {
        "sliding_window": 40,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full") * 2]
        + ["sliding_attention"],
    },
}
BIG = 2**24


@pytest.fixture(scope="module", params=MODELS)
def path(request, tmp_path_factory):
    return write_family(tmp_path_factory.mktemp(request.param), MODELS[request.param])


def open_driver(path, num_blocks=2000, **options):
    """An engine whose first tier has ``num_blocks`` blocks, of full layers or of windowed ones."""
    options = {"max_num_batched_tokens": 64, "threads": 1} | options
    probe = EngineConfig(model=str(path), dtype="int8", kv_cache_memory=2**22)
    layout = Engine(probe).runner.store.layout
    size = layout.block_bytes
    if options.get("swap_space") == "52 blocks":
        options["swap_space"] = 52 * size * (1 + layout.num_window_tables)
    config = dataclasses.replace(probe, kv_cache_memory=num_blocks * size, **options)
    driver = PatientDriver(Engine(config))
    # The tiny model computes as quickly as a disk reads: without this, fetching is often refused.
    driver.engine.cache.compute_time = Always(1.0)
    return driver


@pytest.fixture(scope="module")
def plenty(path):
    """For what cold runs give."""
    return open_driver(path)


def cold(driver, prompt):
    driver.forget()
    return driver.run(prompt)[0]


def make_prompt(seed, length):
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


def test_places_of_the_models_that_we_serve():
    sizes = {"num_kv_heads": 1, "head_dim": 64, "block_size": 16, "dtype": "int16"}
    gemma = KVLayout.of_windows(([512] * 5 + [0]) * 3, **sizes)
    assert (gemma.num_layers, gemma.num_window_tables) == (3, 5)
    assert gemma.places[:7] == ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (0, 0), (2, 2))
    oss = KVLayout.of_windows([128, 0] * 12, **sizes)
    assert (oss.num_layers, oss.num_window_tables) == (12, 1)
    for windows in ([0] * 30, [512] * 30, [0, 0, 0, 512]):
        layout = KVLayout.of_windows(windows, **sizes)
        assert (layout.num_layers, layout.places) == (len(windows), ())
    assert len(set(gemma.places)) == 18


def test_a_long_prompt_takes_the_window_and_no_more(path):
    driver = open_driver(path)
    windows = driver.engine.cache.windows
    assert windows.window.num_tokens == 40
    driver.add(make_prompt(1, 1000), max_tokens=3)
    most = 0
    while driver.engine.has_work:
        driver.step()
        pool = driver.engine.cache.pool
        most = max(most, len(pool.blocks) - pool.num_available)
    assert most <= 63 + windows.window.num_pages * windows.window.max_parts


def test_conversations_in_turns_under_pressure(path, plenty):
    """Several take turns, and each turn finds all of the one before: nothing has to be computed
    again because windowed layers gave it up."""
    driver = open_driver(path, num_blocks=620)  # four turns with a part for each block take 800
    histories = [make_prompt(seed, 300) for seed in range(6)]
    for turn in range(4):
        for number, history in enumerate(histories):
            request = driver.add(history, max_tokens=6)
            driver.finish()
            if turn:
                assert driver.num_cached(request) >= len(history) - 20 - 16
            assert_bit_equal(driver.result(request), cold_with(plenty, history))
            histories[number] = history + driver.tokens(request) + make_prompt(99 * turn, 14)


def cold_with(driver, prompt):
    driver.forget()
    request = driver.add(prompt, max_tokens=6)
    driver.finish()
    return driver.result(request)


def test_an_edited_last_turn(path, plenty):
    """The message before the answer is changed: all before it is found."""
    driver = open_driver(path, num_blocks=400)
    history = make_prompt(1, 500)
    first = driver.add(history, max_tokens=30)
    driver.finish()
    history += driver.tokens(first)
    driver.run(history + make_prompt(2, 60))
    for stranger in range(5):  # others need room meanwhile
        driver.run(make_prompt(50 + stranger, 100))
    edited = history + make_prompt(3, 60)
    logits, num_cached = driver.run(edited)
    assert num_cached == (len(history) - 1) // 16 * 16
    assert_bit_equal(logits, cold(plenty, edited))


def test_a_lost_branch_point_is_kept_when_it_was_missed_once(path, plenty):
    """A system prompt in the middle of what was computed: found by the third request at last."""
    driver = open_driver(path, num_blocks=4000)
    system = make_prompt(1, 200)
    prompts = [system + make_prompt(seed, 150) for seed in range(2, 6)]
    driver.run(prompts[0])
    windows = driver.engine.cache.windows
    while windows._passed:  # as a full cache would take them
        windows._drop(next(iter(windows._passed.values())))
    logits, num_cached = driver.run(prompts[1])
    assert num_cached == 0
    assert_bit_equal(logits, cold(plenty, prompts[1]))
    while windows._passed:
        windows._drop(next(iter(windows._passed.values())))
    for prompt in prompts[2:]:
        logits, num_cached = driver.run(prompt)
        assert num_cached == 192
        assert_bit_equal(logits, cold(plenty, prompt))


@pytest.mark.parametrize("lower", ["host", "disk", "both"])
def test_restored_equals_cold(path, plenty, tmp_path, lower):
    """Prompts take turns in a store that holds one: each comes back from below."""
    disk = {"disk_cache": str(tmp_path), "disk_cache_size": BIG}
    options = {
        "host": {"swap_space": BIG},
        "disk": disk,
        "both": {"swap_space": "52 blocks"} | disk,
    }[lower]
    prompts = [make_prompt(seed, 333) for seed in range(4)]
    expected = [cold(plenty, prompt) for prompt in prompts]
    driver = open_driver(path, num_blocks=80, **options)
    for round_ in range(3):
        for prompt, logits in zip(prompts, expected, strict=True):
            found, num_cached = driver.run(prompt)
            assert_bit_equal(found, logits)
            if round_ and lower != "both":  # where a memory this small drops blocks
                assert num_cached == 320
    longer = prompts[0][:200] + make_prompt(9, 50)  # where only a passed part could have been
    assert_bit_equal(driver.run(longer)[0], cold(plenty, longer))
    driver.engine.close()


def test_after_a_restart(path, plenty, tmp_path):
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    options = {
        "disk_cache": str(tmp_path / "disk"),
        "disk_cache_size": BIG,
        "disk_cache_persist": True,
        "disk_cache_key_file": str(key),
    }
    (tmp_path / "disk").mkdir()
    prompt = make_prompt(1, 333)
    first = open_driver(path, num_blocks=200, **options)
    first.run(prompt)
    first.engine.close()
    second = open_driver(path, num_blocks=200, **options)
    logits, num_cached = second.run(prompt)
    assert num_cached == 320
    assert_bit_equal(logits, cold(plenty, prompt))
    second.engine.close()


def test_random_use_is_exact(path, plenty):
    """Prompts with common beginnings, preempted and evicted at random, in little memory."""
    rng = random.Random(4)
    driver = open_driver(path, num_blocks=150, swap_space=2**19)
    documents = [make_prompt(seed, 260) for seed in range(3)]
    expected = {}
    for _ in range(12):
        ids = {}
        for _ in range(rng.randint(1, 4)):
            document = rng.choice(documents)
            prompt = document[: rng.randint(20, 260)] + make_prompt(rng.randint(0, 5), 10)
            key = tuple(prompt)
            if key not in expected:
                expected[key] = cold(plenty, prompt)
            ids[driver.add(prompt)] = key
        while driver.engine.has_work:
            driver.step()
            running = driver.engine.scheduler.running
            if running and rng.random() < 0.05:
                driver.engine.scheduler._preempt(running[0], Step(0))
        for request_id, key in ids.items():
            assert_bit_equal(driver.result(request_id), expected[key])
    driver.engine.close()


def test_tenants_share_no_part_and_a_purge_leaves_nothing(path):
    driver = open_driver(path)
    prompt = make_prompt(1, 200)
    driver.run(prompt, scope=CacheScope(tenant="alice"))
    _, num_cached = driver.run(prompt, scope=CacheScope(tenant="bob"))
    assert num_cached == 0
    cache, store = driver.engine.cache, driver.engine.runner.store
    pages = {
        tenant: [
            page.block_id
            for block in cache.pool.findable()
            if block.owner.tenant == tenant and block.window
            for page in block.window.pages
        ]
        for tenant in ("alice", "bob")
    }
    assert pages["alice"]
    assert not set(pages["alice"]) & set(pages["bob"])
    driver.engine.command(PurgeCache(tenant="alice"))
    for block_id in pages["alice"]:
        assert not any(store.block_view(block_id))
    assert all(any(store.block_view(block_id)) for block_id in pages["bob"])


def test_after_all_parts_are_lost(path, plenty):
    """The blocks are there, but not what windowed layers see: computed again, then found again."""
    driver = open_driver(path)
    prompt = make_prompt(1, 333)
    driver.run(prompt)
    pool = driver.engine.cache.pool
    while pool.reclaim(None):
        pass
    num_findable = pool.num_findable
    logits, num_cached = driver.run(prompt)
    assert num_cached == 0
    assert_bit_equal(logits, cold(plenty, prompt))
    assert pool.num_findable == num_findable  # no block twice
    warm, num_cached = driver.run(prompt)
    assert num_cached == 320
    assert_bit_equal(warm, logits)


def test_pins_count_what_windowed_layers_need(path):
    """What may be pinned fits, so that a pinned prompt is found whatever else comes."""
    driver = open_driver(path, num_blocks=600, pin_quota=0.3)
    cache = driver.engine.cache
    prompt = make_prompt(1, 320)
    driver.run(prompt)
    pin = cache.pin(CacheScope(), prompt, 1e6)
    assert pin.num_tokens == 320
    allowed = int(0.3 * 600) // (1 + cache.windows.window.num_pages)
    too_long = make_prompt(2, 16 * (allowed + 1))
    driver.run(too_long)
    with pytest.raises(QuotaExceeded):
        cache.pin(CacheScope(), too_long, 1e6)
    for seed in range(3, 20):
        driver.run(make_prompt(seed, 300))
    assert driver.run(prompt)[1] == 319


def test_nothing_of_another_tenant_stays_in_blocks_that_are_partly_written(path):
    driver = open_driver(path, num_blocks=150)
    for seed in range(4):
        driver.run(make_prompt(seed, 300), scope=CacheScope(tenant="alice"))
    alices = pieces(driver)
    driver.run(make_prompt(9, 301), scope=CacheScope(tenant="bob"))
    driver.engine.command(PurgeCache(tenant="alice"))
    assert alices
    assert not alices & pieces(driver)


def pieces(driver, size=256):  # values of eight tokens, which two prompts do not have in common
    """What is in the store, cut up."""
    store = driver.engine.runner.store
    views = (bytes(store.block_view(block_id)) for block_id in range(store.num_blocks))
    found = {v[at : at + size] for v in views for at in range(0, len(v) - size + 1, size)}
    return {piece for piece in found if any(piece)}


def test_audits_look_at_window_parts(path, caplog):
    driver = open_driver(path, audit_hits=1.0)
    prompt = make_prompt(1, 200)

    def run():
        driver.add(prompt)
        while driver.engine.has_work or driver.engine.has_spare_work:
            driver.step()

    run()
    run()
    assert driver.engine.auditor.num_blocks == 12
    assert driver.engine.auditor.num_mismatches == 0
    cache = driver.engine.cache
    last = next(b for b in cache.pool.findable() if b.depth == 11)
    driver.engine.runner.store.block_view(last.window.pages[-1].block_id)[5] ^= 1
    run()
    assert driver.engine.auditor.num_mismatches == 1
    assert "AUDIT" in caplog.text

"""Promise 2: a hit gives the same bits as a miss, and so does everything else that could differ.

Every test compares the logits behind each generated token with those of a cold run alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from anaphora import _native
from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.engine.scheduler import Step
from anaphora.types import CacheScope
from tests.engine.driving import Driver, assert_bit_equal
from tests.models.families import GEMMA3, GPT_OSS, write_family
from tests.models.tiny import write_tiny_llama

FAMILIES = {
    "gemma3": GEMMA3,
    "gpt_oss": GPT_OSS,
    "gpt_oss_window_40": GPT_OSS | {"sliding_window": 40},  # more than a block
}
BEST, *OTHERS = _native.available_kernels()
MODELS = [
    *(
        ("tiny", dtype, kernels, "auto")
        for dtype in ("int8", "float32")
        for kernels in (BEST, *OTHERS)
    ),
    *(("tiny", "int8", BEST, kv_dtype) for kv_dtype in ("float16", "bfloat16", "float32")),
    *((family, dtype, BEST, "auto") for family in FAMILIES for dtype in ("int8", "float32")),
    *(("gpt_oss", "int8", kernels, "auto") for kernels in OTHERS),
    ("smollm2", "int8", BEST, "auto"),
    ("smollm2", "float32", BEST, "auto"),
]
NUM_PROMPT = 700  # crosses the first attention partition (512) and is no multiple of a block


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def driver(request, tmp_path_factory):
    name, dtype, kernels, kv_dtype = request.param
    _native.select_kernels(kernels)
    if name == "tiny":
        path = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    elif name in FAMILIES:
        path = write_family(tmp_path_factory.mktemp(name), FAMILIES[name])
    else:
        path = request.getfixturevalue("smollm2_path")
    config = EngineConfig(
        model=str(path),
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        threads=2,
        kv_cache_memory=2**30 if name == "smollm2" else 2**26,
    )
    yield Driver(Engine(config))
    _native.select_kernels(BEST)


@pytest.fixture(autouse=True)
def as_before(driver):
    """Each test starts with an empty cache and leaves the engine as it was."""
    scheduler = driver.engine.scheduler
    settings = (scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    driver.forget()
    yield
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = settings
    _native.set_num_threads(2)


def make_prompt(driver, seed, length=NUM_PROMPT):
    rng = np.random.default_rng(seed)
    return rng.integers(3, driver.engine.info.vocab_size, length).tolist()


@pytest.fixture
def prompt(driver):
    return make_prompt(driver, seed=1)


@pytest.fixture(scope="module")
def cold(driver):
    """The truth: cold, alone, in chunks of 512, two threads."""
    logits, num_cached = driver.run(make_prompt(driver, seed=1))
    assert num_cached == 0
    return logits


def test_warm(driver, prompt, cold):
    driver.run(prompt)
    warm, num_cached = driver.run(prompt)
    assert num_cached == NUM_PROMPT // 16 * 16
    assert_bit_equal(warm, cold)


def test_warm_to_the_end_of_the_last_block(driver, prompt):
    """All blocks are found; the last token is computed, and the block that holds it not written."""
    prompt = prompt[:688]
    cold, _ = driver.run(prompt)
    found = [block.block_id for block in driver.engine.cache.pool.blocks if block.key is not None]
    before = driver.engine.runner.store.data[found]
    warm, num_cached = driver.run(prompt, max_tokens=1)
    assert num_cached == 687
    assert_bit_equal(warm, cold[:1])
    after = driver.engine.runner.store.data[found]
    np.testing.assert_array_equal(after.view(np.uint8), before.view(np.uint8))
    longer, num_cached = driver.run(prompt)
    assert num_cached == 687
    assert_bit_equal(longer, cold)


@pytest.mark.parametrize("num_shared", [16, 17, 511, 512, 528, 699])
def test_partly_warm(driver, prompt, cold, num_shared):
    driver.run([*prompt[:num_shared], 2], max_tokens=1)
    logits, num_cached = driver.run(prompt)
    assert num_cached == num_shared // 16 * 16
    assert_bit_equal(logits, cold)


@pytest.mark.parametrize("budget", [7, 33, 100, 4096])
def test_chunked(driver, prompt, cold, budget):
    driver.engine.scheduler.max_num_batched_tokens = budget
    logits, num_cached = driver.run(prompt)
    assert num_cached == 0
    assert_bit_equal(logits, cold)


@pytest.mark.parametrize("budget", [64, 512])
def test_in_a_batch_of_16_with_strangers(driver, prompt, cold, budget):
    driver.engine.scheduler.max_num_batched_tokens = budget
    rng = np.random.default_rng(5)
    strangers = [make_prompt(driver, 100 + i, int(rng.integers(1, 200))) for i in range(15)]
    for stranger in strangers[:8]:
        driver.add(stranger, max_tokens=12)
    driver.step()
    mine = driver.add(prompt)
    for i, stranger in enumerate(strangers[8:]):
        driver.add(stranger, max_tokens=3 + i)
    driver.finish()
    assert driver.num_cached(mine) == 0
    assert_bit_equal(driver.result(mine), cold)


def test_batched_requests_that_share_a_prefix(driver, prompt, cold):
    ids = [driver.add(prompt) for _ in range(4)]
    relatives = [driver.add(prompt[:600] + make_prompt(driver, 50 + i, 40)) for i in range(4)]
    driver.finish()
    for request_id in ids:
        assert_bit_equal(driver.result(request_id), cold)
    assert [driver.num_cached(i) for i in ids] == [0, 688, 688, 688]
    assert [driver.num_cached(i) for i in relatives] == [592] * 4


def test_one_thread(driver, prompt, cold):
    _native.set_num_threads(1)
    logits, _ = driver.run(prompt)
    assert_bit_equal(logits, cold)


def test_many_threads(driver, prompt, cold):
    _native.set_num_threads(7)
    logits, _ = driver.run(prompt)
    assert_bit_equal(logits, cold)


def test_after_preemption(driver, prompt, cold):
    """The sequence is thrown out in the middle of its decode, twice, and comes back."""
    request_id = driver.add(prompt)
    while len(driver.outputs[f"{request_id}/0"]) < 3:
        driver.step()
    driver.engine.scheduler._preempt(driver.engine.scheduler.running[0], Step(0))
    driver.step()
    driver.forget()  # and once its blocks are gone too
    driver.engine.scheduler._preempt(driver.engine.scheduler.running[0], Step(0))
    driver.finish()
    assert driver.num_cached(request_id) == 0
    assert_bit_equal(driver.result(request_id), cold)


def test_after_eviction_and_recomputation(driver, prompt, cold):
    """Only the tail of the prompt's blocks is lost, as under memory pressure."""
    driver.run(prompt)
    pool, taken = driver.engine.cache.pool, []
    while pool.num_findable > 20:
        taken.append(pool.take())
    pool.release(taken)
    logits, num_cached = driver.run(prompt)
    assert num_cached == 20 * 16 or driver.engine.cache.windows
    assert num_cached <= 20 * 16
    assert_bit_equal(logits, cold)


def test_generated_tokens_are_found_by_the_next_turn(driver, prompt):
    """A conversation's second turn reuses what the first one generated, bit for bit."""
    first = driver.add(prompt[:100], max_tokens=40)
    driver.finish()
    turn = prompt[:100] + driver.tokens(first) + prompt[200:210]
    warm, num_cached = driver.run(turn)
    assert num_cached == 139 // 16 * 16
    driver.forget()
    cold, _ = driver.run(turn)
    assert_bit_equal(warm, cold)


def test_another_tenant_gets_the_same_bits_and_shares_nothing(driver, prompt, cold):
    driver.run(prompt, scope=CacheScope(tenant="a"), max_tokens=1)
    logits, num_cached = driver.run(prompt, scope=CacheScope(tenant="b"))
    assert num_cached == 0
    assert_bit_equal(logits, cold)

"""Promise 2 with adapters: nothing that is computed beside a row changes it, and nothing is shared.

As in test_exactness, logits are compared bit for bit with those of a cold run alone.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from anaphora import _native
from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.engine.scheduler import Step
from anaphora.errors import ConfigError, UnknownModel, UnusableAdapter
from anaphora.types import CacheScope, LoadAdapter, PurgeCache, UnloadAdapter
from tests.engine.driving import Driver, PatientDriver, assert_bit_equal
from tests.models.adapters import ATTENTION, MLP, write_adapter
from tests.models.tiny import TINY_CONFIG, write_tiny_llama

BEST, *OTHERS = _native.available_kernels()
ENGINES = [(dtype, kernels) for dtype in ("int8", "float32") for kernels in (BEST, *OTHERS)]
NUM_PROMPT = 550  # crosses the first attention partition and is no multiple of a block
ADAPTERS = {  # two on everything, one on a part each
    "all": {"rank": 16, "seed": 1},
    "small": {"rank": 3, "seed": 2},
    "attention": {"targets": ATTENTION, "rank": 20, "seed": 3},
    "mlp": {"targets": MLP, "rank": 8, "seed": 4},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(root / name, TINY_CONFIG, **arguments)
        for name, arguments in ADAPTERS.items()
    }


def load(driver, folder):
    """The scope of an adapter's requests."""
    info = driver.engine.command(LoadAdapter(path=str(folder))).adapter
    return CacheScope(adapter=info.digest)


def make_engine(path, dtype="int8", **options):
    defaults = {"threads": 2, "kv_cache_memory": 2**25, "max_loras": len(ADAPTERS)}
    return Engine(EngineConfig(model=str(path), dtype=dtype, **(defaults | options)))


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def driver(request, path):
    dtype, kernels = request.param
    _native.select_kernels(kernels)
    yield Driver(make_engine(path, dtype))
    _native.select_kernels(BEST)


@pytest.fixture(scope="module")
def scopes(driver, folders):
    """By name; the model itself is the first."""
    return {"base": CacheScope()} | {name: load(driver, folder) for name, folder in folders.items()}


@pytest.fixture(autouse=True)
def as_before(request):
    if "driver" not in request.fixturenames:
        yield
        return
    driver = request.getfixturevalue("driver")
    budget = driver.engine.scheduler.max_num_batched_tokens
    driver.forget()
    yield
    driver.engine.scheduler.max_num_batched_tokens = budget
    _native.set_num_threads(2)


def make_prompt(seed=1, length=NUM_PROMPT):
    return np.random.default_rng(seed).integers(3, TINY_CONFIG["vocab_size"], length).tolist()


PROMPT = make_prompt()


@pytest.fixture(scope="module")
def cold(driver, scopes):
    """The truth: cold and alone."""
    logits = {}
    for name, scope in scopes.items():
        driver.forget()
        logits[name], num_cached = driver.run(PROMPT, scope=scope)
        assert num_cached == 0
    return logits


def test_each_adapter_gives_another_answer(cold):
    names = list(cold)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert np.abs(cold[one] - cold[other]).max() > 0.1, (one, other)


def test_the_model_is_what_it_is_without_adapters(driver, path, cold):
    """The same bits as an engine that has never heard of adapters."""
    plain = Driver(make_engine(path, driver.engine.info.dtype, max_loras=None))
    assert_bit_equal(plain.run(PROMPT)[0], cold["base"])


def test_warm_and_never_shared(driver, scopes, cold):
    for name, scope in scopes.items():
        logits, num_cached = driver.run(PROMPT, scope=scope)
        assert num_cached == 0, name
        assert_bit_equal(logits, cold[name])
    for name, scope in scopes.items():
        logits, num_cached = driver.run(PROMPT, scope=scope)
        assert num_cached == NUM_PROMPT // 16 * 16
        assert_bit_equal(logits, cold[name])


@pytest.mark.parametrize("num_shared", [16, 17, 511, 512, 528])
def test_partly_warm(driver, scopes, cold, num_shared):
    for name in ("all", "mlp"):
        driver.run([*PROMPT[:num_shared], 2], max_tokens=1, scope=scopes[name])
        logits, num_cached = driver.run(PROMPT, scope=scopes[name])
        assert num_cached == num_shared // 16 * 16
        assert_bit_equal(logits, cold[name])


@pytest.mark.parametrize("budget", [7, 33, 4096])
def test_chunked(driver, scopes, cold, budget):
    driver.engine.scheduler.max_num_batched_tokens = budget
    for name in ("small", "attention"):
        assert_bit_equal(driver.run(PROMPT, scope=scopes[name])[0], cold[name])


@pytest.mark.parametrize("budget", [64, 512])
def test_all_in_one_batch(driver, scopes, cold, budget):
    """The model and every adapter with one prompt, among strangers that come and go."""
    driver.engine.scheduler.max_num_batched_tokens = budget
    rng = np.random.default_rng(5)
    everybody = list(scopes.values())
    for i in range(6):
        driver.add(make_prompt(100 + i, int(rng.integers(1, 90))), scope=everybody[i % 5])
    driver.step()
    mine = {}
    for i, (name, scope) in enumerate(scopes.items()):
        mine[name] = driver.add(PROMPT, scope=scope)
        driver.add(make_prompt(200 + i, 30 + i), max_tokens=3 + i, scope=everybody[-i])
    driver.finish()
    for name, request_id in mine.items():
        assert driver.num_cached(request_id) == 0
        assert_bit_equal(driver.result(request_id), cold[name])


@pytest.mark.parametrize("threads", [1, 7])
def test_threads(driver, scopes, cold, threads):
    _native.set_num_threads(threads)
    ids = {name: driver.add(PROMPT, scope=scope) for name, scope in scopes.items()}
    driver.finish()
    for name, request_id in ids.items():
        assert_bit_equal(driver.result(request_id), cold[name])


def test_after_preemption(driver, scopes, cold):
    """Thrown out in the middle of the decode, beside others, and computed anew."""
    ids = {name: driver.add(PROMPT, scope=scopes[name]) for name in ("all", "base", "mlp")}
    while len(driver.outputs[f"{ids['mlp']}/0"]) < 3:
        driver.step()
    for _ in range(2):
        driver.engine.scheduler._preempt(driver.engine.scheduler.running[0], Step(0))
        driver.forget()
        driver.step()
    driver.finish()
    for name, request_id in ids.items():
        assert_bit_equal(driver.result(request_id), cold[name])


def test_choices_of_one_request(driver, scopes, cold):
    request_id = driver.add(PROMPT, n=3, scope=scopes["small"])
    beside = driver.add(PROMPT, scope=scopes["base"])
    driver.finish()
    for index in range(3):
        assert_bit_equal(driver.result(request_id, index), cold["small"])
    assert_bit_equal(driver.result(beside), cold["base"])


def test_a_random_crowd(driver, scopes):
    """Requests of all kinds arrive at random; each is what it is alone."""
    rnd = random.Random(8)
    requests = []
    for seed in range(24):
        name = rnd.choice(list(scopes))
        prompt = make_prompt(rnd.randrange(6), rnd.randrange(1, 120))
        requests.append((name, prompt, rnd.randrange(1, 9), seed))
    ids = []
    for name, prompt, max_tokens, _ in requests:
        ids.append(driver.add(prompt, scope=scopes[name], max_tokens=max_tokens))
        for _ in range(rnd.randrange(3)):
            driver.step()
    driver.finish()
    for request_id, (name, prompt, max_tokens, _) in zip(ids, requests, strict=True):
        driver.forget()
        alone, _ = driver.run(prompt, scope=scopes[name], max_tokens=max_tokens)
        assert_bit_equal(driver.result(request_id), alone)


class TestLoading:
    """What happens to the cache, and to requests that run."""

    @pytest.fixture
    def driver(self, path):
        return Driver(make_engine(path, "float32", threads=1))

    def test_another_adapter_is_the_reason(self, driver, folders):
        one, other = load(driver, folders["all"]), load(driver, folders["mlp"])
        driver.run(PROMPT, scope=one)
        for scope in (CacheScope(), other):
            request_id = driver.add(PROMPT, scope=scope)
            driver.finish()
            report = driver.outputs[f"{request_id}/0"][0].cache_report
            assert report.miss_reason == "other_adapter"

    def test_the_same_content_elsewhere_shares_within_a_tenant(self, driver, tmp_path):
        scopes = [load(driver, write_adapter(tmp_path / n, TINY_CONFIG, seed=1)) for n in "ab"]
        assert scopes[0] == scopes[1]
        driver.run(PROMPT, scope=scopes[0])
        assert driver.run(PROMPT, scope=scopes[1])[1] == NUM_PROMPT // 16 * 16
        stranger = CacheScope(tenant="another", adapter=scopes[0].adapter)
        assert driver.run(PROMPT, scope=stranger)[1] == 0

    def test_new_weights_at_the_old_path_never_hit(self, driver, tmp_path):
        first = load(driver, write_adapter(tmp_path, TINY_CONFIG, seed=1))
        before, _ = driver.run(PROMPT, scope=first)
        second = load(driver, write_adapter(tmp_path, TINY_CONFIG, seed=2))
        after, num_cached = driver.run(PROMPT, scope=second)
        assert num_cached == 0
        assert np.abs(before - after).max() > 0.1

    def test_unloading_purges_and_refuses(self, driver, folders):
        scope = load(driver, folders["all"])
        base, _ = driver.run(PROMPT)
        driver.run(PROMPT, scope=scope)
        answer = driver.engine.command(UnloadAdapter(digest=scope.adapter))
        assert answer.purged["device"].blocks == (NUM_PROMPT + 7) // 16
        with pytest.raises(UnknownModel, match="unloaded"):
            driver.add(PROMPT, scope=scope)
        logits, num_cached = driver.run(PROMPT)
        assert num_cached == NUM_PROMPT // 16 * 16  # the model's own stay
        assert_bit_equal(logits, base)
        assert load(driver, folders["all"]) == scope
        assert driver.run(PROMPT, scope=scope)[1] == 0

    def test_running_requests_end_with_what_they_began_with(self, driver, folders):
        """Decoding, in the middle of a prefill, waiting, preempted: and nothing is left behind."""
        scope = load(driver, folders["all"])
        expected, _ = driver.run(PROMPT, scope=scope, max_tokens=40)
        short, _ = driver.run(PROMPT[:50], scope=scope, max_tokens=40)
        driver.forget()
        driver.engine.scheduler.max_num_seqs = 2
        decoding = driver.add(PROMPT[:50], scope=scope, max_tokens=40)
        driver.step()
        driver.step()
        others = [driver.add(PROMPT, scope=scope, max_tokens=40) for _ in range(2)]
        driver.step()
        driver.engine.command(UnloadAdapter(digest=scope.adapter))
        driver.engine.scheduler._preempt(driver.engine.scheduler.running[0], Step(0))
        driver.finish()
        assert_bit_equal(driver.result(decoding), short)
        for request_id in others:
            assert_bit_equal(driver.result(request_id), expected)
        pool = driver.engine.cache.pool
        assert not [b for b in pool.blocks if b.key and b.owner.adapter == scope.adapter]
        assert not driver.engine.adapters._num_uses

    def test_loaded_again_while_requests_still_run(self, driver, folders):
        scope = load(driver, folders["all"])
        first = driver.add(PROMPT, scope=scope, max_tokens=60)
        driver.step()
        driver.engine.command(UnloadAdapter(digest=scope.adapter))
        assert load(driver, folders["all"]) == scope
        second = driver.add(PROMPT, scope=scope, max_tokens=60)
        driver.finish()
        assert_bit_equal(driver.result(second), driver.result(first))
        assert driver.run(PROMPT, scope=scope)[1] == NUM_PROMPT // 16 * 16

    def test_purging_an_adapter_of_one_tenant(self, driver, folders):
        digest = load(driver, folders["all"]).adapter
        for tenant in ("a", "b"):
            driver.run(PROMPT, scope=CacheScope(tenant=tenant, adapter=digest))
            driver.run(PROMPT, scope=CacheScope(tenant=tenant))
        driver.engine.command(PurgeCache(tenant="a", adapter=digest))
        cached = {
            (tenant, adapter): driver.run(PROMPT, scope=CacheScope(tenant, adapter=adapter))[1]
            for tenant in ("a", "b")
            for adapter in ("", digest)
        }
        assert [key for key, num in cached.items() if num == 0] == [("a", digest)]

    def test_a_refused_adapter_leaves_everything_as_it_was(self, driver, folders, tmp_path):
        scope = load(driver, folders["all"])
        expected, _ = driver.run(PROMPT, scope=scope)
        with pytest.raises(UnusableAdapter):
            load(driver, tmp_path)
        logits, num_cached = driver.run(PROMPT, scope=scope)
        assert num_cached > 0
        assert_bit_equal(logits, expected)


@pytest.mark.parametrize("lower", ["host", "disk"])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_restored_from_below_equals_cold(path, folders, tmp_path, dtype, lower):
    """One prompt, the model and two adapters, in a store that holds one of them."""
    block = make_engine(path, dtype, kv_cache_memory=2**20)._block_bytes
    names = ("all", "mlp")
    reference = Driver(make_engine(path, dtype))
    scopes = [CacheScope(), *(load(reference, folders[name]) for name in names)]
    cold = [reference.run(PROMPT, scope=scope)[0] for scope in scopes]
    below = {"swap_space": 2**24}
    if lower == "disk":
        below = {"disk_cache": str(tmp_path), "disk_cache_size": 2**24}
    driver = PatientDriver(make_engine(path, dtype, kv_cache_memory=50 * block, **below))
    for name in names:
        load(driver, folders[name])
    for round_ in range(3):
        for scope, expected in zip(scopes, cold, strict=True):
            driver.engine.cache.compute_time.seconds = 1.0  # so that fetching is worth it
            logits, num_cached = driver.run(PROMPT, scope=scope)
            assert_bit_equal(logits, expected)
            if round_:
                assert num_cached == NUM_PROMPT // 16 * 16
    assert driver.engine.stats().tiers[lower].loaded_blocks > 2 * 3 * 16
    digest = scopes[1].adapter
    purged = driver.engine.command(UnloadAdapter(digest=digest)).purged
    assert purged[lower].blocks >= NUM_PROMPT // 16
    for tier in driver.engine.cache.hierarchy.tiers:
        assert not [b for b in tier.pool.findable() if b.owner.adapter == digest]
    driver.engine.close()


def test_a_restart_finds_what_the_same_adapter_left_on_disk(path, folders, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    (tmp_path / "blocks").mkdir()
    options = {
        "disk_cache": str(tmp_path / "blocks"),
        "disk_cache_size": 2**24,
        "disk_cache_persist": True,
        "disk_cache_key_file": str(key),
    }
    first = PatientDriver(make_engine(path, **options))
    scope = load(first, folders["all"])
    expected, _ = first.run(PROMPT, scope=scope)
    first.engine.close()
    second = PatientDriver(make_engine(path, **options))
    other = load(second, folders["small"])
    assert load(second, folders["all"]) == scope
    second.engine.cache.compute_time.seconds = 1.0
    assert second.run(PROMPT, scope=other)[1] == second.run(PROMPT)[1] == 0
    logits, num_cached = second.run(PROMPT, scope=scope)
    assert num_cached == NUM_PROMPT // 16 * 16
    assert_bit_equal(logits, expected)
    purged = second.engine.command(UnloadAdapter(digest=scope.adapter)).purged
    assert purged["disk"].blocks >= NUM_PROMPT // 16
    second.engine.close()


def test_an_audit_computes_with_the_adapter(path, folders):
    driver = Driver(make_engine(path, audit_hits=1.0))
    scope = load(driver, folders["all"])
    for _ in range(2):
        request_id = driver.add(PROMPT, scope=scope)
        while driver.engine.has_work:
            driver.step()
    while driver.engine.has_spare_work:
        driver.step()
    stats = driver.engine.stats()
    assert driver.num_cached(request_id) > 0
    assert stats.num_audited_blocks == NUM_PROMPT // 16
    assert stats.num_audit_mismatches == 0


def test_smollm2_with_adapters_beside_each_other(smollm2_path, tmp_path):
    """The real sizes: 8 decodes of 4 adapters and the model, against each alone."""
    config = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
    config |= {"num_key_value_heads": 3, "head_dim": 64, "num_hidden_layers": 30}
    driver = Driver(make_engine(smollm2_path, kv_cache_memory=2**27))
    scopes = [CacheScope()]
    for seed in range(4):
        folder = write_adapter(tmp_path / str(seed), config, rank=16, seed=seed, size=0.2)
        scopes.append(load(driver, folder))
    prompts = [make_prompt(seed, 40 + 7 * seed) for seed in range(8)]
    asked = [(prompt, scopes[i % 5]) for i, prompt in enumerate(prompts)]
    ids = [driver.add(prompt, scope=scope, max_tokens=6) for prompt, scope in asked]
    driver.finish()
    for request_id, (prompt, scope) in zip(ids, asked, strict=True):
        driver.forget()
        alone, _ = driver.run(prompt, scope=scope, max_tokens=6)
        assert_bit_equal(driver.result(request_id), alone)


def test_memory_is_kept_free_for_adapters(path):
    """What fits the limits fits the memory: the cache leaves room for it from the start."""
    without = make_engine(path, kv_cache_memory=None, max_loras=0, gpu_memory_utilization=0.01)
    with_room = make_engine(
        path, kv_cache_memory=None, max_loras=64, max_lora_rank=512, gpu_memory_utilization=0.01
    )
    freed = (without.info.num_blocks - with_room.info.num_blocks) * without._block_bytes
    assert with_room.info.adapter_bytes > 10 * without._block_bytes
    assert abs(freed - with_room.info.adapter_bytes) <= without._block_bytes
    with pytest.raises(ConfigError, match="--max-loras adapters"):
        make_engine(
            path,
            kv_cache_memory=None,
            max_loras=4096,
            max_lora_rank=4096,
            gpu_memory_utilization=0.01,
        )

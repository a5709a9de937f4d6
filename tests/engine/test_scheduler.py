"""Batching, single flight, preemption and the accounts, on a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from anaphora.cache.hashing import encode_tokens
from anaphora.engine import sampler
from anaphora.errors import ContextTooLong, InvalidRequest
from anaphora.types import CacheScope
from tests.engine.driving import assert_bit_equal, make_driver, prompt


@pytest.fixture
def driver(tiny_path):
    return make_driver(tiny_path)


def test_the_last_prompt_token_is_always_computed(driver):
    """And nothing else: a prompt that ends with a block finds that block too."""
    for length in (1, 15, 16, 17, 32, 33, 48):
        driver.run(prompt(1, length))
        before = driver.engine.stats().num_computed_tokens
        assert driver.run(prompt(1, length), max_tokens=1)[1] == min(length // 16 * 16, length - 1)
        computed = driver.engine.stats().num_computed_tokens - before
        assert computed == max(length % 16, 1)


def test_budget_bounds_every_step(tiny_path):
    driver = make_driver(tiny_path, max_num_batched_tokens=32)
    sizes = []
    run = driver.engine.runner.run
    driver.engine.runner.run = lambda chunks: (
        sizes.append(sum(c.num_tokens for c in chunks)),
        run(chunks),
    )[1]
    for i in range(5):
        driver.add(prompt(i, 50), max_tokens=5)
    driver.finish()
    assert max(sizes) == 32
    assert sum(sizes) == 5 * (50 + 4)


def test_decodes_go_before_prefills(tiny_path):
    """A long prompt does not stop a running stream: it gets a token in every step."""
    driver = make_driver(tiny_path, max_num_batched_tokens=16)
    stream = driver.add(prompt(0, 4), max_tokens=30)
    driver.step()
    driver.add(prompt(1, 200), max_tokens=1)
    for expected in range(2, 14):
        driver.step()
        assert len(driver.tokens(stream)) == expected
    driver.finish()


def test_single_flight_computes_a_shared_prefix_once(driver):
    shared = prompt(1, 160)
    ids = [driver.add(shared + prompt(i, 10), max_tokens=2) for i in range(6)]
    driver.finish()
    assert [driver.num_cached(i) for i in ids] == [0] + [160] * 5
    stats = driver.engine.stats()
    assert stats.num_computed_tokens == 160 + 6 * 10 + 6 * 1


def test_a_follower_takes_over_when_the_leader_is_aborted(tiny_path):
    driver = make_driver(tiny_path, max_num_batched_tokens=16)
    shared = prompt(1, 160)
    leader = driver.add(shared)
    follower = driver.add(shared)
    driver.step()
    driver.step()
    assert driver.engine.stats().num_waiting == 1
    driver.engine.abort(leader)
    driver.finish()
    assert not driver.tokens(leader)
    assert len(driver.tokens(follower)) == 8
    assert driver.num_cached(follower) == 32  # what the leader had finished


def test_waiting_for_a_leader_does_not_hold_up_others(tiny_path):
    driver = make_driver(tiny_path, max_num_batched_tokens=170)
    shared = prompt(1, 160)
    driver.add(shared)
    driver.add(shared)
    stranger = driver.add(prompt(2, 8), max_tokens=1)
    driver.step()
    assert len(driver.tokens(stranger)) == 1
    assert driver.engine.stats().num_waiting == 1  # only the follower
    driver.finish()


def test_n_choices_share_their_prompt_and_count_it_once(driver):
    request_id = driver.add(prompt(1, 100), n=4, temperature=1.0, seed=3)
    driver.finish()
    stats = driver.engine.stats()
    assert stats.num_computed_tokens == 100 + 3 * 4 + 4 * 7
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (100, 0)
    assert len({tuple(driver.tokens(request_id, i)) for i in range(4)}) == 4
    assert {driver.num_cached(request_id, i) for i in range(4)} == {0}


def test_preemption_when_the_pool_is_full(tiny_path):
    """Two sequences that only fit one after the other, still bit-equal to running alone."""
    prompts = [prompt(i, 60) for i in range(3)]
    alone = make_driver(tiny_path, num_blocks=64)
    expected = [alone.run(p, max_tokens=60)[0] for p in prompts]
    driver = make_driver(tiny_path, num_blocks=14)
    ids = [driver.add(p, max_tokens=60) for p in prompts]
    driver.finish()
    assert driver.engine.stats().num_preemptions > 0
    for request_id, logits in zip(ids, expected, strict=True):
        assert_bit_equal(driver.result(request_id), logits)


def test_a_preempted_request_is_counted_once(tiny_path):
    driver = make_driver(tiny_path, num_blocks=14)
    for i in range(3):
        driver.add(prompt(i, 60), max_tokens=60)
    driver.finish()
    stats = driver.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_queries == 3 * 60
    assert stats.prefix_cache_hits == 0


def test_hits_are_the_sum_of_what_requests_report(driver):
    rng = np.random.default_rng(0)
    ids = []
    for _ in range(30):
        base = prompt(int(rng.integers(3)), 80)
        ids.append(driver.add(base[: int(rng.integers(1, 80))], max_tokens=2))
        if rng.random() < 0.3:
            driver.finish()
    driver.finish()
    stats = driver.engine.stats()
    assert stats.prefix_cache_hits == sum(driver.num_cached(i) for i in ids)


def test_generated_blocks_are_evicted_before_the_shared_head(tiny_path):
    """T3's smaller sibling: the head of a prompt outlives its tail under pressure."""
    driver = make_driver(tiny_path, num_blocks=12)
    driver.run(prompt(1, 120))
    driver.run(prompt(2, 100))
    assert driver.run(prompt(1, 120))[1] >= 16


def test_scopes_share_nothing(driver):
    tokens = prompt(1, 100)
    driver.run(tokens, scope=CacheScope(tenant="a"))
    for scope in (
        CacheScope(tenant="b"),
        CacheScope(tenant="a", cache_salt="s"),
        CacheScope(tenant="a", prompt_cache_key="s"),
        CacheScope(tenant="as"),
        CacheScope(),
    ):
        assert driver.run(tokens, scope=scope)[1] == 0
    assert driver.run(tokens, scope=CacheScope(tenant="a"))[1] == 96


def test_evicted_prompts_are_recomputed_to_the_same_bits(tiny_path):
    driver = make_driver(tiny_path, num_blocks=16)
    expected, _ = driver.run(prompt(1, 120))
    for i in range(2, 8):
        driver.run(prompt(i, 60 + i))
    assert driver.engine.stats().num_evicted_blocks > 0
    found, num_cached = driver.run(prompt(1, 120))
    assert num_cached < 112
    assert_bit_equal(found, expected)


def test_one_token_at_a_time_gives_the_same_bits(tiny_path):
    expected, _ = make_driver(tiny_path).run(prompt(1, 60))
    driver = make_driver(tiny_path, max_num_batched_tokens=1, max_num_seqs=1)
    assert_bit_equal(driver.run(prompt(1, 60))[0], expected)


def test_a_lone_sequence_may_fill_the_whole_cache(tiny_path):
    driver = make_driver(tiny_path, num_blocks=8)
    assert driver.engine.info.max_model_len == 128
    request_id = driver.add(prompt(1, 100), max_tokens=None)
    driver.finish()
    assert len(driver.tokens(request_id)) == 28
    assert driver.outputs[f"{request_id}/0"][-1].finish_reason == "length"


@pytest.mark.parametrize(("length", "max_tokens"), [(128, None), (129, 1), (100, 29), (1000, 5)])
def test_what_cannot_fit_is_refused_and_changes_nothing(tiny_path, length, max_tokens):
    driver = make_driver(tiny_path, num_blocks=8)
    with pytest.raises(ContextTooLong, match="the context holds 128 tokens"):
        driver.add(prompt(1, length), max_tokens=max_tokens)
    assert not driver.engine.has_work
    assert not driver.engine._requests


def test_token_ids_outside_the_vocabulary_are_refused(driver):
    with pytest.raises(InvalidRequest, match="331"):
        driver.add([5, 331])
    with pytest.raises(InvalidRequest, match="logit_bias"):
        driver.add([5], logit_bias={400: 1.0})
    with pytest.raises(InvalidRequest, match="empty"):
        driver.add([])


def test_abort_in_every_state_frees_everything(driver):
    waiting = driver.add(prompt(0, 40))
    driver.engine.abort(waiting)
    running = driver.add(prompt(1, 40), n=3, temperature=1.0)
    driver.step()
    driver.engine.abort(running, 0)
    driver.step()
    driver.engine.abort(running)
    driver.engine.abort(running)
    driver.engine.abort("unknown")
    assert not driver.engine.has_work
    assert not driver.engine._requests
    driver.finish()


def test_nan_logits_end_one_request_and_no_other(driver):
    good, bad = driver.add(prompt(0, 20)), driver.add(prompt(1, 20))
    run = driver.engine.runner.run

    def poison(chunks):
        logits = run(chunks)
        for row, chunk in enumerate(c for c in chunks if c.is_last):
            if chunk.seq.request_id == bad:
                logits[row] = np.nan
        return logits

    driver.engine.runner.run = poison
    driver.finish()
    assert driver.outputs[f"{bad}/0"][-1].finish_reason == "error"
    assert "nan" in driver.outputs[f"{bad}/0"][-1].error
    assert len(driver.tokens(good)) == 8


def test_an_unexpected_error_ends_one_request_and_no_other(driver, monkeypatch):
    good, bad = driver.add(prompt(0, 20)), driver.add(prompt(1, 20))
    sample = sampler.sample

    def fail_for_one(logits, seq, *rest):
        if seq.request_id == bad:
            raise IndexError("a bug")
        return sample(logits, seq, *rest)

    monkeypatch.setattr(sampler, "sample", fail_for_one)
    driver.finish()
    assert driver.outputs[f"{bad}/0"][-1].error == "a bug"
    assert len(driver.tokens(good)) == 8


def test_thousands_of_followers_do_not_stop_a_stream(tiny_path):
    """Only so many waiting sequences are matched in one step."""
    driver = make_driver(tiny_path, max_num_seqs=4)
    shared = prompt(1, 160)
    for _ in range(500):
        driver.add(shared, max_tokens=1)
    calls = []
    match = driver.engine.cache.match
    driver.engine.cache.match = lambda seq: (calls.append(seq), match(seq))[1]
    while driver.engine.has_work:
        before = len(calls)
        driver.step()
        assert len(calls) - before <= 4
    assert driver.engine.stats().num_computed_tokens == 160 + 499


def test_a_forced_hash_collision_is_caught_by_the_stored_tokens(driver, monkeypatch):
    """Every key of the whole process the same: still no wrong token, only misses."""
    expected = driver.run(prompt(1, 50))[0]
    other = driver.run(prompt(2, 50))[0]
    driver.forget()
    same = driver.engine.cache._hasher.root({})
    monkeypatch.setattr(driver.engine.cache._hasher, "child", lambda parent, tokens: same)
    for _ in range(2):
        assert_bit_equal(driver.run(prompt(1, 50))[0], expected)
        assert_bit_equal(driver.run(prompt(2, 50))[0], other)


def test_caching_off_computes_everything_again(tiny_path):
    driver = make_driver(tiny_path, enable_prefix_caching=False)
    first, _ = driver.run(prompt(1, 100))
    second, num_cached = driver.run(prompt(1, 100))
    assert num_cached == 0
    assert_bit_equal(first, second)
    assert driver.engine.stats().prefix_cache_queries == 0


@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
def test_block_size_does_not_change_bits(tiny_path, block_size):
    expected, _ = make_driver(tiny_path).run(prompt(1, 300))
    driver = make_driver(tiny_path, num_blocks=128, block_size=block_size)
    found, _ = driver.run(prompt(1, 300))
    assert_bit_equal(found, expected)
    again, num_cached = driver.run(prompt(1, 300))
    assert num_cached == 299 // block_size * block_size
    assert_bit_equal(again, expected)


def test_hashing_a_prompt_is_linear(driver):
    """T11: each block is hashed once, however many steps look at it."""
    calls = []
    child = driver.engine.cache._hasher.child
    driver.engine.cache._hasher.child = lambda parent, tokens: (
        calls.append(tokens),
        child(parent, tokens),
    )[1]
    driver.engine.scheduler.max_num_batched_tokens = 16
    tokens = prompt(1, 320)
    driver.add(tokens, max_tokens=4)
    driver.add(tokens, max_tokens=4)
    driver.finish()
    expected = [encode_tokens(tokens[i : i + 16]) for i in range(0, 320, 16)]
    assert sorted(calls) == sorted(2 * expected)


class EngineMachine(RuleBasedStateMachine):
    """Random requests, steps and aborts in a pool that is too small for them."""

    path = None

    @initialize(num_blocks=st.integers(4, 20), budget=st.integers(16, 80))
    def create(self, num_blocks, budget):
        self.driver = make_driver(
            self.path, num_blocks, max_num_batched_tokens=budget, max_num_seqs=5
        )
        self.limit = self.driver.engine.info.max_model_len
        self.live = []

    @rule(
        seed=st.integers(0, 2),
        length=st.integers(1, 100),
        max_tokens=st.integers(1, 30),
        n=st.integers(1, 3),
        tenant=st.sampled_from(["a", "b"]),
    )
    def add(self, seed, length, max_tokens, n, tenant):
        if length + max_tokens > self.limit:
            return
        self.live.append(
            self.driver.add(
                prompt(seed, length), max_tokens=max_tokens, n=n, scope=CacheScope(tenant=tenant)
            )
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data(), index=st.one_of(st.none(), st.integers(0, 2)))
    def abort(self, data, index):
        self.driver.engine.abort(data.draw(st.sampled_from(self.live)), index)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.driver.step()

    @rule()
    def forget(self):
        self.driver.forget()

    @invariant()
    def accounts_balance(self):
        if hasattr(self, "driver"):
            self.driver.engine.scheduler.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.finish()
            assert not self.driver.engine._requests


def test_random_operations(tiny_path):
    EngineMachine.path = tiny_path
    machine = EngineMachine.TestCase
    machine.settings = settings(
        max_examples=25,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    machine("runTest").runTest()


def test_urgent_kinds_of_work_come_first(tiny_path):
    """Batch rows wait while an interactive prompt is computed, and are preempted before it."""
    driver = make_driver(tiny_path, num_blocks=64, max_num_batched_tokens=64)
    rows = [driver.add(prompt(i, 200), workload="batch", max_tokens=4) for i in range(4)]
    driver.step()
    driver.step()
    urgent = driver.add(prompt(9, 200), max_tokens=4)
    for _ in range(5):
        driver.step()
    assert driver.tokens(urgent)
    assert sum(bool(driver.tokens(row)) for row in rows) <= 1
    driver.finish()
    assert all(len(driver.tokens(row)) == 4 for row in rows)


def test_the_least_urgent_is_preempted(tiny_path):
    driver = make_driver(tiny_path, num_blocks=24)
    row = driver.add(prompt(1, 150), workload="batch", max_tokens=100)
    for _ in range(4):
        driver.step()
    urgent = driver.add(prompt(2, 150), max_tokens=100)
    driver.finish()
    assert driver.engine.stats().num_preemptions > 0
    assert len(driver.tokens(urgent)) == len(driver.tokens(row)) == 100
    [seq_outputs] = [driver.outputs[f"{urgent}/0"]]
    assert seq_outputs[0].num_cached_tokens == 0
    # the urgent one never started again: it would have found its own blocks
    assert driver.engine.stats().prefix_cache_hits == 0


def test_long_prompts_are_hashed_beside_the_step_loop(tiny_path):
    """Others go on meanwhile; an abort on the way leaves nothing; the hit comes all the same."""
    driver = make_driver(tiny_path, num_blocks=400)
    first = driver.add(prompt(1, 3000), max_tokens=2)
    assert driver.engine.scheduler.waiting == []
    assert driver.engine.has_work
    short = driver.add(prompt(2, 20), max_tokens=2)
    assert driver.engine.scheduler.waiting[0].request_id == short
    driver.finish()
    assert len(driver.tokens(first)) == len(driver.tokens(short)) == 2
    gone = driver.add(prompt(3, 3000))
    driver.engine.abort(gone)
    driver.finish()
    assert driver.outputs[f"{gone}/0"] == []
    both = driver.add(prompt(1, 3000), max_tokens=2, n=2)
    driver.finish()
    assert driver.num_cached(both) == 3000 // 16 * 16
    assert driver.tokens(both, 0) == driver.tokens(both, 1) == driver.tokens(first)


def test_batch_rows_make_room_for_an_urgent_prompt(tiny_path):
    """It starts at once although rows hold all blocks; they lose little and end with their bits."""
    driver = make_driver(tiny_path, num_blocks=40, max_num_batched_tokens=64)
    expected = [driver.run(prompt(i, 150), max_tokens=30)[0] for i in range(4)]
    driver.forget()
    rows = [driver.add(prompt(i, 150), workload="batch", max_tokens=30) for i in range(4)]
    for _ in range(15):
        driver.step()
    urgent = driver.add(prompt(9, 300), max_tokens=4)
    for _ in range(5):
        driver.step()
    assert driver.tokens(urgent)
    driver.finish()
    for row, logits in zip(rows, expected, strict=True):
        assert_bit_equal(driver.result(row), logits)

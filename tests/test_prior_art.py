"""Failures that users of other engines met; docs/prior-art-tests.md lists them all.

Here are those that no other test file is the place for, and the check of that list.
"""

from __future__ import annotations

import ast
import datetime
import gc
import re
import weakref
from pathlib import Path

import numpy as np
import pytest

from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.ops.native import NativeOps
from anaphora.ops.reference import ReferenceOps
from anaphora.text import chat
from anaphora.types import CacheScope
from tests.engine.driving import BLOCK_BYTES, Driver, assert_bit_equal, make_driver, prompt
from tests.models.tiny import write_tiny_llama
from tests.text.tiny import golden_tokenizer

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "prior-art-tests.md"


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def driver(tiny_path):
    return make_driver(tiny_path)


class TestTheSameAnswer:
    def test_caching_changes_no_bit(self, tiny_path, driver):
        """C4: another answer with the cache than without."""
        without = make_driver(tiny_path, enable_prefix_caching=False)
        for length in (30, 100, 100, 64):
            found, _ = driver.run(prompt(1, length))
            expected, _ = without.run(prompt(1, length))
            assert_bit_equal(found, expected)
        assert driver.engine.stats().prefix_cache_hits > 0

    def test_nobody_gets_another_prompts_tokens(self, tiny_path):
        """C12, S13: prompts that share heads, aborted, set back and evicted in a small pool."""
        rng = np.random.default_rng(4)
        heads = [prompt(i, 60) for i in range(4)]
        prompts = [
            heads[rng.integers(4)][: rng.integers(10, 60)] + prompt(100 + i, rng.integers(1, 30))
            for i in range(40)
        ]
        alone = make_driver(tiny_path, enable_prefix_caching=False)
        expected = [alone.run(p, max_tokens=12)[0] for p in prompts]
        driver = make_driver(tiny_path, num_blocks=12, max_num_batched_tokens=48)
        ids = []
        for i, tokens in enumerate(prompts):
            ids.append(driver.add(tokens, max_tokens=12))
            if i % 5 == 4:
                gone = driver.add(tokens, max_tokens=12)
                driver.step()
                driver.engine.abort(gone)
        driver.finish()
        for request_id, logits in zip(ids, expected, strict=True):
            assert_bit_equal(driver.result(request_id), logits)
        stats = driver.engine.stats()
        assert min(stats.num_preemptions, stats.num_evicted_blocks, stats.prefix_cache_hits) > 0


class TestLeaks:
    def test_a_strangers_cached_prompt_takes_as_many_steps_as_a_cold_one(self, tiny_path):
        """S4: the time to the first token tells whether somebody else has sent this prompt."""

        def cost_for_b(*, is_known_to_a):
            driver = make_driver(tiny_path, max_num_batched_tokens=32)
            driver.run(prompt(1 if is_known_to_a else 2, 160), scope=CacheScope(tenant="a"))
            before = driver.engine.stats()
            driver.run(prompt(1, 160), scope=CacheScope(tenant="b"))
            after = driver.engine.stats()
            return (
                after.num_steps - before.num_steps,
                after.num_computed_tokens - before.num_computed_tokens,
                after.prefix_cache_hits - before.prefix_cache_hits,
            )

        assert cost_for_b(is_known_to_a=True) == cost_for_b(is_known_to_a=False)

    @pytest.mark.parametrize("is_warm", [False, True])
    def test_service_is_in_turn_whatever_is_cached(self, tiny_path, is_warm):
        """PromptPeek: who is served first tells what is cached, when the longest match wins."""
        driver = make_driver(tiny_path, max_num_batched_tokens=32)
        if is_warm:
            driver.run(prompt(3, 160), scope=CacheScope(tenant="a"))
        scopes = [CacheScope(tenant=name) for name in "abab"]
        ids = [driver.add(prompt(i, 160), scope=scope) for i, scope in enumerate(scopes)]
        ids.append(driver.add(prompt(3, 160), scope=CacheScope(tenant="a")))
        order = []
        while driver.engine.has_work:
            driver.step()
            order += [i for i in ids if driver.tokens(i) and i not in order]
        assert order == ids
        assert driver.num_cached(ids[-1]) == (159 if is_warm else 0)


class TestHitRate:
    def test_conversations_in_turn_find_all_that_was_said(self, tiny_path):
        """H1: round robin between sessions in a cache that holds them all hits nothing."""
        driver = make_driver(tiny_path, num_blocks=200)
        histories = [prompt(i, 50) for i in range(6)]
        for turn in range(4):
            for i, history in enumerate(histories):
                request_id = driver.add(history, max_tokens=20)
                driver.finish()
                known = len(history) - 13 if turn else 0  # but for the new part and one token
                assert driver.num_cached(request_id) == known // 16 * 16
                histories[i] = history + driver.tokens(request_id) + prompt(90 + i, 12)
        assert driver.engine.stats().num_evicted_blocks == 0

    def test_only_the_shortfall_is_evicted(self, tiny_path):
        """H19: an allocation that evicts as much as it needs, not as much as is missing."""
        driver = make_driver(tiny_path, num_blocks=20)
        driver.run(prompt(1, 100), max_tokens=1)  # 6 full blocks stay
        driver.run(prompt(2, 150), max_tokens=1)  # 9 full blocks stay, 5 are free
        assert driver.engine.stats().num_evicted_blocks == 0
        driver.run(prompt(3, 120), max_tokens=1)  # needs 8
        assert driver.engine.stats().num_evicted_blocks == 3

    def test_what_is_left_after_eviction_can_be_reached(self, tiny_path):
        """H14, H10: a block whose parent is gone takes memory and is never hit."""
        driver = make_driver(tiny_path, num_blocks=24)
        rng = np.random.default_rng(1)
        prompts, ids = [], []
        for i in range(40):
            old = prompts[rng.integers(len(prompts))] if i % 3 else []
            prompts.append(old[: rng.integers(1, 150)] + prompt(1000 + i, rng.integers(1, 60)))
            ids.append(driver.add(prompts[-1], max_tokens=int(rng.integers(1, 40))))
            if i % 2:
                driver.finish()
        driver.finish()
        reachable = set()
        for tokens, request_id in zip(prompts, ids, strict=True):
            everything = [*tokens, *driver.tokens(request_id), 5]
            probe = driver.add(everything, max_tokens=1)
            [seq] = driver.engine.scheduler.waiting
            for index in range(len(driver.engine.cache.match(seq).found)):
                reachable.add(tuple(everything[: 16 * (index + 1)]))
            driver.engine.abort(probe)
        stats = driver.engine.stats()
        assert stats.num_evicted_blocks > 0
        assert len(reachable) == stats.num_cached_blocks > 0

    def test_the_clock_does_not_change_the_prompt(self, monkeypatch):
        """H16: a template that prints the date misses everything at midnight, or every second."""

        class Clock(datetime.date):
            day = 1

            @classmethod
            def today(cls):
                return cls(2026, 11, cls.day)

        monkeypatch.setattr(chat.datetime, "date", Clock)
        source = "{{ strftime_now('%d %b %Y %H:%M:%S') }} {{ messages[0].content }}"
        template = chat.ChatTemplate(source, golden_tokenizer("llama-bpe"))
        question = [{"role": "user", "content": "hello"}]
        first = template.encode(question)
        assert "01 Nov 2026" in template.render(question)
        Clock.day = 2
        assert template.encode(question) == first


class TestNumbers:
    def test_a_prompt_that_waits_for_room_is_counted_once(self, tiny_path):
        """M2: queries counted again with every allocation that fails."""
        driver = make_driver(tiny_path, num_blocks=10)
        driver.add(prompt(1, 100), max_tokens=20)
        driver.step()
        late = driver.add(prompt(1, 48) + prompt(2, 60), max_tokens=2)
        num_waits = 0
        while driver.engine.has_work:
            num_waits += driver.engine.stats().num_waiting
            driver.step()
        stats = driver.engine.stats()
        assert num_waits > 10
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (208, 48)
        assert driver.num_cached(late) == 48

    @pytest.mark.parametrize("create_ops", [NativeOps, ReferenceOps])
    def test_every_backend_hits_and_counts(self, tiny_path, create_ops):
        """M3: the hit counter of one backend stays 0."""
        config = EngineConfig(
            model=str(tiny_path), dtype="float32", kv_cache_memory=64 * BLOCK_BYTES
        )
        driver = Driver(Engine(config, ops=create_ops("float32")))
        cold, _ = driver.run(prompt(1, 100))
        warm, num_cached = driver.run(prompt(1, 100))
        np.testing.assert_allclose(warm, cold, atol=1e-4)  # NumPy's products round by shape
        assert driver.engine.stats().prefix_cache_hits == num_cached == 96

    def test_what_is_reported_as_cached_is_what_was_not_computed(self, driver):
        """M6, M7: cached_tokens look well and the prompt is computed all the same."""
        rng = np.random.default_rng(2)
        sizes = []
        run = driver.engine.runner.run
        driver.engine.runner.run = lambda chunks: (
            sizes.append(sum(chunk.num_tokens for chunk in chunks)),
            run(chunks),
        )[1]
        lengths = {}
        for i in range(30):
            tokens = prompt(int(rng.integers(3)), 90)[: int(rng.integers(1, 90))]
            lengths[driver.add(tokens, max_tokens=3)] = len(tokens)
            if i % 4 == 0:
                driver.finish()
        driver.finish()
        # the last generated token is never fed back
        expected = sum(length - driver.num_cached(i) + 3 - 1 for i, length in lengths.items())
        assert sum(sizes) == driver.engine.stats().num_computed_tokens == expected
        assert driver.engine.stats().num_preemptions == 0


def number_of(text, field):
    """Of a line such as ``Rss:  12 kB``."""
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1])


def mapping_of(array):
    """The entry of /proc/self/smaps that holds ``array``."""
    address = array.ctypes.data
    entries = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
    )
    for entry in entries:
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry):
            start, end = (int(part, 16) for part in match.groups())
            if start <= address < end:
                return entry
    raise AssertionError("the array lies in no mapping")


class TestMemory:
    def test_the_cache_takes_what_was_asked_for(self, tiny_path):
        """R5: 1.92 times the memory. Every block is written; the process grows by the budget."""
        budget, status = 2**26, Path("/proc/self/status")

        def fill(num_blocks):
            # large blocks, so that the lists of blocks do not weigh
            driver = make_driver(tiny_path, num_blocks, block_size=64, max_num_batched_tokens=256)
            for i in range(num_blocks * 16 // 2000 + 2):
                driver.run(prompt(i, 2000), max_tokens=1)
                driver.logits.clear()
            assert driver.engine.stats().num_evicted_blocks > 0  # so all have been used
            return driver.engine

        fill(200)  # what does not belong to the cache is there from here on
        gc.collect()
        before = number_of(status.read_text(), "RssAnon")
        engine = fill(budget // BLOCK_BYTES)
        growth = (number_of(status.read_text(), "RssAnon") - before) * 2**10
        assert growth <= budget * 1.03
        store = mapping_of(engine.runner.store.data)
        assert number_of(store, "Rss") * 2**10 >= budget * 0.97
        assert re.search(r"^VmFlags:.* dd\b", store, re.MULTILINE)  # it stays out of core dumps

    def test_finished_requests_leave_nothing(self, driver):
        """R8: memory that grows with every request."""
        for i in range(20):
            driver.add(prompt(i % 3, 40), n=2, temperature=1.0, max_tokens=5)
        seqs = [weakref.ref(seq) for seq in driver.engine.scheduler.waiting]
        driver.engine.abort("3")
        driver.finish()
        gc.collect()
        assert len(seqs) == 40
        assert not [seq for seq in seqs if seq() is not None]


def defined_tests(path):
    """``name`` and ``Class::name`` of all tests in a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{f.name}" for f in node.body if hasattr(f, "name")}
    return found


def test_every_test_in_the_document_exists():
    names = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", DOCUMENT.read_text())
    assert len(names) > 40
    for path, name in names:
        assert name in defined_tests(ROOT / path), f"{path}::{name}"
    assert DOCUMENT.read_text().count("tests/") == len(names)  # none is misspelt

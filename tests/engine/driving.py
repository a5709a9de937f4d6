"""Drives an engine step by step and keeps the logits behind every sampled token."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from anaphora.cache.tiers import Estimate
from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.types import CacheScope, EngineRequest, SamplingParams

SCOPE = CacheScope()
BLOCK_BYTES = 2 * 3 * 2 * 16 * 24 * 4  # of the tiny model in float32


class Driver:
    """Runs requests to their end; every run ends with the pool's invariants checked."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.logits: dict[str, list[np.ndarray]] = defaultdict(list)
        self.outputs = defaultdict(list)
        self.num_requests = 0
        self._run = engine.runner.run
        engine.runner.run = self._record

    def _record(self, chunks):
        logits = self._run(chunks)
        last = [chunk.seq for chunk in chunks if chunk.is_last]
        for seq, row in zip(last, logits, strict=True):
            self.logits[f"{seq.request_id}/{seq.index}"].append(row.copy())
        return logits

    def add(
        self, prompt, *, scope=SCOPE, workload="interactive", endpoint="", urgent_in=None, **params
    ) -> str:
        """Queues a greedy request and returns its id."""
        self.num_requests += 1
        request_id = str(self.num_requests)
        defaults = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
        self.engine.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                params=SamplingParams(**(defaults | params)),
                scope=scope,
                workload=workload,
                endpoint=endpoint,
                urgent_in=urgent_in,
            )
        )
        return request_id

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[f"{output.request_id}/{output.index}"].append(output)
        self.engine.scheduler.check()

    def finish(self) -> None:
        """Steps until nothing is left to do."""
        while self.engine.has_work:
            self.step()
        while self.engine.cache.hierarchy.num_under_way:
            self.engine.cache.poll(1.0)
        assert self.engine.cache.pool.num_available == len(self.engine.cache.pool.blocks)
        assert not self.engine.cache._computing

    def run(self, prompt, **params):
        """One request alone: its logits [num_tokens, vocab] and its number of cached tokens."""
        request_id = self.add(prompt, **params)
        self.finish()
        return self.result(request_id), self.num_cached(request_id)

    def result(self, request_id, index=0) -> np.ndarray:
        return np.array(self.logits[f"{request_id}/{index}"])

    def tokens(self, request_id, index=0) -> list[int]:
        return [o.token_id for o in self.outputs[f"{request_id}/{index}"]]

    def num_cached(self, request_id, index=0) -> int:
        return self.outputs[f"{request_id}/{index}"][-1].num_cached_tokens

    def forget(self) -> None:
        """Empties the cache."""
        self.engine.cache.hierarchy.purge(lambda _: True)


class PatientDriver(Driver):
    """Lets every transfer end before the next step: these steps are quicker than a disk."""

    def step(self):
        super().step()
        while self.engine.cache.hierarchy.num_under_way:
            self.engine.cache.hierarchy.poll(1.0)


class Always(Estimate):
    """A measurement that nothing changes."""

    def add(self, seconds):
        pass


def assert_bit_equal(found: np.ndarray, expected: np.ndarray) -> None:
    """Equality of bits: NaN equals NaN, and 0.0 differs from -0.0."""
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def make_driver(path, num_blocks=64, **options) -> Driver:
    """A tiny float32 engine with few blocks."""
    defaults = {"dtype": "float32", "threads": 1, "max_num_seqs": 16}
    config = EngineConfig(
        model=str(path), kv_cache_memory=num_blocks * BLOCK_BYTES, **(defaults | options)
    )
    return Driver(Engine(config))


def prompt(seed, length):
    """Random token ids of the tiny model."""
    return np.random.default_rng(seed).integers(3, 331, length).tolist()

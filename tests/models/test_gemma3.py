"""Gemma 3 270M: real weights against transformers in float32, and int8 against that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.ops.native import NativeOps
from tests.engine.driving import Driver
from tests.golden.sampling import sample_vocabulary
from tests.models.running import all_logits, divergence, load, perplexity

GOLDENS = np.load(Path(__file__).parent.parent / "golden" / "families.npz")
NUM_PROMPTS = 10
HANDBOOK = Path(__file__).parents[2] / "examples" / "handbook.txt"


@pytest.fixture(scope="module")
def gemma3(gemma3_path):
    engine = Engine(EngineConfig(model=str(gemma3_path), dtype="float32", kv_cache_memory=2**28))
    return Driver(engine)


@pytest.mark.parametrize("prompt", range(NUM_PROMPTS))
def test_gemma3_logits_equal_transformers(gemma3, prompt):
    model = gemma3.engine.runner.model
    found = all_logits(model, GOLDENS[f"gemma3-270m/{prompt}/ids"])
    chosen = sample_vocabulary(found.shape[1])
    difference = np.abs(found[:, chosen] - GOLDENS[f"gemma3-270m/{prompt}/logits"]).max()
    largest = GOLDENS[f"gemma3-270m/{prompt}/max"]
    difference = max(difference, np.abs(found.max(axis=1) - largest).max())
    print(f"prompt {prompt}: largest logit difference {difference:.2e}")
    assert difference <= 2e-3


def test_gemma3_logits_beyond_the_window(gemma3):
    found = all_logits(gemma3.engine.runner.model, GOLDENS["gemma3-270m/long/ids"])
    chosen = sample_vocabulary(found.shape[1])
    expected = GOLDENS["gemma3-270m/long/logits"]
    difference = np.abs(found[-len(expected) :, chosen] - expected).max()
    print(f"900 tokens: largest logit difference {difference:.2e}")
    assert difference <= 2e-3


@pytest.mark.parametrize("prompt", range(NUM_PROMPTS))
def test_gemma3_greedy_tokens_equal_transformers(gemma3, prompt):
    expected = GOLDENS[f"gemma3-270m/{prompt}/greedy"].tolist()
    ids = GOLDENS[f"gemma3-270m/{prompt}/ids"].tolist()
    request_id = gemma3.add(ids, max_tokens=len(expected))
    gemma3.finish()
    assert gemma3.tokens(request_id) == expected


def test_gemma3_int8_stays_close_to_float32(gemma3, gemma3_path):
    """On a text of 1,200 tokens, longer than two windows; every fourth one is looked at."""
    with open_checkpoint(gemma3_path) as checkpoint:
        ids = checkpoint.tokenizer.encode(HANDBOOK.read_text())[:1200]
    assert len(ids) == 1200
    exact = all_logits(gemma3.engine.runner.model, ids, every=4)
    near = all_logits(load(gemma3_path, NativeOps("int8")), ids, "int16", every=4)
    kl = divergence(exact, near)
    perplexities = perplexity(exact, ids, 4), perplexity(near, ids, 4)
    print(f"int8 against float32: mean KL {kl:.5f}, perplexity {perplexities}")
    assert kl <= 0.008
    assert abs(perplexities[1] / perplexities[0] - 1) <= 0.012

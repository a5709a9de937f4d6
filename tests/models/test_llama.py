"""Fidelity: our logits against transformers' in float32, and int8 against float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.models.registry import load_model
from anaphora.ops.batch import Batch
from anaphora.ops.kv_store import KVLayout
from anaphora.ops.native import NativeOps
from anaphora.ops.reference import ReferenceOps
from tests.engine.driving import Driver
from tests.golden.sampling import sample_vocabulary
from tests.models.tiny import TINY_VARIANTS, write_tiny_llama

GOLDENS = np.load(Path(__file__).parent.parent / "golden" / "llama.npz")
NUM_PROMPTS = 10
HANDBOOK = Path(__file__).parents[2] / "examples" / "handbook.txt"


def all_logits(model, ops, token_ids, kv_dtype="float32", adapters=None):
    """Logits [T, vocab] of one sequence in one chunk."""
    c = model.config
    model.set_max_model_len(2048)
    layout = KVLayout(
        num_layers=c.num_hidden_layers,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        block_size=16,
        dtype=kv_dtype,
    )
    num_blocks = -(-len(token_ids) // 16)
    store = ops.create_kv_store(layout, num_blocks)
    span = np.arange(len(token_ids))
    batch = Batch(
        token_ids=np.asarray(token_ids, np.int32),
        positions=span.astype(np.int32),
        seq_index=np.zeros(len(span), np.int32),
        slots=span.astype(np.int64),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        logit_rows=span.astype(np.int32),
        adapters=adapters,
    )
    return model.forward(batch, store)


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    engine = Engine(EngineConfig(model=str(smollm2_path), dtype="float32", kv_cache_memory=2**28))
    return Driver(engine)


@pytest.mark.parametrize("variant", TINY_VARIANTS)
@pytest.mark.parametrize("backend", [NativeOps, ReferenceOps])
def test_tiny_llama_equals_transformers(tmp_path, variant, backend):
    ops = backend("float32")
    with open_checkpoint(write_tiny_llama(tmp_path, TINY_VARIANTS[variant])) as checkpoint:
        model = load_model(checkpoint, ops)
    found = all_logits(model, ops, GOLDENS[f"tiny/{variant}/ids"])
    np.testing.assert_allclose(found, GOLDENS[f"tiny/{variant}/logits"], atol=2e-4)


def test_tiny_llama_int8_equals_its_twin(tmp_path):
    """A whole model on both backends: what differs is rounding in float, nothing else."""
    path = write_tiny_llama(tmp_path)
    results = []
    for backend in (NativeOps, ReferenceOps):
        ops = backend("int8")
        with open_checkpoint(path) as checkpoint:
            model = load_model(checkpoint, ops)
        results.append(all_logits(model, ops, list(range(3, 60)), "int16"))
    # a last-bit difference may round an activation the other way, a step of 1/127, here and there
    np.testing.assert_allclose(*results, atol=0.1)
    assert np.abs(results[0] - results[1]).mean() < 1e-3


@pytest.mark.parametrize("prompt", range(NUM_PROMPTS))
def test_smollm2_logits_equal_transformers(smollm2, prompt):
    model = smollm2.engine.runner.model
    found = all_logits(model, model.ops, GOLDENS[f"smollm2/{prompt}/ids"])
    chosen = sample_vocabulary(found.shape[1])
    difference = np.abs(found[:, chosen] - GOLDENS[f"smollm2/{prompt}/logits"]).max()
    difference = max(difference, np.abs(found.max(axis=1) - GOLDENS[f"smollm2/{prompt}/max"]).max())
    print(f"prompt {prompt}: largest logit difference {difference:.2e}")
    assert difference <= 2e-3


@pytest.mark.parametrize("prompt", range(NUM_PROMPTS))
def test_smollm2_greedy_tokens_equal_transformers(smollm2, prompt):
    expected = GOLDENS[f"smollm2/{prompt}/greedy"].tolist()
    request_id = smollm2.add(GOLDENS[f"smollm2/{prompt}/ids"].tolist(), max_tokens=len(expected))
    smollm2.finish()
    assert smollm2.tokens(request_id) == expected


def log_softmax(logits):
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def test_int8_stays_close_to_float32(smollm2, smollm2_path):
    """On a text of 1,500 tokens: mean KL divergence and perplexity."""
    with open_checkpoint(smollm2_path) as checkpoint:
        ids = checkpoint.tokenizer.encode(HANDBOOK.read_text())[:1500]
        ops = NativeOps("int8")
        int8 = load_model(checkpoint, ops)
    assert len(ids) == 1500
    full = smollm2.engine.runner.model
    exact = log_softmax(all_logits(full, full.ops, ids))
    near = log_softmax(all_logits(int8, ops, ids, "int16"))
    divergence = (np.exp(exact) * (exact - near)).sum(axis=1).mean()
    targets = np.arange(len(ids) - 1), np.asarray(ids[1:])
    perplexity = [float(np.exp(-logprobs[targets].mean())) for logprobs in (exact, near)]
    print(f"int8 against float32: mean KL {divergence:.5f}, perplexity {perplexity}")
    assert divergence <= 0.008
    assert abs(perplexity[1] / perplexity[0] - 1) <= 0.012

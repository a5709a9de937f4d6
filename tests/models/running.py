"""Runs a model over one sequence in one chunk, outside the engine."""

from __future__ import annotations

import numpy as np

from anaphora.loaders.checkpoint import open_checkpoint
from anaphora.models.registry import load_model
from anaphora.ops.batch import Batch
from anaphora.ops.kv_store import KVLayout


def load(path, ops):
    with open_checkpoint(path) as checkpoint:
        return load_model(checkpoint, ops)


def all_logits(model, token_ids, kv_dtype="float32", adapters=None, every=1):
    """Logits [T, vocab] of one sequence in one chunk, or only of each so many tokens."""
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
    store = model.ops.create_kv_store(layout, num_blocks)
    span = np.arange(len(token_ids))
    batch = Batch(
        token_ids=np.asarray(token_ids, np.int32),
        positions=span.astype(np.int32),
        seq_index=np.zeros(len(span), np.int32),
        slots=span.astype(np.int64),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        logit_rows=span[::every].astype(np.int32),
        adapters=adapters,
    )
    return model.logits(model.forward(batch, store)[batch.logit_rows])


def log_softmax(logits):
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def divergence(exact, near):
    """Mean KL divergence of ``near`` logits [T, vocab] from ``exact`` ones."""
    a, b = log_softmax(exact), log_softmax(near)
    return float((np.exp(a) * (a - b)).sum(axis=1).mean())


def perplexity(logits, token_ids, every=1):
    """Of a text under the logits of its tokens, or of each so many."""
    targets = np.asarray(token_ids[1:])[::every]
    return float(np.exp(-log_softmax(logits)[np.arange(len(targets)), targets].mean()))

"""Turns a step's chunks into one flat batch and runs the model over it."""

from __future__ import annotations

import numpy as np

from anaphora.engine.scheduler import Chunk
from anaphora.models.registry import Model
from anaphora.ops.api import Array
from anaphora.ops.batch import NO_SLOT, Batch
from anaphora.ops.kv_store import KVStore


class ModelRunner:
    """Owns the model and the K/V store."""

    def __init__(self, model: Model, store: KVStore) -> None:
        self.model = model
        self.store = store

    def run(self, chunks: list[Chunk]) -> Array:
        """Logits [R, vocab], one row for each chunk that reaches its sequence's end, in order."""
        return self.model.forward(make_batch(chunks, self.store.layout.block_size), self.store)


def make_batch(chunks: list[Chunk], block_size: int) -> Batch:
    """The chunks' tokens side by side."""
    token_ids: list[int] = []
    positions, slots = [], []
    width = max(len(chunk.seq.block_table) for chunk in chunks)
    block_tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in enumerate(chunks):
        seq, start = chunk.seq, chunk.seq.num_computed_tokens
        token_ids += seq.token_ids[start : start + chunk.num_tokens]
        block_tables[row, : len(seq.block_table)] = seq.block_table
        span = np.arange(start, start + chunk.num_tokens)
        positions.append(span)
        own = block_tables[row, span // block_size].astype(np.int64) * block_size
        slots.append(np.where(span < seq.num_found_tokens, NO_SLOT, own + span % block_size))
    lengths = [chunk.num_tokens for chunk in chunks]
    last_rows = np.cumsum(lengths) - 1
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        seq_index=np.repeat(np.arange(len(chunks), dtype=np.int32), lengths),
        slots=np.concatenate(slots),
        block_tables=block_tables,
        logit_rows=last_rows[[chunk.is_last for chunk in chunks]].astype(np.int32),
    )

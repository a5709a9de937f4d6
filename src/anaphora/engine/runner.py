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
    # Lists of numbers: for a decode's few tokens NumPy's calls would take longer than the work.
    token_ids: list[int] = []
    positions: list[int] = []
    seq_index: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    width = max(len(chunk.seq.block_table) for chunk in chunks)
    block_tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in enumerate(chunks):
        seq, table = chunk.seq, chunk.seq.block_table
        span = range(seq.num_computed_tokens, seq.num_computed_tokens + chunk.num_tokens)
        block_tables[row, : len(table)] = table
        token_ids += seq.token_ids[span.start : span.stop]
        positions += span
        seq_index += [row] * len(span)
        slots += [
            NO_SLOT
            if p < seq.num_found_tokens
            else table[p // block_size] * block_size + p % block_size
            for p in span
        ]
        if chunk.is_last:
            logit_rows.append(len(token_ids) - 1)
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        seq_index=np.array(seq_index, np.int32),
        slots=np.array(slots, np.int64),
        block_tables=block_tables,
        logit_rows=np.array(logit_rows, np.int32),
    )

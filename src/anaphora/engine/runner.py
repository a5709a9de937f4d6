"""Turns a step's chunks into one flat batch and runs the model over it."""

from __future__ import annotations

import array

import numpy as np

from anaphora.engine.scheduler import Chunk
from anaphora.models.registry import Model
from anaphora.ops.api import Array
from anaphora.ops.batch import NO_SLOT, Batch, Int32, Int64
from anaphora.ops.kv_store import KVStore


class ModelRunner:
    """Owns the model and the K/V store."""

    def __init__(self, model: Model, store: KVStore) -> None:
        self.model = model
        self.store = store

    def run(self, chunks: list[Chunk]) -> Array:
        """Logits [R, vocab], one row for each chunk that reaches its sequence's end, in order."""
        layout = self.store.layout
        batch = make_batch(chunks, layout.block_size, layout.num_window_tables)
        return self.model.forward(batch, self.store)


def make_batch(chunks: list[Chunk], block_size: int, num_window_tables: int = 0) -> Batch:
    """The chunks' tokens side by side."""
    # Lists of numbers: for a decode's few tokens NumPy's calls would take longer than the work.
    token_ids: list[int] = []
    positions: list[int] = []
    seq_index: list[int] = []
    logit_rows: list[int] = []
    for row, chunk in enumerate(chunks):
        seq = chunk.seq
        span = range(seq.num_computed_tokens, seq.num_computed_tokens + chunk.num_tokens)
        token_ids += seq.token_ids[span.start : span.stop]
        positions += span
        seq_index += [row] * len(span)
        if chunk.is_last:
            logit_rows.append(len(token_ids) - 1)
    slots, block_tables = _table(chunks, [c.seq.block_table for c in chunks], block_size)
    windows = [
        _table(chunks, [c.seq.window.tables[i] for c in chunks], block_size)
        for i in range(num_window_tables)
    ]
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        seq_index=np.array(seq_index, np.int32),
        slots=slots,
        block_tables=block_tables,
        logit_rows=np.array(logit_rows, np.int32),
        window_slots=tuple(slots for slots, _ in windows),
        window_tables=tuple(tables for _, tables in windows),
    )


def _table(
    chunks: list[Chunk], tables: list[array.array[int]], block_size: int
) -> tuple[Int64, Int32]:
    """Slots [T] and block tables [S, max_blocks] of one table of each chunk's sequence."""
    slots: list[int] = []
    block_tables = np.zeros((len(chunks), max(map(len, tables))), np.int32)
    for row, (chunk, table) in enumerate(zip(chunks, tables, strict=True)):
        block_tables[row, : len(table)] = table
        first, num_found = chunk.seq.num_computed_tokens, chunk.seq.num_found_tokens
        slots += [
            NO_SLOT if p < num_found else table[p // block_size] * block_size + p % block_size
            for p in range(first, first + chunk.num_tokens)
        ]
    return np.array(slots, np.int64), block_tables

"""Turns a step's chunks into one flat batch and runs the model over it."""

from __future__ import annotations

import dataclasses

import numpy as np

from anaphora.engine.scheduler import Chunk
from anaphora.models.registry import Model
from anaphora.ops.api import Array
from anaphora.ops.batch import NO_SLOT, Batch
from anaphora.ops.kv_store import KVStore
from anaphora.ops.lora import AdaptedRows, Adapter


class ModelRunner:
    """Owns the model and the K/V store."""

    def __init__(self, model: Model, store: KVStore) -> None:
        self.model = model
        self.store = store
        self._adapters = AdaptedRows(())  # of the latest step that had any

    def run(self, chunks: list[Chunk]) -> Array:
        """Logits [R, vocab], one row for each chunk that reaches its sequence's end, in order."""
        batch = make_batch(chunks, self.store.layout.block_size)
        if (adapters := batch.adapters) is not None:
            if adapters.segments != self._adapters.segments:
                self._adapters = adapters
            # Decode steps are alike: the backend need not look everything up again.
            batch = dataclasses.replace(batch, adapters=self._adapters)
        return self.model.forward(batch, self.store)


def _by_adapter(chunks: list[Chunk]) -> list[int]:
    """Positions of the chunks in an order in which those of one adapter are neighbours."""
    first_of: dict[Adapter | None, int] = {None: -1}
    for index, chunk in enumerate(chunks):
        first_of.setdefault(chunk.seq.adapter, index)
    if len(first_of) == 1:
        return list(range(len(chunks)))
    return sorted(range(len(chunks)), key=lambda i: first_of[chunks[i].seq.adapter])


def make_batch(chunks: list[Chunk], block_size: int) -> Batch:
    """The chunks' tokens side by side; the logits of the last ones in the order of the chunks."""
    # Lists of numbers: for a decode's few tokens NumPy's calls would take longer than the work.
    token_ids: list[int] = []
    positions: list[int] = []
    seq_index: list[int] = []
    slots: list[int] = []
    last_rows: dict[int, int] = {}  # of the chunks whose logits are wanted
    segments: list[tuple[Adapter, int, int]] = []
    width = max(len(chunk.seq.block_table) for chunk in chunks)
    block_tables = np.zeros((len(chunks), width), np.int32)
    for row, index in enumerate(_by_adapter(chunks)):
        chunk = chunks[index]
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
            last_rows[index] = len(token_ids) - 1
        if seq.adapter is not None:
            first = len(token_ids) - len(span)
            if segments and segments[-1][0] is seq.adapter and segments[-1][2] == first:
                first = segments.pop()[1]
            segments.append((seq.adapter, first, len(token_ids)))
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        seq_index=np.array(seq_index, np.int32),
        slots=np.array(slots, np.int64),
        block_tables=block_tables,
        logit_rows=np.array([last_rows[i] for i in sorted(last_rows)], np.int32),
        adapters=AdaptedRows(tuple(segments)) if segments else None,
    )

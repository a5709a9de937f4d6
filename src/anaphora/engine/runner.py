"""Turns a step's chunks into one flat batch and runs the model over it."""

from __future__ import annotations

import array
import dataclasses

import numpy as np

from anaphora.engine.sampler import logprob
from anaphora.engine.scheduler import Chunk
from anaphora.models.registry import Model
from anaphora.ops.api import Array
from anaphora.ops.batch import NO_SLOT, Batch, Int32, Int64
from anaphora.ops.kv_store import KVStore
from anaphora.ops.lora import AdaptedRows, Adapter

_SCORED_ROWS = 16


class ModelRunner:
    """Owns the model and the K/V store."""

    def __init__(self, model: Model, store: KVStore) -> None:
        self.model = model
        self.store = store
        self._adapters = AdaptedRows(())  # of the latest step that had any

    def run(self, chunks: list[Chunk]) -> Array:
        """Logits [R, vocab], one row for each chunk that reaches its sequence's end, in order."""
        layout = self.store.layout
        batch = make_batch(chunks, layout.block_size, layout.num_window_tables)
        if (adapters := batch.adapters) is not None:
            if adapters.segments != self._adapters.segments:
                self._adapters = adapters
            # Decode steps are alike: the backend need not look everything up again.
            batch = dataclasses.replace(batch, adapters=self._adapters)
        hidden = self.model.forward(batch, self.store)
        for row, index in enumerate(_by_adapter(chunks)):
            if chunks[index].seq.is_scored:
                first = int(np.searchsorted(batch.seq_index, row))
                self._score(chunks[index], hidden[first : first + chunks[index].num_tokens])
        return self.model.logits(hidden[batch.logit_rows])

    def _score(self, chunk: Chunk, hidden: Array) -> None:
        """Adds the log-probabilities of the prompt's tokens after those of ``chunk``.

        A few positions at a time: logits of all would be the vocabulary times the prompt.
        """
        seq, num_top = chunk.seq, chunk.seq.params.prompt_logprobs
        assert num_top is not None
        first = seq.num_computed_tokens
        del seq.prompt_logprobs[first:]  # it was preempted, and begins again
        targets = seq.token_ids[first + 1 : min(first + len(hidden) + 1, seq.num_prompt_tokens)]
        for start in range(0, len(targets), _SCORED_ROWS):
            some = targets[start : start + _SCORED_ROWS]
            logits = self.model.logits(hidden[start : start + len(some)])
            seq.prompt_logprobs += [
                logprob(row, target, num_top) for row, target in zip(logits, some, strict=True)
            ]


def _by_adapter(chunks: list[Chunk]) -> list[int]:
    """Positions of the chunks in an order in which those of one adapter are neighbours."""
    first_of: dict[Adapter | None, int] = {None: -1}
    for index, chunk in enumerate(chunks):
        first_of.setdefault(chunk.seq.adapter, index)
    if len(first_of) == 1:
        return list(range(len(chunks)))
    return sorted(range(len(chunks)), key=lambda i: first_of[chunks[i].seq.adapter])


def make_batch(chunks: list[Chunk], block_size: int, num_window_tables: int = 0) -> Batch:
    """The chunks' tokens side by side; the logits of the last ones in the order of the chunks."""
    order = _by_adapter(chunks)
    chunks = [chunks[i] for i in order]
    # Lists of numbers: for a decode's few tokens NumPy's calls would take longer than the work.
    token_ids: list[int] = []
    positions: list[int] = []
    seq_index: list[int] = []
    last_rows: dict[int, int] = {}  # of the chunks whose logits are wanted
    segments: list[tuple[Adapter, int, int]] = []
    for row, (index, chunk) in enumerate(zip(order, chunks, strict=True)):
        seq = chunk.seq
        span = range(seq.num_computed_tokens, seq.num_computed_tokens + chunk.num_tokens)
        token_ids += seq.token_ids[span.start : span.stop]
        positions += span
        seq_index += [row] * len(span)
        if chunk.is_last:
            last_rows[index] = len(token_ids) - 1
        if seq.adapter is not None:
            first = len(token_ids) - len(span)
            if segments and segments[-1][0] is seq.adapter and segments[-1][2] == first:
                first = segments.pop()[1]
            segments.append((seq.adapter, first, len(token_ids)))
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
        logit_rows=np.array([last_rows[i] for i in sorted(last_rows)], np.int32),
        adapters=AdaptedRows(tuple(segments)) if segments else None,
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

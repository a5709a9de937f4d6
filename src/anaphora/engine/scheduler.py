"""Decides what each step computes: running decodes first, then prefill up to the token budget."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter, OrderedDict
from collections.abc import Callable

from anaphora.cache.cacheable import Match
from anaphora.cache.manager import CacheManager
from anaphora.engine.sequence import Sequence, SequenceStatus
from anaphora.types import FinishReason


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """The next ``num_tokens`` uncomputed tokens of a sequence."""

    seq: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether it reaches the sequence's end, so that its logits choose a token."""
        return self.seq.num_computed_tokens + self.num_tokens == len(self.seq.token_ids)


class Scheduler:
    """Owns the queues. ``waiting`` is first come, first served within a kind of work, and the more
    urgent kinds come first; ``running`` is in start order.

    Between the two, those of ``loading`` have their blocks and wait until the bytes are there.
    """

    def __init__(
        self, cache: CacheManager, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()  # an ordered set
        self.loading: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        # Called with a sequence at its first start, and for blocks that were only lent.
        self.on_start: Callable[[Sequence], None] | None = None
        self.reclaim: Callable[[], bool] | None = None

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence."""
        self.waiting[seq] = None

    def schedule(self) -> list[Chunk]:
        """The chunks of one step, with blocks for all their tokens; empty if nothing can run."""
        self.run_loaded()
        chunks: list[Chunk] = []
        preemptions_before = self.num_preemptions
        budget = self._schedule_running(chunks)
        if self.num_preemptions == preemptions_before:  # else the victim would come straight back
            self._schedule_waiting(budget, chunks)
        self.cache.prepare()
        return chunks

    def run_loaded(self, timeout: float = 0.0) -> None:
        """Lets those run whose blocks have come; waits up to ``timeout`` seconds for them."""
        for seq in self.cache.poll(timeout):
            assert isinstance(seq, Sequence)
            self.loading.remove(seq)
            self._run(seq)

    def _schedule_running(self, chunks: list[Chunk]) -> int:
        """By kind of work, then decodes before prefills in progress, then in start order.

        Returns the budget that is left.
        """
        budget = self.max_num_batched_tokens
        by_kind = sorted(self.running, key=_urgency)  # stable
        for seq in by_kind:
            if budget == 0:
                break
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted a moment ago
            num_tokens = min(_num_uncomputed(seq), budget)
            if self._allocate(seq, seq.num_computed_tokens + num_tokens, chunks):
                chunks.append(Chunk(seq, num_tokens))
                budget -= num_tokens
        return self.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks)

    def _allocate(self, seq: Sequence, num_tokens: int, chunks: list[Chunk]) -> bool:
        """Blocks for ``seq``, taken from the last started ones if need be; it may be itself."""
        while not self.cache.allocate(seq, num_tokens):
            if self.reclaim is not None and self.reclaim():
                continue
            victim = max(reversed(self.running), key=_rank)  # of the least urgent the latest
            self._preempt(victim, chunks)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence, chunks: list[Chunk]) -> None:
        """Back to the front of the queue; its full blocks stay findable, so little is lost."""
        chunks[:] = [chunk for chunk in chunks if chunk.seq is not seq]
        self.running.remove(seq)
        self.cache.free(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting[seq] = None
        self.waiting.move_to_end(seq, last=False)
        self.num_preemptions += 1

    def _schedule_waiting(self, budget: int, chunks: list[Chunk]) -> None:
        """Starts sequences in turn, except those whose next blocks another one is computing."""
        num_matched_against = 0
        if budget == 0 or len(self.running) + len(self.loading) == self.max_num_seqs:
            return  # before thousands are sorted
        for seq in sorted(self.waiting, key=_rank):  # stable
            if budget == 0 or len(self.running) + len(self.loading) == self.max_num_seqs:
                break
            if self.cache.is_being_computed(seq.awaited_hash):
                continue
            if num_matched_against == self.max_num_seqs:
                break  # matching costs time; thousands of followers take several steps
            num_matched_against += 1
            if seq.is_scored:
                match = Match([], [], [], is_unwanted=True)
            else:
                match = self.cache.match(seq)
                seq.awaited_hash = self.cache.find_awaited(seq, len(match.found))
            if seq.awaited_hash is not None:
                continue
            while not self.cache.can_start(match, len(seq.token_ids)) and self.running:
                victim = max(reversed(self.running), key=_rank)
                if victim.rank <= seq.rank:
                    break
                self._preempt(victim, chunks)  # less urgent work makes room
                budget = self.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks)
            if not self.cache.can_start(match, len(seq.token_ids)):
                if self.reclaim is not None and self.reclaim():
                    continue  # the next step starts it
                break  # strictly in turn, so that nobody starves
            if self._start(seq, match):
                num_tokens = min(_num_uncomputed(seq), budget)
                self.cache.allocate(seq, seq.num_computed_tokens + num_tokens)
                chunks.append(Chunk(seq, num_tokens))
                budget -= num_tokens

    def _start(self, seq: Sequence, match: Match) -> bool:
        """Gives ``seq`` its blocks; whether it can run at once."""
        del self.waiting[seq]
        self.cache.start(seq, match)
        if match.below:
            seq.status = SequenceStatus.LOADING
            self.loading.append(seq)
            return False
        self._run(seq)
        return True

    def _run(self, seq: Sequence) -> None:
        """All that could be found for ``seq`` is there: the rest gets computed."""
        seq.status = SequenceStatus.RUNNING
        self.running.append(seq)
        if seq.num_cached_tokens is None:  # its first start
            seq.num_cached_tokens = seq.num_computed_tokens
            if seq.index == 0:  # a request's other choices share the prompt, which counts once
                seq.cache_report = self.cache.report(seq)
                if self.on_start is not None:
                    self.on_start(seq)

    def complete(self, chunk: Chunk) -> None:
        """Notes that a chunk has been computed and publishes the blocks it filled."""
        before = chunk.seq.num_computed_tokens
        chunk.seq.num_computed_tokens += chunk.num_tokens
        self.cache.commit(chunk.seq, before)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """The one place where a sequence ends: done, aborted or failed, running or waiting."""
        if seq.is_finished:
            return
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self.cache.free(seq)
        elif seq.status is SequenceStatus.LOADING:
            self.loading.remove(seq)
            self.cache.free(seq)
        else:
            self.waiting.pop(seq, None)  # its prompt may still be being hashed
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not finished."""
        return bool(self.waiting or self.loading or self.running)

    def check(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        self.cache.check()
        started = self.running + self.loading
        held = Counter(block_id for seq in started for block_id in seq.block_table)
        parts = {id(part): part for seq in started for part in seq.window.parts}
        parts |= {id(b.window): b.window for b in self.cache.pool.blocks if b.window is not None}
        held.update(page.block_id for part in parts.values() for page in part.pages)
        for block in self.cache.pool.blocks:
            is_lent = bool(self.cache.hierarchy.num_under_way) or self.reclaim is not None
            assert block.ref_count >= held[block.block_id]
            assert block.ref_count == held[block.block_id] or is_lent
        assert all(seq.status is SequenceStatus.RUNNING for seq in self.running)
        assert not any(seq.block_table for seq in self.waiting)


_rank = operator.attrgetter("rank")


def _urgency(seq: Sequence) -> tuple[int, bool]:
    """Of one kind of work decodes come first; the next kind takes what is left."""
    return seq.rank, _num_uncomputed(seq) > 1


def _num_uncomputed(seq: Sequence) -> int:
    return len(seq.token_ids) - seq.num_computed_tokens

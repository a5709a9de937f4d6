"""Decides what each step computes: the most urgent kind of work first, of each kind running decodes
and then prefills, up to the token budget."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator

from anaphora.cache.cacheable import Match
from anaphora.cache.manager import CacheManager
from anaphora.config import Weights
from anaphora.engine.accounts import NUM_RANKS, Account, Accounts
from anaphora.engine.sequence import Sequence, SequenceStatus
from anaphora.types import FinishReason

_SHORT_STEP = 64  # tokens of others, where somebody has bought capacity


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """The next ``num_tokens`` uncomputed tokens of a sequence."""

    seq: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether it reaches the sequence's end, so that its logits choose a token."""
        return self.seq.num_computed_tokens + self.num_tokens == len(self.seq.token_ids)


class Step:
    """What one step is going to compute, while it is being decided."""

    def __init__(self, budget: int) -> None:
        self.chunks: list[Chunk] = []
        self.budget = budget  # tokens that are left
        self.is_blocked = False  # nobody else starts in it
        self.num_matched = 0  # against the cache

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Takes a chunk in."""
        self.chunks.append(Chunk(seq, num_tokens))
        self.budget -= num_tokens

    def remove(self, seq: Sequence) -> None:
        """Takes it out again."""
        self.budget += sum(chunk.num_tokens for chunk in self.chunks if chunk.seq is seq)
        self.chunks = [chunk for chunk in self.chunks if chunk.seq is not seq]


class Scheduler:
    """Owns the queues. The more urgent kinds of work come first; within a kind, who has been served
    least (``Accounts``), and within an account, who came first. ``running`` is in start order.

    Those of ``loading`` have their blocks and wait until the bytes are there.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        accounts: Accounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.accounts = accounts or Accounts(Weights())
        self.loading: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.clock = clock
        # Called with a sequence at its first start, and for blocks that were only lent.
        self.on_start: Callable[[Sequence], None] | None = None
        self.reclaim: Callable[[], bool] | None = None

    @property
    def waiting(self) -> list[Sequence]:
        """Those that have not started, or were preempted."""
        return list(self.accounts.waiting())

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence."""
        self.accounts.add(seq)

    def schedule(self) -> list[Chunk]:
        """The chunks of one step, with blocks for all their tokens; empty if nothing can run."""
        self.run_loaded()
        self.accounts.promote(self.running, self.clock())
        step = Step(self.max_num_batched_tokens)
        decodes, prefills = self._by_rank()
        for rank in range(NUM_RANKS):
            for seq in decodes[rank]:
                self._continue(seq, step)
            self._schedule_prefills(rank, prefills[rank], step)
            if rank == 0 and self.accounts.has_bought:
                # Whoever bought capacity waits for the step that runs: it is to be a short one.
                step.budget = min(step.budget, max(_SHORT_STEP, len(self.running)))
        self.cache.prepare()
        return step.chunks

    def _by_rank(self) -> tuple[list[list[Sequence]], list[list[Sequence]]]:
        """Running decodes and prefills in progress, by rank, in start order."""
        decodes: list[list[Sequence]] = [[] for _ in range(NUM_RANKS)]
        prefills: list[list[Sequence]] = [[] for _ in range(NUM_RANKS)]
        for seq in self.running:
            kind = prefills if _num_uncomputed(seq) > 1 else decodes
            kind[seq.account.rank].append(seq)
        return decodes, prefills

    def run_loaded(self, timeout: float = 0.0) -> None:
        """Lets those run whose blocks have come; waits up to ``timeout`` seconds for them."""
        for seq in self.cache.poll(timeout):
            assert isinstance(seq, Sequence)
            self.loading.remove(seq)
            self._run(seq)

    def _schedule_prefills(self, rank: int, running: list[Sequence], step: Step) -> None:
        """A chunk at a time to the account that was served least, prefills in progress first."""
        if step.budget == 0:
            return
        accounts: dict[Account, list[Sequence]] = {
            account: [] for account in self.accounts.of_rank(rank)
        }
        for seq in running:
            accounts.setdefault(seq.account, []).append(seq)
        turns = [
            (account.served, number, account, itertools.chain(started, list(account.waiting)))
            for number, (account, started) in enumerate(accounts.items())
        ]
        heapq.heapify(turns)
        while turns and step.budget > 0:
            _, number, account, candidates = heapq.heappop(turns)
            if self._serve(candidates, step):
                heapq.heappush(turns, (account.served, number, account, candidates))

    def _serve(self, candidates: Iterator[Sequence], step: Step) -> bool:
        """Gives the next candidate that can run a chunk; whether there was one."""
        for seq in candidates:
            if seq.status is SequenceStatus.RUNNING:
                if self._continue(seq, step):
                    return True
            elif step.is_blocked:
                break
            elif self._try_start(seq, step):
                return True
        return False

    def _continue(self, seq: Sequence, step: Step) -> bool:
        """Computes more of a running sequence, unless it is preempted or the budget is spent."""
        if step.budget == 0 or seq.status is not SequenceStatus.RUNNING:
            return False
        num_tokens = min(_num_uncomputed(seq), step.budget)
        if not self._allocate(seq, seq.num_computed_tokens + num_tokens, step):
            return False
        step.add(seq, num_tokens)
        self.accounts.charge_computed(seq, seq.num_computed_tokens + num_tokens)
        return True

    def _allocate(self, seq: Sequence, num_tokens: int, step: Step) -> bool:
        """Blocks for ``seq``, taken from the last started ones if need be; it may be itself."""
        while not self.cache.allocate(seq, num_tokens):
            if self.reclaim is not None and self.reclaim():
                continue
            victim = self._victim()
            self._preempt(victim, step)
            step.is_blocked = True  # else the victim would come straight back
            if victim is seq:
                return False
        return True

    def _victim(self) -> Sequence:
        """Of the least urgent the one that was started last."""
        return max(reversed(self.running), key=_rank)

    def _preempt(self, seq: Sequence, step: Step) -> None:
        """Back to the front of the queue; its full blocks stay findable, so little is lost."""
        step.remove(seq)
        self.running.remove(seq)
        self.cache.free(seq)
        seq.status = SequenceStatus.WAITING
        self.accounts.put_back(seq)
        self.num_preemptions += 1

    def _try_start(self, seq: Sequence, step: Step) -> bool:
        """Starts a waiting sequence with its first chunk, unless another one computes its next
        block. If there is no room, nobody else starts in this step, so that nobody starves."""
        if self.cache.is_being_computed(seq.awaited_hash):
            return False
        if step.num_matched == self.max_num_seqs:
            step.is_blocked = True  # matching costs time; thousands of followers take several steps
            return False
        step.num_matched += 1
        if seq.is_scored:
            match = Match([], [], [], is_unwanted=True)
        else:
            match = self.cache.match(seq)
            seq.awaited_hash = self.cache.find_awaited(seq, len(match.found))
        if seq.awaited_hash is not None:
            return False
        while not self._has_room(match, seq):
            victim = self._victim() if self.running else seq
            if victim.account.rank <= seq.account.rank:
                break
            self._preempt(victim, step)  # less urgent work makes room
        if not self._has_room(match, seq):
            # what is reclaimed is there for the next step
            step.is_blocked = self.reclaim is None or not self.reclaim()
            return False
        if not self._start(seq, match):
            return False
        num_tokens = min(_num_uncomputed(seq), step.budget)
        self.cache.allocate(seq, seq.num_computed_tokens + num_tokens)
        step.add(seq, num_tokens)
        self.accounts.charge_computed(seq, seq.num_computed_tokens + num_tokens)
        return True

    def _has_room(self, match: Match, seq: Sequence) -> bool:
        has_seat = len(self.running) + len(self.loading) < self.max_num_seqs
        return has_seat and self.cache.can_start(match, len(seq.token_ids))

    def _start(self, seq: Sequence, match: Match) -> bool:
        """Gives ``seq`` its blocks; whether it can run at once."""
        self.accounts.start(seq)
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
            self.accounts.charge_cached(seq, seq.num_cached_tokens)
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
        self.accounts.remove(seq)
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self.cache.free(seq)
        elif seq.status is SequenceStatus.LOADING:
            self.loading.remove(seq)
            self.cache.free(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not finished."""
        return bool(self.accounts.num_waiting or self.loading or self.running)

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
        waiting = self.waiting
        assert not any(seq.block_table for seq in waiting)
        assert len(waiting) == self.accounts.num_waiting
        assert all(seq in seq.account.waiting for seq in waiting)
        for account, num_started in Counter(seq.account for seq in started).items():
            assert account.num_started == num_started


_rank = operator.attrgetter("account.rank")


def _num_uncomputed(seq: Sequence) -> int:
    return len(seq.token_ids) - seq.num_computed_tokens

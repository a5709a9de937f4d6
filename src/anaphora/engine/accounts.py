"""Whose turn it is: service rendered is counted for each account, and who had least goes next.

An account is a tenant's work of one kind, or an endpoint that bought capacity. Its counter grows by
the tokens that were computed for it, weighted as ``Weights`` says; cached tokens cost next to
nothing. An account that was idle starts from the least of those that were not, so that nobody can
save up (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from anaphora.cache.shares import Owner
from anaphora.config import BoughtCapacity, Weights
from anaphora.engine.sequence import Sequence, SequenceStatus
from anaphora.types import WORKLOADS

NUM_RANKS = len(WORKLOADS)  # 0 is the most urgent
_PROVISIONED, _INTERACTIVE, _BATCH = range(NUM_RANKS)
_HELD = NUM_RANKS  # a rank that is never served
_CREDIT_SECONDS = 5.0  # what a bought endpoint may save up while it asks for less
_MAX_IDLE_ACCOUNTS = 4096


class Account:
    """Sequences that are served as one, in the order in which they came."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.served = 0.0  # weighted tokens
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()  # an ordered set
        self.num_started = 0

    @property
    def is_active(self) -> bool:
        """Whether it asks for anything."""
        return bool(self.waiting) or self.num_started > 0


class _Total:
    """A counter of costs that never falls: what is given back makes the next costs count less."""

    def __init__(self) -> None:
        self.value = 0.0
        self._owed = 0.0

    def add(self, cost: float) -> None:
        self._owed += cost
        if self._owed > 0:
            self.value += self._owed
            self._owed = 0.0


class Bought:
    """An endpoint's bought tokens a second, and its sequences while nothing is left for them."""

    def __init__(self, capacity: BoughtCapacity, now: float) -> None:
        self.rate = capacity.tokens_per_second
        self.balance = self.rate * _CREDIT_SECONDS
        self.within = Account(_PROVISIONED)
        self.over = Account(_INTERACTIVE if capacity.may_burst else _HELD)
        self.spent = _Total()  # of what was bought, since the start
        self._updated = now

    def refill(self, now: float) -> None:
        """Credits what was bought since the last call."""
        gained = self.rate * max(0.0, now - self._updated)
        self.balance = min(self.balance + gained, self.rate * _CREDIT_SECONDS)
        self._updated = now

    def seconds_until_credit(self) -> float:
        """How long until held work may go on."""
        return max(0.0, -self.balance) / self.rate


class Accounts:
    """All accounts: who waits in them, what each was served, and what was bought."""

    def __init__(
        self, weights: Weights, capacities: Iterable[BoughtCapacity] = (), now: float = 0.0
    ) -> None:
        self.num_waiting = 0
        self._served = [_Total() for _ in range(NUM_RANKS)]
        self._weights = weights
        self._bought = {c.endpoint: Bought(c, now) for c in capacities}
        self._of_rank: list[dict[str, Account]] = [{} for _ in range(NUM_RANKS)]
        for name, bought in self._bought.items():
            self._of_rank[_PROVISIONED][f"endpoint:{name}"] = bought.within
            if bought.over.rank < NUM_RANKS:
                self._of_rank[bought.over.rank][f"endpoint:{name}"] = bought.over
        self._floor = [0.0] * NUM_RANKS  # the least of the active accounts, as last seen
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._numbers = itertools.count()

    def of(self, owner: Owner, endpoint: str) -> Account:
        """Where new sequences of ``owner`` begin."""
        bought = self._bought.get(endpoint)
        if bought is not None and owner.workload == "provisioned":
            return bought.over
        return self._account(WORKLOADS.index(owner.workload), owner.tenant)

    def add(self, seq: Sequence) -> None:
        """A new sequence waits."""
        # While its prompt was hashed its account, idle as yet, may have been forgotten.
        seq.account = self.of(seq.owner, seq.endpoint)
        if seq.urgent_at is not None and seq.account.rank == _BATCH:
            heapq.heappush(self._deadlines, (seq.urgent_at, next(self._numbers), seq))
        self._wake(seq.account)
        seq.account.waiting[seq] = None
        self.num_waiting += 1

    def put_back(self, seq: Sequence) -> None:
        """A preempted sequence waits again, before the others of its account."""
        seq.account.num_started -= 1
        seq.account.waiting[seq] = None
        seq.account.waiting.move_to_end(seq, last=False)
        self.num_waiting += 1

    def start(self, seq: Sequence) -> None:
        """A sequence waits no longer: it has its blocks."""
        del seq.account.waiting[seq]
        seq.account.num_started += 1
        self.num_waiting -= 1

    def remove(self, seq: Sequence) -> None:
        """A sequence has ended."""
        account = seq.account
        if not seq.num_generated_tokens and seq.num_charged_tokens > seq.num_computed_tokens:
            self._charge(seq, seq.num_computed_tokens - seq.num_charged_tokens)  # paid in advance
        if seq in account.waiting:
            del account.waiting[seq]
            self.num_waiting -= 1
        elif seq.status is not SequenceStatus.WAITING:
            account.num_started -= 1
        if not account.is_active and account.rank < NUM_RANKS:
            self._floor[account.rank] = max(self._floor[account.rank], account.served)

    @property
    def has_bought(self) -> bool:
        """Whether anybody has bought capacity."""
        return bool(self._bought)

    def waiting(self) -> Iterator[Sequence]:
        """All that wait, whatever for."""
        for accounts in (*self._of_rank, self._held()):
            for account in accounts.values():
                yield from account.waiting

    def of_rank(self, rank: int) -> Iterator[Account]:
        """Accounts of one rank in which somebody waits."""
        if not self.num_waiting:
            return iter(())
        return (account for account in self._of_rank[rank].values() if account.waiting)

    def charge_cached(self, seq: Sequence, num_tokens: int) -> None:
        """``num_tokens`` at the start of ``seq`` were found: they cost a fraction."""
        discount = 1 - self._weights.cached
        if seq.num_charged_tokens >= num_tokens:  # paid for in advance
            self._charge(seq, -discount * num_tokens)
        else:
            self._charge(seq, self._weights.cached * num_tokens)
            seq.num_charged_tokens = num_tokens

    def charge_computed(self, seq: Sequence, num_tokens: int) -> None:
        """The first ``num_tokens`` of ``seq`` are computed; each is charged once."""
        first = seq.num_charged_tokens
        if num_tokens <= first:
            return
        num_prompt = max(0, min(num_tokens, seq.num_prompt_tokens) - first)
        num_output = num_tokens - first - num_prompt
        seq.num_charged_tokens = num_tokens
        self._charge(seq, num_prompt + num_output * self._weights.output)

    def promote(self, running: Iterable[Sequence], now: float) -> None:
        """Lets bought capacity and deadlines have their effect."""
        while self._deadlines and self._deadlines[0][0] <= now:
            seq = heapq.heappop(self._deadlines)[2]
            if not seq.is_finished and seq.account.rank == _BATCH:
                self._move(seq, self._account(_INTERACTIVE, seq.owner.tenant))
        for bought in self._bought.values():
            bought.refill(now)
            if bought.over.is_active:
                self._spend(bought, running)

    def served(self) -> dict[str, float]:
        """Weighted tokens that each kind of work had."""
        return {name: total.value for name, total in zip(WORKLOADS, self._served, strict=True)}

    def spent(self) -> dict[str, float]:
        """Weighted tokens that each endpoint had of what it bought."""
        return {name: bought.spent.value for name, bought in self._bought.items()}

    def seconds_until_credit(self) -> float | None:
        """When held sequences may start, if there are any."""
        held = [b for b in self._bought.values() if b.over.rank == _HELD and b.over.waiting]
        return min((b.seconds_until_credit() for b in held), default=None)

    def _spend(self, bought: Bought, running: Iterable[Sequence]) -> None:
        """Whose prompt is covered goes first, those that run already before those that wait."""
        over = [seq for seq in running if seq.account is bought.over]
        for seq in itertools.chain(over, list(bought.over.waiting)):
            if bought.balance <= 0:
                break
            self._move(seq, bought.within)
            self.charge_computed(seq, seq.num_prompt_tokens)

    def _charge(self, seq: Sequence, cost: float) -> None:
        seq.account.served += cost
        self._served[seq.account.rank].add(cost)
        if (bought := self._bought.get(seq.endpoint)) and seq.account is bought.within:
            bought.balance -= cost
            bought.spent.add(cost)

    def _account(self, rank: int, name: str) -> Account:
        accounts = self._of_rank[rank]
        account = accounts.get(name)
        if account is None:
            if len(accounts) >= _MAX_IDLE_ACCOUNTS:
                self._forget_idle(rank)
            account = accounts[name] = Account(rank)
        return account

    def _forget_idle(self, rank: int) -> None:
        """They start from the floor if they come again."""
        kept = {n: a for n, a in self._of_rank[rank].items() if a.is_active or n[:9] == "endpoint:"}
        self._of_rank[rank] = kept

    def _move(self, seq: Sequence, account: Account) -> None:
        self._wake(account)
        old, seq.account = seq.account, account
        if seq in old.waiting:
            del old.waiting[seq]
            account.waiting[seq] = None
        else:
            old.num_started -= 1
            account.num_started += 1

    def _wake(self, account: Account) -> None:
        if account.is_active or account.rank == _HELD:
            return
        active = (a.served for a in self._of_rank[account.rank].values() if a.is_active)
        floor = self._floor[account.rank] = min(active, default=self._floor[account.rank])
        account.served = max(account.served, floor)

    def _held(self) -> dict[str, Account]:
        return {n: b.over for n, b in self._bought.items() if b.over.rank == _HELD}

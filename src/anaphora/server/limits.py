"""How much a tenant may ask for: requests and tokens a minute, and requests at a time.

A limit a minute is a bucket that refills evenly. A request takes what it may need when it comes
(its prompt, and its ``max_tokens``) and gives back what it did not use: output not generated, and
most of what was cached. What is larger than a whole bucket is let in when the bucket is full, and
paid off afterwards; so a limit bounds what a tenant gets over time, not how much one request holds.

Buckets are full at the start, and count by a clock that nobody can set.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Literal

from anaphora.errors import RateLimited
from anaphora.server.registry import ANY, LimitTerms

Kind = Literal["requests", "input_tokens", "output_tokens"]
_MINUTE = 60.0
_QUEUE_SECONDS = 1.0  # when to try again if only others' work is in the way


class _Bucket:
    """One limit a minute of one tenant."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self._updated = now

    def refill(self, now: float) -> None:
        gained = self.limit * (now - self._updated) / _MINUTE
        self.level = min(self.level + gained, float(self.limit))
        self._updated = now

    def seconds_until(self, amount: float) -> float:
        """Until ``amount`` can be taken; more than a bucket holds is awaited as a full one."""
        if self.limit == 0:
            return _MINUTE  # perhaps the operator has changed it by then
        missing = min(amount, float(self.limit)) - self.level
        if missing <= 1e-9:
            return 0.0
        return missing * _MINUTE / self.limit


@dataclasses.dataclass
class _Account:
    """A tenant at one endpoint, or at all together."""

    terms: LimitTerms
    buckets: dict[Kind, _Bucket]
    num_running: int = 0


class Limiter:
    """Lets requests in, or says when. For one event loop; nothing here waits."""

    def __init__(
        self,
        *,
        cached_weight: float,
        max_requests: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_requests`` bounds the requests of all tenants together, running and waiting."""
        self._cached_weight = cached_weight
        self._max_requests = max_requests
        self._clock = clock
        self._terms: dict[tuple[str, str], LimitTerms] = {}
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._num_running = 0

    @property
    def num_running(self) -> int:
        """Requests that were let in and have not ended."""
        return self._num_running

    def update(self, terms: Mapping[tuple[str, str], LimitTerms]) -> None:
        """Limits by tenant and endpoint, each possibly ``*``; running requests keep their place."""
        self._terms = dict(terms)

    def admit(
        self,
        tenant: str,
        endpoint: str,
        num_input: int,
        num_output: int,
        *,
        is_line: bool = False,
    ) -> Reservation:
        """Takes a request's share. Raises ``RateLimited`` and then has taken nothing.

        A batch's line is bound by the limits of its endpoint alone, and by no number of requests:
        it has a queue of its own.
        """
        now = self._clock()
        if not is_line and self._num_running >= self._max_requests:
            raise RateLimited(
                f"the server has {self._num_running} requests, as many as it takes at a time; try "
                "again soon",
                retry_after=_QUEUE_SECONDS,
            )
        accounts = [
            account
            for name in ((endpoint,) if is_line else (ANY, endpoint))
            if (account := self._account(tenant, name, now)) is not None
        ]
        wanted: dict[Kind, float] = {
            "requests": 1,
            "input_tokens": num_input,
            "output_tokens": num_output,
        }
        for account in accounts:
            self._check(account, wanted)
        for account in accounts:
            account.num_running += 1
            for kind, bucket in account.buckets.items():
                bucket.level -= wanted[kind]
        self._num_running += not is_line
        return Reservation(self, accounts, num_output, is_line=is_line)

    def _check(self, account: _Account, wanted: Mapping[Kind, float]) -> None:
        terms = account.terms
        if terms.concurrent_requests is not None and (
            account.num_running >= terms.concurrent_requests
        ):
            raise RateLimited(
                f"you have {account.num_running} requests running, and "
                f"{terms.concurrent_requests} may run at a time; wait for one to end",
                retry_after=_QUEUE_SECONDS,
                headers=_headers([account]),
            )
        waits = {k: b.seconds_until(wanted[k]) for k, b in account.buckets.items()}
        kind = max(waits, key=lambda k: waits[k], default=None)
        if kind is None or waits[kind] <= 0:
            return
        bucket = account.buckets[kind]
        what = kind.replace("_", " ")
        raise RateLimited(
            f"the limit of {bucket.limit} {what} a minute is used up: this request needs "
            f"{wanted[kind]:.0f}, {max(0.0, bucket.level):.0f} are left; try again in "
            f"{waits[kind]:.1f} seconds",
            retry_after=waits[kind],
            headers=_headers([account]),
        )

    def _account(self, tenant: str, endpoint: str, now: float) -> _Account | None:
        """Where the two are counted, refilled; None if nothing limits them."""
        terms = self._terms.get((tenant, endpoint)) or self._terms.get((ANY, endpoint))
        key = tenant, endpoint
        if terms is None:
            self._accounts.pop(key, None)
            return None
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(LimitTerms(), {})
        if account.terms != terms:
            limits = _per_minute(terms)
            account.terms = terms
            account.buckets = {kind: _Bucket(limit, now) for kind, limit in limits.items()}
        for bucket in account.buckets.values():
            bucket.refill(now)
        return account

    def _settle(self, reservation: Reservation, num_cached: int, num_output: int) -> None:
        """Gives back what was reserved and not used."""
        now = self._clock()
        unused: dict[Kind, float] = {
            "requests": 0,
            "input_tokens": num_cached * (1 - self._cached_weight),
            "output_tokens": reservation.num_output - num_output,
        }
        for account in reservation.accounts:
            account.num_running -= 1
            for kind, bucket in account.buckets.items():
                bucket.refill(now)
                bucket.level = min(bucket.level + unused[kind], float(bucket.limit))
        self._num_running -= not reservation.is_line


class Reservation:
    """What one request has taken, until ``settle``."""

    def __init__(
        self,
        limiter: Limiter,
        accounts: list[_Account],
        num_output: int,
        *,
        is_line: bool,
    ) -> None:
        self.is_line = is_line
        self.accounts = accounts
        self.num_output = num_output
        self._limiter: Limiter | None = limiter
        self.headers = _headers(accounts)

    def settle(self, *, num_cached: int, num_output: int) -> None:
        """Ends it: so much was cached and generated. Further calls do nothing."""
        if self._limiter is not None:
            self._limiter._settle(self, num_cached, num_output)
            self._limiter = None


def _per_minute(terms: LimitTerms) -> dict[Kind, int]:
    limits: dict[Kind, int | None] = {
        "requests": terms.requests_per_minute,
        "input_tokens": terms.input_tokens_per_minute,
        "output_tokens": terms.output_tokens_per_minute,
    }
    return {kind: limit for kind, limit in limits.items() if limit is not None}


def _headers(accounts: list[_Account]) -> dict[str, str]:
    """``x-ratelimit-*`` as OpenAI has them, of the limit that is nearest to its end.

    ``tokens`` is of input tokens, or of output tokens if only these are limited.
    """
    headers: dict[str, str] = {}
    names: tuple[tuple[str, tuple[Kind, ...]], ...] = (
        ("requests", ("requests",)),
        ("tokens", ("input_tokens", "output_tokens")),
        ("input-tokens", ("input_tokens",)),
        ("output-tokens", ("output_tokens",)),
    )
    for name, kinds in names:
        buckets = [a.buckets[kind] for a in accounts for kind in kinds if kind in a.buckets]
        if not buckets:
            continue
        least = min(buckets, key=lambda bucket: bucket.level)
        headers[f"x-ratelimit-limit-{name}"] = str(least.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(least.level)))
        headers[f"x-ratelimit-reset-{name}"] = f"{least.seconds_until(least.limit):.3f}s"
    return headers

"""Who may fill how much of the cache: workload classes and tenants, guaranteed and at most."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import NamedTuple

from anaphora.errors import ConfigError
from anaphora.types import WORKLOADS, Workload

_SUBJECT = re.compile(r"(class|tenant):([A-Za-z0-9*][A-Za-z0-9._-]{0,63})")
ANY_TENANT = "tenant:*"


class Owner(NamedTuple):
    """For whom a block is kept."""

    tenant: str
    workload: Workload
    adapter: str = ""  # digest of the adapter that computed it


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """Parts of a tier, 0 to 1: ``guaranteed`` is kept from others, ``maximum`` is never passed."""

    subject: str  # class:NAME, tenant:NAME, or tenant:* for each tenant without a share of its own
    guaranteed: float
    maximum: float

    @classmethod
    def parse(cls, text: str) -> Share:
        """From ``SUBJECT=MINIMUM:MAXIMUM`` in percent, as ``class:batch=0:10``.

        Raises ``ConfigError``.
        """
        subject, _, limits = text.partition("=")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)%?:(\d+(?:\.\d+)?)%?", limits)
        if not _SUBJECT.fullmatch(subject) or match is None:
            raise ConfigError(
                f"--cache-share {text!r}: write class:NAME=MIN:MAX or tenant:NAME=MIN:MAX in "
                "percent, for example class:batch=0:10"
            )
        guaranteed, maximum = float(match[1]) / 100, float(match[2]) / 100
        kind, _, name = subject.partition(":")
        if kind == "class" and name not in WORKLOADS:
            raise ConfigError(
                f"--cache-share {text!r}: there is no class {name!r}; "
                f"choose one of {', '.join(WORKLOADS)}"
            )
        if not guaranteed <= maximum <= 1:
            raise ConfigError(
                f"--cache-share {text!r}: it must hold that MIN <= MAX <= 100; correct the two"
            )
        return cls(subject, guaranteed, maximum)


def parse_shares(texts: Iterable[str]) -> tuple[Share, ...]:
    """All ``--cache-share`` options. Raises ``ConfigError`` if together they make no sense."""
    shares = tuple(Share.parse(text) for text in texts)
    subjects = [share.subject for share in shares]
    for subject in subjects:
        if subjects.count(subject) > 1:
            raise ConfigError(f"--cache-share gives {subject} twice; keep one of them")
    for kind in ("class", "tenant"):
        total = sum(share.guaranteed for share in shares if share.subject.startswith(kind))
        if total > 1:
            raise ConfigError(
                f"--cache-share guarantees {total:.0%} to the {kind}-shares together; "
                "lower them to 100 % at most"
            )
    return shares


class Limit(NamedTuple):
    """A share in blocks of one pool."""

    subject: str
    guaranteed: int
    maximum: int


class Limits:
    """The shares of one pool of ``num_blocks`` blocks, and how much of each is in use."""

    def __init__(self, shares: Iterable[Share] = (), num_blocks: int = 0) -> None:
        self._limits = {
            share.subject: Limit(
                share.subject,
                int(share.guaranteed * num_blocks),
                int(share.maximum * num_blocks),
            )
            for share in shares
        }
        self._of_owner: dict[Owner, tuple[Limit, ...]] = {}
        self.num_used: dict[str, int] = {}  # subject → findable blocks

    def of(self, owner: Owner) -> tuple[Limit, ...]:
        """What binds ``owner``; owners with equal limits are evicted as one group."""
        if not self._limits:
            return ()
        known = self._of_owner.get(owner)
        if known is None:
            known = self._of_owner[owner] = tuple(self._find(owner))
        return known

    def _find(self, owner: Owner) -> Iterable[Limit]:
        if limit := self._limits.get(f"class:{owner.workload}"):
            yield limit
        subject = f"tenant:{owner.tenant}"
        if limit := self._limits.get(subject):
            yield limit
        elif limit := self._limits.get(ANY_TENANT):
            yield limit._replace(subject=subject)

    def count(self, limits: tuple[Limit, ...], change: int) -> None:
        """``change`` blocks more are findable for owners with ``limits``."""
        for limit in limits:
            self.num_used[limit.subject] = self.num_used.get(limit.subject, 0) + change

    def passed(self, limits: tuple[Limit, ...]) -> str | None:
        """The subject that one more block would bring past its maximum, if there is one."""
        for limit in limits:
            if self.num_used.get(limit.subject, 0) >= limit.maximum:
                return limit.subject
        return None

    def is_guaranteed(self, limits: tuple[Limit, ...], taker: tuple[Limit, ...]) -> bool:
        """Whether ``taker`` must leave a block with ``limits`` where it is."""
        return any(
            limit not in taker and self.num_used.get(limit.subject, 0) <= limit.guaranteed
            for limit in limits
            if limit.guaranteed
        )

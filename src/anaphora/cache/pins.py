"""Prefixes that somebody asked to keep, for a while and within a quota."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

from anaphora.cache.hashing import BlockHash
from anaphora.cache.pool import BlockPool
from anaphora.errors import QuotaExceeded
from anaphora.types import PinInfo


class _Pin:
    def __init__(self, tenant: str, hashes: Sequence[BlockHash], expires: float) -> None:
        self.tenant = tenant
        self.hashes = frozenset(hashes)
        self.expires = expires  # time.monotonic()


class Pins:
    """All pins of one pool. A pinned block goes only when a running sequence cannot do without."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        quota: float,
        num_pages: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``quota``: part of the pool that one tenant may pin; all together may pin half of it.

        ``num_pages``: blocks of the pool that a block of a prefix takes, with its window part.
        """
        self._pool = pool
        self._block_size = block_size
        self._clock = clock
        self._num_of_tenant = int(quota * len(pool.blocks)) // num_pages
        self._num_of_all = len(pool.blocks) // 2 // num_pages
        self._pins: dict[str, _Pin] = {}
        self._next_expiry = float("inf")

    def add(self, tenant: str, hashes: Sequence[BlockHash], seconds: float) -> PinInfo:
        """Keeps blocks for ``seconds``. Raises ``QuotaExceeded``."""
        self.expire()
        wanted = set(hashes)
        for whose, limit in ((tenant, self._num_of_tenant), (None, self._num_of_all)):
            others = self._hashes(whose)
            if len(others | wanted) > limit:
                name = "all tenants" if whose is None else "a tenant"
                size = self._block_size
                raise QuotaExceeded(
                    f"{name} may pin {limit * size} tokens; {len(others) * size} are pinned and "
                    f"this prefix has {len(wanted) * size}; remove a pin, shorten the prefix or "
                    "have the operator raise --pin-quota"
                )
        pin_id = f"pin_{uuid.uuid4().hex}"
        pin = self._pins[pin_id] = _Pin(tenant, hashes, self._clock() + seconds)
        for block_hash in pin.hashes:
            self._pool.pin(block_hash, 1)
        self._next_expiry = min(self._next_expiry, pin.expires)
        return self._info(pin_id, pin)

    def remove(self, tenant: str, pin_id: str) -> bool:
        """Ends one of ``tenant``'s pins; False if it has no such pin."""
        pin = self._pins.get(pin_id)
        if pin is None or pin.tenant != tenant:
            return False
        self._end(pin_id)
        return True

    def list(self, tenant: str) -> list[PinInfo]:
        """What ``tenant`` has pinned, the oldest first."""
        self.expire()
        return [self._info(i, pin) for i, pin in self._pins.items() if pin.tenant == tenant]

    def expire(self) -> None:
        """Ends the pins whose time is up. Costs next to nothing if there are none."""
        now = self._clock()
        if now < self._next_expiry:
            return
        for pin_id in [i for i, pin in self._pins.items() if pin.expires <= now]:
            self._end(pin_id)
        self._next_expiry = min((p.expires for p in self._pins.values()), default=float("inf"))

    def end_lost(self) -> None:
        """Ends the pins of which nothing is left, as after a purge."""
        for pin_id, pin in list(self._pins.items()):
            if not any(map(self._pool.is_findable, pin.hashes)):
                self._end(pin_id)

    def _end(self, pin_id: str) -> None:
        for block_hash in self._pins.pop(pin_id).hashes:
            self._pool.pin(block_hash, -1)

    def _hashes(self, tenant: str | None) -> set[BlockHash]:
        pins = (pin for pin in self._pins.values() if tenant in (None, pin.tenant))
        return set().union(*(pin.hashes for pin in pins))

    def _info(self, pin_id: str, pin: _Pin) -> PinInfo:
        return PinInfo(
            pin_id=pin_id,
            num_tokens=len(pin.hashes) * self._block_size,
            seconds_left=max(0.0, pin.expires - self._clock()),
        )

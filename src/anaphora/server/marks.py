"""Prefixes that ``cache_control`` marks: hints, kept as pins within the tenant's quota."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence

from anaphora.errors import RequestError
from anaphora.server.served import ServedLLM
from anaphora.types import CacheScope, EndPin, PinPrefix

MAX_MARKS_OF_TENANT = 64  # kept at a time; the one that was used longest ago gives way
_RENEWED_AFTER = 30.0  # seconds, or a tenth of its time: a younger mark is taken as it is

_Key = tuple[CacheScope, bytes]


@dataclasses.dataclass(frozen=True)
class _Kept:
    pin_id: str
    num_tokens: int
    expires: float  # time.monotonic()

    def is_fresh(self, seconds: float) -> bool:
        """Whether it lasts about as long as a new one of ``seconds`` would."""
        return self.expires - time.monotonic() > seconds - min(_RENEWED_AFTER, seconds / 10)


class MarkedPrefixes:
    """The pins that marks made. A prefix has one, which lives on while it is used."""

    def __init__(self, llm: ServedLLM) -> None:
        self._llm = llm
        self._of_tenant: dict[str, OrderedDict[_Key, _Kept]] = {}

    async def keep(self, prefix: Sequence[int], scope: CacheScope, seconds: float) -> int:
        """Tokens of ``prefix`` that are kept for ``seconds`` from now.

        None are where the quota is used up, or the prefix fills no block.
        """
        own = self._of_tenant.setdefault(scope.tenant, OrderedDict())
        key = scope, hashlib.blake2b(array.array("i", prefix).tobytes(), digest_size=16).digest()
        known = own.get(key)
        if known is not None and known.is_fresh(seconds):
            own.move_to_end(key)
            return known.num_tokens
        command = PinPrefix(token_ids=list(prefix), scope=scope, seconds=seconds)
        try:
            [pin] = (await self._llm.command(command)).pins
        except RequestError:  # a hint may fail
            return 0
        ended = [own.pop(key)] if key in own else []
        own[key] = _Kept(pin.pin_id, pin.num_tokens, time.monotonic() + pin.seconds_left)
        if len(own) > MAX_MARKS_OF_TENANT:
            ended.append(own.popitem(last=False)[1])
        for one in ended:
            await self._end(scope.tenant, one.pin_id)
        return pin.num_tokens

    async def _end(self, tenant: str, pin_id: str) -> None:
        try:
            await self._llm.command(EndPin(tenant=tenant, pin_id=pin_id))
        except RequestError:  # it has ended by itself
            return

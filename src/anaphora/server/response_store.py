"""Responses that clients may go on from: in memory, for a while, each tenant's apart."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from anaphora.errors import UnknownResponse

SECONDS = 3600.0
MAX_BYTES_OF_TENANT = 16 * 2**20
MAX_BYTES = 256 * 2**20
_MAX_SHOWN_CHARS = 64


@dataclasses.dataclass(frozen=True)
class _Stored:
    body: bytes
    messages: bytes  # of the whole conversation, this answer included
    expires: float

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.messages)


class ResponseStore:
    """Finished responses by tenant and id. What is beyond a bound goes, the oldest first."""

    def __init__(
        self,
        *,
        seconds: float = SECONDS,
        max_bytes_of_tenant: int = MAX_BYTES_OF_TENANT,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._max_bytes_of_tenant = max_bytes_of_tenant
        self._max_bytes = max_bytes
        self._clock = clock
        self._of_tenant: dict[str, OrderedDict[str, _Stored]] = {}
        self._num_bytes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(self._num_bytes.values())

    def add(self, tenant: str, body: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Store a response with its conversation; one over the tenant's bound is not kept."""
        now = self._clock()
        for name in list(self._of_tenant):
            self._expire(name, now)
        encode = msgspec.json.encode
        stored = _Stored(encode(body), encode(messages), now + self._seconds)
        self._of_tenant.setdefault(tenant, OrderedDict())[body["id"]] = stored
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + stored.num_bytes
        while self._num_bytes.get(tenant, 0) > self._max_bytes_of_tenant:
            self._drop_oldest(tenant)
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(max(self._num_bytes, key=lambda name: self._num_bytes[name]))

    def body(self, tenant: str, response_id: str) -> bytes:
        """The response as JSON. Raises ``UnknownResponse``."""
        return self._find(tenant, response_id, "response_id").body

    def messages(self, tenant: str, response_id: str) -> bytes:
        """The conversation up to a response, as JSON. Raises ``UnknownResponse``."""
        return self._find(tenant, response_id, "previous_response_id").messages

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response. Raises ``UnknownResponse``."""
        self._find(tenant, response_id, "response_id")
        self._drop(tenant, response_id)

    def forget(self, tenant: str | None) -> None:
        """Forget all responses of a tenant, or of everybody."""
        for name in list(self._of_tenant) if tenant is None else [tenant]:
            self._of_tenant.pop(name, None)
            self._num_bytes.pop(name, None)

    def _find(self, tenant: str, response_id: str, param: str) -> _Stored:
        self._expire(tenant, self._clock())
        own = self._of_tenant.get(tenant)
        stored = None if own is None else own.get(response_id)
        if stored is None:
            raise UnknownResponse(
                f"there is no response {response_id[:_MAX_SHOWN_CHARS]!r}; it was not stored, or "
                "not by this key, or has gone: send the whole conversation as input",
                param=param,
            )
        return stored

    def _expire(self, tenant: str, now: float) -> None:
        while own := self._of_tenant.get(tenant):
            if next(iter(own.values())).expires > now:
                return
            self._drop_oldest(tenant)

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._of_tenant[tenant])))

    def _drop(self, tenant: str, response_id: str) -> None:
        self._num_bytes[tenant] -= self._of_tenant[tenant].pop(response_id).num_bytes
        if not self._of_tenant[tenant]:
            self.forget(tenant)

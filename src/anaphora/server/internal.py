"""A request of the server to itself: a batch's line takes the same way as one over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from anaphora.server.tenants import Caller

_KEY = "anaphora.internal"  # of an ASGI scope; nothing that a client sends becomes a key of it


@dataclasses.dataclass(frozen=True)
class Internal:
    """On whose behalf, and until when it may take its time."""

    caller: Caller
    urgent_in: float | None  # seconds until it is no batch work any more; None: never


@dataclasses.dataclass(frozen=True)
class Answer:
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes


def internal_of(scope: MutableMapping[str, Any]) -> Internal | None:
    """What the server said with its own request; None for a client's."""
    found = scope.get(_KEY)
    return found if isinstance(found, Internal) else None


async def call(app: ASGIApp, path: str, body: bytes, internal: Internal) -> Answer:
    """POSTs a JSON ``body``. Cancelling it is a client that leaves."""
    sent = False
    head: Message = {"status": 500, "headers": []}
    parts: list[bytes] = []
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {},
        _KEY: internal,
    }

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()  # we never leave of our own accord
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal head
        if message["type"] == "http.response.start":
            head = message
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in head["headers"]}
    return Answer(head["status"], headers, b"".join(parts))
